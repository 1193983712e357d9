"""The judge's transport: ranks' messages pass through the judge's process, which matches them and counts them there.

A traced run believes what a rank says that it sent. A relayed run does not have to: there is no other way from rank
to rank. Ranks speak to it through `relayed`. Nothing that a rank sends is trusted: what is too much, or makes no sense,
ends that rank's connection.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import protocol

# rank -> relay
JOIN = b"J"  # rank
SEND = b"S"  # operation, destination, tag, size: a message may be asked for
DATA = b"M"  # operation, then the message: the answer to WANTED
RECEIVE = b"R"  # operation, source or ANY, tag
TAKE = b"T"  # operation: its receive is being waited for
BARRIER = b"B"  # operation
GATHER = b"G"  # operation, length of the label; then the label and this rank's part
# relay -> rank
WANTED = b"W"  # operation: a receive is there for this message
ARRIVED = b"A"  # operation: its message is here, to be taken
DONE = b"D"  # operation, source; then the message, or the parts of all ranks
REFUSED = b"N"  # why this connection has ended

ADDRESS = struct.Struct("!QiiQ")
ANY = -1
OWN = "own "  # begins the name of an operation that the course's own version did in place of an answer

MAX_OPERATIONS = 20_000  # that one rank may begin
MAX_MESSAGE = 1 << 28  # bytes
MAX_UNDER_WAY = 1 << 30  # bytes that the judge holds for all ranks together
_MAX_LABEL = 64
_NONSENSE = "what came from this rank is not what ranks send"


class _Refusal(Exception):
    """A rank has gone too far; the message tells it how."""


@dataclass(eq=False)
class _Message:
    source: int
    operation: int
    tag: int
    size: int
    event: dict[str, Any]
    receive: _Receive | None = None
    data: bytes | None = None


@dataclass(eq=False)
class _Receive:
    rank: int
    operation: int
    posted_at: float
    message: _Message | None = None
    wanted: bool = False


@dataclass
class _Waiting:
    """What waits for its counterpart at one rank, by (source, tag), each with its place in the order of arrival."""

    places: int = 0
    messages: dict[tuple[int, int], deque[tuple[int, _Message]]] = field(default_factory=dict)
    receives: dict[tuple[int, int], deque[tuple[int, _Receive]]] = field(default_factory=dict)

    def add_message(self, source: int, message: _Message) -> None:
        self.places += 1
        self.messages.setdefault((source, message.tag), deque()).append((self.places, message))

    def add_receive(self, source: int, tag: int, receive: _Receive) -> None:
        self.places += 1
        self.receives.setdefault((source, tag), deque()).append((self.places, receive))

    def take_message(self, source: int, tag: int, nprocs: int) -> _Message | None:
        """Take the first message that a receive from `source`, which may be ANY, fits."""
        sources = range(nprocs) if source == ANY else (source,)
        queues = [queue for one in sources if (queue := self.messages.get((one, tag)))]
        return min(queues, key=lambda queue: queue[0][0]).popleft()[1] if queues else None

    def take_receive(self, source: int, tag: int) -> _Receive | None:
        """Take the receive, from this source or from any, that waits longest."""
        queues = [queue for one in (source, ANY) if (queue := self.receives.get((one, tag)))]
        return min(queues, key=lambda queue: queue[0][0]).popleft()[1] if queues else None


@dataclass
class _Client:
    """One rank's connection, and what it has asked for."""

    sock: socket.socket
    rank: int = -1
    refused: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    operations: int = 0
    largest: int = 0  # bytes of the largest message that it has announced
    sends: dict[int, _Message] = field(default_factory=dict)  # not handed over yet
    receives: dict[int, _Receive] = field(default_factory=dict)  # not taken yet
    barriers: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)
    parts: deque[tuple[int, str, bytes]] = field(default_factory=deque)


class Relay:
    """Carries messages between the ranks of one run and records each as `tracing.trace_of` wants it.

    As with gloo, a message stays with its sender until a receive has been posted for it. Then the sender is asked for
    it and hands over what stands there at that time; with that its send is done. The receiver gets the message when it
    waits for it. An event whose "end" is None never came to its end.
    """

    def __init__(self, path: str, nprocs: int, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._epoch = time.monotonic()
        self._clients: dict[int, _Client] = {}
        self._waiting = [_Waiting() for _ in range(nprocs)]
        self._sockets: list[socket.socket] = []
        self._nprocs = nprocs
        self._steps = 0
        self._under_way = 0  # bytes of the messages that have been asked for and not been taken
        self.recorded: list[list[dict[str, Any]]] = [[] for _ in range(nprocs)]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(nprocs)
        selector.register(self._listener, selectors.EVENT_READ, self._on_newcomer)

    def close(self) -> None:
        """Close every connection; messages not delivered are dropped."""
        for sock in (self._listener, *self._sockets):
            sock.close()

    # ---- connections

    def _on_newcomer(self, ready: int) -> None:
        sock, _ = self._listener.accept()
        if len(self._sockets) >= 2 * self._nprocs:  # an answer's doing: every rank connects once
            sock.close()
            return
        sock.setblocking(False)
        self._sockets.append(sock)
        client = _Client(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda ready: self._on_client(client, ready))

    def _on_client(self, client: _Client, ready: int) -> None:
        if ready & selectors.EVENT_WRITE:
            self._flush(client)
        if not ready & selectors.EVENT_READ or client.refused or client.sock not in self._selector.get_map():
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
        try:
            for kind, payload in self._frames(client, data):
                self._on_message(client, kind, payload)
        except _Refusal as refusal:
            self._refuse(client, str(refusal))

    def _frames(self, client: _Client, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The messages that `data` completes; a length that cannot be right is refused before it is waited for."""
        buffer = client.received
        buffer += data
        while len(buffer) >= protocol.HEADER.size:
            kind, length = protocol.HEADER.unpack_from(buffer)
            if not ADDRESS.size <= length <= ADDRESS.size + self._most(client, kind):
                raise _Refusal(_NONSENSE)
            end = protocol.HEADER.size + length
            if len(buffer) < end:
                return
            payload = bytes(memoryview(buffer)[protocol.HEADER.size : end])
            del buffer[:end]
            yield kind, payload

    def _most(self, client: _Client, kind: bytes) -> int:
        """How many bytes may follow the address in a message of this kind."""
        if kind == DATA:
            return client.largest
        if kind == GATHER:
            return _MAX_LABEL + MAX_UNDER_WAY // self._nprocs**2  # every rank gets the parts of all
        return 0

    def _refuse(self, client: _Client, why: str) -> None:
        """Tell a rank that its connection has ended, and take nothing more from it."""
        client.refused = True
        client.received.clear()
        with contextlib.suppress(OSError):
            client.sock.shutdown(socket.SHUT_RD)  # so that no write of the rank waits for ever
        self._answer(client, REFUSED, 0, data=why.encode())

    # ---- what ranks ask for

    def _on_message(self, client: _Client, kind: bytes, payload: bytes) -> None:
        operation, peer, tag, size = ADDRESS.unpack_from(payload)
        if (kind == JOIN) != (client.rank < 0):
            raise _Refusal(_NONSENSE)
        if kind == JOIN:
            if not 0 <= peer < self._nprocs or peer in self._clients:
                raise _Refusal(_NONSENSE)
            client.rank = peer
            self._clients[peer] = client
            return
        if kind == DATA:
            self._on_data(client, operation, payload[ADDRESS.size :])
            return
        client.operations += 1
        if client.operations > MAX_OPERATIONS:
            raise _Refusal(f"it has begun more than {MAX_OPERATIONS:,} sends and receives")
        if kind == SEND:
            self._on_send(client, operation, peer, tag, size)
        elif kind == RECEIVE:
            self._on_receive(client, operation, peer, tag)
        elif kind == TAKE and operation in client.receives:
            client.receives[operation].wanted = True
            self._hand_over(client, client.receives[operation])
        elif kind == BARRIER:
            client.barriers.append((operation, self._record(client.rank, "barrier")))
            while self._all_have("barriers"):
                for one in self._clients.values():
                    its_operation, event = one.barriers.popleft()
                    self._end(event)
                    self._answer(one, DONE, its_operation)
        elif kind == GATHER:
            self._on_part(client, operation, payload[ADDRESS.size :], length_of_label=peer)
        else:
            raise _Refusal(_NONSENSE)

    def _on_send(self, client: _Client, operation: int, destination: int, tag: int, size: int) -> None:
        if not 0 <= destination < self._nprocs or destination == client.rank or operation in client.sends:
            raise _Refusal(_NONSENSE)
        if size > MAX_MESSAGE:
            raise _Refusal(f"a message of {size:,} bytes; {MAX_MESSAGE:,} are the most that is carried here")
        event = self._record(client.rank, "send", destination, size, tag)
        message = client.sends[operation] = _Message(client.rank, operation, tag, size, event)
        client.largest = max(client.largest, size)
        receive = self._waiting[destination].take_receive(client.rank, tag)
        if receive is None:
            self._waiting[destination].add_message(client.rank, message)
        else:
            self._match(receive, message)

    def _on_receive(self, client: _Client, operation: int, source: int, tag: int) -> None:
        if not ANY <= source < self._nprocs or source == client.rank or operation in client.receives:
            raise _Refusal(_NONSENSE)
        receive = client.receives[operation] = _Receive(client.rank, operation, time.monotonic())
        message = self._waiting[client.rank].take_message(source, tag, self._nprocs)
        if message is None:
            self._waiting[client.rank].add_receive(source, tag, receive)
        else:
            self._match(receive, message)

    def _match(self, receive: _Receive, message: _Message) -> None:
        """Ask the sender for a message: a receive is there."""
        sender = self._clients[message.source]
        held = self._under_way + sum(len(client.unsent) for client in self._clients.values())
        if held + message.size > MAX_UNDER_WAY:
            raise _Refusal(f"messages of more than {MAX_UNDER_WAY:,} bytes were sent and not taken")
        self._under_way += message.size
        receive.message, message.receive = message, receive
        self._answer(sender, WANTED, message.operation)

    def _on_data(self, client: _Client, operation: int, data: bytes) -> None:
        message = client.sends.get(operation)
        receive = message.receive if message is not None else None
        if message is None or receive is None or len(data) != message.size:  # not announced, asked for, or so long
            raise _Refusal(_NONSENSE)
        message.data = data
        del client.sends[operation]
        self._end(message.event)
        receiver = self._clients[receive.rank]
        self._answer(receiver, ARRIVED, receive.operation)
        self._hand_over(receiver, receive)

    def _hand_over(self, receiver: _Client, receive: _Receive) -> None:
        message = receive.message
        if message is None or message.data is None or not receive.wanted:
            return
        del receiver.receives[receive.operation]
        self._under_way -= message.size
        event = self._record(receiver.rank, "recv", message.source, message.size, message.tag, receive.posted_at)
        self._end(event)
        self._answer(receiver, DONE, receive.operation, message.source, message.data)

    def _on_part(self, client: _Client, operation: int, content: bytes, length_of_label: int) -> None:
        """Take a rank's part for the course's own version; when all are there, give every rank the parts of all."""
        if not 0 < length_of_label <= min(_MAX_LABEL, len(content)) or client.parts:
            raise _Refusal(_NONSENSE)
        label = content[:length_of_label].decode("ascii", "replace")
        part = content[length_of_label:]
        self._end(self._record(client.rank, OWN + label, None, len(part)))
        client.parts.append((operation, label, part))
        if not self._all_have("parts"):
            return
        together = [self._clients[rank].parts.popleft() for rank in range(self._nprocs)]
        if len({(label, len(part)) for _, label, part in together}) > 1:
            for one in self._clients.values():
                self._refuse(one, "the ranks called the course's own version with tensors of different sizes")
            return
        parts = b"".join(part for _, _, part in together)
        for rank, (its_operation, _, _) in enumerate(together):
            self._answer(self._clients[rank], DONE, its_operation, data=parts)

    def _all_have(self, what: str) -> bool:
        return len(self._clients) == self._nprocs and all(getattr(one, what) for one in self._clients.values())

    # ---- the record, and the answers

    def _record(
        self,
        rank: int,
        op: str,
        peer: int | None = None,
        size: int = 0,
        tag: int | None = None,
        began: float | None = None,
    ) -> dict[str, Any]:
        self._steps += 1
        event = {
            "op": op,
            "peer": peer,
            "bytes": size,
            "tag": tag,
            "group": "",
            "start": (time.monotonic() if began is None else began) - self._epoch,
            "end": None,
            "started": self._steps,
            "finished": None,
        }
        self.recorded[rank].append(event)
        return event

    def _end(self, event: dict[str, Any]) -> None:
        self._steps += 1
        event["end"], event["finished"] = time.monotonic() - self._epoch, self._steps

    def _answer(self, client: _Client, kind: bytes, operation: int, source: int = ANY, data: bytes = b"") -> None:
        client.unsent += protocol.frame(kind, ADDRESS.pack(operation, source, 0, len(data)) + data)
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            while client.unsent:
                del client.unsent[: client.sock.send(client.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the rank is gone
            client.unsent.clear()
        if client.sock not in self._selector.get_map():
            return
        wanted = (0 if client.refused else selectors.EVENT_READ) | (selectors.EVENT_WRITE if client.unsent else 0)
        if wanted:
            self._selector.modify(client.sock, wanted, self._selector.get_key(client.sock).data)
        else:
            self._selector.unregister(client.sock)
