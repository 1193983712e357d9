"""How kernel, server and ranks talk: framed messages over Unix sockets, and sockets that carry file descriptors.

Three kinds of socket, all inherited or passed on, so that no port and no path is needed:

- *base*: kernel <-> server, for the server's whole life. One byte and one descriptor per run: a new run socket.
- *run*: kernel <-> server, one a run. The kernel asks for ranks, the server tells how each one ended. When the kernel
  closes its side, for whatever reason, the server ends the run's ranks: it is the run's leash.
- *control*: kernel <-> rank. What to run goes down; progress, stacks, errors and results come back.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("!cQ")

# kernel -> rank
TASK = b"T"  # JSON: who this rank is; once
CALL = b"C"  # JSON: what to run next
STACK_WANTED = b"W"
RELEASE = b"X"  # everyone has reported: leave
# rank -> kernel
HELLO = b"H"  # JSON: pid; the rank is alive and has its task
BEGUN = b"B"  # JSON: the first fn starts now; the backend and notes
PROGRESS = b"P"
STACK = b"S"  # JSON: where the main thread is
VALUE = b"V"  # the return value, pickled or as plain data
DONE = b"D"  # JSON: seconds and events; after VALUE
ERROR = b"E"  # JSON: an exception
# kernel -> server, on the base socket
GOODBYE = b"G"  # an orderly end: the kernel lives on
# kernel -> server, then server -> kernel, on a run socket
RUN = b"R"  # JSON, then two descriptors a rank
EXITED = b"Q"  # JSON: rank and wait status
REFUSED = b"N"  # JSON: why the ranks could not be started
# server -> kernel, on the base socket
READY = b"Y"  # JSON: whether ranks are forked, and if not although asked, why


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """One message as bytes: its kind, its length, its payload."""
    return HEADER.pack(kind, len(payload)) + payload


def frame_json(kind: bytes, content: Any) -> bytes:
    """One message whose payload is `content` as JSON."""
    return frame(kind, json.dumps(content).encode())


class Unframer:
    """Turns a stream of bytes, arriving in any pieces, back into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield each (kind, payload) that `data` completes."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._buffer)
            if len(self._buffer) < HEADER.size + length:
                return
            payload = bytes(memoryview(self._buffer)[HEADER.size : HEADER.size + length])
            del self._buffer[: HEADER.size + length]
            yield kind, payload


class Channel:
    """The blocking end of a control socket, for a rank: its main thread and its watcher both send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unframer = Unframer()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        with self._lock:
            self._socket.sendall(frame(kind, payload))

    def send_json(self, kind: bytes, content: Any) -> None:
        self.send(kind, json.dumps(content).encode())

    def receive(self) -> list[tuple[bytes, bytes]] | None:
        """Wait for bytes and return the messages they complete (perhaps none); None when the other side is gone."""
        try:
            data = self._socket.recv(1 << 20)
        except OSError:
            return None
        return list(self._unframer.feed(data)) if data else None


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Take `count` bytes from a blocking socket; raises ConnectionError when the sender is gone before that."""
    received = bytearray()
    while len(received) < count:
        data = sock.recv(count - len(received))
        if not data:
            raise ConnectionError("the other side closed the socket")
        received += data
    return bytes(received)


def send_descriptors(sock: socket.socket, descriptors: list[int]) -> None:
    """Pass open files along a Unix socket, a byte each, in order."""
    for descriptor in descriptors:
        socket.send_fds(sock, [b"F"], [descriptor])


def receive_descriptors(sock: socket.socket, count: int) -> list[int]:
    """Take `count` open files from a Unix socket; raises ConnectionError when the sender is gone before that."""
    received: list[int] = []
    while len(received) < count:
        data, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        if not data:
            for descriptor in descriptors + received:
                socket.close(descriptor)
            raise ConnectionError("the other side closed the socket")
        received += descriptors
    return received
