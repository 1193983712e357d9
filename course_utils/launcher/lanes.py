"""What ranks print, as a notebook shows it: one display of two forms, updated while they run.

HTML has a lane for each rank; the text form holds the same lines with their rank, for whatever shows no HTML. No script
and no widget: the front ends of Kaggle, Colab and VS Code keep neither. What is saved with the notebook is the last
state, and bounded.
"""

from __future__ import annotations

import html
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

SECONDS_BETWEEN_UPDATES = 0.1
CHARACTERS = 20_000  # of all ranks together, in each of the two forms
_SIDE_BY_SIDE = 60  # characters: lanes with longer lines lie below each other
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, for all eyes


class Excerpt:
    """The first and the last lines of one rank within `budget` characters, and how many were left out between."""

    def __init__(self, budget: int) -> None:
        self._longest = max(80, budget // 4)
        self._room = budget // 3
        self._rest = budget - self._room
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._in_tail = 0
        self._head_is_full = False
        self.left_out = 0
        self.partial = ""

    def add(self, lines: Sequence[str]) -> None:
        """Take the next whole lines."""
        for line in lines:
            line = self._short(line)
            size = len(line) + 1
            if not self._head_is_full and size <= self._room:
                self._head.append(line)
                self._room -= size
                continue
            self._head_is_full = True
            self._tail.append(line)
            self._in_tail += size
            while self._in_tail > self._rest and len(self._tail) > 1:
                self._in_tail -= len(self._tail.popleft()) + 1
                self.left_out += 1

    def lines(self, rank: int) -> list[str]:
        """What is shown: the first lines, a word on what was left out, the last lines and what is not yet a line."""
        gap = [f"... ({self.left_out:,} lines left out; run.show(rank={rank}) prints them)"] if self.left_out else []
        partial = [self._short(self.partial)] if self.partial else []
        return [*self._head, *gap, *self._tail, *partial]

    def _short(self, line: str) -> str:
        return line if len(line) <= self._longest else f"{line[: self._longest]} ..."


class Lanes:
    """The display of one run."""

    def __init__(self, nprocs: int) -> None:
        self._excerpts = [Excerpt(CHARACTERS // nprocs) for _ in range(nprocs)]
        self._notes: list[str] = []
        self._id = uuid.uuid4().hex
        self._is_up = False
        self._changed = False
        self._shown_at = 0.0

    def show(self, rank: int, lines: Sequence[str], partial: str) -> None:
        """Take what a rank printed: whole lines, and the beginning of the next one."""
        excerpt = self._excerpts[rank]
        if lines or partial != excerpt.partial:
            excerpt.add(lines)
            excerpt.partial = partial
            self._changed = True

    def note(self, text: str) -> None:
        """Take a note about the whole run."""
        self._notes.append(f"Note: {text}")
        self._changed = True

    def due_in(self) -> float | None:
        """Seconds until the display should be brought up to date, or None while it is."""
        return max(0.0, self._shown_at + SECONDS_BETWEEN_UPDATES - time.monotonic()) if self._changed else None

    def refresh(self) -> None:
        """Bring the display up to date. Raises whatever the notebook's publisher raises."""
        if not self._changed:
            return
        from IPython.display import display

        self._changed = False
        data = {"text/html": self.html(), "text/plain": self.text()}
        options: dict[str, Any] = {"update": True} if self._is_up else {}
        display(data, raw=True, display_id=self._id, **options)
        self._is_up = True
        self._shown_at = time.monotonic()

    def text(self) -> str:
        """Notes, then each rank's lines with their rank."""
        lines = [f"[rank {rank}] {line}" for rank, excerpt in enumerate(self._excerpts) for line in excerpt.lines(rank)]
        return "\n".join([*self._notes, *lines])

    def html(self) -> str:
        """Notes, then a lane for each rank that has printed anything."""
        notes = "".join(f'<pre style="{_PRE}">{html.escape(note)}</pre>' for note in self._notes)
        shown = [(rank, lines) for rank, excerpt in enumerate(self._excerpts) if (lines := excerpt.lines(rank))]
        longest = max((len(line) for _, lines in shown for line in lines), default=0)
        columns = min(len(shown), 2 if longest <= _SIDE_BY_SIDE else 1)
        if longest <= _SIDE_BY_SIDE / 2:
            columns = min(len(shown), 4)
        lanes = "".join(_lane(rank, lines) for rank, lines in shown)
        grid = f"display:grid;gap:6px 12px;grid-template-columns:repeat({max(1, columns)},minmax(0,1fr))"
        return f'{notes}<div style="{grid}">{lanes}</div>'


_PRE = "margin:0;padding:0;white-space:pre-wrap;overflow-wrap:anywhere;max-height:20em;overflow:auto;background:none"


def _lane(rank: int, lines: Sequence[str]) -> str:
    colour = _COLOURS[rank % len(_COLOURS)]
    body = html.escape("\n".join(lines))
    return (
        f'<div style="border-left:3px solid {colour};padding-left:8px;min-width:0">'
        f'<div style="font-weight:600;color:{colour}">rank {rank}</div><pre style="{_PRE}">{body}</pre></div>'
    )
