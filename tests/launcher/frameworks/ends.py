"""The ways in which a rank of any framework can end before its time, and what the error must say of each."""

from __future__ import annotations

import os
import signal

from course_utils.errors import WorkerFailed

WAYS = ("raises", "exits", "is killed")


def end(way: str) -> None:
    """End this rank so."""
    if way == "raises":
        raise ValueError("boom")
    if way == "exits":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def names(error: WorkerFailed, rank: int, way: str) -> None:
    """Hold the error of a run in which `rank` ended so against what it must name."""
    assert error.rank == rank
    if way == "raises":
        assert (error.exception_type, error.exception_message) == ("ValueError", "boom")
    elif way == "exits":
        assert (error.kind, error.exitcode) == ("exit", 3)
    else:
        assert (error.kind, error.signal) == ("signal", signal.SIGKILL)
