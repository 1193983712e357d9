"""An emulated link: messages take the time that it says, and the run says that it is emulated."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from course_utils import Link, launch
from course_utils.errors import BadRequest, WorkerTimeout


def ping_pong(elements: int) -> float:
    """Seconds for a message there and back, as rank 0 sees it; the best of five."""
    tensor, taken = torch.ones(elements), []
    for _ in range(5):
        dist.barrier()
        start = time.monotonic()
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        taken.append(time.monotonic() - start)
    return min(taken)


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize(
    ("elements", "link"), [(1, Link(0.02, 1e9)), (500_000, Link(0.0, 1e8)), (250_000, Link(0.01, 1e8))]
)
def test_a_message_there_and_back_takes_twice_what_the_link_says(elements: int, link: Link, trace: bool) -> None:
    seconds = launch(ping_pong, elements, link=link, trace=trace).results[0]
    expected = 2 * link.seconds(4 * elements)
    assert expected <= seconds < expected + 0.5  # never faster; what is above is this machine's own time


def test_messages_of_one_rank_leave_one_after_the_other() -> None:
    def burst() -> tuple[float, float]:
        start = time.monotonic()
        if dist.get_rank() == 0:
            for request in [dist.isend(torch.ones(250_000), 1) for _ in range(5)]:
                request.wait()
        else:
            for _ in range(5):
                dist.recv(torch.empty(250_000), 0)
        return start, time.monotonic()

    (start, sent), (_, received) = launch(burst, link=Link(latency=0.01, bandwidth=1e8)).results
    assert 5 * 0.01 <= sent - start < 5 * 0.01 + 1
    assert 5 * 0.01 + 0.01 <= received - start < 5 * 0.01 + 0.01 + 1


def test_a_receive_that_was_posted_early_overlaps_with_work() -> None:
    def overlap() -> float:
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
            return 0.0
        request = dist.irecv(torch.empty(1), 0)
        time.sleep(0.6)  # stands for a computation longer than the message's way
        start = time.monotonic()
        request.wait()
        return time.monotonic() - start

    assert launch(overlap, link=Link(latency=0.5, bandwidth=1e9)).results[1] < 0.25


def test_a_collective_costs_a_ring_from_the_moment_the_last_rank_joins() -> None:
    link = Link(latency=0.005, bandwidth=1e8)

    def late() -> float:
        taken = []
        for _ in range(3):  # the quickest counts: this machine may have other things to do
            tensor = torch.ones(300_000)
            dist.barrier()
            if dist.get_rank() == 1:
                time.sleep(0.1)
            joined = time.monotonic()
            dist.all_reduce(tensor)
            taken.append(time.monotonic() - joined)
            assert tensor[0] == dist.get_world_size()
        return min(taken)

    seconds = launch(late, nprocs=3, link=link).results
    expected = link.seconds_of("all_reduce", 4 * 300_000, 3)
    assert expected == pytest.approx(4 * (0.005 + 4e5 / 1e8))
    assert expected <= seconds[1] < expected + 0.5
    assert expected + 0.05 <= seconds[0]


@pytest.mark.parametrize("trace", [False, True])
def test_a_collective_that_compiled_code_starts_takes_its_time_too(trace: bool) -> None:
    def step() -> tuple[float, float]:
        model = torch.nn.Linear(1000, 1000, bias=False)
        torch.nn.init.constant_(model.weight, 1e-3)
        replica = torch.nn.parallel.DistributedDataParallel(model)
        data, taken = torch.full((1, 1000), float(dist.get_rank())), []
        for _ in range(4):  # the quickest counts: this machine may have other things to do
            model.zero_grad()
            start = time.monotonic()
            replica(data).sum().backward()
            taken.append(time.monotonic() - start)
        assert model.weight.grad is not None
        return min(taken), model.weight.grad[0, 0].item()

    link = Link(latency=0.01, bandwidth=2e7)
    expected = link.seconds_of("all_reduce", 4_000_000, 2)
    for seconds, gradient in launch(step, link=link, trace=trace).results:
        assert expected <= seconds < expected + 0.5
        assert gradient == pytest.approx(0.5)


def test_the_ends_of_collectives_keep_their_order_whoever_waits_for_them_first() -> None:
    def six_at_once() -> None:
        for _ in range(30):
            requests = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(6)]
            for request in requests:
                request.wait()

    run = launch(six_at_once, nprocs=3, link=Link(3e-4, 1e9), trace=True)
    for rank in run.trace:
        ends = [event.end for event in rank.events if event.op == "all_reduce"]
        assert len(ends) == 180
        assert ends == sorted(ends)


def test_a_rank_that_waits_for_an_emulated_collective_is_said_to() -> None:
    def skips() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(WorkerTimeout) as caught:
        launch(skips, link=Link(latency=1e-3, bandwidth=1e9), timeout=1.0)
    assert [state.collective for state in caught.value.states] == ["all_reduce", None]


def test_values_and_counts_are_those_of_the_run_without_a_link() -> None:
    def ring() -> float:
        rank, world = dist.get_rank(), dist.get_world_size()
        passed, total = torch.tensor([float(rank)]), float(rank)
        for _ in range(world - 1):
            arrived = torch.empty(1)
            request = dist.isend(passed, (rank + 1) % world)
            dist.recv(arrived)  # from any rank
            request.wait()
            passed, total = arrived, total + arrived.item()
        return total

    slow, fast = launch(ring, nprocs=4, trace=True, link=Link(1e-3, 1e9)), launch(ring, nprocs=4, trace=True)
    assert slow.results == fast.results == [6.0] * 4
    for one, other in zip(slow.trace, fast.trace, strict=True):
        assert (one.messages_sent, one.bytes_sent, one.rounds) == (other.messages_sent, other.bytes_sent, other.rounds)


def test_the_run_says_that_its_times_are_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    run = launch(dist.get_rank, link=Link(latency=1e-3, bandwidth=1e9))
    assert run.notes == ["times on the wire are emulated: latency 0.001 s, bandwidth 1e+09 bytes/s"]
    assert run.notes[0] in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [(-1, 1e9), (1e-3, 0), ("1", 1e9), (1e-3, -5), (float("nan"), 1.0), (True, 1e9)])
def test_an_impossible_link_is_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(BadRequest, match="Link"):
        Link(*wrong)


def test_a_link_where_there_is_no_wire_is_refused() -> None:
    with pytest.raises(BadRequest, match="torch"):
        launch(int, framework="python", link=Link(1e-3, 1e9))
    with pytest.raises(BadRequest, match="Link"):
        launch(dist.get_rank, link=1e-3)
