"""How long lesson 02's rings take against dist.all_reduce at 64 MB, in turns; `make bench` runs it.

The rings are the lesson's own, read from the solutions in its source. Like dist.all_reduce, their halves work in place
on one tensor; the median of 45 turns is held to the targets (that of 15 moves by a tenth from run to run). Shown beside
it: the same with a copy made first by both, which is what `ring_all_reduce(tensor)` does for its caller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BYTES = 64_000_000
SEGMENT = 2**20  # elements, as in the lesson
FRAMEWORK, PLAIN, SEGMENTED = "dist.all_reduce", "plain ring", "ring in segments"
AT_MOST = {(PLAIN, 2): 1.7, (PLAIN, 4): 1.2, (SEGMENTED, 2): 1.35, (SEGMENTED, 4): 1.1}

Contender = Callable[[Any], Any]


# --- the rings -------------------------------------------------------------------------------------------------------


def contenders() -> dict[str, Contender]:
    """Each contender by name; all of them sum a flat tensor over all ranks, in place."""
    from tests.benchmarks.solutions import solutions

    ring = solutions("02", "reduce_scatter_ring", "all_gather_ring", "segmented_ring")

    def framework(tensor: Any) -> None:
        import torch.distributed as dist

        dist.all_reduce(tensor)

    def plain(tensor: Any) -> None:
        import torch.distributed as dist

        chunks = list(tensor.tensor_split(dist.get_world_size()))
        ring["reduce_scatter_ring"](chunks)
        ring["all_gather_ring"](chunks)

    def segmented(tensor: Any) -> None:
        import torch.distributed as dist

        ring["segmented_ring"](list(tensor.tensor_split(dist.get_world_size())), SEGMENT)

    return {FRAMEWORK: framework, PLAIN: plain, SEGMENTED: segmented}


def in_turns(functions: Mapping[str, Contender], size: int, turns: int, copy: bool) -> dict[str, list[float]]:
    """A rank's part: the seconds that the slowest rank took, for each contender and turn. Checks each sum."""
    import time

    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    tensor = torch.empty(size // 4)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(turns + 1):
        for name, function in functions.items():
            tensor.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            result = tensor.clone() if copy else tensor
            function(result)
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn:  # the first one warms up
                seconds[name].append(took.item())
            if not bool((result == world).all()):
                raise ValueError(f"{name}: the sum is wrong")
    return seconds


# --- the verdict -----------------------------------------------------------------------------------------------------


def missed(ratios: Mapping[tuple[str, int], float]) -> list[str]:
    """A line for each ring whose median is further from dist.all_reduce's than its target."""
    return [
        f"{name} at {world} ranks takes {ratios[name, world]:.2f} times dist.all_reduce; at most {target} are allowed"
        for (name, world), target in AT_MOST.items()
        if ratios[name, world] > target
    ]


def table(world: int, medians: Mapping[str, float], copied: Mapping[str, float]) -> str:
    """Medians in milliseconds and as multiples of dist.all_reduce, in place and with a copy made first."""
    lines = [f"{world} ranks, {BYTES // 10**6} MB{'':5}   in place  ratio  target     copied  ratio"]
    for name, seconds in medians.items():
        target = f"{AT_MOST[name, world]:.2f}" if (name, world) in AT_MOST else ""
        own = f"{1e3 * seconds:8.1f} ms {seconds / medians[FRAMEWORK]:6.2f} {target:>7}"
        lines.append(f"{name:17} {own} {1e3 * copied[name]:7.1f} ms {copied[name] / copied[FRAMEWORK]:6.2f}")
    return "\n".join(lines)


def main() -> int:
    """Measure at 2 and 4 ranks; return 1 if a target is missed."""
    sys.path.insert(0, str(ROOT))
    from course_utils import launch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=45, help="turns of each contender (default: 45)")
    turns = parser.parse_args().turns
    functions = contenders()
    ratios = {}
    for world in (2, 4):
        medians, copied = (
            {
                name: statistics.median(seconds)
                for name, seconds in launch(in_turns, functions, BYTES, turns, copy, nprocs=world, backend="gloo")
                .results[0]
                .items()
            }
            for copy in (False, True)
        )
        print(table(world, medians, copied), flush=True)
        ratios |= {(name, world): seconds / medians[FRAMEWORK] for name, seconds in medians.items()}
    misses = missed(ratios)
    print("\n".join(misses) if misses else "every target is met")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
