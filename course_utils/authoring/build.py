"""Write both editions of lessons, and say where what is written differs from what the sources give."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from .editions import learner_edition, solved_edition, source_hash, to_text
from .execute import execute, machine_paths, oversize
from .source import AuthoringError, Lesson, read_lesson

COMMAND = "python -m course_utils.authoring build"
FILE_BYTES = 300_000  # a file larger than this is slow to review

_NAME_IN_MARKER = re.compile(r"^# (?:<!-- )?@exercise\s+(\S+)", re.MULTILINE)


class Course:
    """Where sources and notebooks lie in one repository.

    Raises AuthoringError if `root` has no folder notebooks/source.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.learner_folder = self.root / "notebooks"
        self.source_folder = self.learner_folder / "source"
        self.solved_folder = self.learner_folder / "solutions"
        if not self.source_folder.is_dir():
            raise AuthoringError(f"{self.root} has no folder notebooks/source: it is not the root of the course")

    def sources(self, numbers: Sequence[str] = ()) -> list[Path]:
        """Return the sources of the lessons `numbers` ("01" or "1"), or all; an unknown number is refused."""
        found = sorted(self.source_folder.glob("*.py"))
        if not numbers:
            return found
        wanted = [number.zfill(2) for number in numbers]
        for number in wanted:
            if not any(path.name.startswith(f"{number}_") for path in found):
                there = ", ".join(path.stem for path in found) or "none"
                raise AuthoringError(f"there is no lesson {number} in notebooks/source (there are: {there})")
        return [path for path in found if path.name[:2] in wanted]

    def read(self, source: Path) -> Lesson:
        """Parse one source; an exercise name that another lesson has taken is a mistake too."""
        lesson = read_lesson(source, self.root)
        taken = {
            name: other
            for other in self.sources()
            if other != source
            for name in _NAME_IN_MARKER.findall(other.read_text(encoding="utf-8"))
        }
        for cell in lesson.cells:
            if cell.exercise and cell.exercise.name in taken:
                where, other = self.shown(source), self.shown(taken[cell.exercise.name])
                raise AuthoringError(f"{where}:{cell.line}: the exercise name {cell.exercise.name} is taken by {other}")
        return lesson

    def learner_path(self, name: str) -> Path:
        """Return where the learner edition of the lesson `name` lies."""
        return self.learner_folder / f"{name}.ipynb"

    def solved_path(self, name: str) -> Path:
        """Return where the solved edition of the lesson `name` lies."""
        return self.solved_folder / f"{name}.ipynb"

    def shown(self, path: Path) -> str:
        """Return `path` as messages name it."""
        return path.relative_to(self.root).as_posix()


def build(course: Course, source: Path) -> str:
    """Write both editions of one lesson and return a line about it.

    The solved edition is run first: if that fails, or its outputs break a rule, AuthoringError says where and both
    files stay as they were.
    """
    lesson = course.read(source)
    began = time.monotonic()
    shown = course.shown(course.solved_path(lesson.name))
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        record = Path(folder, "progress.json")
        solved = execute(solved_edition(lesson), shown, record)
        unsolved = list(_unsolved(lesson, record, course.shown(source)))
    if problems := [*unsolved, *oversize(solved, shown)]:
        raise AuthoringError("\n".join(problems))
    texts = {
        course.learner_path(lesson.name): to_text(learner_edition(lesson)),
        course.solved_path(lesson.name): to_text(solved),
    }
    for path, text in texts.items():
        _write(path, text)
    points = sum(exercise.points for exercise in lesson.exercises)
    size = len(texts[course.solved_path(lesson.name)].encode())
    large = f" (over {FILE_BYTES // 1000} KB: slow to review)" if size > FILE_BYTES else ""
    return (
        f"{lesson.name}: {len(lesson.cells)} cells, {len(lesson.exercises)} exercises, {points} points; "
        f"ran in {time.monotonic() - began:.1f} s, solved edition {size / 1000:.0f} KB{large}"
    )


def _unsolved(lesson: Lesson, record: Path, shown: str) -> Iterator[str]:
    """A line for each exercise whose own answer did not pass its check while the solved edition ran."""
    if not record.exists():
        return
    entries = json.loads(record.read_text(encoding="utf-8"))["exercises"]
    for cell in lesson.cells:
        if cell.exercise and (entry := entries.get(cell.exercise.name)) and not entry.get("passed"):
            found = entry.get("verdict", "no verdict")
            yield f"{shown}:{cell.line}: the answer to {cell.exercise.name} does not pass its own check ({found})"


def check(course: Course, numbers: Sequence[str] = ()) -> list[str]:
    """Compare both editions of the lessons `numbers` (or of all) with what their sources give, without running them.

    Returns one line per difference, naming the file, the cell and what mends it; an empty list means all is as built.
    """
    problems = []
    for source in course.sources(numbers):
        try:
            lesson = course.read(source)
        except AuthoringError as error:
            problems += str(error).split("\n")
            continue
        found = [*_learner_problems(course, lesson), *_solved_problems(course, lesson)]
        problems += [f"{problem}; run: {COMMAND} {lesson.number}" for problem in found]
    if not numbers:
        problems += _orphans(course)
    return problems


def _learner_problems(course: Course, lesson: Lesson) -> Iterator[str]:
    path = course.learner_path(lesson.name)
    shown = course.shown(path)
    expected = learner_edition(lesson)
    if path.exists() and path.read_text(encoding="utf-8") == to_text(expected):
        return
    stored = _load(path, shown)
    if isinstance(stored, str):
        yield stored
        return
    yield from _differences(shown, stored, expected) or [f"{shown} is not formatted as the builder writes it"]


def _solved_problems(course: Course, lesson: Lesson) -> Iterator[str]:
    path = course.solved_path(lesson.name)
    shown = course.shown(path)
    stored = _load(path, shown)
    if isinstance(stored, str):
        yield stored
        return
    if to_text(stored) != path.read_text(encoding="utf-8"):
        yield f"{shown} is not formatted as the builder writes it"
    if stored.metadata.get("course", {}).get("source_hash") != source_hash(lesson):
        yield f"{shown} is stale: it was run from another state of {course.shown(lesson.path)}"
    yield from oversize(stored, shown)
    yield from machine_paths(stored, shown)
    count = 0
    for index, cell in enumerate(stored.cells, start=1):
        if cell.get("cell_type") != "code":
            continue
        count += 1
        if cell.get("execution_count") != count:
            yield f"{shown}: cell {index} ({cell.get('id')}) was not run in its turn"
        cell.execution_count, cell.outputs = None, []
    yield from _differences(shown, stored, solved_edition(lesson))


def _differences(shown: str, stored: NotebookNode, expected: NotebookNode) -> list[str]:
    """One line for the first cell that differs, or for the notebook's own metadata; none if all is equal."""
    found = []
    for index, (old, new) in enumerate(zip(stored.cells, expected.cells, strict=False), start=1):
        parts = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        if parts:
            found.append(f"{shown}: cell {index} ({new.id}) differs from its source in {', '.join(parts)}")
            break
    if not found and len(stored.cells) != len(expected.cells):
        found.append(f"{shown} has {len(stored.cells)} cells, its source gives {len(expected.cells)}")
    keys = ("metadata", "nbformat", "nbformat_minor")
    if not found and any(stored.get(key) != expected.get(key) for key in keys):
        found.append(f"{shown}: the notebook's own metadata differs from what its source gives")
    return found


def _orphans(course: Course) -> Iterator[str]:
    names = {path.stem for path in course.sources()}
    for folder in (course.learner_folder, course.solved_folder):
        for path in sorted(folder.glob("*.ipynb")):
            if path.stem not in names:
                yield f"{course.shown(path)} has no source; delete it, or add notebooks/source/{path.stem}.py"


def _load(path: Path, shown: str) -> NotebookNode | str:
    """The notebook, or a line that says why there is none."""
    if not path.exists():
        return f"{shown} is missing"
    try:
        notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
        if all(isinstance(cell, dict) for cell in notebook.cells) and isinstance(notebook.metadata, dict):
            return notebook
    except (ValueError, AttributeError, KeyError, TypeError):  # no JSON, or JSON of another shape
        pass
    return f"{shown} is not a notebook"


def _write(path: Path, text: str) -> None:
    """Replace `path` in one step: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
