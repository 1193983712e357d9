"""Every wrong answer that the tests of the checks know loses its marks, and right ones of every style keep them.

The answers are those of tests/exercises/answers_NN.py, handed in as source text.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import cache
from typing import Any

import pytest

from course_utils.exercises.registry import exercises_of
from course_utils.grading import marking
from course_utils.grading.finding import Release
from course_utils.grading.marking import Mark, marks_of
from course_utils.grading.reading import Cell
from tests.exercises.judged import LESSONS, families_of
from tests.grading.returned import SEED


@cache
def definitions_of(lesson: str) -> str:
    """The module of answers as a learner's cell: without what files the answers, their decorators."""
    tree = ast.parse(inspect.getsource(importlib.import_module(f"tests.exercises.answers_{lesson}")))
    kept = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            statement.decorator_list = [
                one for one in statement.decorator_list if "Family" not in names_in(one, lesson)
            ]
        if "Family" not in names_in(statement, lesson) or isinstance(statement, ast.FunctionDef | ast.ClassDef):
            kept.append(statement)
    return ast.unparse(ast.Module(kept, []))


def names_in(node: ast.AST, lesson: str) -> set[str]:
    """The names that a piece of code uses, each family as "Family"."""
    families = {family.exercise for family in families_of(lesson).values()}
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    imported = {alias.name for part in ast.walk(node) if isinstance(part, ast.ImportFrom) for alias in part.names}
    return {"Family" if name in families else name for name in names | imported}


def mark(lesson: str, exercise: str, answer: str) -> Mark:
    cells = [
        Cell(1, "code", definitions_of(lesson)),
        Cell(2, "code", f"# @exercise {exercise} points=1 minutes=1\n{exercise} = {answer}"),
    ]
    return next(mark for mark in marks_of(lesson, cells, Release({}), SEED) if mark.exercise.name == exercise)


def cases(kind: str, at_once: int) -> list[Any]:
    """All answers of a kind; of each exercise only some, evenly chosen, are judged without COURSE_LONG=1."""
    found = []
    for lesson in LESSONS:
        for family in families_of(lesson).values():
            names = list(family.wrong) if kind == "wrong" else [answer.__name__ for answer in family.right]
            step = -(-len(names) // at_once)
            for place, name in enumerate(names):
                marks = [pytest.mark.long] if place % step else []
                found.append(pytest.param(lesson, family.exercise, name, marks=marks))
    return found


WRONG = cases("wrong", at_once=2)
RIGHT = cases("right", at_once=1)


@pytest.mark.parametrize(("lesson", "exercise", "answer"), WRONG)
def test_G15_a_wrong_answer_loses_its_marks(lesson: str, exercise: str, answer: str) -> None:
    told = mark(lesson, exercise, answer)
    assert (told.verdict, told.points) in (("failed", 0), ("stopped", 0)), told.reason
    assert told.reason


@pytest.mark.parametrize(("lesson", "exercise", "answer"), RIGHT)
def test_a_right_answer_of_any_style_keeps_its_marks(
    lesson: str, exercise: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marking, "PATIENCE", 30.0)  # it does not get stuck: on a busy machine it may only be slow
    told = mark(lesson, exercise, answer)
    assert told.verdict == "passed", told.reason


RING = """\
def ring_all_reduce(tensor):
    total = copy_of(tensor)
    chunks = list(total.view(-1).tensor_split(dist.get_world_size()))
    reduce_scatter_ring(chunks)
    all_gather_ring(chunks)
    return total"""
AVERAGE = """\
def average_gradients(gradients):
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) / dist.get_world_size()
    parts = ring_all_reduce(flat).split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]"""
A_RING_EACH = """\
def average_gradients(gradients):
    return [ring_all_reduce(gradient / dist.get_world_size()) for gradient in gradients]"""
BORROWS_UNASKED = """\
def ring_all_reduce(tensor):
    group = dist.distributed_c10d._get_default_group()
    return sum(group.of_every_rank("reduce_scatter_ring", tensor.contiguous()))"""


def marks_for(**answers: str) -> dict[str, tuple[str, str]]:
    """The verdict and the reason for each of these exercises of lesson 02; an answer is a definition or a name."""
    cells = [Cell(1, "code", definitions_of("02"))]
    for number, (exercise, text) in enumerate(answers.items(), start=2):
        answer = text if text.startswith("def ") else f"{exercise} = {text}"
        cells.append(Cell(number, "code", f"# @exercise {exercise} points=1 minutes=1\n{answer}"))
    found = {one.exercise.name: (one.verdict, one.reason) for one in marks_of("02", cells, Release({}), SEED)}
    return {exercise: found[exercise] for exercise in answers}


def test_who_failed_one_exercise_earns_the_marks_of_another_that_is_built_on_it() -> None:
    told = marks_for(
        reduce_scatter_ring="scatter_one_off",
        all_gather_ring="gather_half",
        ring_all_reduce=RING,
        average_gradients=AVERAGE,
    )
    assert {exercise: verdict for exercise, (verdict, _) in told.items()} == {
        "reduce_scatter_ring": "failed",
        "all_gather_ring": "passed",
        "ring_all_reduce": "passed",
        "average_gradients": "passed",
    }, told
    told = marks_for(ring_all_reduce="ring_of_whole_tensors", average_gradients=AVERAGE)
    assert [verdict for verdict, _ in told.values()] == ["failed", "passed"], told


def test_what_stands_in_for_a_failed_exercise_is_counted_like_the_real_one() -> None:
    told = marks_for(ring_all_reduce="ring_of_whole_tensors", average_gradients=A_RING_EACH)
    verdict, reason = told["average_gradients"]
    assert verdict == "failed"
    assert "one ring for all of them" in reason


def test_nobody_borrows_the_courses_version_who_was_not_given_it() -> None:
    told = marks_for(reduce_scatter_ring="scatter_half", ring_all_reduce=BORROWS_UNASKED)
    verdict, reason = told["ring_all_reduce"]
    assert verdict == "failed"
    assert "a call of the course's reduce_scatter_ring" in reason


def test_every_exercise_with_a_check_has_wrong_answers() -> None:
    for lesson in LESSONS:
        checked = {exercise.name for exercise in exercises_of(lesson) if exercise.cases is not None}
        assert {family.exercise for family in families_of(lesson).values() if family.wrong} == checked
