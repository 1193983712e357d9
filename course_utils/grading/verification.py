"""Does the grader give each edition what it deserves? Solved editions full marks, untouched ones none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..exercises.registry import LESSONS, exercises_of
from .finding import lesson_of, release_of
from .marking import Mark, marks_of
from .reading import Unreadable, read


def verify(notebooks: Path, lessons: Sequence[str], seed: int) -> Iterator[tuple[str, list[str]]]:
    """Grade both editions of lessons; yield each edition's name with what is wrong there, if anything."""
    for lesson in lessons or tuple(LESSONS):
        for folder, wanted in ((notebooks / "solutions", "solved"), (notebooks, "untouched")):
            name = f"lesson {lesson}, {wanted}"
            paths = sorted(folder.glob(f"{lesson}_*.ipynb"))
            if len(paths) != 1:
                yield name, [f"{folder.name}/{lesson}_*.ipynb: {len(paths)} notebooks, not one"]
                continue
            try:
                cells = read(paths[0])
            except Unreadable as error:
                yield name, [f"{paths[0].name}: {error}"]
                continue
            if lesson_of(cells) != lesson:
                yield name, [f"{paths[0].name}: its exercises are those of lesson {lesson_of(cells)}"]
                continue
            marks = list(marks_of(lesson, cells, release_of(lesson, notebooks), seed))
            assert len(marks) == len(exercises_of(lesson))
            yield name, [trouble for mark in marks if (trouble := _trouble(mark, wanted))]


def _trouble(mark: Mark, wanted: str) -> str:
    expected = "not attempted" if wanted == "untouched" else "passed"
    if wanted == "solved" and mark.exercise.kind == "explain":
        expected = "needs review"
    if mark.verdict == expected:
        return ""
    return f"{mark.exercise.name}: {mark.verdict}, not {expected}. {mark.reason}".rstrip()
