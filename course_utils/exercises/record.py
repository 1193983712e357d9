"""What a learner has done so far: verdicts, hints and predictions, in one small JSON file.

Where: the file that COURSE_PROGRESS names; else, on Kaggle, /kaggle/working (it is saved with the notebook's version);
else the user's data folder ($XDG_DATA_HOME or ~/.local/share), so that the file belongs to the person and not to one
copy of the notebooks. Under COURSE_PLAIN=1 without COURSE_PROGRESS nothing is read or written: an execution must not
depend on earlier ones. A write replaces the file whole; a file that cannot be read is kept beside the new one; where
nothing can be written, the record lives as long as the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import machine
from ..front_end import is_plain

FORMAT = 1
FOLDER = "course_utils"
FILE = "progress.json"


class Record:
    """The record and its file. `path` is None where it lives in this process only; `notes` say what went wrong."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.notes: list[str] = []
        self._memory = _empty()

    def read(self) -> dict[str, Any]:
        """Return the record as it is now: {"format", "exercises": {name: ...}, "predictions": {name: ...}}."""
        if self.path is None:
            return self._memory
        try:
            found = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            return _empty()
        except OSError as error:
            self._live_in_memory(error)
            return self._memory
        except ValueError:
            found = None
        if not _well_formed(found):
            self._keep_aside()
            return _empty()
        return found

    def change(self, alter: Callable[[dict[str, Any]], None]) -> None:
        """Read the record, let `alter` change it, and write it whole; another notebook's change waits its turn."""
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with _lock(self.path.with_suffix(".lock")):
                    record = self.read()
                    alter(record)
                    if self.path is not None:
                        _replace(self.path, json.dumps(record, indent=1, sort_keys=True) + "\n")
                return
            except OSError as error:
                self._live_in_memory(error)
        alter(self._memory)

    def take_notes(self) -> list[str]:
        """Return what there is to tell the learner about the file, once."""
        notes, self.notes = self.notes, []
        return notes

    def _keep_aside(self) -> None:
        assert self.path is not None
        aside = next(
            path
            for number in range(1, 1000)
            if not (path := self.path.with_name(f"{self.path.name}.unreadable-{number}")).exists()
        )
        with contextlib.suppress(FileNotFoundError):  # another notebook moved it first
            os.replace(self.path, aside)
            self.notes.append(
                f"The record of your progress could not be read. It is kept as {aside}; a new one has begun."
            )

    def _live_in_memory(self, error: OSError) -> None:
        self.notes.append(
            f"Your progress cannot be kept in {self.path} ({error.strerror or error}): it lasts as long as this "
            "kernel. COURSE_PROGRESS=path names another file."
        )
        self.path = None


_records: dict[Path | None, Record] = {}


def current() -> Record:
    """Return the record that this process uses now (COURSE_PROGRESS may change between two calls)."""
    path = where()
    return _records.setdefault(path, Record(path))


def where() -> Path | None:
    """Return the file that the record is kept in, or None where it lives in this process only."""
    named = os.environ.get("COURSE_PROGRESS")
    if named:
        return Path(named).expanduser()
    if is_plain():
        return None
    if machine.platform() == "kaggle":
        return Path("/kaggle/working", FILE)
    home = os.environ.get("XDG_DATA_HOME")
    return Path(home if home else Path.home() / ".local" / "share", FOLDER, FILE)


def _empty() -> dict[str, Any]:
    return {"format": FORMAT, "exercises": {}, "predictions": {}}


def _well_formed(found: Any) -> bool:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return False
    parts = (found.get("exercises"), found.get("predictions"))
    return all(isinstance(part, dict) and all(isinstance(entry, dict) for entry in part.values()) for part in parts)


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: the last writer wins
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
