"""What a traced run sent: messages, bytes and rounds of each rank, counted from the events that ranks recorded."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """One operation of one rank.

    `op` is "send", "recv" or a collective ("all_reduce", ...); `peer` the other rank of a message, None for a
    collective; `bytes` the size of the message or of this rank's own contribution; `start` and `end` seconds since
    the run began (`end` is None for what was never waited for); `round` the message's place in the longest chain of
    messages that had to arrive, one after the other, before it could be sent (None for collectives).
    """

    op: str
    peer: int | None
    bytes: int
    tag: int | None
    start: float
    end: float | None
    round: int | None


@dataclass(frozen=True)
class RankTrace:
    """What one rank sent and received point to point, and everything it did on the wire as `events`.

    `rounds` is the longest chain of dependent messages that ends at this rank.
    """

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    rounds: int
    events: tuple[Event, ...]


class Trace(list[RankTrace]):
    """The traces of all ranks, by rank; `rounds` is the longest chain of dependent messages in the whole run."""

    @property
    def rounds(self) -> int:
        return max((rank.rounds for rank in self), default=0)


def trace_of(recorded: list[list[dict[str, Any]]]) -> Trace:
    """Count what ranks recorded.

    A message depends on every message that its sender had received before sending it: its round is one more than the
    latest of those (a Lamport clock that only messages advance; Lamport 1978). Messages in flight together share a
    round. Sends and receives are matched in order per (sender, receiver, tag, group), as the transport does.
    """
    rounds = _rounds(recorded)
    traces = Trace()
    for rank, events in enumerate(recorded):
        sent = [event for event in events if event["op"] == "send"]
        received = [event for event in events if event["op"] == "recv" and event["finished"] is not None]
        mine = [rounds.get((rank, index)) for index in range(len(events))]
        traces.append(
            RankTrace(
                messages_sent=len(sent),
                messages_received=len(received),
                bytes_sent=sum(event["bytes"] for event in sent),
                bytes_received=sum(event["bytes"] for event in received),
                rounds=max((number for number in mine if number), default=0),
                events=tuple(
                    Event(e["op"], e["peer"], e["bytes"], e["tag"], e["start"], e["end"], number)
                    for e, number in zip(events, mine, strict=True)
                ),
            )
        )
    return traces


def _rounds(recorded: list[list[dict[str, Any]]]) -> dict[tuple[int, int], int]:
    """(rank, index of the event) -> round, for every message."""
    timelines = [deque(_timeline(events)) for events in recorded]
    clocks = [0] * len(recorded)
    in_flight: dict[tuple[Any, ...], deque[int]] = defaultdict(deque)
    rounds: dict[tuple[int, int], int] = {}
    moved = True
    while moved:
        moved = False
        for rank, timeline in enumerate(timelines):
            while timeline:
                index, what = timeline[0]
                event = recorded[rank][index]
                if what == "send":
                    rounds[rank, index] = clocks[rank] + 1
                    in_flight[rank, event["peer"], event["tag"], event["group"]].append(clocks[rank] + 1)
                else:
                    arrived = in_flight[event["peer"], rank, event["tag"], event["group"]]
                    if not arrived:
                        break  # its sender's timeline has to be read further first
                    rounds[rank, index] = arrived.popleft()
                    clocks[rank] = max(clocks[rank], rounds[rank, index])
                timeline.popleft()
                moved = True
    return rounds


def _timeline(events: Iterable[dict[str, Any]]) -> list[tuple[int, str]]:
    """The moments that order messages: a send counts when it is started, a receive when it has arrived."""
    moments = []
    for index, event in enumerate(events):
        if event["op"] == "send":
            moments.append((event["started"], index, "send"))
        elif event["op"] == "recv" and event["finished"] is not None:
            moments.append((event["finished"], index, "recv"))
    return [(index, what) for _, index, what in sorted(moments)]
