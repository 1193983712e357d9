"""check() and hint(): a verdict on an answer in its own cell, and help that climbs."""

from __future__ import annotations

from typing import Any

from ..errors import FrameworkMissing
from . import judging, record
from .judging import Verdict
from .own import OwnVersion
from .panels import Panel, show
from .registry import Exercise, find
from .standins import StandIn
from .telling import counted

_HEADLINES = {
    "passed": "Passed: {name} ({points})",
    "failed": "Not right yet: {name}",
    "stopped": "Stopped: {name}",
    "not attempted": "Not attempted yet: {name} ({points})",
}


def check(name: str, answer: Any) -> Any:
    """Judge `answer` in fresh ranks, show the verdict, and return what the lesson goes on with.

    That is the answer itself when it is right; else the version built on torch.distributed where there is one; else a
    stand-in that raises AnswerNeeded when a later cell calls it or sends it to ranks. Never raises (but for the
    learner's own interrupt) and never hangs: an answer without progress is stopped, and the verdict says where each
    rank stood.

    Example: `assign_rank = check("assign_rank", assign_rank)`.
    """
    exercise = find(name, lambda exercise: exercise.cases is not None)
    if isinstance(exercise, str):
        show(Panel("not attempted", "No such exercise", sentences=[exercise]))
        return answer
    try:
        verdict = judging.judge(exercise, answer)
    except FrameworkMissing as error:
        verdict = Verdict(exercise, "not attempted", f"It cannot be judged here: {error}")
    except Exception as error:
        reason = f"The check itself failed ({type(error).__name__}: {error}); your answer was not judged."
        verdict = Verdict(exercise, "stopped", reason)
    _note(verdict)
    instead = OwnVersion(exercise.name) if exercise.own else StandIn(exercise.name)
    going_on = answer if verdict.state == "passed" else instead
    show(_panel(verdict))
    return going_on


def hint(name: str) -> None:
    """Show the next hint for an exercise; after the last one, the last one again.

    Example: `hint("assign_rank")`.
    """
    exercise = find(name, lambda exercise: bool(exercise.hints))
    if isinstance(exercise, str):
        show(Panel("hint", "No such exercise", sentences=[exercise]))
        return
    given = record.current().read()["exercises"].get(exercise.name, {}).get("hints", 0)
    given = given if isinstance(given, int) else 0
    number = min(given + 1, len(exercise.hints))
    more = (
        "This is the last one."
        if number == len(exercise.hints)
        else f'hint("{exercise.name}") once more goes one step further.'
    )
    record.current().change(lambda kept: _entry(kept, exercise).update(hints=number))
    headline = f"Hint {number} of {len(exercise.hints)}: {exercise.name}"
    show(Panel("hint", headline, sentences=[exercise.hints[number - 1], more, *record.current().take_notes()]))


def _note(verdict: Verdict) -> None:
    """Keep the verdict; an exercise once passed stays passed."""

    def alter(kept: dict[str, Any]) -> None:
        entry = _entry(kept, verdict.exercise)
        attempts = entry.get("attempts", 0)
        entry["attempts"] = (attempts if isinstance(attempts, int) else 0) + (verdict.state != "not attempted")
        entry["verdict"] = verdict.state
        entry["passed"] = entry.get("passed") is True or verdict.state == "passed"

    record.current().change(alter)


def _entry(kept: dict[str, Any], exercise: Exercise) -> dict[str, Any]:
    entry: dict[str, Any] = kept["exercises"].setdefault(exercise.name, {})
    return entry


def _panel(verdict: Verdict) -> Panel:
    exercise = verdict.exercise
    points = f"{exercise.points} point{'' if exercise.points == 1 else 's'}"
    headline = _HEADLINES[verdict.state].format(name=exercise.name, points=points)
    rows: list[tuple[str, str]] = []
    sentences = [verdict.reason] if verdict.reason else []
    if verdict.finding:
        found = verdict.finding
        rows = [("input", found.given), ("expected", found.expected), ("received", found.received)]
        if found.rank is not None:
            rows.append(("on", f"rank {found.rank}"))
        if found.why:
            sentences.append(found.why)
    if verdict.given:
        rows.append(("input", verdict.given))
    rows += [(f"rank {state.rank}", str(state).partition(": ")[2]) for state in verdict.states]
    if verdict.state == "passed":
        sentences.append(f"{counted(verdict.tried, 'case')}, {_sizes(verdict.sizes)}.")
    else:
        if exercise.own is not None:
            sentences.append(f"The lesson goes on with a version built on {exercise.own_name}.")
        if exercise.hints and verdict.state != "not attempted":
            sentences.append(f'hint("{exercise.name}") gives a hint.')
    folded = [("Where it was raised", verdict.traceback)] if verdict.traceback else []
    if verdict.printed and verdict.state in ("failed", "stopped"):
        folded.append(("What it printed", verdict.printed))
    return Panel(verdict.state, headline, rows, (), [*sentences, *record.current().take_notes()], folded)


def _sizes(sizes: tuple[int, ...]) -> str:
    low, high = min(sizes), max(sizes)
    return f"on {counted(low, 'rank')}" if low == high else f"on {low} to {high} ranks"
