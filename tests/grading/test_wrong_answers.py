"""Every wrong answer that the tests of the checks know loses its marks, and right ones of every style keep them.

The answers are those of tests/exercises/answers_NN.py, handed in as source text.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from course_utils.exercises.registry import exercises_of
from course_utils.grading.finding import Release
from course_utils.grading.marking import Mark, marks_of
from course_utils.grading.reading import Cell
from tests.grading.returned import SEED

LESSONS = sorted(
    path.stem.removeprefix("answers_") for path in (Path(__file__).parents[1] / "exercises").glob("answers_*.py")
)


def families_of(lesson: str) -> list[Any]:
    module = importlib.import_module(f"tests.exercises.answers_{lesson}")
    return [value for value in vars(module).values() if type(value).__name__ == "Family"]


@cache
def definitions_of(lesson: str) -> str:
    """The module of answers as a learner's cell: without what files the answers, their decorators."""
    tree = ast.parse(inspect.getsource(importlib.import_module(f"tests.exercises.answers_{lesson}")))
    kept = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            statement.decorator_list = [
                one for one in statement.decorator_list if "Family" not in names_in(one, lesson)
            ]
        if "Family" not in names_in(statement, lesson) or isinstance(statement, ast.FunctionDef):
            kept.append(statement)
    return ast.unparse(ast.Module(kept, []))


def names_in(node: ast.AST, lesson: str) -> set[str]:
    """The names that a piece of code uses, each family as "Family"."""
    families = {family.exercise for family in families_of(lesson)}
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    imported = {alias.name for part in ast.walk(node) if isinstance(part, ast.ImportFrom) for alias in part.names}
    return {"Family" if name in families else name for name in names | imported}


def mark(lesson: str, exercise: str, answer: str) -> Mark:
    cells = [
        Cell(1, "code", definitions_of(lesson)),
        Cell(2, "code", f"# @exercise {exercise} points=1 minutes=1\n{exercise} = {answer}"),
    ]
    return next(mark for mark in marks_of(lesson, cells, Release({}), SEED) if mark.exercise.name == exercise)


# What the judge's transport does not show yet: it takes its copy of a message at once and lets a rank send to itself,
# where gloo reads the tensor late and refuses; it stops at an empty tensor that is a view, and notes no barrier.
KNOWN = {
    "does_not_wait_for_its_send": "a relayed isend takes its copy at once",
    "forgets_the_single_rank_in_the_ring": "a relayed rank may send to itself",
    "twice_around_the_ring": "a relayed send refuses an empty tensor whose stride is not 1",
    "from_both_ends_at_once": "a relayed send refuses an empty tensor whose stride is not 1",
    "ring_the_other_way": "a relayed send refuses an empty tensor whose stride is not 1",
    "halving_by_recursion": "a relayed send refuses an empty tensor whose stride is not 1",
    "ring_with_a_barrier": "a relayed barrier is not among the events of the trace",
}


def cases(kind: str, at_once: int) -> list[Any]:
    """All answers of a kind; of each exercise only some, evenly chosen, are judged without COURSE_LONG=1."""
    found = []
    for lesson in LESSONS:
        for family in families_of(lesson):
            names = list(family.wrong) if kind == "wrong" else [answer.__name__ for answer in family.right]
            step = -(-len(names) // at_once)
            for place, name in enumerate(names):
                marks = [pytest.mark.xfail(reason=KNOWN[name], strict=False)] if name in KNOWN else []
                if place % step:
                    marks.append(pytest.mark.long)
                found.append(pytest.param(lesson, family.exercise, name, marks=marks))
    return found


WRONG = cases("wrong", at_once=3)
RIGHT = cases("right", at_once=1)


@pytest.mark.parametrize(("lesson", "exercise", "answer"), WRONG)
def test_G15_a_wrong_answer_loses_its_marks(lesson: str, exercise: str, answer: str) -> None:
    told = mark(lesson, exercise, answer)
    assert (told.verdict, told.points) in (("failed", 0), ("stopped", 0)), told.reason
    assert told.reason


@pytest.mark.parametrize(("lesson", "exercise", "answer"), RIGHT)
def test_a_right_answer_of_any_style_keeps_its_marks(lesson: str, exercise: str, answer: str) -> None:
    told = mark(lesson, exercise, answer)
    assert told.verdict == "passed", told.reason


def test_every_exercise_with_a_check_has_wrong_answers() -> None:
    for lesson in LESSONS:
        checked = {exercise.name for exercise in exercises_of(lesson) if exercise.cases is not None}
        assert {family.exercise for family in families_of(lesson) if family.wrong} == checked
