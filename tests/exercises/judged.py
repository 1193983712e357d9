"""How the tests judge answers: whole families of right and wrong ones, each by the check that a learner meets."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from course_utils.exercises import answers, judging, registry

Answer = Callable[..., Any]


class Family:
    """The right and the wrong answers to one exercise; a wrong one is filed with words that its verdict must hold."""

    def __init__(self, exercise: str) -> None:
        self.exercise = exercise
        self.right: list[Answer] = []
        self.wrong: dict[str, tuple[Answer, str, tuple[str, ...]]] = {}

    def accepted(self, answer: Answer) -> Answer:
        """File a right answer."""
        self.right.append(answer)
        return answer

    def rejected(self, *words: str, state: str = "failed") -> Callable[[Answer], Answer]:
        """File a wrong answer with the state and the words of its verdict."""

        def file(answer: Answer) -> Answer:
            self.wrong[answer.__name__] = (answer, state, words)
            return answer

        return file


LESSONS = sorted(path.stem.removeprefix("answers_") for path in Path(__file__).parent.glob("answers_*.py"))


def families_of(lesson: str) -> dict[str, Family]:
    """The answers to each exercise of a lesson, by its name; they then travel by value, as a notebook's do."""
    module = importlib.import_module(f"tests.exercises.answers_{lesson}")
    cloudpickle.register_pickle_by_value(module)
    return {family.exercise: family for family in vars(module).values() if isinstance(family, Family)}


def each_right(families: dict[str, Family]) -> list[tuple[str, Answer]]:
    """Every right answer, with its exercise."""
    return [(family.exercise, answer) for family in families.values() for answer in family.right]


def each_wrong(families: dict[str, Family]) -> list[tuple[str, str]]:
    """The name of every wrong answer, with its exercise."""
    return [(family.exercise, name) for family in families.values() for name in family.wrong]


def rejection(family: Family, name: str, seed: int | None = None) -> str:
    """What a learner reads about a wrong answer, in the state and with the words it was filed with.

    With a seed it is judged as a grader does, whose cases may meet another of its faults first: in other words, then.
    """
    answer, state, words = family.wrong[name]
    verdict = verdict_on(family.exercise, answer, seed)
    text = text_of(verdict)
    assert verdict.state == state, text
    assert seed is not None or [word for word in words if word not in text] == [], text
    return text


def verdict_on(exercise: str, answer: Any, seed: int | None = None) -> judging.Verdict:
    """Judge an answer as check does, or with a seed as a grader does."""
    found = registry.find(exercise)
    assert isinstance(found, registry.Exercise), found
    return judging.judge(found, answer, seed)


def text_of(verdict: judging.Verdict) -> str:
    """What a learner reads."""
    return answers._panel(verdict).text()
