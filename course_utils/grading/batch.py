"""A folder of returned files: whose each one is, which of a learner's submissions counts, and all their rows."""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..exercises.registry import LESSONS
from .finding import lesson_of, markers, release_of
from .marking import Mark, marks_of
from .reading import Cell, Unreadable, read

_LESSON = re.compile(r"(?<!\d)\d\d_[a-z][a-z0-9_]*[a-z0-9]")
_COPY = re.compile(r"(?:[ _-]*\((\d+)\)|[ _-]+copy[ _-]?(\d*))$", re.IGNORECASE)
_SUFFIXES = re.compile(r"(?:\.(?:ipynb|json|txt))+$", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """One line of the table of marks; `points` None is left empty, for a person to fill in."""

    learner: str
    file: str
    lesson: str
    exercise: str
    verdict: str
    points: int | None
    out_of: int | None
    reason: str


@dataclass(frozen=True)
class Submission:
    """One file: whose, what is in it, or why it cannot be read. `order` says which of two is the later one."""

    file: str
    learner: str
    order: tuple[int, int, float]
    cells: tuple[Cell, ...] = ()
    lesson: str = ""
    trouble: str = ""


@dataclass(frozen=True)
class Report:
    """What came of one file: its rows, how it went in a sentence, and the seconds it took."""

    file: str
    rows: tuple[Row, ...]
    summary: str
    seconds: float


def collect(folder: Path, lessons: Collection[str] = (), leave_out: Collection[Path] = ()) -> list[Submission]:
    """Read every file below a folder, hidden ones excepted, sorted by learner."""
    left_out = {path.resolve() for path in leave_out}
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.resolve() not in left_out
        and not any(part.startswith((".", "__MACOSX")) for part in path.relative_to(folder).parts)
    ]
    submissions = [_submission(path, folder, lessons) for path in paths]
    return sorted(submissions, key=lambda one: (one.learner, one.lesson, one.order, one.file))


def grade(submissions: Sequence[Submission], release: Path, seed: int) -> Iterator[Report]:
    """Mark submissions one by one. Of several by one learner for one lesson the later counts; the others get a row."""
    counts: dict[tuple[str, str], Submission] = {}
    for one in submissions:
        rival = counts.get((one.learner, one.lesson))
        if not one.trouble and (rival is None or rival.order <= one.order):
            counts[one.learner, one.lesson] = one
    for one in submissions:
        start = time.perf_counter()
        rows, summary = _rows(one, counts, release, seed)
        yield Report(one.file, tuple(rows), summary, time.perf_counter() - start)


def learner_of(path: Path, folder: Path) -> tuple[str, int]:
    """Tell from a file's name whose it is, and the number that a browser or file manager gave a copy of it (0 if none).

    The name without its ending, a copy's "(1)" or "copy", and the lesson's own name. If nothing is left, the folder
    it lies in; a name in a folder below `folder` comes with that folder.

    Example:
        >>> learner_of(Path("in/Ada Lovelace_01_ranks_and_rendezvous (1).ipynb"), Path("in"))
        ('Ada Lovelace', 1)
        >>> learner_of(Path("in/Ada/01_ranks_and_rendezvous.ipynb"), Path("in"))
        ('Ada', 0)
    """
    name = _SUFFIXES.sub("", path.name) if _SUFFIXES.search(path.name) else path.stem
    copy = 0
    while found := _COPY.search(name):
        copy = max(copy, int(found[1] or found[2] or 1))
        name = name[: found.start()]
    bare = _LESSON.sub("", name).strip(" _-.")
    inner = path.parent.relative_to(folder).as_posix()
    parts = [part for part in (inner if inner != "." else "", bare) if part]
    return unicodedata.normalize("NFC", "/".join(parts) or name), copy


def _submission(path: Path, folder: Path, lessons: Collection[str]) -> Submission:
    learner, copy = learner_of(path, folder)
    file = path.relative_to(folder).as_posix()
    changed = path.stat().st_mtime
    order = (
        int(changed // 60),
        copy,
        changed,
    )  # a copy's number decides within a minute: copying and unpacking blur times
    try:
        cells = read(path)
    except Unreadable as error:
        return Submission(file, learner, order, trouble=str(error))
    lesson = lesson_of(cells)
    if lesson is None:
        return Submission(file, learner, order, trouble=_why_no_lesson(cells))
    if lessons and lesson not in lessons:
        asked = ", ".join(sorted(lessons))
        return Submission(file, learner, order, lesson=lesson, trouble=f"It is lesson {lesson}; asked for: {asked}.")
    return Submission(file, learner, order, cells, lesson)


def _why_no_lesson(cells: Sequence[Cell]) -> str:
    if not cells:
        return "The notebook has no cells."
    unknown = sorted({name for cell in cells for name in markers(cell)})
    if unknown:
        return f"Its exercises are of no lesson that this release knows: {', '.join(unknown[:5])}."
    return "No cell of it carries the marker of an exercise (# @exercise ...)."


def _rows(
    one: Submission, counts: dict[tuple[str, str], Submission], release: Path, seed: int
) -> tuple[list[Row], str]:
    if one.trouble:
        return [Row(one.learner, one.file, one.lesson, "", "not graded", None, None, one.trouble)], one.trouble
    last = counts[one.learner, one.lesson]
    if last is not one:
        why = f"A later submission of this learner counts: {last.file}."
        return [Row(one.learner, one.file, one.lesson, "", "superseded", None, None, why)], why
    marks = list(marks_of(one.lesson, one.cells, release_of(one.lesson, release), seed))
    rows = [
        Row(
            one.learner,
            one.file,
            one.lesson,
            mark.exercise.name,
            mark.verdict,
            mark.points,
            mark.exercise.points,
            mark.reason,
        )
        for mark in marks
    ]
    return rows, _summary(one.lesson, marks)


def _summary(lesson: str, marks: Sequence[Mark]) -> str:
    judged = [mark for mark in marks if mark.points is not None]
    reached, possible = sum(mark.points or 0 for mark in judged), sum(mark.exercise.points for mark in judged)
    to_read = len(marks) - len(judged)
    more = f", {to_read} to be read by a person" if to_read else ""
    return f"lesson {lesson} {LESSONS[lesson]}: {reached} of {possible} points{more}"
