"""What ranks print: whole in a log file a rank, live and bounded in the cell.

A notebook gets one display (see `lanes`); terminals and captured streams get lines. Under COURSE_PLAIN=1 nothing is
shown before the run has ended; then the same lines come ordered by rank, so that a notebook executed twice shows the
same text.
"""

from __future__ import annotations

import codecs
import contextlib
import shutil
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from ..front_end import is_plain, prints_to_a_notebook
from .lanes import Lanes

MAX_LINES = 200
MAX_CHARACTERS = 20_000
MAX_LINE = 1_000
_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red


class Logs(Sequence[str]):
    """All that each rank printed, by rank, read from disk when asked for. The files go when nobody holds this."""

    def __init__(self, folder: str, nprocs: int) -> None:
        self._paths = [Path(folder, f"rank-{rank}.log") for rank in range(nprocs)]
        self._finalizer = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._read(path) for path in self._paths[index]]
        return self._read(self._paths[index])

    def __repr__(self) -> str:
        return f"<what {len(self)} ranks printed: " + ", ".join(f"{len(log)} characters" for log in self) + ">"

    @staticmethod
    def _read(path: Path) -> str:
        return path.read_bytes().decode("utf-8", "replace") if path.exists() else ""


class Lane:
    """One rank's output: bytes in, log written, whole lines out."""

    def __init__(self, rank: int, log: Path) -> None:
        self.rank = rank
        self._log = log.open("wb")
        self._log_is_whole = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""
        self._line_length = 0

    @property
    def partial(self) -> str:
        """What was begun and is no whole line yet; of a progress bar, its present state."""
        return self._shown()

    def feed(self, data: bytes) -> list[str]:
        """Keep `data` in the log; return the lines that it completes."""
        lines = self._complete(self._decoder.decode(data))
        try:
            self._log.write(data)
            self._log.flush()
        except OSError as error:  # a full disk must not end a run
            if self._log_is_whole:
                self._log_is_whole = False
                lines.append(f"... (run.logs[{self.rank}] ends here: {error})")
        return lines

    def close(self) -> list[str]:
        """Return what was begun but never ended with a newline, and close the log."""
        lines = self._complete(self._decoder.decode(b"", final=True))
        if self._line:
            lines += self._complete("\n")
        with contextlib.suppress(OSError):
            self._log.close()
        return lines

    def _complete(self, text: str) -> list[str]:
        lines = []
        *complete, rest = text.split("\n")
        for part in complete:
            self._extend(part)
            lines.append(self._shown())
            self._line, self._line_length = "", 0
        self._extend(rest)
        return lines

    def _extend(self, part: str) -> None:
        # "\r" starts the line again: a progress bar shows its last state. The line kept is bounded, the log is whole.
        text = self._line + part
        before_end = text[:-1] if text.endswith("\r") else text  # "\r" at the very end may belong to "\r\n"
        start = before_end.rfind("\r") + 1
        self._line_length = len(text) - start if start else self._line_length + len(part)
        self._line = text[start : start + MAX_LINE + 1]

    def _shown(self) -> str:
        line = self._line.rstrip("\r")
        if self._line_length > MAX_LINE + 1:
            line = f"{line[:MAX_LINE]} ... ({self._line_length} characters; the whole line is in run.logs[{self.rank}])"
        return line


class Console:
    """Shows lines with the rank they come from: in a notebook as one display, elsewhere as lines at once, and under
    COURSE_PLAIN=1 as lines at the end, ordered by rank.
    """

    def __init__(self, nprocs: int, silent: bool = False) -> None:
        self._silent = silent
        self._plain = is_plain()
        self._kept: list[list[str]] = [[] for _ in range(nprocs)]
        self._room = [_Room() for _ in range(nprocs)]
        self._lanes = Lanes(nprocs) if not silent and not self._plain and prints_to_a_notebook() else None
        self._colour = not self._plain and _shows_colour()

    def show(self, rank: int, lines: Sequence[str], partial: str = "") -> None:
        """Show the lines that a rank printed; `partial` is what it has begun."""
        if self._silent:
            return
        if self._lanes is not None:
            self._lanes.show(rank, lines, partial)
            return
        lines = self._room[rank].take(rank, lines)
        if self._plain:
            self._kept[rank] += lines
        elif lines:
            prefix = f"[rank {rank}]"
            if self._colour:
                prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
            _write("".join(f"{prefix} {line}\n" for line in lines))

    def note(self, text: str) -> None:
        """Show a note about the whole run."""
        if self._lanes is not None:
            self._lanes.note(text)
        elif not self._silent:
            _write(f"Note: {text}\n")

    def due_in(self) -> float | None:
        """Seconds until `refresh` has something to do, or None."""
        return self._lanes.due_in() if self._lanes is not None else None

    def refresh(self) -> None:
        """Bring the notebook's display up to date, unless that has just been done."""
        if self.due_in() == 0.0:
            self._publish()

    def close(self) -> None:
        """Show what was kept back."""
        self._publish()
        kept, self._kept = self._kept, []
        _write("".join(f"[rank {rank}] {line}\n" for rank, lines in enumerate(kept) for line in lines))

    def _publish(self) -> None:
        if self._lanes is None:
            return
        try:
            self._lanes.refresh()
        except Exception as error:  # a display must never break a run: from here on, lines
            lanes, self._lanes = self._lanes, None
            _write(f"Note: the notebook cannot show lanes ({type(error).__name__}: {error})\n{lanes.text()}\n")


class _Room:
    """What may still be written of one rank where each line is written once."""

    def __init__(self) -> None:
        self._lines = MAX_LINES
        self._characters = MAX_CHARACTERS

    def take(self, rank: int, lines: Sequence[str]) -> list[str]:
        taken = []
        for line in lines:
            if self._lines < 0 or self._characters < 0:
                break
            self._lines -= 1
            self._characters -= len(line)
            is_full = self._lines < 0 or self._characters < 0
            taken.append(f"... (not shown from here on; run.logs[{rank}] has everything)" if is_full else line)
        return taken


def reprint(rank: int, log: str) -> None:
    """Print a rank's whole log, each line with its rank."""
    _write("".join(f"[rank {rank}] {line}\n" for line in log.splitlines()))


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _shows_colour() -> bool:
    ipython = sys.modules.get("IPython")
    return bool(ipython and ipython.get_ipython()) or sys.stdout.isatty()
