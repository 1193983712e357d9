"""A judged run: messages pass through the judge and are counted there, results come back as plain data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_utils.errors import WorkerFailed, WorkerTimeout
from course_utils.launcher import launch, launch_judged


def ring(length: int) -> list[float]:
    """Sum over a ring in 2(N-1) steps of one chunk."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = list((torch.arange(length, dtype=torch.float32) * (rank + 1)).tensor_split(world))
    for step in range(2 * (world - 1)):
        out, into = (rank - step) % world, (rank - step - 1) % world
        arrived = torch.empty_like(chunks[into])
        request = dist.isend(chunks[out].contiguous(), (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
        request.wait()
        chunks[into] = chunks[into] + arrived if step < world - 1 else arrived
    return torch.cat(chunks).tolist()


def batched() -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    room = [torch.empty(1) for _ in range(world)]
    mine = torch.tensor([float(rank)])
    others = [peer for peer in range(world) if peer != rank]
    operations = [dist.P2POp(dist.isend, mine, peer) for peer in others]
    operations += [dist.P2POp(dist.irecv, room[peer], peer) for peer in others]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return float(mine + sum(room[peer] for peer in others))


def from_anyone() -> list[int]:
    if dist.get_rank():
        dist.send(torch.tensor(dist.get_rank()), 0)
        return []
    return sorted(dist.recv(torch.tensor(0)) for _ in range(dist.get_world_size() - 1))


def by_tag() -> list[float]:
    if dist.get_rank() == 0:
        requests = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (5, 6)]
        return [request.wait() for request in requests][:0]
    first, second = torch.empty(2), torch.empty(2)
    dist.recv(second, 0, tag=6)
    dist.recv(first, 0, tag=5)
    return [first[0].item(), second[0].item()]


@pytest.mark.parametrize("nprocs", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 7, 1000])
def test_values_and_counts_are_those_of_a_traced_run_over_gloo(nprocs: int, length: int) -> None:
    judged = launch_judged(ring, length, nprocs=nprocs, timeout=10)
    traced = launch(ring, length, nprocs=nprocs, trace=True)
    assert judged.results == traced.results
    for ours, theirs in zip(judged.trace, traced.trace, strict=True):
        assert ours.messages_sent == theirs.messages_sent == 2 * (nprocs - 1)
        assert ours.bytes_sent == theirs.bytes_sent
        assert ours.bytes_received == theirs.bytes_received
        assert ours.rounds == theirs.rounds == 2 * (nprocs - 1)


@pytest.mark.parametrize(
    ("fn", "expected"), [(batched, [3.0, 3.0, 3.0]), (from_anyone, [[1, 2], [], []]), (by_tag, [[], [5.0, 6.0]])]
)
def test_every_way_to_send_and_receive_works(fn: Callable[[], Any], expected: list[Any]) -> None:
    assert launch_judged(fn, nprocs=len(expected), timeout=10).results == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_type_of_tensor_arrives(dtype: torch.dtype) -> None:
    def pass_on(kind: str) -> bool:
        tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, kind))
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
            return True
        room = torch.zeros_like(tensor)
        dist.recv(room, 0)
        return torch.equal(room, tensor)

    assert launch_judged(pass_on, str(dtype).removeprefix("torch."), nprocs=2, timeout=10).results == [True, True]


def test_a_send_waits_for_its_receive_so_that_a_deadlock_shows_as_over_gloo() -> None:
    def both_send_first() -> None:
        other = 1 - dist.get_rank()
        dist.send(torch.ones(3), other)
        dist.recv(torch.empty(3), other)

    with pytest.raises(WorkerTimeout) as caught:
        launch_judged(both_send_first, nprocs=2, timeout=1)
    assert [state.collective for state in caught.value.states] == ["send to rank 1", "send to rank 0"]


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "reduce"])
def test_what_the_exercise_builds_is_not_there_ready_made(name: str) -> None:
    def cheat(operation: str) -> None:
        tensor = torch.ones(2)
        arguments: tuple[Any, ...] = (tensor,)
        if operation == "all_gather":
            arguments = ([torch.empty(2), torch.empty(2)], tensor)
        elif operation in ("broadcast", "reduce"):
            arguments = (tensor, 0)
        getattr(dist, operation)(*arguments)

    with pytest.raises(WorkerFailed, match=f"{name} is not there"):
        launch_judged(cheat, name, nprocs=2, timeout=10)


def test_barrier_holds_all_ranks() -> None:
    def meet(folder: str) -> int:
        import time

        if dist.get_rank() == 0:
            time.sleep(0.3)
        open(f"{folder}/{dist.get_rank()}", "w").close()
        dist.barrier()
        return len(os.listdir(folder))

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        assert launch_judged(meet, folder, nprocs=3, timeout=10).results == [3, 3, 3]


def test_a_message_of_the_wrong_size_is_named() -> None:
    def mistaken() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.empty(5), 0)

    with pytest.raises(WorkerFailed, match="sent 12 bytes, and recv has room for 20"):
        launch_judged(mistaken, nprocs=2, timeout=10)


class Explosive:
    """Would run code in whoever unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_what_is_not_plain_data_never_reaches_the_judge() -> None:
    with pytest.raises(WorkerFailed) as caught:
        launch_judged(Explosive, nprocs=1, timeout=10)
    assert caught.value.kind == "result"
    assert launch_judged(pickle.dumps, 3, nprocs=1, timeout=10).results == [pickle.dumps(3)]


def test_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run = launch_judged(print, "a secret", nprocs=1, timeout=10)
    assert run.logs[0] == "a secret\n"
    assert capsys.readouterr().out == ""


def test_a_message_to_a_rank_that_does_not_exist_is_the_answers_mistake() -> None:
    def off_the_end() -> None:
        dist.send(torch.ones(3), dist.get_world_size())

    with pytest.raises(WorkerFailed, match="rank"):
        launch_judged(off_the_end, nprocs=3, timeout=10)


def test_empty_tensors_of_any_stride_arrive() -> None:
    def pass_on() -> int:
        empty = torch.arange(6).reshape(2, 3)[:, :0]
        if dist.get_rank() == 0:
            dist.send(empty.contiguous(), 1)
        else:
            dist.recv(torch.empty_strided((0,), (2,), dtype=torch.int64), 0)
        return empty.numel()

    assert launch_judged(pass_on, nprocs=2, timeout=10).results == [0, 0]


def test_a_rank_cannot_send_to_itself() -> None:
    with pytest.raises(WorkerFailed, match=r"itself|same as the rank"):
        launch_judged(lambda: dist.isend(torch.ones(1), dist.get_rank()) and None, nprocs=1, timeout=10)


def test_a_barrier_is_recorded() -> None:
    run = launch_judged(dist.barrier, nprocs=2, timeout=10)
    assert run.trace is not None
    assert [[event.op for event in rank.events] for rank in run.trace] == [["barrier"], ["barrier"]]


def test_without_the_relay_ranks_have_every_collective_and_results_are_still_plain_data() -> None:
    def worker() -> float:
        value = torch.ones(3)
        dist.all_reduce(value)
        replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        replica(torch.ones(1, 2)).sum().backward()
        return float(value.sum())

    run = launch_judged(worker, nprocs=2, timeout=30, relayed=False)
    assert run.results == [6.0, 6.0]
    assert run.trace is not None
    assert [event.op for event in run.trace[0].events].count("all_reduce") >= 2
    with pytest.raises(WorkerFailed, match="cannot be sent back"):
        launch_judged(object, nprocs=1, timeout=30, relayed=False)
