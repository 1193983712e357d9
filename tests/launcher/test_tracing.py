"""trace=True counts what theory counts: messages, bytes and rounds of algorithms, and changes nothing about results."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_utils import launch
from course_utils.errors import WorkerFailed, WorkerTimeout
from course_utils.launcher import Run


def ring_all_reduce(length: int) -> torch.Tensor:
    """Reduce-scatter, then all-gather, in chunks around a ring."""
    tensor = torch.full((length,), dist.get_rank() + 1.0)
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = list(tensor.tensor_split(world))
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(2 * (world - 1)):
        reducing = step < world - 1
        outgoing = (rank - step) % world if reducing else (rank - step + world) % world
        incoming = (outgoing - 1) % world
        arrived = torch.empty_like(chunks[incoming])
        request = dist.isend(chunks[outgoing].contiguous(), right)
        dist.recv(arrived, left)
        chunks[incoming] = chunks[incoming] + arrived if reducing else arrived
        request.wait()
    return torch.cat(chunks)


def gather_and_send_back(length: int) -> torch.Tensor:
    """Everybody's tensor to rank 0, the sum back to everybody."""
    tensor = torch.full((length,), dist.get_rank() + 1.0)
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            arrived = torch.empty(length)
            dist.recv(arrived, other)
            tensor += arrived
        for other in range(1, dist.get_world_size()):
            dist.send(tensor, other)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
    return tensor


def chain(length: int) -> torch.Tensor:
    """Rank 0 to 1 to 2 to ... the last."""
    tensor = torch.full((length,), dist.get_rank() + 1.0)
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        arrived = torch.empty(length)
        dist.recv(arrived, rank - 1)
        tensor += arrived
    if rank < world - 1:
        dist.send(tensor, rank + 1)
    return tensor


def doubling(length: int) -> torch.Tensor:
    """Recursive doubling: each rank exchanges its whole tensor with a partner, twice as far away each time."""
    tensor = torch.full((length,), dist.get_rank() + 1.0)
    distance = 1
    while distance < dist.get_world_size():
        partner = dist.get_rank() ^ distance
        arrived = torch.empty(length)
        request = dist.isend(tensor.clone(), partner)
        dist.recv(arrived, partner)
        request.wait()
        tensor += arrived
        distance *= 2
    return tensor


def traced(fn: Callable[..., Any], *args: Any, nprocs: int, **options: Any) -> Run:
    run = launch(fn, *args, nprocs=nprocs, trace=True, timeout=30, **options)
    assert run.trace is not None
    assert len(run.trace) == nprocs
    assert run.backend == "gloo"
    return run


# ---- counts against theory


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("length", [20, 23, 3])
def test_a_ring_sends_what_theory_says(world: int, length: int) -> None:
    run = traced(ring_all_reduce, length, nprocs=world)
    total = float(sum(range(1, world + 1)))
    for result in run.results:
        assert result.tolist() == [total] * length
    rounds = 2 * (world - 1)
    assert run.trace is not None
    assert run.trace.rounds == rounds
    for rank in run.trace:
        assert rank.messages_sent == rank.messages_received == rounds
        assert rounds * (length // world) <= rank.bytes_sent / 4 <= rounds * -(-length // world)
        assert rounds * (length // world) <= rank.bytes_received / 4 <= rounds * -(-length // world)
    assert sum(rank.bytes_sent for rank in run.trace) == 4 * rounds * length
    assert sum(rank.bytes_sent for rank in run.trace) == sum(rank.bytes_received for rank in run.trace)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_naive_way_makes_one_rank_carry_it_all(world: int) -> None:
    run = traced(gather_and_send_back, 10, nprocs=world)
    assert run.trace is not None
    root, *others = run.trace
    assert (root.messages_sent, root.messages_received) == (world - 1, world - 1)
    assert (root.bytes_sent, root.bytes_received) == (40 * (world - 1), 40 * (world - 1))
    for other in others:
        assert (other.messages_sent, other.messages_received) == (1, 1)
    assert run.trace.rounds == 2  # in, and back: no message waits for more than one other


@pytest.mark.parametrize("world", [2, 4])
def test_a_chain_takes_a_round_a_hop_and_doubling_a_round_a_doubling(world: int) -> None:
    run = traced(chain, 10, nprocs=world)
    assert run.trace is not None
    assert run.trace.rounds == world - 1
    assert [rank.rounds for rank in run.trace] == [*range(1, world), world - 1]
    run = traced(doubling, 10, nprocs=world)
    assert run.trace is not None
    assert run.trace.rounds == {2: 1, 4: 2}[world]


def test_messages_in_flight_together_share_a_round() -> None:
    def worker() -> None:
        if dist.get_rank() == 0:
            for request in [dist.isend(torch.ones(3), other) for other in (1, 2, 3)]:
                request.wait()
        else:
            dist.recv(torch.empty(3), 0)

    run = traced(worker, nprocs=4)
    assert run.trace is not None
    assert run.trace.rounds == 1
    assert {event.round for rank in run.trace for event in rank.events} == {1}


def test_a_silent_run_has_no_rounds() -> None:
    run = traced(lambda: None, nprocs=3)
    assert run.trace is not None
    assert run.trace.rounds == 0
    assert [(r.messages_sent, r.bytes_sent, r.messages_received, r.bytes_received) for r in run.trace] == [(0,) * 4] * 3


def test_an_untraced_run_has_no_trace() -> None:
    assert launch(lambda: None, nprocs=1).trace is None


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float16, 2), (torch.float64, 8), (torch.int8, 1), (torch.int64, 8), (torch.bool, 1)]
)
def test_bytes_follow_the_type(dtype: torch.dtype, size: int) -> None:
    def worker() -> None:
        tensor = torch.zeros(3, 5, dtype=dtype)
        dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor, 0)

    run = traced(worker, nprocs=2)
    assert run.trace is not None
    assert run.trace[0].bytes_sent == run.trace[1].bytes_received == 15 * size


def test_an_empty_message_is_a_message() -> None:
    def worker() -> None:
        dist.send(torch.empty(0), 1) if dist.get_rank() == 0 else dist.recv(torch.empty(0), 0)

    run = traced(worker, nprocs=2)
    assert run.trace is not None
    assert (run.trace[0].messages_sent, run.trace[0].bytes_sent, run.trace[1].messages_received) == (1, 0, 1)


# ---- every way to send and to receive


def ways_to_pass() -> dict[str, Callable[[torch.Tensor, int, int], Any]]:
    """Ways to send `tensor` to the right and receive from the left; each returns what arrived."""

    def isend_and_irecv(tensor: torch.Tensor, right: int, left: int) -> torch.Tensor:
        arrived = torch.empty_like(tensor)
        requests = [dist.isend(tensor, right), dist.irecv(arrived, left)]
        for request in requests:
            assert request is not None
            request.wait()
        return arrived

    def irecv_first(tensor: torch.Tensor, right: int, left: int) -> torch.Tensor:
        arrived = torch.empty_like(tensor)
        request = dist.irecv(arrived, left)
        assert request is not None
        dist.send(tensor, right)
        request.wait()
        return arrived

    def batch(tensor: torch.Tensor, right: int, left: int) -> torch.Tensor:
        arrived = torch.empty_like(tensor)
        operations = [dist.P2POp(dist.isend, tensor, right), dist.P2POp(dist.irecv, arrived, left)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return arrived

    def with_tags(tensor: torch.Tensor, right: int, left: int) -> torch.Tensor:
        arrived = torch.empty_like(tensor)
        request = dist.isend(tensor, right, tag=7)
        dist.recv(arrived, left, tag=7)
        assert request is not None
        request.wait()
        return arrived

    def in_a_group_of_their_own(tensor: torch.Tensor, right: int, left: int) -> torch.Tensor:
        group = dist.new_group(list(range(dist.get_world_size())))
        arrived = torch.empty_like(tensor)
        request = dist.isend(tensor, right, group=group)
        dist.recv(arrived, left, group=group)
        assert request is not None
        request.wait()
        return arrived

    def by_keyword(tensor: torch.Tensor, right: int, left: int) -> torch.Tensor:
        arrived = torch.empty_like(tensor)
        request = dist.isend(tensor=tensor, dst=right)
        dist.recv(tensor=arrived, src=left)
        assert request is not None
        request.wait()
        return arrived

    return {
        function.__name__: function
        for function in (
            isend_and_irecv,
            irecv_first,
            batch,
            with_tags,
            in_a_group_of_their_own,
            by_keyword,
        )
    }


@pytest.mark.parametrize("way", list(ways_to_pass()))
def test_a_pass_to_the_right_counts_the_same_however_it_is_written(way: str) -> None:
    pass_on = ways_to_pass()[way]

    def worker() -> Any:
        rank, world = dist.get_rank(), dist.get_world_size()
        return pass_on(torch.full((6,), float(rank)), (rank + 1) % world, (rank - 1) % world)

    run = traced(worker, nprocs=3)
    assert [result[0].item() for result in run.results] == [2.0, 0.0, 1.0]
    assert run.trace is not None
    assert run.trace.rounds == 1
    for number, rank in enumerate(run.trace):
        assert (rank.messages_sent, rank.messages_received, rank.bytes_sent, rank.bytes_received) == (1, 1, 24, 24)
        peers = {event.op: event.peer for event in rank.events if event.op in ("send", "recv")}
        assert peers == {"send": (number + 1) % 3, "recv": (number - 1) % 3}


def test_a_message_from_any_rank_names_the_rank_it_came_from() -> None:
    def worker() -> Any:
        if dist.get_rank() == 0:
            return sorted(dist.recv(torch.empty(2)) for _ in range(2))
        return dist.send(torch.ones(2), 0)

    run = traced(worker, nprocs=3)
    assert run.results[0] == [1, 2]
    assert run.trace is not None
    assert (run.trace[0].messages_received, run.trace[0].bytes_received) == (2, 16)
    assert sorted(event.peer for event in run.trace[0].events) == [1, 2]
    assert run.trace.rounds == 1


def test_objects_are_counted_by_their_bytes() -> None:
    def worker() -> Any:
        received = [None]
        if dist.get_rank() == 0:
            dist.send_object_list([{"a": 1}], 1)
        else:
            dist.recv_object_list(received, 0)
        return received[0]

    run = traced(worker, nprocs=2)
    assert run.results[1] == {"a": 1}
    assert run.trace is not None
    assert run.trace[0].messages_sent == run.trace[1].messages_received > 0
    assert run.trace[0].bytes_sent == run.trace[1].bytes_received > 0


def test_peers_in_a_group_of_some_ranks_are_named_by_their_rank_in_the_world() -> None:
    def worker() -> Any:
        group = dist.new_group([1, 3])
        value = torch.ones(2)
        if dist.get_rank() == 1:
            dist.send(value, 3, group=group)
        elif dist.get_rank() == 3:
            dist.recv(value, 1, group=group)
        if dist.get_rank() in (1, 3):
            dist.all_reduce(value, group=group)
        return value.tolist()

    run = traced(worker, nprocs=4)
    assert run.results == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [2.0, 2.0]]
    assert run.trace is not None
    assert [rank.messages_sent for rank in run.trace] == [0, 1, 0, 0]
    assert [event.peer for event in run.trace[1].events if event.op == "send"] == [3]
    assert [event.peer for event in run.trace[3].events if event.op == "recv"] == [1]
    assert [Counter(event.op for event in rank.events)["all_reduce"] for rank in run.trace] == [0, 1, 0, 1]


# ---- collectives


def collectives() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Calls, the name of the event each must leave, and nothing else."""

    def gather() -> Any:
        parts = [torch.zeros(2) for _ in range(2)] if dist.get_rank() == 0 else None
        dist.gather(torch.full((2,), float(dist.get_rank())), parts)
        return parts and [part.tolist() for part in parts]

    def scatter() -> Any:
        arrived = torch.zeros(2)
        dist.scatter(arrived, [torch.zeros(2), torch.ones(2)] if dist.get_rank() == 0 else None)
        return arrived.tolist()

    def all_gather() -> Any:
        parts = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(parts, torch.full((2,), float(dist.get_rank())))
        return [part.tolist() for part in parts]

    def all_gather_into_tensor() -> Any:
        whole = torch.zeros(4)
        dist.all_gather_into_tensor(whole, torch.full((2,), float(dist.get_rank())))
        return whole.tolist()

    def reduce_scatter() -> Any:
        arrived = torch.zeros(2)
        dist.reduce_scatter(arrived, [torch.ones(2), torch.full((2,), 2.0)])
        return arrived.tolist()

    def reduce_scatter_tensor() -> Any:
        arrived = torch.zeros(2)
        dist.reduce_scatter_tensor(arrived, torch.arange(4.0))
        return arrived.tolist()

    def all_to_all_single() -> Any:
        arrived = torch.zeros(2)
        dist.all_to_all_single(arrived, torch.tensor([0.0, 1.0]) + 10 * dist.get_rank())
        return arrived.tolist()

    def in_place(operation: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        def call() -> Any:
            value = torch.full((2,), dist.get_rank() + 1.0)
            operation(value)
            return value.tolist()

        return call

    return {
        "all_reduce": ("all_reduce", in_place(dist.all_reduce)),
        "all_reduce later": ("all_reduce", in_place(lambda value: dist.all_reduce(value, async_op=True).wait())),
        "all_reduce max": ("all_reduce", in_place(lambda value: dist.all_reduce(value, op=dist.ReduceOp.MAX))),
        "broadcast": ("broadcast", in_place(lambda value: dist.broadcast(value, 1))),
        "reduce": ("reduce", in_place(lambda value: dist.reduce(value, 0))),
        "gather": ("gather", gather),
        "scatter": ("scatter", scatter),
        "all_gather": ("all_gather", all_gather),
        "all_gather_into_tensor": ("all_gather_into_tensor", all_gather_into_tensor),
        "reduce_scatter": ("reduce_scatter", reduce_scatter),
        "reduce_scatter_tensor": ("reduce_scatter_tensor", reduce_scatter_tensor),
        "all_to_all_single": ("all_to_all_single", all_to_all_single),
        "barrier": ("barrier", dist.barrier),
    }


@pytest.mark.parametrize("call", list(collectives()))
def test_a_collective_gives_the_same_result_and_leaves_one_event(call: str) -> None:
    name, collective = collectives()[call]

    def worker() -> Any:
        return collective()

    plain = launch(worker)
    run = traced(worker, nprocs=2)
    if call == "reduce":  # only the root's value is defined
        assert run.results[0] == plain.results[0]
    else:
        assert run.results == plain.results
    assert run.trace is not None
    for rank in run.trace:
        assert [event.op for event in rank.events] == [name]
        (event,) = rank.events
        assert event.peer is None
        assert event.round is None
        assert event.end is not None
        assert 0 <= event.start <= event.end < 60
        assert (rank.messages_sent, rank.messages_received) == (0, 0)
        if name in ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"):
            assert event.bytes == 8


def test_events_are_in_the_order_they_began_and_tell_tag_and_time() -> None:
    def worker() -> None:
        value = torch.zeros(5)
        dist.all_reduce(value)
        if dist.get_rank() == 0:
            time.sleep(0.2)
            dist.send(value, 1, tag=3)
        else:
            dist.recv(value, 0, tag=3)
        dist.barrier()

    run = traced(worker, nprocs=2)
    assert run.trace is not None
    assert [event.op for event in run.trace[0].events] == ["all_reduce", "send", "barrier"]
    assert [event.op for event in run.trace[1].events] == ["all_reduce", "recv", "barrier"]
    received = run.trace[1].events[1]
    assert received.tag == 3
    assert received.bytes == 20
    assert received.end is not None
    assert received.end - received.start > 0.15
    for rank in run.trace:
        starts = [event.start for event in rank.events]
        assert starts == sorted(starts)


# ---- DDP


def trains(steps: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    wrapped = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.grad for parameter in model.parameters()], model.state_dict()


def test_ddp_gives_the_same_gradients_traced_and_untraced_and_its_all_reduces_are_seen() -> None:
    plain, run = launch(trains, 3), traced(trains, 3, nprocs=2)
    for (plain_gradients, plain_state), (gradients, state) in zip(plain.results, run.results, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain_gradients, gradients, strict=True))
        assert all(torch.equal(plain_state[name], state[name]) for name in state)
    parameters = 6 * 5 + 5 + 5 * 2 + 2
    assert run.trace is not None
    for rank in run.trace:
        reduced = [event for event in rank.events if event.op == "all_reduce" and event.bytes == 4 * parameters]
        assert len(reduced) == 3  # one bucket, three steps
        assert all(event.end is not None and event.end >= event.start for event in reduced)


def test_ddp_buckets_show_as_separate_all_reduces() -> None:
    def worker() -> int:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        for _ in range(2):
            wrapped(torch.ones(2, 512)).sum().backward()
        return sum(4 * parameter.numel() for parameter in model.parameters())

    run = traced(worker, nprocs=2)
    assert run.trace is not None
    for rank, size in zip(run.trace, run.results, strict=True):
        reduced = [event.bytes for event in rank.events if event.op == "all_reduce"]
        assert sum(reduced) == 2 * size
        assert len(reduced) >= 4


# ---- what a trace must not break


def test_failures_and_hangs_of_a_traced_run_are_told_as_always() -> None:
    def fails() -> None:
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.barrier()

    with pytest.raises(WorkerFailed, match="boom") as caught:
        launch(fails, trace=True)
    assert caught.value.rank == 1

    def hangs() -> None:
        if dist.get_rank() == 0:
            dist.recv(torch.empty(1), 1)

    with pytest.raises(WorkerTimeout) as hung:
        launch(hangs, trace=True, timeout=0.8)
    assert hung.value.states[0].collective == "recv from rank 1"


def test_a_traced_run_can_start_its_process_group_by_hand() -> None:
    def worker() -> Any:
        dist.init_process_group("gloo")
        value = torch.ones(2)
        if dist.get_rank() == 0:
            dist.send(value, 1)
        else:
            dist.recv(value, 0)

    run = launch(worker, init=False, trace=True)
    assert run.trace is not None
    assert [rank.messages_sent for rank in run.trace] == [1, 0]


def test_fresh_interpreters_trace_too(fresh_interpreters: None) -> None:
    run = traced(ring_all_reduce, 10, nprocs=2)
    assert run.trace is not None
    assert run.trace.rounds == 2
    assert [rank.bytes_sent for rank in run.trace] == [40, 40]


def test_a_message_that_was_never_received_is_sent_and_nothing_more() -> None:
    def worker() -> None:
        if dist.get_rank() == 0:
            kept = dist.isend(torch.ones(2), 1)
            assert kept is not None

    run = traced(worker, nprocs=2)
    assert run.trace is not None
    assert (run.trace[0].messages_sent, run.trace[1].messages_received) == (1, 0)
    assert run.trace[0].events[0].end is None


def test_the_backend_looks_like_gloo_to_the_function() -> None:
    run = traced(lambda: (dist.get_backend(), dist.get_world_size(), int(os.environ["RANK"])), nprocs=2)
    assert run.results == [("gloo", 2, 0), ("gloo", 2, 1)]
