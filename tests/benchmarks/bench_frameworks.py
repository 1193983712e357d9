"""Later launches of TensorFlow and Horovod ranks, and calls of ranks that stay, each beside its rival, in turns.

`make bench` runs it. TensorFlow: two workers make a MultiWorkerMirroredStrategy and all-reduce once, by `launch` and
as two plain processes. Horovod: two ranks all-reduce once, by `launch` and by `horovod.run`. Ranks that stay: a call of
four that returns a number from each, by `Ranks` and by ipyparallel's warm engines (which have no process group).
A framework or a rival that is not installed is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from course_utils import Ranks, launch
from course_utils.launcher.frameworks.hosting import reserved_ports

TENSORFLOW, POPEN = "launch, TensorFlow", "two processes, TensorFlow"
HOROVOD, HOROVOD_RUN = "launch, Horovod", "horovod.run"
STAYING, ENGINES = "Ranks, a call", "ipyparallel's warm engines, a call"
AT_LEAST_FASTER = {POPEN: (TENSORFLOW, 10.0), HOROVOD_RUN: (HOROVOD, 5.0)}  # their median over ours
MOST_A_CALL = {"median": 0.005, "95th percentile": 0.015}  # seconds
Contender = Callable[[], list[Any]]


# --- the work --------------------------------------------------------------------------------------------------------


def reduce_in_tensorflow() -> float:
    """What each worker does once it has started."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def step() -> Any:
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(1.0))
        )

    return float(step())


def reduce_in_horovod() -> float:
    """What each rank does once it has met the others."""
    import horovod.torch as hvd
    import torch

    hvd.init()  # horovod.run leaves it to the function; after launch's own, a second one does nothing
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum))


def by_processes() -> list[float]:
    """Start two workers as a script would, and read what they leave."""
    with tempfile.TemporaryDirectory() as folder, reserved_ports(2) as ports:
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        files = [Path(folder, str(index)) for index in range(2)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--tensorflow-worker", str(file)],
                env={
                    **os.environ,
                    "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                },
                stderr=subprocess.DEVNULL,
            )
            for index, file in enumerate(files)
        ]
        for process in processes:
            if process.wait(300):
                raise SystemExit(f"a plain TensorFlow worker ended with code {process.returncode}")
        return [float(file.read_text()) for file in files]


def by_horovod_run() -> list[float]:
    from horovod import run

    found: list[float] = run(reduce_in_horovod, np=2, use_gloo=True, disable_cache=True)
    return found


@contextmanager
def engines() -> Iterator[Contender]:
    """Warm engines, and a call of all of them."""
    import ipyparallel

    cluster = ipyparallel.Cluster(n=4, log_level=40)
    with cluster as client:
        view = client[:]
        view.block = True
        yield lambda: list(view.apply(os.getpid))


# --- taking turns ----------------------------------------------------------------------------------------------------


def seconds_of(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in `rounds` turns, after one that is not counted."""
    for contend in contenders.values():
        contend()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            contenders[name]()
            taken[name].append(time.perf_counter() - start)
    return taken


def missed(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """A sentence for each target that was measured and missed."""
    found = []
    for rival, (ours, times) in AT_LEAST_FASTER.items():
        if rival in seconds and ours in seconds:
            ratio = statistics.median(seconds[rival]) / statistics.median(seconds[ours])
            if ratio < times:
                found.append(f"{rival} took {ratio:.1f} times as long as {ours}; the target is at least {times:.0f}")
    if STAYING in seconds:
        for what, most in MOST_A_CALL.items():
            value = spread(seconds[STAYING])[what]
            if value > most:
                found.append(f"{STAYING}: {what} {value * 1e3:.1f} ms; the target is at most {most * 1e3:.0f} ms")
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    return {
        "median": statistics.median(values),
        "95th percentile": statistics.quantiles(values, n=20, method="inclusive")[-1],
    }


def table(seconds: Mapping[str, Sequence[float]]) -> str:
    """Median and 95th percentile in milliseconds, a line a contender."""
    lines = [f"{'contender':<36}{'turns':>6}{'median ms':>12}{'p95 ms':>10}"]
    for name, values in seconds.items():
        median, high = (value * 1e3 for value in spread(values).values())
        lines.append(f"{name:<36}{len(values):>6}{median:>12.1f}{high:>10.1f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="launches by each launcher (default 5)")
    parser.add_argument("--calls", type=int, default=300, help="calls of ranks that stay (default 300)")
    parser.add_argument("--tensorflow-worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tensorflow_worker:
        options.tensorflow_worker.write_text(str(reduce_in_tensorflow()))
        return 0
    seconds: dict[str, list[float]] = {}
    absent = [name for name in ("tensorflow", "horovod", "ipyparallel") if importlib.util.find_spec(name) is None]
    with ExitStack() as stack:
        calls: dict[str, Contender] = {}
        if "ipyparallel" not in absent:
            calls[ENGINES] = stack.enter_context(engines())
        ranks = stack.enter_context(Ranks(4))
        calls[STAYING] = lambda: ranks.run(os.getpid).results
        seconds |= seconds_of(calls, options.calls)
    if "tensorflow" not in absent:
        launched = {
            TENSORFLOW: lambda: launch(reduce_in_tensorflow, framework="tensorflow").results,
            POPEN: by_processes,
        }
        seconds |= seconds_of(launched, options.rounds)
    if "horovod" not in absent:
        launched = {
            HOROVOD: lambda: launch(reduce_in_horovod, framework="horovod").results,
            HOROVOD_RUN: by_horovod_run,
        }
        seconds |= seconds_of(launched, options.rounds)
    print(f"Later launches and calls, in turns (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores):")
    print(table(seconds))
    if absent:
        print(f"Not installed, so not measured: {', '.join(absent)}.")
    misses = missed(seconds)
    print("\n".join(f"MISSED: {miss}" for miss in misses) or "Every target that was measured is met.")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
