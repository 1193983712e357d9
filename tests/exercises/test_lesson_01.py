"""The checks of lesson 01 accept what is right, reject what is wrong, and say what is wrong."""

from __future__ import annotations

import pytest

from course_utils.exercises import judging
from tests.exercises.judged import each_right, each_wrong, families_of, rejection, verdict_on

FAMILIES = families_of("01")
RIGHT, WRONG = each_right(FAMILIES), each_wrong(FAMILIES)


@pytest.mark.parametrize(("exercise", "answer"), RIGHT, ids=lambda value: getattr(value, "__name__", value))
def test_a_right_answer_passes_however_it_is_written(exercise, answer):
    assert verdict_on(exercise, answer).state == "passed"


@pytest.mark.parametrize("exercise", FAMILIES)
def test_the_graders_fresh_cases_accept_a_right_answer(exercise):
    for answer, seed in zip(FAMILIES[exercise].right[:2], (7, 2026), strict=True):
        assert verdict_on(exercise, answer, seed).state == "passed"


@pytest.mark.parametrize(("exercise", "name"), WRONG)
def test_a_wrong_answer_is_rejected_in_words_that_help(exercise, name, monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 5.0)  # above the 3 seconds after which register is stopped
    monkeypatch.setattr(judging, "SECOND_PATIENCE", 5.0)
    rejection(FAMILIES[exercise], name)


def test_each_check_has_three_differently_written_right_answers():
    assert all(len(family.right) >= 3 for family in FAMILIES.values())
