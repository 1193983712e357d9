"""When nothing moves: a launch ends, says where each rank stands, and leaves alone what merely takes long."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_utils import launch
from course_utils.errors import RankState, WorkerFailed, WorkerTimeout
from course_utils.launcher import Run
from tests.kernels import await_that

from .conftest import Notebook

SECONDS = 1.0


@pytest.fixture(scope="module", autouse=True)
def the_server_is_not_busy_with_imports() -> None:
    """In its first idle moment the server imports more of torch, and a launch waits for that."""

    def has_imported() -> bool:
        (found,) = launch(lambda: "torch._dynamo" in sys.modules, nprocs=1, init=False).results
        if not found:
            time.sleep(0.7)  # leaves it idle
        return bool(found)

    await_that(has_imported, 60, "the server to import what it wants")


def timeout_of(fn: Callable[..., Any], *args: Any, **options: Any) -> WorkerTimeout:
    timeout, started = options.pop("timeout", SECONDS), time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        launch(fn, *args, timeout=timeout, **options)
    assert time.monotonic() - started < timeout + 20
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.seconds == timeout
    return caught.value


def rows_of(text: str) -> list[list[str]]:
    """The table in the message of a timeout, row by row."""
    table = text.partition("\n")[2].partition("\n\n")[0]
    return [re.split(r"  +", line.strip()) for line in table.splitlines()]


def side_by_side(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each call returned or raised: launches that only wait may wait together."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(calls, pool.map(outcome, calls.values()), strict=True))


@pytest.fixture(scope="module")
def signs_of_life() -> Callable[[], Any]:
    """A context for ranks: inside it, dots are printed. The first DDP model of a process imports for a second or two."""

    @contextlib.contextmanager
    def dots() -> Iterator[None]:
        done = threading.Event()

        def print_dots() -> None:
            while not done.wait(0.2):
                print(".", end="", flush=True)

        thread = threading.Thread(target=print_dots)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    return dots


def states_of(error: WorkerTimeout) -> list[str]:
    return [state.state for state in error.states]


# ---- L17: a run that hangs says where


def test_L17_one_rank_skips_a_collective(notebook: Notebook, each_way: str) -> None:
    notebook.run("import torch\nimport torch.distributed as dist\n")
    notebook.run(
        """
def worker():
    value = torch.ones(1)
    if dist.get_rank() == 0:
        dist.all_reduce(value)
    return value
"""
    )
    # fresh interpreters import torch first, for seconds in which nothing else happens
    error = timeout_of(notebook["worker"], timeout=SECONDS if each_way == "warm server" else 8)
    waiting, returned = error.states
    assert (waiting.rank, waiting.state, waiting.collective) == (0, "waiting", "all_reduce")
    assert (waiting.where, waiting.code) == ("cell 2, line 5", "dist.all_reduce(value)")
    assert (returned.rank, returned.state, returned.collective) == (1, "returned", None)
    text = str(error)
    assert rows_of(text) == [
        ["rank", "state", "waits in", "line", "code"],
        ["0", "waiting", "all_reduce", "cell 2, line 5", "dist.all_reduce(value)"],
        ["1", "returned"],
    ]
    assert "in worker" in waiting.stack
    assert waiting.stack in text
    assert "rank.py" not in text


def waits() -> dict[str, tuple[Callable[[], Any], str]]:
    """Calls of rank 0 that wait for a peer that never comes, and how the error must name them."""
    zeros = functools.partial(torch.zeros, 2)
    return {
        "recv": (lambda: dist.recv(zeros(), 1), "recv from rank 1"),
        "recv from any rank": (lambda: dist.recv(zeros()), "recv from any rank"),
        "send": (lambda: dist.send(zeros(), 1), "send to rank 1"),
        "irecv": (lambda: dist.irecv(zeros(), 1).wait(), "recv from rank 1"),
        "isend": (lambda: dist.isend(zeros(), 1).wait(), "send to rank 1"),
        "batch": (
            lambda: [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, zeros(), 1)])],
            "recv from rank 1",
        ),
        "an object": (lambda: dist.recv_object_list([None], 1), "recv from rank 1"),
        "all_reduce": (lambda: dist.all_reduce(zeros()), "all_reduce"),
        "all_reduce later": (lambda: dist.all_reduce(zeros(), async_op=True).wait(), "all_reduce"),
        "broadcast": (lambda: dist.broadcast(zeros(), 1), "broadcast"),
        "reduce": (lambda: dist.reduce(zeros(), 0), "reduce"),
        "all_gather": (lambda: dist.all_gather([zeros(), zeros()], zeros()), "all_gather"),
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(torch.zeros(4), zeros()),
            "all_gather_into_tensor",
        ),
        "all_gather_object": (lambda: dist.all_gather_object([None, None], 1), "all_gather"),
        "gather": (lambda: dist.gather(zeros(), [zeros(), zeros()]), "gather"),
        "scatter": (lambda: dist.scatter(zeros(), [zeros(), zeros()]), "scatter"),
        "reduce_scatter": (lambda: dist.reduce_scatter(zeros(), [zeros(), zeros()]), "reduce_scatter"),
        "all_to_all": (lambda: dist.all_to_all_single(zeros(), zeros()), "all_to_all_single"),
        "barrier": (dist.barrier, "barrier"),
        "monitored_barrier": (dist.monitored_barrier, "monitored_barrier"),
    }


@pytest.fixture(scope="module")
def hangs() -> dict[str, Any]:
    """How a launch of each of `waits` ended."""

    def worker(wait: Callable[[], Any]) -> None:
        if dist.get_rank() == 0:
            wait()

    calls = {call: functools.partial(launch, worker, wait, timeout=SECONDS) for call, (wait, _) in waits().items()}
    return side_by_side(calls)


@pytest.mark.parametrize("call", list(waits()))
def test_L17_what_a_rank_waits_in_is_named(call: str, hangs: dict[str, Any]) -> None:
    error, name = hangs[call], waits()[call][1]
    assert isinstance(error, WorkerTimeout), error
    waiting = error.states[0]
    assert (waiting.state, waiting.collective) == ("waiting", name)
    assert states_of(error)[1] == "returned"
    assert waiting.where is not None
    assert re.fullmatch(r"test_timeouts\.py, line \d+", waiting.where)


def test_L17_differing_collectives() -> None:
    def worker() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2))
        else:
            dist.recv(torch.ones(2), 0)

    error = timeout_of(worker)
    assert [state.collective for state in error.states] == ["all_reduce", "recv from rank 0"]
    assert states_of(error) == ["waiting", "waiting"]


def test_L17_a_ring_of_blocking_sends() -> None:
    def worker() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        value = torch.ones(1_000_000)
        dist.send(value, (rank + 1) % size)
        dist.recv(value, (rank - 1) % size)

    error = timeout_of(worker, nprocs=4)
    assert [state.collective for state in error.states] == [f"send to rank {(rank + 1) % 4}" for rank in range(4)]
    assert len({state.where for state in error.states}) == 1


def test_L17_in_a_group_of_some_ranks_the_peer_is_named_as_the_learner_knows_it() -> None:
    def worker() -> None:
        group = dist.new_group([1, 2])
        if dist.get_rank() == 2:
            dist.recv(torch.zeros(1), 1, group=group)

    error = timeout_of(worker, nprocs=3)
    assert error.states[2].collective == "recv from rank 1"
    assert states_of(error) == ["returned", "returned", "waiting"]


def places_to_hang() -> dict[str, Callable[[], Any]]:
    """Ways to stand still that no collective explains."""

    def busy() -> None:
        while True:
            pass

    def asleep() -> None:
        time.sleep(600)

    def holding_the_interpreter() -> None:
        sum(itertools.repeat(0))

    def on_a_lock() -> None:
        threading.Semaphore(0).acquire()

    def on_a_pipe() -> None:
        os.read(os.pipe()[0], 1)

    def ignoring_sigterm() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    def catching_everything() -> None:
        while True:
            try:
                time.sleep(600)
            except BaseException:
                continue

    return {
        function.__name__: function
        for function in (
            busy,
            asleep,
            holding_the_interpreter,
            on_a_lock,
            on_a_pipe,
            ignoring_sigterm,
            catching_everything,
        )
    }


@pytest.mark.parametrize("how", list(places_to_hang()))
def test_L17_a_rank_that_stands_still_on_its_own_is_running_and_its_line_is_shown(how: str) -> None:
    hang = places_to_hang()[how]

    def worker() -> None:
        if os.environ["RANK"] == "1":
            hang()

    error = timeout_of(worker, framework="python")
    assert states_of(error) == ["returned", "running"]
    stuck = error.states[1]
    assert stuck.where is not None
    assert stuck.where.startswith("test_timeouts.py, line ")
    assert stuck.code
    assert f"in {how}" in stuck.stack
    assert "in worker" in stuck.stack
    assert ["1", "running", stuck.where, stuck.code] in rows_of(str(error))


def test_L17_a_stopped_rank_ends_too() -> None:
    def worker() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)

    assert states_of(timeout_of(worker, framework="python")) == ["returned", "running"]


def test_L17_a_rank_that_waits_in_a_store_before_any_process_group() -> None:
    def worker() -> None:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=os.environ["RANK"] == "0"
        )
        store.get("never set")

    error = timeout_of(worker, init=False)
    assert states_of(error) == ["running", "running"]
    assert all(state.code == 'store.get("never set")' for state in error.states)


def test_L17_a_rank_that_waits_for_a_peer_that_does_not_join() -> None:
    def worker() -> None:
        if os.environ["RANK"] == "0":
            dist.init_process_group("gloo")

    error = timeout_of(worker, init=False)
    assert states_of(error) == ["running", "returned"]
    assert error.states[0].code == 'dist.init_process_group("gloo")'


def test_L17_a_rank_that_leaves_the_others_in_backward(signs_of_life: Callable[[], Any]) -> None:
    def worker() -> None:
        with signs_of_life():
            model = DistributedDataParallel(torch.nn.Linear(3, 1))
        for step in range(3):
            loss = model(torch.ones(2, 3)).sum()
            if step == 1 and dist.get_rank() == 1:
                return
            loss.backward()

    error = timeout_of(worker)
    assert states_of(error)[1] == "returned"
    assert error.states[0].code in ("loss.backward()", "loss = model(torch.ones(2, 3)).sum()")


def test_L17_hangs_below_library_code_show_the_learners_line() -> None:
    def worker() -> None:
        import torch.distributed.nn.functional as differentiable

        if dist.get_rank() == 0:
            differentiable.all_reduce(torch.ones(1))

    error = timeout_of(worker)
    assert error.states[0].code == "differentiable.all_reduce(torch.ones(1))"
    assert error.states[0].collective == "all_reduce"


def test_L17_a_rank_in_code_made_by_a_library_shows_the_learners_line() -> None:
    def worker() -> None:
        exec(compile("import time; time.sleep(600)", "<string>", "exec"))

    error = timeout_of(worker, framework="python", nprocs=1)
    assert error.states[0].code == 'exec(compile("import time; time.sleep(600)", "<string>", "exec"))'


def test_L17_a_timeout_keeps_what_was_printed() -> None:
    def worker() -> None:
        print("so far")
        time.sleep(600)

    error = timeout_of(worker, framework="python")
    assert error.logs == ["so far\n", "so far\n"]


def test_L17_each_rank_has_a_state() -> None:
    def worker() -> None:
        if dist.get_rank() != 5:
            dist.barrier()

    error = timeout_of(worker, nprocs=6)
    assert [state.rank for state in error.states] == list(range(6))
    assert states_of(error) == ["waiting"] * 5 + ["returned"]
    assert all(isinstance(state, RankState) for state in error.states)
    assert [row[0] for row in rows_of(str(error))] == ["rank", *"012345"]


def test_L17_a_failure_is_told_as_a_failure_although_others_wait() -> None:
    def worker() -> None:
        if dist.get_rank() == 0:
            time.sleep(SECONDS / 2)
            raise ValueError("boom")
        dist.barrier()

    with pytest.raises(WorkerFailed, match="boom"):
        launch(worker, timeout=SECONDS)


def test_L17_the_next_launch_works() -> None:
    timeout_of(lambda: time.sleep(600), framework="python")
    assert launch(abs, -3, framework="python").results == [3, 3]


# ---- the timeout counts time without progress, not the length of the run


def steady(signs_of_life: Callable[[], Any] = contextlib.nullcontext) -> dict[str, Callable[[float], Any]]:
    """What rank 0 may do for long, now and then giving a sign."""

    def prints(until: float) -> None:
        while time.monotonic() < until:
            time.sleep(0.1)
            if dist.get_rank() == 0:
                print(".", end="", flush=True)
        dist.barrier()

    def writes_to_stderr(until: float) -> None:
        while time.monotonic() < until:
            time.sleep(0.1)
            if dist.get_rank() == 1:
                os.write(2, b".")
        dist.barrier()

    def reduces(until: float) -> None:
        while time.monotonic() < until:
            time.sleep(0.1)
            for _ in range(2):
                dist.all_reduce(torch.ones(1))

    def sends(until: float) -> None:
        value = torch.zeros(1)
        more = True
        while more:
            time.sleep(0.1)
            if dist.get_rank() == 0:
                more = time.monotonic() < until
                dist.send(torch.tensor([float(more)]), 1)
            else:
                dist.recv(value, 0)
                more = bool(value)

    def sends_in_a_group_of_its_own(until: float) -> None:
        group = dist.new_group([0, 1])
        value = torch.zeros(1)
        more = True
        while more:
            time.sleep(0.1)
            if dist.get_rank() == 0:
                more = time.monotonic() < until
                dist.isend(torch.tensor([float(more)]), 1, group=group).wait()
            else:
                dist.irecv(value, 0, group=group).wait()
                more = bool(value)

    def trains(until: float) -> None:
        with signs_of_life():
            model = DistributedDataParallel(torch.nn.Linear(3, 1))
        for _ in range(int(2.5 * SECONDS / 0.1)):
            time.sleep(0.1)
            model(torch.ones(2, 3)).sum().backward()

    return {
        function.__name__: function
        for function in (prints, writes_to_stderr, reduces, sends, sends_in_a_group_of_its_own, trains)
    }


@pytest.fixture(scope="module")
def long_runs(signs_of_life: Callable[[], Any]) -> dict[str, Any]:
    """How a launch of each of `steady` ended."""

    def worker(work: Callable[[float], Any]) -> str:
        work(time.monotonic() + 2.5 * SECONDS)
        return "done"

    ways = steady(signs_of_life).items()
    return side_by_side({how: functools.partial(launch, worker, work, timeout=SECONDS) for how, work in ways})


@pytest.mark.parametrize("how", list(steady()))
def test_L17_a_run_that_makes_progress_may_take_longer_than_the_timeout(how: str, long_runs: dict[str, Any]) -> None:
    run = long_runs[how]
    assert isinstance(run, Run), run
    assert run.results == ["done", "done"]
    assert min(run.seconds) > 2 * SECONDS


def test_L17_progress_of_one_rank_keeps_all_alive() -> None:
    def worker() -> str:
        if dist.get_rank() == 0:
            for _ in range(int(2.5 * SECONDS / 0.1)):
                time.sleep(0.1)
                print("working", flush=True)
        dist.barrier()
        return "done"

    assert launch(worker, nprocs=3, timeout=SECONDS).results == ["done"] * 3


def test_L17_ranks_that_return_one_after_the_other_make_progress() -> None:
    def worker() -> float:
        time.sleep(0.5 * SECONDS * int(os.environ["RANK"]))
        return 1.0

    assert launch(worker, nprocs=5, framework="python", timeout=SECONDS).results == [1.0] * 5


def test_L17_a_short_timeout_does_not_count_the_start(fresh_interpreters: None) -> None:
    assert launch(lambda: dist.get_world_size(), timeout=5).results == [2, 2]


# ---- L25: a rank has no keyboard


def ways_to_ask() -> dict[str, Callable[[], Any]]:
    """Ways to ask somebody at a keyboard."""

    def asks_by_input() -> Any:
        return input("how many? ")

    def stops_at_breakpoint() -> Any:
        breakpoint()
        return 1

    def stops_in_pdb() -> Any:
        import pdb

        pdb.set_trace()
        return 1

    def looks_after_an_error() -> Any:
        import pdb

        try:
            raise ValueError("boom")
        except ValueError as error:
            pdb.post_mortem(error.__traceback__)

    def reads_all() -> Any:
        return sys.stdin.read()

    def reads_a_line() -> Any:
        return sys.stdin.readline()

    def reads_line_by_line() -> Any:
        return list(sys.stdin)

    def asks_for_a_password() -> Any:
        import getpass

        return getpass.getpass()

    def opens_a_console() -> Any:
        import code

        code.interact()

    return {
        function.__name__: function
        for function in (
            asks_by_input,
            stops_at_breakpoint,
            stops_in_pdb,
            looks_after_an_error,
            reads_all,
            reads_a_line,
            reads_line_by_line,
            asks_for_a_password,
            opens_a_console,
        )
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", list(ways_to_ask()))
def test_L25_asking_for_keyboard_input_is_an_error_and_no_hang(how: str) -> None:
    ask = ways_to_ask()[how]
    with pytest.raises(WorkerFailed) as caught:
        launch(lambda: ask(), framework="python", timeout=20)
    assert "keyboard" in str(caught.value)
    assert how in caught.value.traceback


def test_L25_the_same_with_fresh_interpreters(fresh_interpreters: None) -> None:
    for how in ("asks_by_input", "stops_at_breakpoint"):
        ask = ways_to_ask()[how]
        with pytest.raises(WorkerFailed, match="keyboard"):
            launch(lambda ask=ask: ask(), framework="python", timeout=20)


def test_L25_descriptor_0_is_at_its_end() -> None:
    assert launch(lambda: os.read(0, 10), framework="python").results == [b"", b""]


def test_L25_a_child_of_a_rank_reads_nothing() -> None:
    def worker() -> str:
        import subprocess

        return subprocess.run(["cat"], capture_output=True, text=True, timeout=10).stdout

    assert launch(worker, framework="python").results == ["", ""]
