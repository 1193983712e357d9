"""Launches with a random fault at a random moment: each must end in the right verdict, in time, and leave nothing behind."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from course_utils import launch
from course_utils.errors import LaunchError, WorkerFailed, WorkerTimeout
from tests.conftest import LONG
from tests.kernels import await_that

from .conftest import below_servers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no rank imports the tests
PATIENCE = 3.0  # seconds without progress, for the fault that hangs
MOST = 25.0  # seconds that one launch may take in all, on a busy machine
FAULTS = ("none", "killed", "segfault", "exception", "exit", "early return", "flood", "hang", "interrupt")


Meet = Callable[[], Callable[[], None]]  # makes, in a rank, what every rank has to call for any of them to go on


def worker(meet: Meet, fault: str, failing: int, moment: float) -> str:
    """Meet once; after `moment` seconds the rank `failing` does what the fault says, while the others wait for it."""
    begun = time.monotonic()
    rank = int(os.environ["RANK"])
    everyone = meet()
    everyone()
    while time.monotonic() - begun < moment:
        time.sleep(0.01)
    if fault == "interrupt":
        time.sleep(60)
    if rank == failing:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "segfault":
            ctypes.string_at(0)
        if fault == "exception":
            raise ValueError(f"boom of {rank}")
        if fault == "exit":
            os._exit(7)
        if fault in ("early return", "hang"):
            return "early"
        if fault == "flood":
            for _ in range(3_000):
                print("x" * 100)
    if fault not in ("flood", "none", "early return"):
        everyone()
    return "done"


def judge(fault: str, failing: int, nprocs: int, attempt: Callable[[], Any]) -> None:
    """Launch once and hold what came of it against what the fault should end in."""
    if fault in ("none", "flood", "early return"):
        run = attempt()
        early = fault == "early return"
        assert run.results == ["early" if early and rank == failing else "done" for rank in range(nprocs)]
        if fault == "flood":
            assert run.logs[failing].count("x") == 300_000
    elif fault == "hang":
        with pytest.raises(WorkerTimeout) as hung:
            attempt()
        assert [state.state for state in hung.value.states] == [
            "returned" if rank == failing else "waiting" for rank in range(nprocs)
        ]
    elif fault == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            attempt()
    else:
        with pytest.raises(WorkerFailed) as failed:
            attempt()
        error = failed.value
        told = (error.rank, error.kind, error.exitcode if error.kind == "exit" else error.signal)
        assert (
            told
            == {
                "killed": (failing, "signal", signal.SIGKILL),
                "segfault": (failing, "signal", signal.SIGSEGV),
                "exception": (failing, "exception", None),
                "exit": (failing, "exit", 7),
            }[fault]
        )


def soak(framework: str, meet: Meet, rounds: int, seconds: float, patience: float = PATIENCE) -> None:
    """Launch `rounds` times, each with a fault; in `make test` at most for so many seconds.

    `patience` is how long a launch that hangs is waited for without progress.
    """
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    start = functools.partial(launch, worker, meet, framework=framework)
    start("none", 0, 0.0)  # the server is there
    files, shared = psutil.Process().num_fds(), set(Path("/dev/shm").glob("*"))
    begun = time.monotonic()
    for number in range(rounds):
        if not LONG and time.monotonic() - begun > seconds:
            break
        fault, nprocs = rng.choice(FAULTS), rng.choice([2, 3])
        failing, moment = rng.randrange(nprocs), rng.choice([0.0, rng.uniform(0, 0.3)])
        story = (
            f"{framework}, launch {number} of seed {seed}: {fault} of rank {failing} of {nprocs} after {moment:.2f} s"
        )
        timeout = patience if fault == "hang" else 60
        attempt = functools.partial(start, fault, failing, moment, nprocs=nprocs, timeout=timeout)
        interrupt = threading.Timer(rng.uniform(0.05, 1.0), os.kill, (os.getpid(), signal.SIGINT))
        started = time.monotonic()
        if fault == "interrupt":
            interrupt.start()
        try:
            judge(fault, failing, nprocs, attempt)
        except (AssertionError, LaunchError, pytest.fail.Exception) as error:
            raise AssertionError(f"{story}: {error}") from error
        finally:
            interrupt.cancel()
        assert time.monotonic() - started < MOST, story
        await_that(lambda: not below_servers(), 5, f"every rank to go after {story}")
    print(f"{framework}: {number + 1} launches in {time.monotonic() - begun:.0f} s, seed {seed}")
    assert psutil.Process().num_fds() <= files + 3
    assert set(Path("/dev/shm").glob("*")) <= shared
