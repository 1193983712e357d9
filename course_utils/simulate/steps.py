"""A simulated run round by round: who sent what to whom, and how a watched variable looked after it."""

from __future__ import annotations

import html
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from ..front_end import is_plain
from .record import Message, Messages

SHOWN_RANKS = 16
SHOWN_ROUNDS = 20
SHOWN_NUMBERS = 16
_CHANGED = "*"


@dataclass(frozen=True)
class Step:
    """One round: `messages` of that round, and `states`, the watched variable's value on each rank after it.

    Step 0 is how things stood before any message. A state is plain data (numbers and lists); None where a rank did not
    have the variable yet. A cell shows a step as a table; print gives the same as text, where `*` marks what changed.
    """

    number: int
    rounds: int
    nprocs: int
    messages: Sequence[Message]
    watch: str | None
    states: Sequence[Any] | None
    before: Sequence[Any] | None

    def text(self) -> str:
        """Return the step as a table in plain text."""
        rows = [[cell if isinstance(cell, str) else _in_text(cell) for cell in row] for row in self._rows()]
        table = [self._head(), *rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join([self._title(), *(f"  {line}".rstrip() for line in lines), *self._rest()])

    def html(self) -> str:
        """Return the step as a table in self-contained HTML; what changed is bold."""
        head = "".join(f'<th style="{_CELL};font-weight:600">{html.escape(cell)}</th>' for cell in self._head())
        body = ""
        for row in self._rows():
            cells = [html.escape(cell) if isinstance(cell, str) else _in_html(cell) for cell in row]
            body += (
                '<tr style="background:none">' + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"
            )
        rest = "".join(f"<div>{html.escape(line)}</div>" for line in self._rest())
        return (
            f'<div style="margin:6px 0"><div style="font-weight:600">{self._title()}</div>'
            f'<table style="border-collapse:collapse;background:none"><tr style="background:none">{head}</tr>{body}'
            f"</table>{rest}</div>"
        )

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str | None:
        return None if is_plain() else self.html()

    def _title(self) -> str:
        return f"round {self.number} of {self.rounds}" if self.number else "before the first round"

    def _head(self) -> list[str]:
        moved = ["sends", "receives"] if self.number else []
        return ["rank", *moved, *([self.watch] if self.watch else [])]

    def _rows(self) -> list[list[Any]]:
        """One row a rank; a watched value is a list of (text, whether it changed)."""
        rows: list[list[Any]] = []
        for rank in range(min(self.nprocs, SHOWN_RANKS)):
            row: list[Any] = [str(rank)]
            if self.number:
                sent = [f"{_carried(one)} to {one.destination}" for one in self.messages if one.source == rank]
                taken = [one for one in self.messages if one.destination == rank and one.received]
                row += [_joined(sent), _joined([f"{_carried(one)} from {one.source}" for one in taken])]
            if self.states is not None:
                row.append(_marked(self.states[rank], None if self.before is None else self.before[rank]))
            rows.append(row)
        return rows

    def _rest(self) -> list[str]:
        return [f"and {self.nprocs - SHOWN_RANKS:,} more ranks"] if self.nprocs > SHOWN_RANKS else []


class Steps(Sequence[Step]):
    """A run round by round: step 0 is how it began, step k how it stood after round k. A cell shows all of it."""

    def __init__(
        self, messages: Messages, nprocs: int, rounds: int, watch: str | None, states: list[list[Any]] | None
    ) -> None:
        self._messages = messages
        self._nprocs = nprocs
        self._rounds = rounds
        self._watch = watch
        self._states = states  # by rank, then by round

    def __len__(self) -> int:
        return self._rounds + 1

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are the steps 0 to {self._rounds}, and {index} was asked for")
        number = index % len(self)
        first = bisect_left(self._messages, number, key=lambda message: message.round)
        last = bisect_right(self._messages, number, key=lambda message: message.round)
        return Step(
            number,
            self._rounds,
            self._nprocs,
            self._messages[first:last],
            self._watch,
            self._after(number),
            self._after(number - 1) if number else None,
        )

    def __str__(self) -> str:
        return "\n\n".join([step.text() for step in self._shown()] + self._rest())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str | None:
        if is_plain():
            return None
        return "".join([step.html() for step in self._shown()] + [f"<div>{line}</div>" for line in self._rest()])

    def _shown(self) -> list[Step]:
        return self[: SHOWN_ROUNDS + 1]

    def _rest(self) -> list[str]:
        return [f"and {self._rounds - SHOWN_ROUNDS:,} more rounds"] if self._rounds > SHOWN_ROUNDS else []

    def _after(self, number: int) -> list[Any] | None:
        return None if self._states is None else [states[number] for states in self._states]


def states_by_round(seen: list[tuple[int, Any]], rounds: int) -> list[Any]:
    """Return a rank's value after each round 0 to `rounds`: the last seen before a message of a later round came in.

    >>> states_by_round([(0, "a"), (2, "b"), (2, "c")], 3)
    ['a', 'a', 'c', 'c']
    """
    clocks = [clock for clock, _ in seen]
    places = [bisect_right(clocks, number) for number in range(rounds + 1)]
    return [seen[place - 1][1] if place else None for place in places]


def as_plain(value: Any) -> Any:
    """Copy a variable's value as numbers, lists and text, so that later changes do not reach it."""
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        size = 1
        for length in value.shape:
            size *= length
        return value.tolist() if size <= 4 * SHOWN_NUMBERS else f"{size:,} elements"
    if isinstance(value, list | tuple):
        return [as_plain(part) for part in value]
    if isinstance(value, dict):
        return [f"{key}: {_written(as_plain(part))}" for key, part in value.items()]
    return value if isinstance(value, bool | int | float | str) or value is None else repr(value)


_CELL = "text-align:left;vertical-align:top;padding:1px 14px 1px 0;border:none;font-family:monospace"


def _carried(message: Message) -> str:
    if message.values is None or len(message.values) > SHOWN_NUMBERS:
        return f"{message.elements:,} elements"
    return _written(list(message.values))


def _joined(parts: list[str]) -> str:
    shown = parts if len(parts) <= 4 else [*parts[:3], f"and {len(parts) - 3} more"]
    return ", ".join(shown)


def _marked(value: Any, before: Any) -> list[tuple[str, bool]]:
    """The value in parts, each with whether it differs from before."""
    if value is None:
        return [("", False)]
    if not isinstance(value, list) or not any(isinstance(part, list) for part in value):
        return [(_written(value), before is not None and value != before)]
    alike = isinstance(before, list) and len(before) == len(value)
    return [(_written(part), alike and part != before[place]) for place, part in enumerate(value)]


def _in_text(parts: list[tuple[str, bool]]) -> str:
    return " ".join(text + _CHANGED * changed for text, changed in parts)


def _in_html(parts: list[tuple[str, bool]]) -> str:
    return " ".join(f"<b>{html.escape(text)}</b>" if changed else html.escape(text) for text, changed in parts)


def _written(value: Any) -> str:
    if isinstance(value, list):
        shown = value if len(value) <= SHOWN_NUMBERS else value[:SHOWN_NUMBERS]
        more = [] if len(shown) == len(value) else [f"... ({len(value)})"]
        return f"[{' '.join([_written(part) for part in shown] + more)}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
