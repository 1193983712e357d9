"""Which exercises there are: one module a lesson describes them, and everything else asks here."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .judging import Cases

LESSONS = {
    "00": "start here",
    "01": "ranks and rendezvous",
    "02": "all-reduce from scratch",
    "03": "data parallel by hand",
    "04": "build your own DDP",
    "05": "PyTorch DDP",
    "08": "TensorFlow strategies",
}


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lesson.

    `kind` is "predict", "implement", "debug" or "explain"; `points` and `kind` repeat what the lesson's exercise
    marker says (a test holds the two equal). `parameters` are the names of what the answer is called with. `cases`
    makes what the answer is tried on: a few fixed cases for the learner, many fresh random ones for the grader. `own`
    makes the version built on torch.distributed that the lesson goes on with while there is no right answer, None
    where there is none; `own_name` says in words what that version is built on. `hints` climb from a nudge to nearly
    the code.
    """

    name: str
    title: str
    kind: str
    points: int
    parameters: tuple[str, ...] = ()
    cases: Cases | None = None
    own: Callable[[], Callable[..., Any]] | None = None
    own_name: str = ""
    hints: tuple[str, ...] = ()


@cache
def exercises_of(lesson: str) -> tuple[Exercise, ...]:
    """Return the exercises of a lesson ("01"), in its order."""
    exercises: tuple[Exercise, ...] = importlib.import_module(f".lesson_{lesson}", __package__).EXERCISES
    return exercises


@cache
def all_exercises() -> dict[str, Exercise]:
    """Return every exercise by its name; a name belongs to one lesson."""
    return {exercise.name: exercise for lesson in LESSONS for exercise in exercises_of(lesson)}


def find(name: object, wanted: Callable[[Exercise], bool] = lambda _: True) -> Exercise | str:
    """Return the exercise of that name, or a sentence saying which name was probably meant.

    `wanted` narrows the choice, so that what is suggested fits the call (a prediction for `predict`).
    """
    known = {exercise.name: exercise for exercise in all_exercises().values() if wanted(exercise)}
    if not isinstance(name, str):
        return f"The name of an exercise is a text such as {next(iter(known))!r}, not {_a(type(name).__name__)}."
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"There is no {name!r} here. Did you mean {close[0]!r}?"
    return f"There is no {name!r} here. There are {', '.join(map(repr, known))}."


def _a(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
