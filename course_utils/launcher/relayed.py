"""A process group whose messages pass through the judge: send, recv, isend, irecv and barrier, and nothing else."""

from __future__ import annotations

import contextlib
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
GONE = "the judge's relay is gone"
PARTING_SECONDS = 1.0  # for the relay's last words, once it takes nothing more


class RelayedGroup(dist.ProcessGroup):
    """Speaks to the judge's relay over one socket; a thread listens to it, and hands over messages that are wanted."""

    def __init__(self, rank: int, size: int, path: str) -> None:
        super().__init__(rank, size)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._numbering = threading.Lock()
        self._writing = threading.Lock()
        self._operations = 0
        self._sending: dict[int, Any] = {}  # operation -> the bytes of its tensor, as they are at any time
        self._changed = threading.Condition()
        self._answers: dict[tuple[bytes, int], tuple[int, bytes]] = {}
        self._trouble = ""
        self._ask(relay.JOIN, peer=rank)
        threading.Thread(target=self._listen, daemon=True, name="course_utils-messages").start()

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> dist.Work:
        return self._started(relay.SEND, destination, tag, outgoing=_bytes_of(tensors[0]))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        _refuse_scattered(tensors[0])
        return self._started(relay.RECEIVE, source, tag, into=tensors[0])

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        return self.recv(tensors, relay.ANY, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._started(relay.BARRIER)

    def of_every_rank(self, label: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, all of one shape. For the course's own versions: the judge notes the label."""
        part = _bytes_of(tensor.contiguous())
        with self._numbering:
            self._operations += 1
            operation = self._operations
        self._ask(relay.GATHER, operation, len(label), data=label.encode() + part.tobytes())
        _, data = self.finish(operation)
        parts = []
        for rank in range(self.size()):
            parts.append(torch.empty_like(tensor, memory_format=torch.contiguous_format))
            _fill(parts[-1], data[rank * len(part) : (rank + 1) * len(part)], rank)
        return parts

    def finish(self, operation: int) -> tuple[int, bytes]:
        """Wait until an operation is done; return the source and the message."""
        with self._changed:
            self._changed.wait_for(lambda: self._trouble or (relay.DONE, operation) in self._answers)
            if (relay.DONE, operation) not in self._answers:
                raise ConnectionError(self._trouble)
            return self._answers.pop((relay.DONE, operation))

    def take(self, operation: int) -> tuple[int, bytes]:
        """Wait for the message of a receive."""
        self._ask(relay.TAKE, operation)
        return self.finish(operation)

    def has(self, kind: bytes, operation: int) -> bool:
        """Say, without waiting, whether the relay has answered."""
        with self._changed:
            return (kind, operation) in self._answers

    def _started(
        self, kind: bytes, peer: int = 0, tag: int = 0, outgoing: Any = None, into: torch.Tensor | None = None
    ) -> dist.Work:
        if kind in (relay.SEND, relay.RECEIVE) and peer == self.rank():
            raise ValueError(f"rank {peer} cannot send to itself or receive from itself")
        if peer != relay.ANY and not 0 <= peer < self.size():
            raise ValueError(f"there is no rank {peer}: the ranks are 0 to {self.size() - 1}")
        with self._numbering:  # messages are matched in the order in which they were begun
            self._operations += 1
            if outgoing is not None:
                self._sending[self._operations] = outgoing
            self._ask(kind, self._operations, peer, tag, 0 if outgoing is None else len(outgoing))
            return RelayedWork(self, self._operations, into)

    def _ask(
        self, kind: bytes, operation: int = 0, peer: int = 0, tag: int = 0, size: int = 0, data: Any = b""
    ) -> None:
        """Send one message to the relay; raises ConnectionError, with the relay's own words if it has refused more."""
        try:
            self._write(kind, operation, peer, tag, size, data)
        except OSError:
            with self._changed:
                self._changed.wait_for(lambda: self._trouble, PARTING_SECONDS)
            raise ConnectionError(self._trouble or GONE) from None

    def _write(self, kind: bytes, operation: int, peer: int = 0, tag: int = 0, size: int = 0, data: Any = b"") -> None:
        address = relay.ADDRESS.pack(operation, peer, tag, size)
        with self._writing:
            self._socket.sendall(protocol.HEADER.pack(kind, len(address) + len(data)) + address)
            if len(data):
                self._socket.sendall(data)

    def _listen(self) -> None:
        """Serve the relay as long as this process lives, whatever its main thread does."""
        unframer = protocol.Unframer()
        trouble = ""
        while not trouble:
            try:
                data = self._socket.recv(1 << 20)
                trouble = "" if data else GONE
                for kind, payload in unframer.feed(data):
                    if kind == relay.REFUSED:
                        why = payload[relay.ADDRESS.size :].decode()
                        trouble = f"the judge takes no more messages from this rank: {why}"
                    else:
                        self._on_answer(kind, payload)
            except Exception as error:  # whoever waits must learn of it
                trouble = f"{GONE} ({type(error).__name__}: {error})"
        with self._changed:
            self._trouble = trouble
            self._changed.notify_all()

    def _on_answer(self, kind: bytes, payload: bytes) -> None:
        operation, source, _, _ = relay.ADDRESS.unpack_from(payload)
        if kind == relay.WANTED:
            data = self._sending.pop(operation, None)
            if data is None:
                return
            with contextlib.suppress(OSError):  # that the connection has ended shows when it is read from
                self._write(relay.DATA, operation, data=data)
            kind = relay.DONE  # as far as this rank is concerned
        with self._changed:
            self._answers[kind, operation] = (source, payload[relay.ADDRESS.size :])
            self._changed.notify_all()


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


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor: what is written to it later shows here too."""
    _refuse_scattered(tensor)
    if not tensor.numel():  # an empty tensor may have any stride, and cannot be seen as bytes
        return memoryview(b"")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def _fill(tensor: torch.Tensor, data: bytes, source: int) -> None:
    """Put a message into the memory of a tensor; as with gloo, it may be shorter than the room for it."""
    size = tensor.numel() * tensor.element_size()
    if len(data) > size:
        raise RuntimeError(f"rank {source} sent {len(data)} bytes, and recv has room for {size}")
    if data:
        room = tensor.detach().reshape(-1).view(torch.uint8)
        room[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
