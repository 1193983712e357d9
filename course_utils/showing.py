"""What a long piece of set-up shows while it runs: a bar in a notebook or a terminal, elsewhere a line now and then.

Under COURSE_PLAIN=1 only the first and the last line, without times, so that two executions show the same text.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from typing import Any

from .front_end import in_a_notebook, is_plain

WIDTH = 30
LINE_EVERY = 30.0  # seconds between two lines where nothing can be redrawn


class Progress:
    """Shows how far a build is: `say` a sentence, `step` what is done now, `part` how much of the whole is done."""

    def __init__(self, show: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._step = ""
        self._part: float | None = None
        self._part_start = self._start
        self._drawn = self._start
        self._handle: Any = None
        self._how = _how() if show else "silent"

    def say(self, sentence: str) -> None:
        """Show a sentence that stays."""
        if self._how != "silent":
            self.close()
            print(sentence, flush=True)

    def step(self, what: str) -> None:
        """Say what is done from here on."""
        self._step, self._part, self._part_start = what, None, self._clock()
        self._draw(at_once=True)

    def part(self, done: float) -> None:
        """Say that `done` (0 to 1) of this step's time has passed, as far as can be told."""
        self._part = done

    def tick(self) -> None:
        """Draw again; called every second or so."""
        self._draw()

    def close(self) -> None:
        """Take the bar away."""
        if self._handle is not None:
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)
            self._handle = None
        elif self._how == "terminal" and self._step:
            print("\r\x1b[K", end="", flush=True)
        self._step = ""

    def text(self) -> str:
        """Return the state as one line: the step, the bar, the time so far and an estimate of the rest."""
        line = f"{self._step}: {_duration(self._clock() - self._start)}"
        if self._part is None:
            return line
        full = int(WIDTH * self._part)
        return f"[{'#' * full}{'.' * (WIDTH - full)}] {self._part:.0%} {line}{self._rest()}"

    def _rest(self) -> str:
        passed = self._clock() - self._part_start
        if not self._part or self._part < 0.1 or passed < 10:
            return ""
        minutes = round(passed * (1 / self._part - 1) / 60)
        return f", about {minutes} min left" if minutes else ", less than a minute left"

    def _draw(self, at_once: bool = False) -> None:
        if self._how in ("silent", "plain") or not self._step:
            return
        if self._how == "notebook":
            self._draw_in_notebook()
        elif self._how == "terminal":
            print(f"\r\x1b[K{self.text()}", end="", flush=True)
        elif at_once or self._clock() - self._drawn >= LINE_EVERY:
            self._drawn = self._clock()
            print(self.text(), flush=True)

    def _draw_in_notebook(self) -> None:
        from IPython.display import display

        value = "" if self._part is None else f' value="{self._part:.3f}"'
        shown = {
            "text/plain": self.text(),
            "text/html": f'<progress max="1"{value} style="width:24em"></progress> {html.escape(self.text())}',
        }
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def _how() -> str:
    if is_plain():
        return "plain"
    if in_a_notebook():
        return "notebook"
    return "terminal" if sys.stdout.isatty() else "lines"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
