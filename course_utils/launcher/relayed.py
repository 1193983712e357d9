"""A process group whose messages pass through the judge: send, recv, isend, irecv and barrier, and nothing else."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import protocol, relay
from .watching import Watch

BACKEND = "relayed"


class RelayedGroup(dist.ProcessGroup):
    """Speaks to the judge's relay over one socket."""

    def __init__(self, rank: int, size: int, path: str) -> None:
        super().__init__(rank, size)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._unframer = protocol.Unframer()
        self._lock = threading.RLock()
        self._operations = 0
        self._answers: dict[tuple[bytes, int], tuple[int, bytes]] = {}
        self._ask(relay.JOIN, peer=rank)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> dist.Work:
        return self._started(relay.SEND, destination, tag, _bytes_of(tensors[0]))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        _refuse_scattered(tensors[0])
        return self._started(relay.RECEIVE, source, tag, into=tensors[0])

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        return self.recv(tensors, relay.ANY, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._started(relay.BARRIER)

    def finish(self, operation: int) -> tuple[int, bytes]:
        """Wait until the relay says that an operation is done; return the source and the message."""
        return self._await(relay.DONE, operation)

    def take(self, operation: int) -> tuple[int, bytes]:
        """Wait for the message of a receive."""
        self._ask(relay.TAKE, operation)
        return self._await(relay.DONE, operation)

    def has(self, kind: bytes, operation: int) -> bool:
        """Say, without waiting, whether the relay has answered."""
        with self._lock:
            while select.select([self._socket], [], [], 0)[0]:
                self._read()
            return (kind, operation) in self._answers

    def _started(
        self, kind: bytes, peer: int = 0, tag: int = 0, data: bytes = b"", into: torch.Tensor | None = None
    ) -> dist.Work:
        if kind in (relay.SEND, relay.RECEIVE) and peer == self.rank():
            raise ValueError(f"rank {peer} cannot send to itself or receive from itself")
        if peer != relay.ANY and not 0 <= peer < self.size():
            raise ValueError(f"there is no rank {peer}: the ranks are 0 to {self.size() - 1}")
        with self._lock:
            self._operations += 1
            self._ask(kind, self._operations, peer, tag, data)
            return RelayedWork(self, self._operations, into)

    def _ask(self, kind: bytes, operation: int = 0, peer: int = 0, tag: int = 0, data: bytes = b"") -> None:
        with self._lock:
            self._socket.sendall(protocol.frame(kind, relay.ADDRESS.pack(operation, peer, tag) + data))

    def _await(self, kind: bytes, operation: int) -> tuple[int, bytes]:
        with self._lock:
            while (kind, operation) not in self._answers:
                self._read()
            return self._answers.pop((kind, operation))

    def _read(self) -> None:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the judge's relay is gone")
        for kind, payload in self._unframer.feed(data):
            operation, source, _ = relay.ADDRESS.unpack_from(payload)
            self._answers[kind, operation] = (source, payload[relay.ADDRESS.size :])


class RelayedWork(dist.Work):
    """One operation under way."""

    def __init__(self, group: RelayedGroup, operation: int, into: torch.Tensor | None) -> None:
        super().__init__()
        self._group = group
        self._operation = operation
        self._into = into
        self._source = relay.ANY
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done:
            return True
        if self._into is None:
            self._group.finish(self._operation)
        else:
            self._source, data = self._group.take(self._operation)
            _fill(self._into, data, self._source)
        self._done = True
        return True

    def is_completed(self) -> bool:
        kind = relay.DONE if self._into is None else relay.ARRIVED
        return self._done or self._group.has(kind, self._operation)

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank


def register(watch: Watch, path: str) -> None:
    """Make the backend known to torch, seen by this rank's watch like any other."""
    for method in ("send", "recv", "recv_anysource", "barrier"):
        setattr(RelayedGroup, method, watch.watched(method, getattr(RelayedGroup, method)))
    RelayedWork.wait = watch.watched_wait(RelayedWork.wait)  # type: ignore[method-assign]

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return RelayedGroup(rank, size, path)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])


def _refused(method: str) -> Callable[..., Any]:
    def operation(self: RelayedGroup, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"this exercise is about building such things: {method} is not there when it is judged, "
            "only send, recv, isend, irecv and barrier"
        )

    return operation


for _method, _name in (
    ("allreduce", "all_reduce"),
    ("allreduce_coalesced", "all_reduce"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("allgather", "all_gather"),
    ("_allgather_base", "all_gather_into_tensor"),
    ("all_gather_single", "all_gather_into_tensor"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce_scatter", "reduce_scatter"),
    ("_reduce_scatter_base", "reduce_scatter_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
    ("alltoall", "all_to_all"),
    ("alltoall_base", "all_to_all_single"),
    ("all_to_all_single", "all_to_all_single"),
    ("monitored_barrier", "monitored_barrier"),
):
    setattr(RelayedGroup, _method, _refused(_name))


def _refuse_scattered(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError("the tensor must be contiguous: send and recv move one block of memory")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    _refuse_scattered(tensor)
    if not tensor.numel():  # an empty tensor may have any stride, and cannot be seen as bytes
        return b""
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())


def _fill(tensor: torch.Tensor, data: bytes, source: int) -> None:
    size = tensor.numel() * tensor.element_size()
    if len(data) != size:
        raise RuntimeError(f"rank {source} sent {len(data)} bytes, and recv has room for {size}")
    if data:
        room = tensor.detach().reshape(-1).view(torch.uint8)
        room.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
