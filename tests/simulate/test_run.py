"""A function written for launch runs in simulated ranks: same values, same traffic, and errors that say where."""

from __future__ import annotations

import _thread
import functools
import linecache
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import get_rank, recv, send

from course_utils import Link, launch
from course_utils.errors import AnswerNeeded, BadRequest, WorkerFailed, WorkerTimeout
from course_utils.simulate import run_simulated
from tests.simulate.algorithms import ALGORITHMS, ring, total

SENDS = ("rendezvous", "buffered")


# ---- the same as real ranks


@pytest.mark.parametrize("nprocs", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_simulated_ranks_send_what_launched_ones_send(name: str, nprocs: int) -> None:
    launched = launch(ALGORITHMS[name], 11, nprocs=nprocs, trace=True)
    assert launched.trace is not None
    for how in SENDS:
        run = run_simulated(ALGORITHMS[name], 11, nprocs=nprocs, send=how)
        assert run.rounds == launched.trace.rounds
        assert run.trace.rounds == launched.trace.rounds
        for rank, real in enumerate(launched.trace):
            assert torch.equal(run.results[rank], launched.results[rank])
            assert torch.equal(run.results[rank], total(11, nprocs))
            assert run.messages_sent[rank] == run.trace[rank].messages_sent == real.messages_sent
            assert run.messages_received[rank] == run.trace[rank].messages_received == real.messages_received
            assert run.bytes_sent[rank] == run.trace[rank].bytes_sent == real.bytes_sent
            assert run.bytes_received[rank] == run.trace[rank].bytes_received == real.bytes_received
            assert run.trace[rank].rounds == real.rounds
            events = [
                sorted((e.op, e.peer, e.bytes, e.tag, e.round) for e in t.events) for t in (run.trace[rank], real)
            ]
            assert events[0] == events[1]


def assorted() -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    reduced = torch.arange(4) + rank
    dist.all_reduce(reduced)
    largest = torch.tensor([rank, -rank])
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    mean = torch.ones(2) * rank
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    told = torch.full((3,), rank)
    dist.broadcast(told, src=1)
    gathered = [torch.empty(2, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(gathered, torch.tensor([rank, rank * rank]))
    dist.barrier()
    short = torch.full((5,), -1.0)
    source = None
    if rank == 0:
        dist.send(torch.arange(3.0), 1, tag=7)
        dist.send(torch.ones(1), 1, tag=3)
    elif rank == 1:
        first = torch.zeros(1)
        wanted = dist.irecv(first, 0, tag=3)
        source = dist.recv(short, tag=7)
        wanted.wait()
        short[4] = first[0]
    return [reduced, largest, mean, told, *gathered, short, torch.tensor(-1 if source is None else source)]


def test_collectives_tags_short_messages_and_receives_from_anyone_give_what_launched_ranks_get() -> None:
    launched = launch(assorted, nprocs=3, trace=True)
    run = run_simulated(assorted, nprocs=3, send="buffered")
    for got, real in zip(run.results, launched.results, strict=True):
        for one, other in zip(got, real, strict=True):
            assert torch.equal(one, other)
    assert launched.trace is not None
    assert [rank.bytes_received for rank in run.trace] == [rank.bytes_received for rank in launched.trace]
    collectives = [event.op for event in run.trace[2].events]
    assert collectives == ["all_reduce", "all_reduce", "all_reduce", "broadcast", "all_gather", "barrier"]
    assert [e.bytes for e in run.trace[2].events] == [
        e.bytes for e in launched.trace[2].events if e.op not in ("send", "recv")
    ]


def test_names_imported_from_torch_distributed_work_too() -> None:
    def pass_on() -> float:
        value = torch.tensor([5.0])
        if get_rank() == 0:
            send(value * 2, 1)
        else:
            recv(value, 0)
        return float(value)

    original = send
    assert run_simulated(get_rank, nprocs=2).results == [0, 1]
    assert run_simulated(functools.partial(get_rank, group=None), nprocs=2).results == [0, 1]
    assert run_simulated(pass_on, nprocs=2).results == [5.0, 10.0]
    assert run_simulated(functools.partial(pass_on), nprocs=2).results == [5.0, 10.0]
    assert send is original


def test_other_threads_keep_torchs_own_functions() -> None:
    initialized: list[bool] = []

    def ask() -> bool:
        other = threading.Thread(target=lambda: initialized.append(dist.is_initialized()))
        other.start()
        other.join()
        return dist.is_initialized()

    assert run_simulated(ask, nprocs=1).results == [True]
    assert initialized == [False]


def test_each_rank_has_its_own_arguments() -> None:
    given = torch.zeros(2)

    def add(tensor: torch.Tensor, parts: list[int]) -> tuple[float, list[int]]:
        tensor += dist.get_rank() + 1
        parts.append(dist.get_rank())
        return float(tensor.sum()), parts

    assert run_simulated(add, given, parts=[7], nprocs=3).results == [(2.0, [7, 0]), (4.0, [7, 1]), (6.0, [7, 2])]
    assert torch.equal(given, torch.zeros(2))


def draw() -> list[float]:
    if dist.get_rank() == 1:
        torch.manual_seed(1)
    drawn = [float(torch.rand(()))]
    dist.barrier()
    drawn.append(float(torch.rand(())))
    return drawn


def test_each_rank_draws_its_own_random_numbers_and_a_seed_repeats_them() -> None:
    torch.manual_seed(0)
    first = run_simulated(draw, nprocs=3).results
    after = float(torch.rand(()))
    torch.manual_seed(0)
    assert run_simulated(draw, nprocs=3).results == first
    torch.manual_seed(0)
    run_simulated(lambda: None, nprocs=3)
    assert float(torch.rand(())) == after  # what ranks draw is not missing from the caller's numbers
    assert len({number for rank in first for number in rank}) == 6
    torch.manual_seed(1)
    assert first[1] == [float(torch.rand(())), float(torch.rand(()))]


def test_two_runs_are_equal_message_by_message() -> None:
    runs = [run_simulated(ring, 12, nprocs=4) for _ in range(2)]
    assert list(runs[0].messages) == list(runs[1].messages)
    assert len(runs[0].messages) == 24


def test_messages_are_told_by_round_with_what_they_carried() -> None:
    run = run_simulated(ring, 4, nprocs=2)
    told = [(m.round, m.source, m.destination, m.elements, m.bytes, m.tag, m.values) for m in run.messages]
    assert told == [
        (1, 0, 1, 2, 8, 0, (0.0, 1.0)),
        (1, 1, 0, 2, 8, 0, (4.0, 6.0)),
        (2, 0, 1, 2, 8, 0, (6.0, 9.0)),
        (2, 1, 0, 2, 8, 0, (0.0, 3.0)),
    ]
    assert all(message.received for message in run.messages)
    assert run_simulated(ring, 1000, nprocs=2).messages[0].values is None


def test_what_ranks_print_gets_their_number_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("begin", end="")
        dist.barrier()
        print(" end")

    run = run_simulated(speak, nprocs=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] begin end", "[rank 1] begin end"]
    assert run.logs == ["begin end\n", "begin end\n"]


def test_a_receive_from_anyone_takes_what_was_sent_first() -> None:
    def collect() -> list[tuple[int, float]]:
        number = torch.zeros(1)
        if dist.get_rank() == 2:
            dist.send(torch.full((1,), 2.0), 0)
        dist.barrier()
        if dist.get_rank() == 1:
            dist.send(torch.full((1,), 1.0), 0)
        dist.barrier()
        if dist.get_rank():
            return []
        return [(dist.recv(number), float(number)) for _ in range(2)]

    assert run_simulated(collect, nprocs=3, send="buffered").results[0] == [(2, 2.0), (1, 1.0)]


@pytest.mark.parametrize("anyone_first", [True, False])
def test_a_message_goes_to_the_receive_that_was_posted_first(anyone_first: bool) -> None:
    def post() -> tuple[float, float]:
        if dist.get_rank():
            dist.send(torch.tensor([1.0]), 0)
            dist.send(torch.tensor([2.0]), 0)
            return 0.0, 0.0
        anyone, named = torch.zeros(1), torch.zeros(1)
        places = [(anyone, None), (named, 1)] if anyone_first else [(named, 1), (anyone, None)]
        for request in [dist.irecv(tensor, source) for tensor, source in places]:
            request.wait()
        return float(anyone), float(named)

    assert run_simulated(post).results[0] == ((1.0, 2.0) if anyone_first else (2.0, 1.0))


def test_a_rank_may_start_several_collectives_before_another_comes() -> None:
    def start_two() -> list[float]:
        tensors = [torch.ones(1) * (dist.get_rank() + 1), torch.ones(1) * 10]
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1), 0)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        if dist.get_rank() == 0:
            dist.send(torch.zeros(1), 1)
        for work in works:
            work.wait()
        return [float(tensor) for tensor in tensors]

    assert run_simulated(start_two).results == [[3.0, 20.0], [3.0, 20.0]]


def test_a_message_that_nobody_received_is_noted() -> None:
    def forget() -> None:
        if dist.get_rank() == 0:
            dist.isend(torch.ones(3), 1)

    run = run_simulated(forget, nprocs=2)
    assert run.notes == ["a message was sent and never received: 3 elements from rank 0 to rank 1"]
    assert [message.received for message in run.messages] == [False]
    assert run.schedule(Link(latency=1.0, bandwidth=1.0)).ends == [None]
    assert run_simulated(ring, 4, nprocs=2).notes == []


# ---- the two kinds of send, and what is true before wait


def both_send_first() -> float:
    other = 1 - dist.get_rank()
    theirs = torch.zeros(1)
    dist.send(torch.ones(1), other)
    dist.recv(theirs, other)
    return float(theirs)


def test_two_ranks_that_both_send_first_hang_unless_sends_are_buffered() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        run_simulated(both_send_first)
    assert time.monotonic() - began < 1.5
    states = caught.value.states
    assert [(state.rank, state.state, state.collective) for state in states] == [
        (0, "waiting", "send to rank 1"),
        (1, "waiting", "send to rank 0"),
    ]
    assert states[0].code == "dist.send(torch.ones(1), other)"
    message = str(caught.value)
    assert message.startswith("deadlock: ")
    assert "rank 0: waits in send to rank 1, test_run.py, line " in message
    assert "they wait in a circle: rank 0 -> 1 -> 0" in message
    assert run_simulated(both_send_first, send="buffered").results == [1.0, 1.0]


def test_a_receive_shows_nothing_before_it_is_waited_for() -> None:
    def read_early() -> tuple[float, float]:
        number = torch.zeros(1)
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
            return 0.0, 0.0
        request = dist.irecv(number, 0)
        while not request.is_completed():
            pass
        early = float(number)
        request.wait()
        return early, float(number)

    assert run_simulated(read_early, nprocs=2).results[1] == (0.0, 1.0)


def change_what_is_on_its_way() -> float:
    number = torch.ones(1)
    if dist.get_rank() == 0:
        request = dist.isend(number, 1)
        number += 1
        request.wait()
    else:
        dist.recv(number, 0)
    return float(number)


def test_a_tensor_that_changes_before_its_send_is_done_is_sent_changed_unless_buffered() -> None:
    assert run_simulated(change_what_is_on_its_way).results == [2.0, 2.0]
    assert run_simulated(change_what_is_on_its_way, send="buffered").results == [2.0, 1.0]


# ---- what goes wrong says where


def test_in_a_notebook_the_place_of_a_hang_is_a_cell_and_a_line() -> None:
    source = "def hang():\n    dist.recv(torch.zeros(1))\n"
    name = "<ipython-input-5-a1b2c3>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    cell: dict[str, Any] = {"dist": dist, "torch": torch}
    exec(compile(source, name, "exec"), cell)
    with pytest.raises(WorkerTimeout) as caught:
        run_simulated(cell["hang"], nprocs=3)
    assert [str(state) for state in caught.value.states] == [
        f"rank {rank}: waits in recv from any rank, cell 5, line 2: dist.recv(torch.zeros(1))" for rank in range(3)
    ]


def test_a_rank_that_waits_for_one_that_has_returned_is_told_so() -> None:
    def wait_in_vain() -> None:
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1), 0)

    with pytest.raises(WorkerTimeout, match="rank 1 waits for rank 0, which has returned") as caught:
        run_simulated(wait_in_vain)
    assert [state.state for state in caught.value.states] == ["returned", "waiting"]


def test_ranks_in_different_collectives_hang_and_the_table_names_both() -> None:
    def disagree() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            dist.barrier()

    with pytest.raises(WorkerTimeout) as caught:
        run_simulated(disagree)
    assert [state.collective for state in caught.value.states] == ["all_reduce", "barrier"]


def test_a_rank_that_looks_forever_for_what_never_comes_is_a_deadlock() -> None:
    def poll() -> None:
        request = dist.irecv(torch.zeros(1), 1 - dist.get_rank())
        while not request.is_completed():
            pass

    with pytest.raises(WorkerTimeout, match="deadlock") as caught:
        run_simulated(poll)
    assert [state.collective for state in caught.value.states] == ["recv from rank 1", "recv from rank 0"]


def test_a_hang_of_many_ranks_is_cut_to_a_readable_table() -> None:
    def wait_left() -> None:
        dist.recv(torch.zeros(1), (dist.get_rank() - 1) % dist.get_world_size())

    with pytest.raises(WorkerTimeout) as caught:
        run_simulated(wait_left, nprocs=100)
    assert len(str(caught.value).splitlines()) < 25
    assert "and 84 more ranks" in str(caught.value)
    assert len(caught.value.states) == 100


def test_a_rank_that_raises_is_named_with_its_line() -> None:
    def fail() -> None:
        if dist.get_rank() == 2:
            raise KeyError("lost")
        dist.barrier()

    with pytest.raises(WorkerFailed) as caught:
        run_simulated(fail, nprocs=4)
    assert caught.value.rank == 2
    assert caught.value.exception_type == "KeyError"
    assert str(caught.value).startswith("rank 2 of 4 failed: KeyError: 'lost'")
    assert 'raise KeyError("lost")' in caught.value.traceback
    assert "course_utils" not in caught.value.traceback


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: dist.send(torch.ones(1), 5), "rank 0 sends to rank 5, and there are the ranks 0 to 1"),
        (lambda: dist.send(torch.ones(1), 0), "rank 0 sends to itself"),
        (lambda: dist.irecv(torch.ones(1), -1), "rank 0 receives from rank -1"),
        (lambda: dist.send([1.0], 1), "moves tensors, and got list"),
        (lambda: dist.send(torch.ones(2, 3).t(), 1), "contiguous"),
        (lambda: dist.all_gather([torch.ones(1)], torch.ones(1)), "a list of 2 tensors"),
        (lambda: dist.broadcast(torch.ones(1), src=2), "broadcast from rank 2"),
        (lambda: dist.reduce(torch.ones(1), 0), "dist.reduce is not simulated"),
        (lambda: dist.new_group([0]), "dist.new_group is not simulated"),
        (lambda: dist.get_rank(group=3), "leave `group` out"),
        (lambda: dist.batch_isend_irecv([]), "at least one"),
        (lambda: dist.P2POp(dist.send, torch.ones(1), 1), "dist.isend or dist.irecv"),
        (lambda: run_simulated(ring, 4), "simulation of its own"),
        (lambda: sys.exit(3), "called sys.exit"),
    ],
)
def test_a_call_that_cannot_be_carried_out_fails_in_the_rank_that_makes_it(wrong: Any, words: str) -> None:
    with pytest.raises(WorkerFailed) as caught:
        run_simulated(lambda: wrong())
    assert caught.value.rank == 0
    assert words in str(caught.value)


@pytest.mark.parametrize("how", SENDS)
@pytest.mark.parametrize(
    ("out", "into", "words"),
    [
        (
            torch.ones(3),
            torch.ones(2),
            "rank 0 sent 3 elements of torch.float32, and rank 1 receives into a tensor of 2",
        ),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), "elements of torch.int32"),
    ],
)
def test_a_message_that_does_not_fit_fails_in_its_receiver(
    how: str, out: torch.Tensor, into: torch.Tensor, words: str
) -> None:
    def misfit() -> None:
        if dist.get_rank() == 0:
            dist.send(out, 1)
        else:
            dist.recv(into, 0)

    with pytest.raises(WorkerFailed) as caught:
        run_simulated(misfit, send=how)
    assert caught.value.rank == 1
    assert words in str(caught.value)


def test_tensors_of_different_length_in_a_collective_are_refused() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 0 brings 1 elements of torch\.float32, and rank 1 2"):
        run_simulated(lambda: dist.all_reduce(torch.ones(1 + dist.get_rank())))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nprocs": 0}, "1 to 1,024"),
        ({"nprocs": True}, "1 to 1,024"),
        ({"send": "eager"}, "'rendezvous' or 'buffered'"),
        ({"watch": "chunks[0]"}, "name of a variable"),
        ({"timeout": 0}, "positive"),
        ({"nproc": 4}, "nproc"),
        ({"length": threading.Lock()}, "cannot be copied"),
    ],
)
def test_a_mistake_in_the_call_is_refused_before_anything_runs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        run_simulated(ring, **{"length": 4, **options})
    with pytest.raises(BadRequest, match="needs a function"):
        run_simulated(None)  # type: ignore[arg-type]


def test_a_stand_in_for_a_missing_answer_says_which() -> None:
    class Missing:
        def __refuse_launch__(self) -> None:
            raise AnswerNeeded("ring")

        def __call__(self) -> None:
            raise AnswerNeeded("ring")

    with pytest.raises(AnswerNeeded, match="ring"):
        run_simulated(Missing())
    missing = Missing()
    with pytest.raises(AnswerNeeded, match="ring"):
        run_simulated(lambda: missing())


def test_a_rank_that_computes_without_end_is_given_up_and_gone() -> None:
    def spin() -> None:
        while dist.get_rank() == 1:
            pass

    with pytest.raises(WorkerTimeout) as caught:
        run_simulated(spin, timeout=0.5)
    assert [state.state for state in caught.value.states] == ["returned", "running"]
    assert caught.value.seconds == 0.5


def test_an_interrupt_passes_as_itself_and_ends_the_ranks() -> None:
    started = threading.Event()

    def spin() -> None:
        started.set()
        while True:
            pass

    def interrupt() -> None:
        started.wait()
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_simulated(spin, nprocs=2)


def test_ranks_that_catch_everything_end_with_the_run() -> None:
    def stubborn() -> None:
        if dist.get_rank() == 1:
            raise ValueError("enough")
        try:
            dist.recv(torch.zeros(1), 1)
        except Exception:
            time.sleep(60)
        finally:
            dist.barrier()

    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="enough"):
        run_simulated(stubborn)
    assert time.monotonic() - began < 5


# ---- size, and what an import costs


def test_a_hundred_ranks_take_less_than_two_seconds_of_one_core() -> None:
    began = time.process_time()
    run = run_simulated(ring, 1000, nprocs=100)
    assert time.process_time() - began < 2
    assert run.rounds == 198
    assert all(torch.equal(result, total(1000, 100)) for result in run.results)


@pytest.mark.long
@pytest.mark.parametrize(("how", "seconds"), [("buffered", 60), ("rendezvous", 90)])
def test_a_thousand_ranks_take_tens_of_seconds_of_one_core(how: str, seconds: int) -> None:
    began = time.process_time()
    run = run_simulated(ring, 1000, nprocs=1000, send=how)
    assert time.process_time() - began < seconds
    assert run.rounds == 1998
    assert set(run.bytes_sent) == {1998 * 4}


def test_importing_the_package_and_its_simulation_does_not_import_torch() -> None:
    code = "import sys, course_utils, course_utils.simulate; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "False"


def test_a_run_says_in_one_line_what_it_was() -> None:
    assert repr(run_simulated(ring, 4, nprocs=2)) == "<2 simulated ranks: 4 messages in 2 rounds>"
