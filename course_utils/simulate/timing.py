"""How long a simulated run would take over a link: its messages played again, each holding its ports for its time."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from ..launcher import Link
from .record import JOINED, LEFT, POSTED, SEND, SENT, UNMATCHED, Record


@dataclass(frozen=True)
class Schedule:
    """When things happen over a link, in seconds since the start.

    `ranks` says when each rank has done its last action on the wire; `starts` and `ends` hold one entry per message, in
    the order of `run.messages` (None for a message that nobody received and that therefore never left).
    """

    ranks: list[float]
    starts: list[float | None]
    ends: list[float | None]

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return max(self.ranks, default=0.0)


def replay(record: Record, order: list[int], buffered: bool, link: Link) -> Schedule:
    """Play a recorded run over `link`."""
    player = _Player(record, buffered, link)
    player.play()
    starts, ends = player.starts, player.ends
    return Schedule(player.clocks, [starts[number] for number in order], [ends[number] for number in order])


class _Player:
    """Each rank performs its recorded actions in order; messages wait for both their ports."""

    def __init__(self, record: Record, buffered: bool, link: Link) -> None:
        messages = len(record.rounds)
        self.clocks = [0.0] * record.nprocs
        self.starts: list[float | None] = [None] * messages
        self.ends: list[float | None] = [None] * messages
        self._record = record
        self._buffered = buffered
        self._link = link
        self._next = [0] * record.nprocs  # each rank's next action
        self._wanted = bytearray(messages)  # how many of a message's two sides are there
        self._arrived = bytearray(messages)
        self._out_free = [True] * record.nprocs
        self._in_free = [True] * record.nprocs
        self._out_queue: list[deque[int]] = [deque() for _ in range(record.nprocs)]
        self._in_queue: list[deque[int]] = [deque() for _ in range(record.nprocs)]
        self._joined = [0] * len(record.collectives)
        self._met_at: list[float | None] = [None] * len(record.collectives)
        self._events: list[tuple[float, int, int]] = []  # (when, 0 for a message and 1 for a collective, its number)

    def play(self) -> None:
        """Let every rank go on until it waits, then let the next arrivals wake those that wait for them."""
        now = 0.0
        for rank in range(len(self.clocks)):
            self._go_on(rank, now)
        while self._events:
            now = self._events[0][0]
            freed: list[int] = []
            woken: list[int] = []
            while self._events and self._events[0][0] == now:
                _, kind, number = heapq.heappop(self._events)
                if kind:
                    self._met_at[number] = now
                    woken += range(len(self.clocks))
                    continue
                source, destination = self._record.sources[number], self._record.destinations[number]
                self._arrived[number] = 1
                self._out_free[source] = self._in_free[destination] = True
                freed.append(number)
                woken += (destination, source)
            for number in freed:  # what has waited longest for a port goes first
                self._serve(self._out_queue[self._record.sources[number]], now)
                self._serve(self._in_queue[self._record.destinations[number]], now)
            for rank in woken:
                self._go_on(rank, now)

    def _go_on(self, rank: int, now: float) -> None:
        actions = self._record.actions[rank]
        place = self._next[rank]
        while place < len(actions):
            action = actions[place]
            if action != UNMATCHED:
                number, what = action >> 3, action & 7
                if what in (SEND, POSTED):
                    self._offer(number, now)
                    if what == SEND and self._buffered:
                        self._offer(number, now)
                elif what == JOINED:
                    self._join(number, now)
                elif what == LEFT:
                    if self._met_at[number] is None:
                        break
                elif not self._arrived[number] and not (what == SENT and self._buffered):
                    break
            place += 1
        if place > self._next[rank]:
            self._next[rank] = place
            self.clocks[rank] = now

    def _offer(self, number: int, now: float) -> None:
        self._wanted[number] += 1
        if self._wanted[number] == 2 and not self._leave(number, now):
            self._out_queue[self._record.sources[number]].append(number)
            self._in_queue[self._record.destinations[number]].append(number)

    def _leave(self, number: int, now: float) -> bool:
        source, destination = self._record.sources[number], self._record.destinations[number]
        if not (self._out_free[source] and self._in_free[destination]):
            return False
        self._out_free[source] = self._in_free[destination] = False
        self.starts[number] = now
        self.ends[number] = end = now + self._link.seconds(self._record.sizes[number])
        heapq.heappush(self._events, (end, 0, number))
        return True

    def _serve(self, queue: deque[int], now: float) -> None:
        if not queue:
            return
        for number in list(queue):
            if self.starts[number] is not None or self._leave(number, now):
                queue.remove(number)

    def _join(self, number: int, now: float) -> None:
        self._joined[number] += 1
        if self._joined[number] == self._record.nprocs:
            one = self._record.collectives[number]
            seconds = self._link.seconds_of(one.op, max(one.bytes.values()), self._record.nprocs)
            heapq.heappush(self._events, (now + seconds, 1, number))
