"""Hundreds of launches with a random fault at a random moment: each ends in the right verdict, in time, and leaves nothing."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from course_utils import launch
from course_utils.errors import LaunchError, WorkerFailed, WorkerTimeout
from tests.conftest import LONG
from tests.kernels import await_that

from .conftest import below_servers

SECONDS = 90.0  # in `make test` the rounds stop here, however many they were
PATIENCE = 3.0  # seconds without progress, for the fault that hangs
MOST = 25.0  # seconds that one launch may take in all, on a busy machine
FAULTS = ("none", "killed", "segfault", "exception", "exit", "early return", "flood", "hang", "interrupt")


def worker(fault: str, failing: int, moment: float) -> str:
    """Reduce once; after `moment` seconds the rank `failing` does what the fault says, while the others wait for it."""
    one = torch.ones(100)
    begun = time.monotonic()
    rank = dist.get_rank()
    dist.all_reduce(one)
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
        dist.barrier()
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


def test_every_fault_ends_in_its_verdict_in_time_and_leaves_nothing(count: Callable[[int, int], int]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    launch(worker, "none", 0, 0.0)  # the server is there
    files, shared = psutil.Process().num_fds(), set(Path("/dev/shm").glob("*"))
    begun = time.monotonic()
    for number in range(count(120, 500)):
        if not LONG and time.monotonic() - begun > SECONDS:
            break
        fault, nprocs = rng.choice(FAULTS), rng.choice([2, 3])
        failing, moment = rng.randrange(nprocs), rng.choice([0.0, rng.uniform(0, 0.3)])
        story = f"launch {number} of seed {seed}: {fault} of rank {failing} of {nprocs} after {moment:.2f} s"
        patience = PATIENCE if fault == "hang" else 60
        attempt = functools.partial(launch, worker, fault, failing, moment, nprocs=nprocs, timeout=patience)
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
    print(f"{number + 1} launches in {time.monotonic() - begun:.0f} s, seed {seed}")
    assert psutil.Process().num_fds() <= files + 3
    assert set(Path("/dev/shm").glob("*")) <= shared
