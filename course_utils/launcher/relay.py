"""The judge's transport: ranks' messages pass through the judge's process, which matches them and counts them there.

A traced run believes what a rank says that it sent. A relayed run does not have to: there is no other way from rank
to rank. Ranks speak to it through `relayed`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from . import protocol

# rank -> relay
JOIN = b"J"  # rank
SEND = b"S"  # operation, destination, tag, then the message
RECEIVE = b"R"  # operation, source or ANY, tag
TAKE = b"T"  # operation: its receive is being waited for
BARRIER = b"B"  # operation
# relay -> rank
DONE = b"D"  # operation, source, then for a receive the message
ARRIVED = b"A"  # operation: its message is here, to be taken

ADDRESS = struct.Struct("!Qii")
ANY = -1


@dataclass
class _Message:
    source: int
    operation: int
    tag: int
    data: bytes
    round: int
    sent_at: float


@dataclass
class _Receive:
    operation: int
    source: int
    tag: int
    message: _Message | None = None
    wanted: bool = False


@dataclass
class _Client:
    """One rank's connection, what it has asked for, and how far the messages that it took had come."""

    sock: socket.socket
    rank: int | None = None
    unframer: protocol.Unframer = field(default_factory=protocol.Unframer)
    unsent: bytearray = field(default_factory=bytearray)
    receives: list[_Receive] = field(default_factory=list)
    clock: int = 0


class Relay:
    """Carries messages between the ranks of one run and records each as `tracing.trace_of` wants it.

    A send is done when its receive has been posted, as with gloo; a message is handed over when the receiver waits
    for it.
    """

    def __init__(self, path: str, nprocs: int, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._epoch = time.monotonic()
        self._clients: dict[int, _Client] = {}
        self._inboxes: list[deque[_Message]] = [deque() for _ in range(nprocs)]  # sent, and not yet waited for
        self._sockets: list[socket.socket] = []
        self._barrier: list[tuple[_Client, int]] = []
        self._nprocs = nprocs
        self._steps = 0
        self.recorded: list[list[dict[str, Any]]] = [[] for _ in range(nprocs)]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(nprocs)
        selector.register(self._listener, selectors.EVENT_READ, self._on_newcomer)

    def close(self) -> None:
        """Close every connection; messages not delivered are dropped."""
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _on_newcomer(self, ready: int) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        self._sockets.append(sock)
        client = _Client(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda ready: self._on_client(client, ready))

    def _on_client(self, client: _Client, ready: int) -> None:
        if ready & selectors.EVENT_WRITE:
            self._flush(client)
        if not ready & selectors.EVENT_READ:
            return
        try:
            data = client.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(client.sock)
            return
        for kind, payload in client.unframer.feed(data):
            self._on_message(client, kind, payload)

    def _on_message(self, client: _Client, kind: bytes, payload: bytes) -> None:
        operation, peer, tag = ADDRESS.unpack_from(payload)
        if kind == JOIN:
            client.rank = peer
            self._clients[peer] = client
        elif kind == SEND:
            self._on_send(client, operation, peer, tag, payload[ADDRESS.size :])
        elif kind == RECEIVE:
            receive = _Receive(operation, peer, tag)
            client.receives.append(receive)
            assert client.rank is not None
            inbox = self._inboxes[client.rank]
            message = next((message for message in inbox if _fits(receive, message)), None)
            if message is not None:
                inbox.remove(message)
                self._match(client, receive, message)
        elif kind == TAKE:
            receive = next(receive for receive in client.receives if receive.operation == operation)
            receive.wanted = True
            self._hand_over(client, receive)
        elif kind == BARRIER:
            assert client.rank is not None
            self._record(client.rank, "barrier", None, _Message(client.rank, operation, 0, b"", 0, time.monotonic()))
            self._barrier.append((client, operation))
            if len(self._barrier) == self._nprocs:
                for waiting, its_operation in self._barrier:
                    self._answer(waiting, DONE, its_operation)
                self._barrier.clear()

    def _on_send(self, client: _Client, operation: int, destination: int, tag: int, data: bytes) -> None:
        assert client.rank is not None
        if not 0 <= destination < self._nprocs:
            return  # never done: the rank has been told by its own group, and gets no further if it went round that
        message = _Message(client.rank, operation, tag, data, client.clock + 1, time.monotonic())
        self._record(client.rank, "send", destination, message)
        receiver = self._clients.get(destination)  # None: it has not come yet
        receives = receiver.receives if receiver else []
        receive = next((receive for receive in receives if _waits_for(receive, message)), None)
        if receiver is None or receive is None:
            self._inboxes[destination].append(message)
        else:
            self._match(receiver, receive, message)

    def _match(self, receiver: _Client, receive: _Receive, message: _Message) -> None:
        receive.message = message
        self._answer(self._clients[message.source], DONE, message.operation)
        self._answer(receiver, ARRIVED, receive.operation)
        self._hand_over(receiver, receive)

    def _hand_over(self, receiver: _Client, receive: _Receive) -> None:
        message = receive.message
        if message is None or not receive.wanted:
            return
        assert receiver.rank is not None
        receiver.receives.remove(receive)
        receiver.clock = max(receiver.clock, message.round)
        self._record(receiver.rank, "recv", message.source, message)
        self._answer(receiver, DONE, receive.operation, message.source, message.data)

    def _record(self, rank: int, op: str, peer: int | None, message: _Message) -> None:
        self._steps += 1
        self.recorded[rank].append(
            {
                "op": op,
                "peer": peer,
                "bytes": len(message.data),
                "tag": message.tag,
                "group": "",
                "start": message.sent_at - self._epoch,
                "end": time.monotonic() - self._epoch,
                "started": self._steps,
                "finished": self._steps,
            }
        )

    def _answer(self, client: _Client, kind: bytes, operation: int, source: int = ANY, data: bytes = b"") -> None:
        client.unsent += protocol.frame(kind, ADDRESS.pack(operation, source, 0) + data)
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while client.unsent:
                    del client.unsent[: client.sock.send(client.unsent)]
            except (BrokenPipeError, ConnectionResetError):
                client.unsent.clear()
        if client.sock in self._selector.get_map():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
            self._selector.modify(client.sock, wanted, self._selector.get_key(client.sock).data)


def _fits(receive: _Receive, message: _Message) -> bool:
    return receive.source in (ANY, message.source) and receive.tag == message.tag


def _waits_for(receive: _Receive, message: _Message) -> bool:
    return receive.message is None and _fits(receive, message)
