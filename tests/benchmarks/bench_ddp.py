"""How long a step of lesson 04's own DDP takes against torch's DistributedDataParallel, in turns; `make bench` runs it.

The wrapper is the lesson's own, read from the solutions in its source. The same model, bucket size and batch on 2
ranks, over the loopback and over an emulated link of 1 ms and 1 GB/s. One flat all-reduce after backward is timed in
the same turns: what overlap gains is the distance to it. A turn is a few steps in ranks of the contender's own. A ratio
is that of two medians; its 95% interval comes from resampling whole turns (bootstrap), since the steps of a turn share
their noise, and so do the contenders of one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OWN, FLAT, TORCH = "own DDP", "one flat all-reduce", "torch's DDP"
LOOPBACK, EMULATED = "loopback", "emulated link, 1 ms and 1 GB/s"
WIDTH, LAYERS, BATCH = 1024, 10, 16
WARM_UP, STEPS = 3, 4  # steps of a turn: not counted, counted
FRONT, POSITIONS = 6, 32  # layers of the front, and how often each is applied to a sample
CAP = 12 * 2**20  # three layers a bucket
AT_MOST = 1.15  # own / torch, the upper end of the interval
AT_LEAST = 0.20  # of the step with one flat all-reduce, gained by overlap on the emulated link

Seconds = Mapping[str, Sequence[float]]


# --- the contenders --------------------------------------------------------------------------------------------------


def lesson_ddp() -> Any:
    """The class that solves the lesson's exercise, as its source has it."""
    from tests.benchmarks.solutions import solutions

    return solutions("04", "flatten", "unflatten", "make_buckets", "own_ddp")["own_ddp"]


def make_model(width: int, layers: int) -> Any:
    """A front that computes much with few parameters, as convolutions do, and a back that holds nearly all of them.

    At 1024 x 10, more than 10 million parameters. Inputs are (samples, POSITIONS, width / 4).
    """
    import torch

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            narrow = width // 4
            self.front = torch.nn.Sequential(*stack(narrow, FRONT))
            self.back = torch.nn.Sequential(torch.nn.Linear(narrow, width), torch.nn.ReLU(), *stack(width, layers))
            self.last = torch.nn.Linear(width, 10)

        def forward(self, inputs: Any) -> Any:
            return self.last(self.back(self.front(inputs).mean(dim=1)))

    def stack(size: int, count: int) -> list[Any]:
        return [part for _ in range(count) for part in (torch.nn.Linear(size, size), torch.nn.ReLU())]

    torch.manual_seed(0)
    return Network()


def steps(make: Any, width: int, layers: int, batch: int, last: bool) -> tuple[list[float], list[Any]]:
    """A rank's part in a turn: the seconds of each step on the slowest rank; in the last turn its gradients, too."""
    import time

    import torch
    import torch.distributed as dist

    model = make(make_model(width, layers))
    torch.manual_seed(1 + dist.get_rank())
    inputs, labels = torch.randn(batch, POSITIONS, width // 4), torch.randint(10, (batch,))
    seconds: list[float] = []
    for step in range(WARM_UP + STEPS):
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        if hasattr(model, "synchronize"):
            model.synchronize()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if step >= WARM_UP:  # torch makes its buckets anew after the first
            seconds.append(took.item())
    return seconds, [one.grad.numpy() for one in model.parameters()] if last else []


def in_turns(
    own: Any, width: int, layers: int, batch: int, cap: int, turns: int, link: Any = None, nprocs: int = 2
) -> dict[str, list[float]]:
    """The seconds of `turns` times STEPS steps of each contender, which take turns in ranks of their own.

    A training process holds one model. Where three shared one process, the flat buffer was measured cheaper than in
    a process of its own, probably because it found memory that another contender had just given back.

    Raises ValueError where the contenders' gradients differ.
    """
    import numpy as np

    from course_utils import launch

    def torchs(model: Any) -> Any:
        import torch

        return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap / 2**20)

    one_bucket = 1 << 40
    sizes = width, layers, batch
    makers = {OWN: lambda model: own(model, cap), FLAT: lambda model: own(model, one_bucket), TORCH: torchs}
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    gradients = {}
    for turn in range(turns):
        names = list(makers)
        for name in names[turn % 3 :] + names[: turn % 3]:
            with contextlib.redirect_stdout(io.StringIO()):  # an emulated link announces itself at every launch
                run = launch(steps, makers[name], *sizes, turn == turns - 1, nprocs=nprocs, backend="gloo", link=link)
            seconds[name] += run.results[0][0]
            gradients[name] = [one for _, of_rank in run.results for one in of_rank]
    for mine in gradients.values():
        same = [np.allclose(one, right, atol=1e-6) for one, right in zip(mine, gradients[TORCH], strict=True)]
        if not all(same):
            raise ValueError("the gradients are not those of torch's DDP")
    return seconds


# --- the verdict -----------------------------------------------------------------------------------------------------


def ratio_with_interval(
    seconds: Seconds, upper: str, lower: str, draws: int = 2000, seed: int = 4
) -> tuple[float, float, float]:
    """The ratio of two medians and the ends of its 95% interval, by resampling turns with all their contenders."""
    pairs = list(zip(seconds[upper], seconds[lower], strict=True))
    turns = [pairs[start : start + STEPS] for start in range(0, len(pairs), STEPS)]

    def ratio(some: Sequence[Sequence[tuple[float, float]]]) -> float:
        above, below = zip(*(pair for turn in some for pair in turn), strict=True)
        return statistics.median(above) / statistics.median(below)

    rng = random.Random(seed)
    drawn = sorted(ratio(rng.choices(turns, k=len(turns))) for _ in range(draws))
    return ratio(turns), drawn[int(0.025 * draws)], drawn[int(0.975 * draws) - 1]


def gain(seconds: Seconds) -> float:
    """The share of a step with one flat all-reduce that overlap saves."""
    return 1 - statistics.median(seconds[OWN]) / statistics.median(seconds[FLAT])


def missed(measured: Mapping[str, Seconds]) -> list[str]:
    """A line for each target that is missed; `measured` has the seconds by link."""
    lines = []
    for link, seconds in measured.items():
        _, _, high = ratio_with_interval(seconds, OWN, TORCH)
        if high > AT_MOST:
            lines.append(f"{link}: own DDP may take {high:.2f} times torch's; at most {AT_MOST} are allowed")
    if EMULATED in measured and gain(measured[EMULATED]) < AT_LEAST:
        saved = gain(measured[EMULATED])
        lines.append(f"{EMULATED}: overlap gains {saved:.0%} over one flat all-reduce; at least {AT_LEAST:.0%} are due")
    return lines


def table(link: str, seconds: Seconds) -> str:
    """Medians in milliseconds, the ratio with its interval, and what overlap gains."""
    ratio, low, high = ratio_with_interval(seconds, OWN, TORCH)
    lines = [f"{link}: 2 ranks, {len(seconds[OWN])} steps each"]
    lines += [f"  {name:20} {1e3 * statistics.median(times):7.1f} ms" for name, times in seconds.items()]
    lines.append(f"  own / torch's {ratio:.3f}, 95% interval {low:.3f} to {high:.3f}, at most {AT_MOST}")
    due = f", at least {AT_LEAST:.0%}" if link == EMULATED else ""
    return "\n".join([*lines, f"  overlap gains {gain(seconds):.0%} over one flat all-reduce{due}"])


def main() -> int:
    """Measure on both links; return 1 if a target is missed."""
    sys.path.insert(0, str(ROOT))
    from course_utils import Link

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12, help=f"of {STEPS} steps of each contender (default: 12)")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"samples a rank (default: {BATCH})")
    parser.add_argument("--cap", type=int, default=CAP, help=f"bytes of a bucket (default: {CAP})")
    options = parser.parse_args()
    size = sum(one.numel() for one in make_model(WIDTH, LAYERS).parameters())
    buckets = f"buckets of {options.cap / 2**20:g} MiB"
    print(f"a step of a model of {size:,} parameters, {options.batch} samples a rank, {buckets}", flush=True)
    measured: dict[str, Seconds] = {}
    for name, link in ((LOOPBACK, None), (EMULATED, Link(latency=1e-3, bandwidth=1e9))):
        measured[name] = in_turns(lesson_ddp(), WIDTH, LAYERS, options.batch, options.cap, options.turns, link)
        print(table(name, measured[name]), flush=True)
    misses = missed(measured)
    print("\n".join(misses) if misses else "every target is met")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
