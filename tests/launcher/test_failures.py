"""When a rank fails: the error names the first original failure, shows the learner's own lines, and stops the others."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_utils import launch
from course_utils.errors import CourseError, LaunchError, WorkerFailed

from .conftest import Notebook


def failure_of(fn: Callable[..., Any], *args: Any, **options: Any) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as caught:
        launch(fn, *args, **options)
    return caught.value


# ---- L2: the root cause


def waiting_ways() -> dict[str, Callable[[int, int], Any]]:
    """What the other ranks may be doing while the rank `failing` fails."""

    def in_recv(rank: int, failing: int) -> None:
        dist.recv(torch.zeros(3), failing)

    def in_large_send(rank: int, failing: int) -> None:
        dist.send(torch.zeros(4_000_000), failing)

    def in_all_reduce(rank: int, failing: int) -> None:
        dist.all_reduce(torch.zeros(3))

    def in_barrier(rank: int, failing: int) -> None:
        dist.barrier()

    def in_store(rank: int, failing: int) -> None:
        dist.distributed_c10d._get_default_store().get("never set")

    def in_a_loop(rank: int, failing: int) -> None:
        while True:
            pass

    def returned(rank: int, failing: int) -> None:
        return None

    return {
        function.__name__: function
        for function in (in_recv, in_large_send, in_all_reduce, in_barrier, in_store, in_a_loop, returned)
    }


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("others", list(waiting_ways()))
def test_L2_the_error_names_the_rank_that_raised_whatever_the_others_do(others: str, failing: int) -> None:
    wait = waiting_ways()[others]

    def worker() -> None:
        rank = dist.get_rank()
        if rank == failing:
            raise ValueError(f"boom of {rank}")
        wait(rank, failing)

    error = failure_of(worker, nprocs=3)
    assert error.rank == failing
    assert error.kind == "exception"
    assert error.exception_type == "ValueError"
    assert error.exception_message == f"boom of {failing}"
    assert str(error).startswith(f"rank {failing} of 3 failed: ValueError: boom of {failing}\n")
    assert 'raise ValueError(f"boom of {rank}")' in error.traceback
    assert error.traceback in str(error)


def test_L2_a_lost_connection_is_folded_as_a_consequence(each_way: str) -> None:
    def worker() -> None:
        if dist.get_rank() == 1:
            dist.destroy_process_group()
            raise ValueError("boom")
        dist.barrier()

    error = failure_of(worker)
    assert (error.rank, error.exception_type) == (1, "ValueError")
    assert [rank for rank, _ in error.consequences] in ([], [0])
    for _, line in error.consequences:
        assert "\n" not in line
        assert line in str(error)
    assert "connection closed" not in str(error).lower()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_L2_a_dead_rank_is_the_cause_and_what_its_peers_say_of_it_is_not(
    failing: int, count: Callable[[int, int], int]
) -> None:
    def worker() -> None:
        dist.all_reduce(torch.ones(10))
        if dist.get_rank() == failing:
            os._exit(3)
        dist.all_reduce(torch.ones(10))

    for _ in range(count(4, 50)):
        error = failure_of(worker, nprocs=3)
        assert (error.rank, error.kind, error.exitcode) == (failing, "exit", 3)


def test_L2_right_every_time(count: Callable[[int, int], int]) -> None:
    def worker(failing: int, leaves_group: bool) -> None:
        dist.all_reduce(torch.ones(10))
        if dist.get_rank() == failing:
            try:
                raise ValueError("boom")
            finally:
                if leaves_group:
                    dist.destroy_process_group()
        dist.barrier()

    for turn in range(count(10, 50)):
        error = failure_of(worker, failing=turn % 2, leaves_group=turn % 4 > 1)
        assert (error.rank, error.exception_type, error.exception_message) == (turn % 2, "ValueError", "boom")
        assert 'raise ValueError("boom")' in error.traceback


def test_L2_a_lost_connection_reported_in_the_learners_own_words_is_still_a_consequence() -> None:
    def worker() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            os._exit(3)
        try:
            dist.recv(torch.zeros(1), 1)
        except RuntimeError as error:
            raise KeyError("the training step failed") from error

    for _ in range(5):
        error = failure_of(worker)
        assert (error.rank, error.kind, error.exitcode) == (1, "exit", 3)


def test_L2_a_failure_that_only_sounds_like_a_lost_connection_is_named_when_it_is_the_only_one() -> None:
    def worker() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("Connection closed by peer, or so I say")
        dist.barrier()

    error = failure_of(worker)
    assert (error.rank, error.exception_message) == (1, "Connection closed by peer, or so I say")


def test_L2_the_first_of_two_different_failures_is_the_cause() -> None:
    def worker(first: int) -> None:
        if dist.get_rank() == first:
            raise ValueError("first")
        time.sleep(0.1)
        raise KeyError("second")

    for first in (0, 1):
        error = failure_of(worker, first)
        assert (error.rank, error.exception_message) == (first, "first")
        assert error.consequences == [(1 - first, "KeyError: 'second'")]


def test_L2_one_failure_on_all_ranks_is_told_once() -> None:
    def worker() -> None:
        raise ValueError("the same" + " everywhere")

    error = failure_of(worker, nprocs=4)
    assert error.rank == 0
    assert error.consequences == []
    assert str(error).count("the same everywhere") == 2  # headline and traceback
    assert "ranks 1, 2 and 3" in str(error)


def test_L2_a_failure_while_ddp_runs_backward() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor, rank: int) -> torch.Tensor:
            context.rank = rank
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            if context.rank == 1:
                raise ArithmeticError("gradient of rank 1")
            return gradient, None

    def worker() -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        for _ in range(3):
            Fails.apply(model(torch.ones(2, 4)), dist.get_rank()).sum().backward()

    error = failure_of(worker)
    assert (error.rank, error.exception_type, error.exception_message) == (1, "ArithmeticError", "gradient of rank 1")
    assert 'raise ArithmeticError("gradient of rank 1")' in error.traceback


def awkward_exceptions() -> dict[str, tuple[Callable[[], BaseException], str]]:
    """Exceptions that are hard to carry, each with a text that the error must show."""

    class TakesThree(Exception):
        def __init__(self, one: int, two: int, three: int) -> None:
            super().__init__(f"{one} {two} {three}")

    class HoldsLock(Exception):
        def __init__(self) -> None:
            super().__init__("holds a lock")
            self.lock = threading.Lock()

    class RefusesPickling(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("no")

    class CannotBeShown(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    class ShowsNoText(Exception):
        def __str__(self) -> str:
            return 3  # type: ignore[return-value]

    class NotAnException(BaseException):
        pass

    def with_note() -> BaseException:
        error = ValueError("boom")
        error.add_note("a note for the reader")
        return error

    return {
        "no message": (AssertionError, "AssertionError"),
        "a key": (lambda: KeyError("missing"), "KeyError: 'missing'"),
        "an errno": (lambda: FileNotFoundError(2, "No such file or directory", "data.csv"), "data.csv"),
        "several lines": (lambda: ValueError("first line\nsecond line"), "second line"),
        "a long message": (lambda: ValueError("x" * 300_000), "ValueError: xxx"),
        "not Latin": (lambda: ValueError("größe — 次元 🙂"), "größe — 次元 🙂"),
        "half a character": (lambda: ValueError("half \udcff character"), "half"),
        "three arguments": (lambda: TakesThree(1, 2, 3), "TakesThree: 1 2 3"),
        "a lock inside": (HoldsLock, "HoldsLock: holds a lock"),
        "refuses pickling": (lambda: RefusesPickling("hard to move"), "RefusesPickling: hard to move"),
        "__str__ fails": (CannotBeShown, "CannotBeShown"),
        "__str__ returns no text": (ShowsNoText, "ShowsNoText"),
        "no Exception": (lambda: NotAnException("deep"), "NotAnException: deep"),
        "a group": (lambda: ExceptionGroup("several", [ValueError("one"), KeyError("two")]), "several"),
        "a note": (with_note, "a note for the reader"),
        "the end of an iterator": (lambda: StopIteration(3), "StopIteration: 3"),
        "an interrupt of its own": (KeyboardInterrupt, "KeyboardInterrupt"),
        "generator exit": (GeneratorExit, "GeneratorExit"),
    }


@pytest.mark.parametrize("which", list(awkward_exceptions()))
def test_L2_every_kind_of_exception_is_told(which: str) -> None:
    make, shown = awkward_exceptions()[which]

    def worker() -> None:
        if os.environ["RANK"] == "1":
            raise make()

    error = failure_of(worker, framework="python")
    assert (error.rank, error.kind) == (1, "exception")
    assert shown in str(error)
    str(error).encode()  # can be printed


def test_L2_exceptions_that_the_interpreter_raises_are_told() -> None:
    def recursive(n: int) -> int:
        return recursive(n + 1) + 1

    error = failure_of(lambda: recursive(0), framework="python")
    assert error.exception_type == "RecursionError"
    assert len(str(error)) < 20_000
    error = failure_of(lambda: exec("for:"), framework="python")
    assert error.exception_type == "SyntaxError"


def test_L2_the_traceback_has_the_causes_and_none_of_our_own_frames(notebook: Notebook, each_way: str) -> None:
    notebook.run(
        """
import os

class NoData(Exception):
    pass

def read(path):
    return {}[path]
"""
    )
    notebook.run(
        """
def load(path):
    try:
        return read(path)
    except KeyError as error:
        raise NoData(f"nothing in {path}") from error

def worker():
    if os.environ["RANK"] == "1":
        load("a.csv")
"""
    )
    error = failure_of(notebook["worker"], framework="python")
    assert (error.exception_type, error.exception_message) == ("NoData", "nothing in a.csv")
    lines = [line.strip() for line in error.traceback.splitlines() if line.strip()]
    assert lines == [
        "cell 2, line 4, in load",
        "return read(path)",
        "cell 1, line 8, in read",
        "return {}[path]",
        "KeyError: 'a.csv'",
        "The above was the direct cause of:",
        "cell 2, line 10, in worker",
        'load("a.csv")',
        "cell 2, line 6, in load",
        'raise NoData(f"nothing in {path}") from error',
        lines[-1],
    ]
    assert lines[-1].endswith("NoData: nothing in a.csv")


def test_L2_an_error_below_library_code_shows_the_learners_line() -> None:
    def worker() -> None:
        torch.nn.Linear(3, 2)(torch.ones(1, 5))

    error = failure_of(worker, framework="torch", nprocs=1)
    assert "torch.nn.Linear(3, 2)(torch.ones(1, 5))" in error.traceback
    assert "mat1 and mat2" in error.exception_message
    assert "rank.py" not in str(error)


def test_L2_the_error_keeps_what_each_rank_printed() -> None:
    def worker() -> None:
        print(f"rank {os.environ['RANK']} was here")
        raise ValueError("boom")

    error = failure_of(worker, framework="python")
    assert [log.splitlines() for log in error.logs] == [["rank 0 was here"], ["rank 1 was here"]]


def test_the_others_are_stopped_at_once() -> None:
    def worker() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        time.sleep(600)

    launch(abs, 1, framework="python")
    start = time.monotonic()
    failure_of(worker, framework="python")
    assert time.monotonic() - start < 2


def test_an_error_of_the_launcher_is_one_of_the_course() -> None:
    def worker() -> None:
        raise ValueError("boom")

    error = failure_of(worker, framework="python")
    assert isinstance(error, LaunchError)
    assert isinstance(error, CourseError)


# ---- L7: ranks are held until all have reported


def test_L7_a_rank_that_returned_early_is_still_there_for_its_peers(tmp_path: Path, each_way: str) -> None:
    class TellsWhenItIsSentBack:
        """Its rank pickles it after the function has returned."""

        def __init__(self, path: Path) -> None:
            self.path = path

        def __reduce__(self) -> Any:
            self.path.touch()
            return (str, ())

    def worker(path: Path) -> Any:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:  # the store lives here
            return TellsWhenItIsSentBack(path)
        while not path.exists():
            time.sleep(0.01)
        time.sleep(0.1)
        store.set("late", "yes")
        return store.get("late")

    run = launch(worker, tmp_path / "returned", timeout=20)
    assert run.results == ["", b"yes"]


# ---- L8: death without a result


def deaths() -> dict[str, tuple[Callable[[], Any], dict[str, Any], str]]:
    """Ways to die, each with what the error's attributes and its text must say."""
    return {
        "os._exit(3)": (lambda: os._exit(3), {"kind": "exit", "exitcode": 3}, "exit code 3"),
        "os._exit(0)": (lambda: os._exit(0), {"kind": "exit", "exitcode": 0}, "exit code 0"),
        "a crash": (lambda: ctypes.string_at(0), {"kind": "signal", "signal": signal.SIGSEGV}, "SIGSEGV"),
        "an abort": (os.abort, {"kind": "signal", "signal": signal.SIGABRT}, "SIGABRT"),
        "killed": (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            {"kind": "signal", "signal": signal.SIGKILL},
            "memory",
        ),
        "terminated": (
            lambda: os.kill(os.getpid(), signal.SIGTERM),
            {"kind": "signal", "signal": signal.SIGTERM},
            "SIGTERM",
        ),
        "sys.exit(0)": (lambda: sys.exit(0), {"exception_type": "SystemExit"}, "sys.exit(0)"),
        "sys.exit()": (lambda: sys.exit(), {"exception_type": "SystemExit"}, "sys.exit("),
        "sys.exit(5)": (lambda: sys.exit(5), {"exception_type": "SystemExit"}, "sys.exit(5)"),
        "sys.exit(text)": (lambda: sys.exit("no data"), {"exception_type": "SystemExit"}, "no data"),
    }


@pytest.mark.parametrize("how", list(deaths()))
def test_L8_the_error_names_rank_and_signal_or_code_and_the_last_lines(how: str) -> None:
    die, attributes, shown = deaths()[how]

    def worker() -> None:
        if dist.get_rank() == 2:
            for number in range(30):
                print(f"line {number}")
            print("last line, without an end", end="")
            die()
        dist.barrier()

    error = failure_of(worker, nprocs=3)
    assert error.rank == 2
    assert {name: getattr(error, name) for name in attributes} == attributes
    text = str(error)
    assert text.startswith("rank 2 of 3 failed: ")
    assert shown in text
    if error.kind in ("exit", "signal"):
        assert "line 29" in text
        assert "last line, without an end" in text
        assert "line 3\n" not in text
    assert error.logs[2].endswith("last line, without an end")


@pytest.mark.parametrize("how", ["os._exit(3)", "os._exit(0)", "a crash", "sys.exit(0)"])
def test_L8_the_same_with_fresh_interpreters(how: str, fresh_interpreters: None) -> None:
    die, attributes, _ = deaths()[how]

    def worker() -> None:
        if os.environ["RANK"] == "1":
            die()
        time.sleep(600)

    error = failure_of(worker, framework="python")
    assert error.rank == 1
    assert {name: getattr(error, name) for name in attributes} == attributes


def test_L8_a_crash_in_compiled_code_shows_the_line_that_led_to_it(notebook: Notebook) -> None:
    notebook.run("import ctypes\ndef worker():\n    ctypes.string_at(0)\n")
    error = failure_of(notebook["worker"], framework="python", nprocs=1)
    assert "cell 1, line 3" in str(error)
    assert "ctypes.string_at(0)" in str(error)


def test_L8_all_ranks_die() -> None:
    error = failure_of(lambda: os._exit(3), framework="python", nprocs=4)
    assert (error.rank, error.exitcode) == (0, 3)
    assert "ranks 1, 2 and 3" in str(error)


def test_L8_a_rank_that_dies_after_its_peers_have_returned() -> None:
    def worker() -> None:
        if os.environ["RANK"] == "0":
            time.sleep(0.2)
            os._exit(9)

    error = failure_of(worker, framework="python")
    assert (error.rank, error.exitcode) == (0, 9)


def test_L8_memory_runs_out() -> None:
    def worker() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
        bytearray(2**40)

    error = failure_of(worker, framework="python", nprocs=1)
    assert error.exception_type == "MemoryError"


def test_L8_an_interpreter_that_cannot_start_is_told() -> None:
    with pytest.raises(WorkerFailed) as caught:
        launch(abs, 1, framework="python", env={"PYTHONHOME": "/nowhere"}, timeout=20)
    assert caught.value.kind == "exit"
    assert "encodings" in str(caught.value)  # what the interpreter says about it


def test_L8_a_rank_that_cannot_read_the_function_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone_by_then.py").write_text("def work():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import gone_by_then  # type: ignore[import-not-found]

    work = gone_by_then.work
    (tmp_path / "gone_by_then.py").unlink()
    for compiled in tmp_path.glob("__pycache__/*"):
        compiled.unlink()
    error = failure_of(work, framework="python")
    assert error.exception_type == "ModuleNotFoundError"
    assert "gone_by_then" in error.exception_message


def test_L8_a_rank_that_closes_all_its_files_ends_the_run() -> None:
    def worker() -> None:
        if os.environ["RANK"] == "1":
            os.closerange(3, 1000)
        time.sleep(600)

    error = failure_of(worker, framework="python", timeout=20)
    assert error.rank == 1


# ---- L11: what a rank returns cannot be sent back


def unsendable_results() -> dict[str, tuple[Callable[[], Any], str]]:
    """Values that cannot come back, each with the type that the error must name."""

    class Refuses:
        def __reduce__(self) -> Any:
            raise RuntimeError("not me")

    class FailsOnArrival:
        def __reduce__(self) -> Any:
            return (int, ("no number",))

    def nested_deep() -> list[Any]:
        value: list[Any] = []
        for _ in range(100_000):
            value = [value]
        return value

    def wrapped_model() -> Any:
        return DistributedDataParallel(torch.nn.Linear(2, 1))

    return {
        "a lock": (threading.Lock, "lock"),
        "a generator": (lambda: (n for n in range(3)), "generator"),
        "a socket": (socket.socket, "socket"),
        "a thread": (threading.current_thread, "Thread"),
        "a binary file": (lambda: open(os.devnull, "rb"), "BufferedReader"),
        "a lock in a dict": (lambda: {"model": [threading.Lock()]}, "lock"),
        "refuses": (Refuses, "Refuses"),
        "fails on arrival": (FailsOnArrival, "FailsOnArrival"),
        "nested too deep": (nested_deep, "list"),
        "a process group": (lambda: dist.group.WORLD, "ProcessGroup"),
        "a DDP model": (wrapped_model, "DistributedDataParallel"),
    }


@pytest.mark.parametrize("which", list(unsendable_results()))
def test_L11_the_error_names_the_rank_and_the_type(which: str) -> None:
    make, type_name = unsendable_results()[which]

    def worker() -> Any:
        value = make()
        return value if dist.get_rank() == 1 else 0

    error = failure_of(worker)
    assert (error.rank, error.kind) == (1, "result")
    assert str(error).startswith("rank 1 of 2 failed: returned ")
    assert type_name in str(error)


def test_L11_the_others_are_stopped(each_way: str) -> None:
    def worker() -> Any:
        if os.environ["RANK"] == "0":
            return threading.Lock()
        time.sleep(600)

    error = failure_of(worker, framework="python")
    assert (error.rank, error.kind) == (0, "result")


def test_L11_what_can_be_sent_by_value_is() -> None:
    def worker() -> Any:
        offset = int(os.environ["RANK"])
        return lambda number: number + offset

    run = launch(worker, framework="python")
    assert [result(10) for result in run.results] == [10, 11]
