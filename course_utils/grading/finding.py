"""The answers in a notebook: for each exercise, the cell that counts, and what the table of marks says about it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from ..exercises.registry import LESSONS, Exercise, exercises_of
from .parsing import calls_of, code_of, definitions, same
from .reading import Cell, Unreadable, read

_MARKER = re.compile(r"^[ \t]*(?:#|<!--)[ \t]*@exercise[ \t]+(\w+)", re.MULTILINE)
_NO_ESSAY = re.compile(r"<!--.*?-->|^\s*\*?Your answer:?\*?:?\s*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Found:
    """What there is for one exercise.

    `state` is "missing", "untouched" or "answered"; `cell` the one that counts; `note` a sentence for the marks.
    """

    state: str
    cell: Cell | None = None
    note: str = ""


@dataclass(frozen=True)
class Release:
    """What was handed out for one lesson: the text of each exercise's cell, and the cells that were given, in order."""

    stubs: dict[str, str]
    cells: tuple[Cell, ...] = ()

    def gave(self, cell: Cell) -> bool:
        """Whether a cell came with the lesson and is no exercise."""
        return cell.text.strip() in self._given

    @cached_property
    def _given(self) -> frozenset[str]:
        return frozenset(cell.text.strip() for cell in self.cells if not markers(cell))

    def before(self, name: str) -> list[Cell]:
        """The given cells up to an exercise, without the exercises among them."""
        place = next((cell.number for cell in self.cells if name in markers(cell)), len(self.cells) + 1)
        return [cell for cell in self.cells if cell.number < place and not markers(cell)]


@cache
def release_of(lesson: str, folder: Path) -> Release:
    """Read the learner edition of a lesson from the folder of what was handed out; empty where there is none."""
    for path in sorted(folder.glob(f"{lesson}_*.ipynb")):
        try:
            cells = read(path)
        except Unreadable:
            continue
        return Release({name: cell.text for cell in cells for name in markers(cell)}, cells)
    return Release({})


def markers(cell: Cell) -> list[str]:
    """The exercises whose marker stands somewhere in a cell."""
    return _MARKER.findall(cell.text)


def lesson_of(cells: Sequence[Cell]) -> str | None:
    """Say which lesson a notebook is, from its markers, whatever its name and metadata say; None if nothing tells."""
    home = {exercise.name: lesson for lesson in LESSONS for exercise in exercises_of(lesson)}
    votes = Counter(home[name] for cell in cells for name in {*markers(cell), cell.labelled} if name in home)
    return votes.most_common(1)[0][0] if votes else None


def find(exercise: Exercise, cells: Sequence[Cell], release: Release) -> Found:
    """Find what counts as the answer to an exercise.

    Cells with the exercise's marker are looked at (or, where a learner has deleted it, those that the metadata label),
    and for functions also unmarked cells that define it. Of several that are not untouched the last one counts.
    """
    marked = [cell for cell in cells if exercise.name in markers(cell)]
    marked = marked or [cell for cell in cells if cell.labelled == exercise.name and not markers(cell)]
    if exercise.kind == "explain":
        return _essay(exercise, marked, cells, release)
    candidates = [cell for cell in cells if cell in marked or _defines_unmarked(exercise, cell, release)]
    if not candidates:
        return Found("missing", note="No cell of this exercise is in the notebook.")
    touched = [cell for cell in candidates if not _is_untouched(exercise, cell, release)]
    if not touched:
        return Found("untouched", candidates[-1])
    defining = [cell for cell in touched if _answers(exercise, cell)]
    counts = (defining or touched)[-1]
    notes = []
    if len(touched) > 1:
        notes.append(f"{len(touched)} cells answer it; the last one, cell {counts.number}, counts.")
    if counts not in marked:
        notes.append(f"Found in cell {counts.number}, outside the exercise's own cell.")
    return Found("answered", counts, " ".join(notes))


def prediction_in(exercise: Exercise, cell: Cell) -> bool:
    """Whether a prediction has been made in a cell: the value is not None, whatever it is."""
    statements = code_of(cell.text).statements
    calls = calls_of("predict", statements, exercise.name)
    values: list[ast.expr] = []
    for call in calls:
        given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "value")]
        values += [value for value in given if not isinstance(value, ast.Name)]
    named = {part.id for call in calls for part in ast.walk(call) if isinstance(part, ast.Name)} or {"guess"}
    for statement in statements:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id in named for target in statement.targets
        ):
            values.append(statement.value)
    return any(not (isinstance(value, ast.Constant) and value.value in (None, ...)) for value in values)


def _defines_unmarked(exercise: Exercise, cell: Cell, release: Release) -> bool:
    return (
        exercise.cases is not None
        and cell.kind == "code"
        and not markers(cell)
        and bool(definitions(cell.text, exercise.name))
        and not release.gave(cell)
    )


def _is_untouched(exercise: Exercise, cell: Cell, release: Release) -> bool:
    if exercise.kind == "predict" and not code_of(cell.text).mistake:
        return not prediction_in(exercise, cell)
    stub = release.stubs.get(exercise.name)
    if stub is None:
        return False
    handed_out = definitions(stub, exercise.name)
    if handed_out and definitions(cell.text, exercise.name) == handed_out:
        return True  # whatever was pasted beside it
    return same(cell.text, stub)


def _answers(exercise: Exercise, cell: Cell) -> bool:
    statements = code_of(cell.text).statements
    return bool(definitions(cell.text, exercise.name) or calls_of("check", statements, exercise.name))


def _essay(exercise: Exercise, marked: Sequence[Cell], cells: Sequence[Cell], release: Release) -> Found:
    if not marked:
        return Found("missing", note="No cell of this exercise is in the notebook.")
    written = [cell for cell in marked if _NO_ESSAY.sub("", cell.text).strip()]
    if written:
        note = f"{len(written)} cells answer it; read the last one, cell {written[-1].number}." if written[1:] else ""
        return Found("answered", written[-1], note)
    following = cells[marked[-1].number :]  # numbers count from 1: this begins with the cell below
    if release.cells and following:
        below = following[0]
        if below.kind == "markdown" and not markers(below) and below.text.strip() and not release.gave(below):
            return Found("answered", below, f"Written in cell {below.number}, below the exercise's own cell.")
    return Found("untouched", marked[-1])
