"""progress(): the lessons and points so far."""

from __future__ import annotations

from ..front_end import is_plain
from . import record
from .panels import Panel, show
from .registry import LESSONS, Exercise, exercises_of

_PARTS = ("exercises", "predictions")


def progress() -> None:
    """Show how far the learner is in each lesson begun: exercises done and points, and where the record is kept.

    A checked exercise counts when it has passed once, a prediction when it was made; an essay is read by a person.

    Example: `progress()`.
    """
    current = record.current()
    kept = current.read()
    table = [("lesson", "exercises done", "points", "")]
    total = reachable = 0
    for lesson, title in LESSONS.items():
        if not any(exercise.name in kept[part] for part in _PARTS for exercise in exercises_of(lesson)):
            continue  # not begun
        exercises = [exercise for exercise in exercises_of(lesson) if exercise.kind != "explain"]
        done = [exercise for exercise in exercises if _is_done(exercise, kept)]
        points, possible = sum(e.points for e in done), sum(e.points for e in exercises)
        essays = len(exercises_of(lesson)) - len(exercises)
        table.append(
            (
                f"{lesson} {title}",
                f"{len(done)} of {len(exercises)}",
                f"{points} of {possible}",
                "and one essay, read by a person" if essays == 1 else "",
            )
        )
        total, reachable = total + points, reachable + possible
    sentences = current.take_notes()
    if not is_plain():
        sentences.append(f"Kept in {current.path}." if current.path else "Kept as long as this kernel runs.")
    if len(table) == 1:
        show(Panel("table", "Progress: nothing yet", sentences=sentences))
    else:
        show(Panel("table", f"Progress: {total} of {reachable} points", table=table, sentences=sentences))


def _is_done(exercise: Exercise, kept: dict[str, dict[str, dict[str, object]]]) -> bool:
    if exercise.kind == "predict":
        return "value" in kept["predictions"].get(exercise.name, {})
    return kept["exercises"].get(exercise.name, {}).get("passed") is True
