"""How the tests judge answers: whole families of right and wrong ones, each by the check that a learner meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def verdict_on(exercise: str, answer: Any, seed: int | None = None) -> judging.Verdict:
    """Judge an answer as check does, or with a seed as a grader does."""
    found = registry.find(exercise)
    assert isinstance(found, registry.Exercise), found
    return judging.judge(found, answer, seed)


def text_of(verdict: judging.Verdict) -> str:
    """What a learner reads."""
    return answers._panel(verdict).text()
