"""The marks of one notebook: each exercise of its lesson judged by its own processes, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import FrameworkMissing, LaunchError, WorkerTimeout
from ..exercises import judging
from ..exercises.judging import Trial, Verdict
from ..exercises.registry import Exercise, exercises_of
from ..launcher import launch_judged
from . import inside
from .finding import Found, Release, find
from .parsing import code_of
from .programs import Program, forget_sources, program_for, show_sources
from .reading import Cell

REASON_LENGTH = 600
PATIENCE = 15.0  # seconds without progress: longer than a learner waits, since here it costs marks
SLOW_START = 60.0  # seconds without progress, once ranks have been seen to start slowly


@dataclass(frozen=True)
class Mark:
    """What one exercise is worth.

    `verdict` is "passed", "failed", "stopped", "not attempted", "missing" or "needs review"; `points` is None where a
    person has to decide.
    """

    exercise: Exercise
    verdict: str
    points: int | None
    reason: str = ""


def marks_of(lesson: str, cells: Sequence[Cell], release: Release, seed: int) -> Iterator[Mark]:
    """Mark every exercise of a lesson in a notebook, on cases drawn from the seed, whatever an answer does."""
    found = {exercise.name: find(exercise, cells, release) for exercise in exercises_of(lesson)}
    others = {name: one.cell for name, one in found.items() if one.state == "answered" and one.cell}
    replaced: dict[str, str] = {}
    for exercise in exercises_of(lesson):
        one = found[exercise.name]
        needs = {name: how for name, how in replaced.items() if name != exercise.name}
        mark = _mark(exercise, one, cells, release, others, needs, seed)
        if exercise.cases is not None and mark.verdict != "passed":
            # as in the lesson: it goes on with the course's own version, or for want of one with what the learner has
            if exercise.own is not None:
                replaced[exercise.name] = "own"
            elif mark.verdict in ("missing", "not attempted"):
                replaced[exercise.name] = "missing"
        yield mark


def judged_apart(program: Program, trial: Trial, batch: list[list[tuple[Any, ...]]]) -> Any:
    """Run a trial in ranks that get the answer as text, this trial's inputs and nothing else; see `launch_judged`."""

    def run(patience: float) -> Any:
        return launch_judged(
            inside.perform,
            program,
            trial.scenario,
            batch,
            judging.LIMIT,
            nprocs=trial.nprocs,
            timeout=patience,
            framework=trial.framework,
            init=trial.group,
            relayed=trial.framework == "torch" and not trial.collectives,
        )

    try:
        return run(PATIENCE)
    except WorkerTimeout as error:
        if all(state.state != "starting" for state in error.states):
            raise
    return run(SLOW_START)  # ranks that had not begun were slow through no fault of the answer


def _mark(
    exercise: Exercise,
    found: Found,
    cells: Sequence[Cell],
    release: Release,
    others: dict[str, Cell],
    replaced: dict[str, str],
    seed: int,
) -> Mark:
    if found.state == "missing":
        return Mark(exercise, "missing", 0, found.note)
    if found.state == "untouched" or found.cell is None:
        return Mark(exercise, "not attempted", 0)
    if exercise.kind == "explain":
        return Mark(exercise, "needs review", None, _joined("To be read by a person.", found.note))
    code = code_of(found.cell.text)
    if code.mistake:
        reason = f"Cell {found.cell.number} is no valid Python: {code.mistake}."
        return Mark(exercise, "failed", 0, _joined(reason, found.note))
    if exercise.cases is None:
        return Mark(exercise, "passed", exercise.points, _joined("A prediction was made.", found.note))
    program = program_for(exercise, found.cell, cells, release, others, replaced)
    show_sources(program)
    try:
        verdict = judging.judge(exercise, program, seed, runner=judged_apart, may_use=program.replaced)
    except FrameworkMissing as error:
        return Mark(
            exercise, "needs review", None, _joined(f"It cannot be judged on this machine: {error}.", found.note)
        )
    except LaunchError as error:
        return Mark(exercise, "stopped", 0, _joined(f"It broke off its own run: {error}", found.note))
    except Exception as error:  # the judge's own trouble, perhaps caused by what an answer sent back
        reason = f"The judge could not finish ({type(error).__name__}: {error}): to be looked at by a person."
        return Mark(exercise, "needs review", None, _joined(reason, found.note))
    finally:
        forget_sources(program)
    points = exercise.points if verdict.state == "passed" else 0
    return Mark(exercise, verdict.state, points, _joined(_reason(verdict), found.note))


def _reason(verdict: Verdict) -> str:
    """The verdict in one line."""
    if verdict.state == "passed":
        sizes = sorted(set(verdict.sizes))
        return f"Right on {verdict.tried} cases, on {', '.join(map(str, sizes))} rank{'s' * (sizes[-1] > 1)}."
    parts = [verdict.reason, f"Given {verdict.given}." if verdict.given else ""]
    if verdict.finding:
        told = verdict.finding
        where = f" on rank {told.rank}" if told.rank is not None else ""
        parts.append(f"Given {told.given}: expected {told.expected}, received {told.received}{where}.")
        parts.append(told.why)
    if verdict.states:
        parts.append(f"{'; '.join(str(state).replace(':', '', 1) for state in verdict.states)}.")
    return " ".join(part for part in parts if part)


def _joined(*sentences: str) -> str:
    text = " ".join(" ".join(sentence.split()) for sentence in sentences if sentence)
    return text if len(text) <= REASON_LENGTH else f"{text[:REASON_LENGTH]} ..."
