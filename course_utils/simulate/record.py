"""What simulated ranks did: every message, and each rank's actions in order. A ring of 1,000 makes two million."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ..launcher.tracing import Event, RankTrace, Trace

KEPT_A_MESSAGE = 64  # elements: a longer message's values are not kept
KEPT_IN_ALL = 100_000  # elements: after these, no values are kept

# A rank's actions, each written with the number of its message or collective as `number * 8 + action`.
SEND, SENT, POSTED, RECEIVED, JOINED, LEFT = range(6)
UNMATCHED = -1  # a receive that was posted and whose message never came


@dataclass(frozen=True)
class Message:
    """One message: `elements` numbers in `bytes` bytes from rank `source` to rank `destination`.

    `round` is its place in the longest chain of messages that had to arrive, one after the other, before it could be
    sent. `values` holds what it carried where that is short, else None; `received` is False for a message that nobody
    took.
    """

    round: int
    source: int
    destination: int
    elements: int
    bytes: int
    tag: int
    values: tuple[float, ...] | None
    received: bool


@dataclass
class Collective:
    """One collective operation: its name, and how many bytes each rank that joined it brought."""

    op: str
    bytes: dict[int, int]


class Record:
    """All that was sent, in columns, in the order in which it was started."""

    def __init__(self, nprocs: int) -> None:
        self.nprocs = nprocs
        self.rounds = array("l")
        self.sources = array("l")
        self.destinations = array("l")
        self.elements = array("q")
        self.sizes = array("q")
        self.tags = array("q")
        self.received = bytearray()
        self.rooms: dict[int, int] = {}  # the receiving tensor's bytes, where the message did not fill it
        self.values: dict[int, tuple[float, ...]] = {}
        self.actions = [array("q") for _ in range(nprocs)]
        self.collectives: list[Collective] = []
        self.clocks = [0] * nprocs  # the latest round that each rank has received from
        self._kept = 0

    def start(self, source: int, destination: int, elements: int, size: int, tag: int) -> int:
        """Note a message that starts now; return its number."""
        number = len(self.rounds)
        self.rounds.append(self.clocks[source] + 1)
        self.sources.append(source)
        self.destinations.append(destination)
        self.elements.append(elements)
        self.sizes.append(size)
        self.tags.append(tag)
        self.received.append(0)
        self.actions[source].append(number * 8 + SEND)
        return number

    def keep(self, number: int, tensor: Any) -> None:
        """Keep what a message carries, if it is short and there is room."""
        elements = self.elements[number]
        if elements <= KEPT_A_MESSAGE and self._kept + elements <= KEPT_IN_ALL:
            self._kept += elements
            self.values[number] = tuple(tensor.detach().reshape(-1).tolist())

    def take(self, number: int, room: int) -> None:
        """Note that a message's receiver has it, in `room` bytes: what that rank sends from now on depends on it."""
        receiver = self.destinations[number]
        self.received[number] = 1
        if room != self.sizes[number]:
            self.rooms[number] = room
        self.actions[receiver].append(number * 8 + RECEIVED)
        if self.rounds[number] > self.clocks[receiver]:
            self.clocks[receiver] = self.rounds[number]

    def message(self, number: int) -> Message:
        """Return one message."""
        return Message(
            self.rounds[number],
            self.sources[number],
            self.destinations[number],
            self.elements[number],
            self.sizes[number],
            self.tags[number],
            self.values.get(number),
            bool(self.received[number]),
        )

    def in_order(self) -> list[int]:
        """Return the messages' numbers by round, then source, then destination."""
        import numpy

        numbers = numpy.lexsort((self.destinations, self.sources, self.rounds))
        return [int(number) for number in numbers]

    def trace(self) -> Trace:
        """Return what a traced launch returns for the same run; a round lasts one second there, from k - 1 to k."""
        return Trace(self._trace_of(rank) for rank in range(self.nprocs))

    def _trace_of(self, rank: int) -> RankTrace:
        events: list[Event] = []
        clock = 0
        sent = [0, 0]
        taken = [0, 0]
        for action in self.actions[rank]:
            number, what = divmod(action, 8)
            if what == SEND:
                sent = [sent[0] + 1, sent[1] + self.sizes[number]]
                events.append(self._event("send", self.destinations[number], number, self.sizes[number]))
            elif what == RECEIVED:
                room = self.rooms.get(number, self.sizes[number])
                taken = [taken[0] + 1, taken[1] + room]
                clock = max(clock, self.rounds[number])
                events.append(self._event("recv", self.sources[number], number, room))
            elif what == JOINED:
                one = self.collectives[number]
                events.append(Event(one.op, None, one.bytes[rank], None, clock, clock, None))
        rounds = max((event.round or 0 for event in events), default=0)
        return RankTrace(sent[0], taken[0], sent[1], taken[1], rounds, tuple(events))

    def _event(self, op: str, peer: int, number: int, size: int) -> Event:
        number_of_round = self.rounds[number]
        return Event(op, peer, size, self.tags[number], number_of_round - 1.0, float(number_of_round), number_of_round)


class Messages(Sequence[Message]):
    """Every message of a run, by round, then by the rank that sent it."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.numbers = record.in_order()

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self._record.message(number) for number in self.numbers[index]]
        return self._record.message(self.numbers[index])

    def __iter__(self) -> Iterator[Message]:
        return map(self._record.message, self.numbers)

    def __repr__(self) -> str:
        return f"<{len(self)} messages>"
