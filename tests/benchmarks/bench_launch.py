"""How long a later launch of two torch ranks takes, against three other launchers, in turns; `make bench` runs it.

Measured from the call to "both ranks have all-reduced and returned". Every launcher lives in a process of its own
that has imported torch and done nothing with it, as in a notebook whose first cell imports torch: notebook_launcher
forks that process, and would hang after a parallel operation. All do the same work: a gloo group of two ranks on this
machine, one all-reduce, one value back from each rank. After a warm-up each, they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

RANKS = 2
EXPECTED = [float(RANKS)] * RANKS
ANSWER = "ANSWER "  # what a launcher's process prints besides is not ours
OURS, SPAWN, TORCHRUN, FORK = "course_utils.launch", "torch.multiprocessing.spawn", "torchrun", "notebook_launcher"
AT_LEAST_FASTER = {SPAWN: 15.0, TORCHRUN: 15.0}  # their median over ours
AT_MOST_SLOWER = {FORK: 1.5}  # our median over theirs


# --- the work --------------------------------------------------------------------------------------------------------


def add_ones() -> float:
    """The work of a rank whose group is up: an all-reduce, and its value."""
    import torch
    import torch.distributed as dist

    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one)


def join_and_add(folder: Path, rank: int) -> None:
    """The whole of a rank that must join the group itself; its value goes to a file, as these launchers return none."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    (folder / str(rank)).write_text(str(add_ones()))
    dist.destroy_process_group()


def spawned(rank: int, folder: Path, port: int) -> None:
    """A rank of torch.multiprocessing.spawn."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    join_and_add(folder, rank)


def placed(folder: Path) -> None:
    """A rank of torchrun or notebook_launcher, which set its variables."""
    join_and_add(folder, int(os.environ["RANK"]))


# --- the launchers ---------------------------------------------------------------------------------------------------


def by_launch(folder: Path) -> list[float]:
    from course_utils import launch

    return launch(add_ones, nprocs=RANKS, backend="gloo").results


def by_spawn(folder: Path) -> list[float]:
    import torch.multiprocessing

    torch.multiprocessing.spawn(spawned, (folder, free_port()), nprocs=RANKS)
    return values_in(folder)


def by_torchrun(folder: Path) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run([*command, __file__, "--torchrun-rank", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return values_in(folder)


def by_notebook_launcher(folder: Path) -> list[float]:
    from accelerate import notebook_launcher

    notebook_launcher(placed, (folder,), num_processes=RANKS, use_port=str(free_port()))
    return values_in(folder)


LAUNCHERS: dict[str, Callable[[Path], list[float]]] = {
    OURS: by_launch,
    SPAWN: by_spawn,
    TORCHRUN: by_torchrun,
    FORK: by_notebook_launcher,
}


def values_in(folder: Path) -> list[float]:
    """What the ranks left in `folder`."""
    return [float((folder / str(rank)).read_text()) for rank in range(RANKS)]


def free_port() -> int:
    """A port that is free right now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# --- taking turns ----------------------------------------------------------------------------------------------------


def serve(name: str) -> None:
    """Be the process of one launcher: a launch for each line that comes in, its seconds out."""
    import torch  # noqa: F401  the notebook's first cell

    for _ in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            values = LAUNCHERS[name](Path(folder))
            seconds = time.perf_counter() - start
        if values != EXPECTED:
            raise SystemExit(f"{name} brought {values}, not {EXPECTED}")
        print(ANSWER + json.dumps(seconds), flush=True)


class Launcher:
    """The process of one launcher, seen from here."""

    def __init__(self, name: str) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def launch(self) -> float:
        """Launch once; seconds from the call to both values."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return float(json.loads(line.removeprefix(ANSWER)))
        raise SystemExit(f"the process of {self.name} ended without an answer (code {self.process.wait()})")

    def close(self) -> None:
        """No more launches: let the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of `rounds` launches by each launcher, taken in turns that start with another one each round."""
    launchers = [Launcher(name) for name in LAUNCHERS]
    seconds: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    try:
        for launcher in launchers:
            launcher.launch()
        for turn in range(rounds):
            first = turn % len(launchers)
            for launcher in launchers[first:] + launchers[:first]:
                seconds[launcher.name].append(launcher.launch())
    finally:
        for launcher in launchers:
            launcher.close()
    return seconds


def missed(medians: Mapping[str, float]) -> list[str]:
    """A sentence for each target that these medians miss."""
    ours = medians[OURS]
    slow = [
        f"{name} took {medians[name] / ours:.1f} times as long as {OURS}; the target is at least {times:.0f}"
        for name, times in AT_LEAST_FASTER.items()
        if medians[name] < times * ours
    ]
    return slow + [
        f"{OURS} took {ours / medians[name]:.2f} times as long as {name}; the target is at most {times}"
        for name, times in AT_MOST_SLOWER.items()
        if ours > times * medians[name]
    ]


def table(seconds: Mapping[str, Sequence[float]]) -> str:
    """Median, range, and ratio to ours, a line a launcher."""
    ours = statistics.median(seconds[OURS])
    lines = [f"{'launcher':<30}{'median s':>10}{'range s':>20}{'times ours':>12}"]
    for name, taken in seconds.items():
        median, reach = statistics.median(taken), f"{min(taken):.3f} to {max(taken):.3f}"
        lines.append(f"{name:<30}{median:>10.3f}{reach:>20}{median / ours:>12.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="launches by each launcher (default 7)")
    parser.add_argument("--serve", choices=list(LAUNCHERS), help=argparse.SUPPRESS)
    parser.add_argument("--torchrun-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torchrun_rank:
        placed(options.torchrun_rank)
        return 0
    if options.serve:
        serve(options.serve)
        return 0
    seconds = measure(options.rounds)
    print(f"Two torch ranks, call to both all-reduced and returned, {options.rounds} later launches each, in turns")
    print(f"(load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; on a busy machine the ratios say little):")
    print(table(seconds))
    misses = missed({name: statistics.median(taken) for name, taken in seconds.items()})
    print("\n".join(f"MISSED: {miss}" for miss in misses) or "Every target is met.")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
