"""The checks of lesson 00 accept what is right, reject what is wrong, and say what is wrong."""

from __future__ import annotations

import cloudpickle
import pytest

from course_utils.exercises import judging
from tests.exercises import answers_00
from tests.exercises.judged import text_of, verdict_on

cloudpickle.register_pickle_by_value(answers_00)
FAMILIES = (answers_00.introduce, answers_00.bring_home)
RIGHT = [(family.exercise, answer) for family in FAMILIES for answer in family.right]
WRONG = [(family.exercise, name) for family in FAMILIES for name in family.wrong]


@pytest.mark.parametrize(("exercise", "answer"), RIGHT, ids=lambda value: getattr(value, "__name__", value))
def test_a_right_answer_passes_at_both_strengths(exercise, answer):
    assert verdict_on(exercise, answer).state == "passed"
    assert verdict_on(exercise, answer, seed=7).state == "passed"


@pytest.mark.parametrize(("exercise", "name"), WRONG)
def test_a_wrong_answer_is_rejected_in_words_that_help(exercise, name, monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 3.0)
    monkeypatch.setattr(judging, "SECOND_PATIENCE", 5.0)
    family = next(family for family in FAMILIES if family.exercise == exercise)
    answer, state, words = family.wrong[name]
    verdict = verdict_on(exercise, answer)
    text = text_of(verdict)
    assert verdict.state == state, text
    assert [word for word in words if word not in text] == [], text


def test_each_check_has_three_differently_written_right_answers():
    assert all(len(family.right) >= 3 for family in FAMILIES)
