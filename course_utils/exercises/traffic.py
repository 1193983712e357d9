"""What one case of a trial sent: the trace of a whole launch, cut where the judge's own barriers stand.

Where the answer has used the course's own version of another exercise, an event called "own NAME" stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..launcher.relay import OWN
from ..launcher.tracing import Event, RankTrace, Trace, trace_of


def own_calls(trace: Iterable[RankTrace]) -> list[tuple[int, str]]:
    """The calls of the course's own versions in a trace: (rank, exercise)."""
    return [
        (rank, event.op.removeprefix(OWN))
        for rank, told in enumerate(trace)
        for event in told.events
        if event.op.startswith(OWN)
    ]


def with_own_calls(trace: Trace, noted: Sequence[Sequence[tuple[str, int]]]) -> Trace:
    """Add calls that each rank has noted itself, (exercise, bytes), as a trace that a judge made has them."""
    return Trace(
        replace(
            told, events=(*told.events, *(Event(OWN + name, None, size, None, 0.0, 0.0, None) for name, size in own))
        )
        for told, own in zip(trace, noted, strict=True)
    )


def by_case(trace: Trace, cases: int) -> list[Trace] | int:
    """Cut a trial's trace into one trace a case, each with rounds counted from its own beginning.

    Between two cases the judge lets all ranks meet in a barrier, so that is where one ends. Returns the number of a
    rank whose barriers are not those: the answer has called one itself. A single case needs no cut.
    """
    if cases == 1:
        return [trace]
    parts: list[list[list[dict[str, Any]]]] = [[] for _ in range(cases)]
    for rank, told in enumerate(trace):
        pieces: list[list[Event]] = [[]]
        for event in sorted(told.events, key=lambda event: event.start):
            if event.op == "barrier":
                pieces.append([])
            else:
                pieces[-1].append(event)
        if len(pieces) != cases:
            return rank
        for part, piece in zip(parts, pieces, strict=True):
            part.append([_recorded(event) for event in piece])
    return [trace_of(part) for part in parts]


def _recorded(event: Event) -> dict[str, Any]:
    """The event as a rank records it; the order of its moments is all that counting rounds needs."""
    return {
        "op": event.op,
        "peer": event.peer,
        "bytes": event.bytes,
        "tag": event.tag,
        "group": "",
        "start": event.start,
        "end": event.end,
        "started": event.start,
        "finished": event.end,
    }
