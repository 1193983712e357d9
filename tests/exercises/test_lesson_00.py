"""The checks of lesson 00 accept what is right, reject what is wrong, and say what is wrong."""

from __future__ import annotations

import pytest

from course_utils.exercises import judging
from tests.exercises.judged import each_right, each_wrong, families_of, rejection, verdict_on

FAMILIES = families_of("00")
RIGHT, WRONG = each_right(FAMILIES), each_wrong(FAMILIES)


@pytest.mark.parametrize(("exercise", "answer"), RIGHT, ids=lambda value: getattr(value, "__name__", value))
def test_a_right_answer_passes_at_both_strengths(exercise, answer):
    assert verdict_on(exercise, answer).state == "passed"
    assert verdict_on(exercise, answer, seed=7).state == "passed"


@pytest.mark.parametrize(("exercise", "name"), WRONG)
def test_a_wrong_answer_is_rejected_in_words_that_help(exercise, name, monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 3.0)
    monkeypatch.setattr(judging, "SECOND_PATIENCE", 5.0)
    rejection(FAMILIES[exercise], name)


def test_each_check_has_three_differently_written_right_answers():
    assert all(len(family.right) >= 3 for family in FAMILIES.values())
