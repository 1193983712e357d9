"""A judged run: messages pass through the judge and are counted there, results come back as plain data."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_utils.errors import BadRequest, WorkerFailed, WorkerTimeout
from course_utils.launcher import launch, launch_judged, protocol, relay
from course_utils.launcher.relay import Relay


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
        if dist.get_rank() == 0:
            time.sleep(0.3)
        open(f"{folder}/{dist.get_rank()}", "w").close()
        dist.barrier()
        return len(os.listdir(folder))

    with tempfile.TemporaryDirectory() as folder:
        assert launch_judged(meet, folder, nprocs=3, timeout=10).results == [3, 3, 3]


def test_a_message_that_is_too_long_for_its_room_is_named() -> None:
    def mistaken() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(5), 1)
        else:
            dist.recv(torch.empty(3), 0)

    with pytest.raises(WorkerFailed, match="sent 20 bytes, and recv has room for 12"):
        launch_judged(mistaken, nprocs=2, timeout=10)


# ---- a message stays its sender's until somebody receives it


def overwritten() -> list[float]:
    parcel = torch.tensor([3.0, 1.0, 4.0])
    if dist.get_rank() == 0:
        request = dist.isend(parcel, 1)
        parcel.fill_(7)
        dist.barrier()
        request.wait()
    else:
        dist.barrier()
        dist.recv(parcel, 0)
    return parcel.tolist()


def into_a_larger_room() -> list[float]:
    room = torch.zeros(5)
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(room, 0)
    return room.tolist()


@pytest.mark.parametrize(
    ("fn", "expected"), [(overwritten, [7.0, 7.0, 7.0]), (into_a_larger_room, [1.0, 1.0, 1.0, 0.0, 0.0])]
)
def test_what_gloo_does_with_a_tensor_the_relay_does_too(fn: Callable[[], Any], expected: list[float]) -> None:
    assert launch(fn, nprocs=2).results[1] == expected
    assert launch_judged(fn, nprocs=2, timeout=10).results[1] == expected


BUSY = 3.0  # seconds


def computes() -> float:
    ones = torch.ones(200, 200)
    until = time.monotonic() + BUSY
    while time.monotonic() < until:
        ones @ ones
    return 0.0


def counts() -> float:
    until = time.monotonic() + BUSY
    while time.monotonic() < until:
        pass
    return 0.0


def waits_for_an_answer() -> float:
    room = torch.empty(1)
    dist.recv(room, 1)
    return room.item()


@pytest.mark.parametrize("occupation", [computes, counts, waits_for_an_answer])
def test_a_rank_serves_its_messages_whatever_it_does_meanwhile(occupation: Callable[[], float]) -> None:
    def converse(meanwhile: Callable[[], float]) -> float:
        if dist.get_rank() == 0:
            request = dist.isend(torch.full((5,), 8.0), 1)
            came = meanwhile()
            request.wait()
            return came
        time.sleep(0.3)  # so that rank 0 is at it
        before = time.monotonic()
        room = torch.empty(5)
        dist.recv(room, 0)
        seconds = time.monotonic() - before
        if meanwhile is waits_for_an_answer:
            dist.send(room[:1], 0)
        assert room.tolist() == [8.0] * 5
        return seconds

    came, seconds = launch_judged(converse, occupation, nprocs=2, timeout=10).results
    assert came == (8.0 if occupation is waits_for_an_answer else 0.0)
    assert seconds < BUSY / 2


def test_a_send_that_nobody_waits_for_is_delivered_after_its_rank_has_returned() -> None:
    def drop(length: int) -> list[float]:
        if dist.get_rank() == 0:
            dist.isend(torch.full((length,), 2.0), 1)
            return []
        time.sleep(0.5)
        room = torch.empty(length)
        dist.recv(room, 0)
        return [room.min().item(), room.max().item()]

    for length in (3, 1_000_000):
        run = launch_judged(drop, length, nprocs=2, timeout=10)
        assert run.results == [[], [2.0, 2.0]]
        assert run.trace is not None
        assert [rank.bytes_sent for rank in run.trace] == [4 * length, 0]


def test_64_megabytes_travel_around_a_ring() -> None:
    def around() -> list[float]:
        rank, world = dist.get_rank(), dist.get_world_size()
        room = torch.empty(16_000_000)
        request = dist.isend(torch.full_like(room, float(rank)), (rank + 1) % world)
        dist.recv(room, (rank - 1) % world)
        request.wait()
        return [room.min().item(), room.max().item()]

    assert launch_judged(around, nprocs=3, timeout=30).results == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


def test_messages_are_matched_in_order_also_for_whoever_takes_any() -> None:
    def meet() -> list[float]:
        if dist.get_rank():
            for number in (1.0, 2.0, 3.0):
                dist.isend(torch.tensor(number + 10 * dist.get_rank()), 0)
            dist.barrier()
            return []
        dist.barrier()
        rooms = [torch.tensor(0.0) for _ in range(6)]
        requests = [dist.irecv(rooms[0], 2), *(dist.irecv(room) for room in rooms[1:])]
        for request in reversed(requests):
            request.wait()
        return [room.item() for room in rooms]

    came = launch_judged(meet, nprocs=3, timeout=10).results[0]
    assert came[0] == 21.0
    assert [value for value in came if value < 20] == [11.0, 12.0, 13.0]
    assert [value for value in came if value > 20] == [21.0, 22.0, 23.0]


def test_a_request_tells_when_it_is_done() -> None:
    def ask() -> list[bool]:
        if dist.get_rank() == 0:
            request = dist.isend(torch.ones(2), 1)
            before = request.is_completed()
            dist.barrier()
            dist.barrier()
            return [before, request.is_completed()]
        dist.barrier()
        room = torch.zeros(2)
        request = dist.irecv(room, 0)
        while not request.is_completed():
            time.sleep(0.01)
        request.wait()
        dist.barrier()
        return [bool(room.all())]

    assert launch_judged(ask, nprocs=2, timeout=10).results == [[False, True], [True]]


# ---- a rank that dies, cheats or floods harms its own run alone


def test_a_rank_that_dies_with_a_message_under_way_is_named() -> None:
    def die() -> None:
        if dist.get_rank() == 0:
            request = dist.isend(torch.ones(16_000_000), 1)
            dist.barrier()
            os._exit(3 if request else 4)
        dist.barrier()
        dist.recv(torch.empty(16_000_000), 0)

    with pytest.raises(WorkerFailed, match="rank 0 of 2 failed: ended with exit code 3"):
        launch_judged(die, nprocs=2, timeout=10)


def test_a_rank_that_closes_its_connection_is_told_so() -> None:
    def close() -> None:
        group = dist.distributed_c10d._get_default_group()
        if dist.get_rank() == 0:
            group._socket.shutdown(2)
        dist.barrier()

    with pytest.raises(WorkerFailed, match="rank 0 of 2 failed: ConnectionError: the judge's relay is gone"):
        launch_judged(close, nprocs=2, timeout=10)


def test_a_rank_that_closes_every_file_ends_in_a_verdict() -> None:
    def close() -> None:
        if dist.get_rank() == 0:
            os.closerange(3, 500)
        dist.barrier()

    with pytest.raises((WorkerFailed, WorkerTimeout)):
        launch_judged(close, nprocs=2, timeout=4)
    assert launch_judged(dist.get_rank, nprocs=2, timeout=10).results == [0, 1]


def test_a_flood_of_messages_is_stopped_with_a_reason() -> None:
    def flood() -> None:
        while True:
            dist.isend(torch.ones(1), 1 - dist.get_rank())

    with pytest.raises(WorkerFailed, match="takes no more messages from this rank: it has begun more than 20,000"):
        launch_judged(flood, nprocs=2, timeout=10)


def test_a_message_larger_than_the_judge_carries_is_refused_before_it_is_sent() -> None:
    def boast() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.empty(300_000_000, dtype=torch.uint8), 1)
        else:
            dist.recv(torch.empty(300_000_000, dtype=torch.uint8), 0)

    with pytest.raises(WorkerFailed, match="a message of 300,000,000 bytes; 268,435,456 are the most"):
        launch_judged(boast, nprocs=2, timeout=10)


def test_messages_that_nobody_takes_do_not_fill_the_judges_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_UNDER_WAY", 1_000_000)

    def hoard() -> None:
        other = 1 - dist.get_rank()
        requests = [dist.irecv(torch.empty(10_000), other) for _ in range(50)]
        requests += [dist.isend(torch.empty(10_000), other) for _ in range(50)]
        requests[-1].wait()

    with pytest.raises(WorkerFailed, match="messages of more than 1,000,000 bytes were sent and not taken"):
        launch_judged(hoard, nprocs=2, timeout=10)


class Judge:
    """A relay, and clients that say whatever a test wants."""

    def __init__(self, path: Path, nprocs: int) -> None:
        self._selector = selectors.DefaultSelector()
        self.relay = Relay(str(path), nprocs, self._selector)
        self._path = str(path)
        self._clients: list[socket.socket] = []

    def connect(self, rank: int | None = None) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.connect(self._path)
        self._clients.append(client)
        self.serve()
        if rank is not None:
            self.say(client, relay.JOIN, peer=rank)
        return client

    def say(
        self, client: socket.socket, kind: bytes, operation: int = 0, peer: int = 0, size: int = 0, data: bytes = b""
    ) -> None:
        client.sendall(protocol.frame(kind, relay.ADDRESS.pack(operation, peer, 0, size) + data))
        self.serve()

    def serve(self) -> None:
        while ready := self._selector.select(0):
            for key, events in ready:
                key.data(events)

    def heard(self, client: socket.socket) -> list[tuple[bytes, int, bytes]]:
        """Every message for this client: its kind, its operation, and what follows."""
        client.setblocking(False)
        unframer, heard = protocol.Unframer(), []
        with contextlib.suppress(BlockingIOError):
            while data := client.recv(1 << 16):
                for kind, payload in unframer.feed(data):
                    heard.append((kind, relay.ADDRESS.unpack_from(payload)[0], payload[relay.ADDRESS.size :]))
        return heard

    def close(self) -> None:
        self.relay.close()
        for client in self._clients:
            client.close()
        self._selector.close()


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    judge = Judge(tmp_path / "relay", nprocs=2)
    yield judge
    judge.close()


def test_a_message_is_asked_for_once_a_receive_is_there_and_handed_over_once_it_is_waited_for(judge: Judge) -> None:
    sender, receiver = judge.connect(0), judge.connect(1)
    judge.say(sender, relay.SEND, 1, peer=1, size=3)
    assert judge.heard(sender) == []
    judge.say(receiver, relay.RECEIVE, 7, peer=0)
    assert judge.heard(sender) == [(relay.WANTED, 1, b"")]
    judge.say(sender, relay.DATA, 1, data=b"abc")
    assert judge.heard(receiver) == [(relay.ARRIVED, 7, b"")]
    assert [event["op"] for event in judge.relay.recorded[1]] == []
    judge.say(receiver, relay.TAKE, 7)
    assert judge.heard(receiver) == [(relay.DONE, 7, b"abc")]
    assert [(event["op"], event["bytes"]) for rank in judge.relay.recorded for event in rank] == [
        ("send", 3),
        ("recv", 3),
    ]


# what a rank says after it has announced message 1 of 3 bytes, which has been asked for, and 2, which has not
NONSENSE: dict[str, tuple[Any, ...]] = {
    "a longer message than announced": (relay.DATA, 1, 0, 0, b"abcd"),
    "a shorter one": (relay.DATA, 1, 0, 0, b"ab"),
    "a message that nobody asked for": (relay.DATA, 2, 0, 0, b"abc"),
    "a message that was not announced": (relay.DATA, 3, 0, 0, b"abc"),
    "the same announcement twice": (relay.SEND, 2, 1, 3),
    "a message to itself": (relay.SEND, 5, 0, 3),
    "a message to nobody": (relay.SEND, 5, 2, 3),
    "a receive from nobody": (relay.RECEIVE, 5, -2),
    "the take of nothing": (relay.TAKE, 5),
    "another rank's name": (relay.JOIN, 0, 1),
    "an unknown word": (b"?",),
    "more than an announcement": (relay.SEND, 5, 1, 3, b"x"),
    "a part without a label": (relay.GATHER, 5, 0, 0, b"x"),
    "a label longer than its message": (relay.GATHER, 5, 9, 0, b"x"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_ends_one_connection_and_no_more(judge: Judge, what: str) -> None:
    cheat, other = judge.connect(0), judge.connect(1)
    judge.say(cheat, relay.SEND, 1, peer=1, size=3)
    judge.say(cheat, relay.SEND, 2, peer=1, size=3)
    judge.say(other, relay.RECEIVE, 1, peer=0)
    assert judge.heard(cheat) == [(relay.WANTED, 1, b"")]
    kind, operation, peer, size, data = (*NONSENSE[what], *(0, 0, 0, b"")[len(NONSENSE[what]) - 1 :])
    judge.say(cheat, kind, operation, peer, size, data)
    ((kind, _, why),) = judge.heard(cheat)
    assert (kind, why) == (relay.REFUSED, b"what came from this rank is not what ranks send")
    with pytest.raises(BrokenPipeError):
        cheat.sendall(b"more")
    judge.say(other, relay.BARRIER, 2)
    assert judge.heard(other) == []


@pytest.mark.parametrize("length", [0, 3, 1 << 40])
def test_a_message_of_an_impossible_length_is_refused_before_it_has_come(judge: Judge, length: int) -> None:
    cheat = judge.connect(0)
    cheat.sendall(protocol.HEADER.pack(relay.SEND, length))
    judge.serve()
    assert [kind for kind, _, _ in judge.heard(cheat)] == [relay.REFUSED]


def test_two_ranks_cannot_have_one_name_and_strangers_are_turned_away(judge: Judge) -> None:
    judge.connect(0)
    assert [kind for kind, _, _ in judge.heard(judge.connect(0))] == [relay.REFUSED]
    assert [kind for kind, _, _ in judge.heard(judge.connect(9))] == [relay.REFUSED]
    stranger = judge.connect()
    judge.say(stranger, relay.BARRIER)
    assert [kind for kind, _, _ in judge.heard(stranger)] == [relay.REFUSED]
    assert judge.connect().recv(1) == b""  # more connections than ranks could need


def test_barriers_that_a_rank_begins_ahead_of_the_others_are_met_one_by_one(judge: Judge) -> None:
    hasty, slow = judge.connect(0), judge.connect(1)
    judge.say(hasty, relay.BARRIER, 1)
    judge.say(hasty, relay.BARRIER, 2)
    assert judge.heard(hasty) == []
    judge.say(slow, relay.BARRIER, 8)
    assert judge.heard(hasty) == [(relay.DONE, 1, b"")]
    assert [event["end"] is None for event in judge.relay.recorded[0]] == [False, True]


# ---- the course's own versions have a service of their own


def test_the_courses_own_version_gets_every_ranks_tensor_and_its_name_is_noted() -> None:
    def gather(kind: str) -> list[float]:
        group = dist.distributed_c10d._get_default_group()
        mine = torch.full((2, 3), float(dist.get_rank())).to(getattr(torch, kind)).t()
        return [float(one.sum()) for one in group.of_every_rank("ring", mine)]

    for dtype in ("float32", "float16", "bfloat16", "int64"):
        run = launch_judged(gather, dtype, nprocs=3, timeout=10)
        assert run.results == [[0.0, 6.0, 12.0]] * 3
        assert run.trace is not None
        size = 6 * getattr(torch, dtype).itemsize
        assert [[(event.op, event.bytes) for event in rank.events] for rank in run.trace] == [[("own ring", size)]] * 3
        assert [rank.messages_sent for rank in run.trace] == [0, 0, 0]


def test_parts_of_different_sizes_are_refused_on_every_rank() -> None:
    def gather() -> None:
        group = dist.distributed_c10d._get_default_group()
        group.of_every_rank("ring", torch.ones(2 + dist.get_rank()))

    with pytest.raises(WorkerFailed, match="called the course's own version with tensors of different sizes"):
        launch_judged(gather, nprocs=2, timeout=10)


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


def test_messages_of_another_framework_cannot_pass_through_the_judge() -> None:
    with pytest.raises(BadRequest, match="relayed=True"):
        launch_judged(sum, [1], nprocs=1, timeout=5, framework="python")
