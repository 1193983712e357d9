"""What one case of a trial sent: the trace of a whole launch, cut where the judge's own barriers stand."""

from __future__ import annotations

from typing import Any

from ..launcher.tracing import Event, Trace, trace_of


def by_case(trace: Trace, cases: int) -> list[Trace] | int:
    """Cut a trial's trace into one trace a case, each with rounds counted from its own beginning.

    Between two cases the judge lets all ranks meet in a barrier, so that is where one ends. Returns the number of a
    rank whose barriers are not those: the answer has called one itself.
    """
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
