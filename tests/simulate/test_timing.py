"""Over a link, a simulated run takes the time that the closed formulas and a hand count give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from course_utils import Link
from course_utils.simulate import (
    Cost,
    halving_doubling_cost,
    naive_cost,
    ring_cost,
    run_simulated,
    tree_cost,
)
from tests.simulate.algorithms import ALGORITHMS

COSTS: dict[str, Callable[[int, int], Cost]] = {
    "naive": naive_cost,
    "tree": tree_cost,
    "ring": ring_cost,
    "halving-doubling": halving_doubling_cost,
}
LINKS = [Link(latency=1e-3, bandwidth=1e6), Link(latency=0.0, bandwidth=1e3), Link(latency=0.5, bandwidth=1e12)]


@pytest.mark.parametrize("nprocs", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16])
@pytest.mark.parametrize("name", COSTS)
def test_the_formulas_give_the_time_rounds_and_bytes_of_the_algorithm_run(name: str, nprocs: int) -> None:
    length = 16 * nprocs  # every chunk is equal
    cost = COSTS[name](nprocs, 4 * length)
    assert cost.algorithm == name
    run = run_simulated(ALGORITHMS[name], length, nprocs=nprocs)
    assert cost.rounds == run.rounds
    assert cost.sent == max(run.bytes_sent)
    for link in LINKS:
        assert run.schedule(link).seconds == pytest.approx(cost.seconds(link), rel=1e-9)


@pytest.mark.parametrize("name", COSTS)
def test_buffered_sends_change_no_time_where_no_rank_runs_ahead(name: str) -> None:
    runs = [run_simulated(ALGORITHMS[name], 64, nprocs=8, send=how) for how in ("rendezvous", "buffered")]
    for link in LINKS:
        times = [run.schedule(link).seconds for run in runs]
        assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_messages_into_one_rank_come_one_after_the_other() -> None:
    def gather() -> None:
        if dist.get_rank():
            dist.send(torch.zeros(100, dtype=torch.uint8), 0)
        else:
            requests = [dist.irecv(torch.zeros(100, dtype=torch.uint8), other) for other in (1, 2, 3)]
            for request in requests:
                request.wait()

    schedule = run_simulated(gather, nprocs=4).schedule(Link(latency=1.0, bandwidth=100.0))
    assert schedule.starts == [0.0, 2.0, 4.0]
    assert schedule.ends == [2.0, 4.0, 6.0]
    assert schedule.ranks == [6.0, 2.0, 4.0, 6.0]


def test_a_rank_sends_and_receives_at_the_same_time() -> None:
    def swap() -> None:
        other = 1 - dist.get_rank()
        request = dist.isend(torch.zeros(100, dtype=torch.uint8), other)
        dist.recv(torch.zeros(100, dtype=torch.uint8), other)
        request.wait()

    assert run_simulated(swap).schedule(Link(latency=1.0, bandwidth=100.0)).ranks == [2.0, 2.0]


def late() -> None:
    byte = torch.zeros(1, dtype=torch.uint8)
    if dist.get_rank() == 0:
        dist.send(byte, 1)
    elif dist.get_rank() == 1:
        dist.recv(byte, 2)
        dist.recv(byte, 0)
    else:
        dist.send(torch.zeros(1, dtype=torch.uint8), 1)


def test_a_send_waits_for_its_receiver_unless_it_is_buffered() -> None:
    link = Link(latency=1.0, bandwidth=float("inf"))
    assert run_simulated(late, nprocs=3).schedule(link).ranks == [2.0, 2.0, 1.0]
    assert run_simulated(late, nprocs=3, send="buffered").schedule(link).ranks == [0.0, 2.0, 0.0]


def test_a_collective_ends_for_all_when_the_last_has_joined_and_its_time_has_passed() -> None:
    def reduce() -> None:
        tensor = torch.zeros(4, dtype=torch.uint8)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, 0)
        dist.all_reduce(tensor)

    link = Link(latency=1.0, bandwidth=4.0)
    ends = 2.0 + link.seconds_of("all_reduce", 4, 3)
    assert run_simulated(reduce, nprocs=3).schedule(link).ranks == [ends] * 3


def test_a_run_without_messages_takes_no_time() -> None:
    assert run_simulated(dist.get_rank, nprocs=2).schedule(Link(latency=1.0, bandwidth=1.0)).seconds == 0.0
