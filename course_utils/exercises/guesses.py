"""predict() and compare(): what a learner expects, kept before the result is shown and set beside it at the end."""

from __future__ import annotations

import math
import numbers
from typing import Any

from . import record
from .panels import Panel, show
from .registry import find

_MISSING = "none made"
_MOST = 10**300  # a float can be compared with what is smaller


def predict(name: str, value: Any = None, unit: str = "") -> None:
    """Keep a prediction; the lesson's last cells show it beside what was computed. Never raises.

    `value` is a number, a truth value or a text; a second call replaces the first. Without a value this shows how to
    give one, or the one kept earlier. It counts that a prediction was made, not that it was right.

    Example: `predict("lost_updates", 4, unit="on the counter")`.
    """
    exercise = find(name, lambda exercise: exercise.kind == "predict")
    if isinstance(exercise, str):
        show(Panel("prediction", "No such prediction", sentences=[exercise]))
        return
    if value is None:
        kept = record.current().read()["predictions"].get(exercise.name)
        if kept is None or "value" not in kept:
            show(
                Panel(
                    "prediction",
                    f"Your prediction: {exercise.title}",
                    sentences=[
                        "None made yet. Put a value in place of None and run this cell before the next one.",
                        "It counts that you made one, not that it is right.",
                        *record.current().take_notes(),
                    ],
                )
            )
            return
        value, unit = kept["value"], unit or str(kept.get("unit", ""))
    else:
        value = _storable(value)
        record.current().change(
            lambda kept: kept["predictions"].update({exercise.name: {"value": value, "unit": unit}})
        )
    headline = f"Your prediction: {_text(value)}{f' {unit}' if unit else ''}"
    show(Panel("prediction", headline, sentences=[f"Kept for: {exercise.title}.", *record.current().take_notes()]))


def compare(**computed: Any) -> None:
    """Show, for each prediction named, what was predicted beside what this notebook computed. Never raises.

    None stands for a value that no cell could compute yet, for want of an answer.

    Example: `compare(lost_updates=counter, chain_messages=sum(rank.messages_sent for rank in run.trace))`.
    """
    kept = record.current().read()["predictions"]
    table = [("question", "you predicted", "computed here", "")]
    unknown = []
    for name, value in computed.items():
        exercise = find(name, lambda exercise: exercise.kind == "predict")
        if isinstance(exercise, str):
            unknown.append(exercise)
            continue
        made = kept.get(name, {})
        unit = str(made.get("unit", ""))
        guess = f"{_text(made['value'])}{f' {unit}' if unit else ''}" if "value" in made else _MISSING
        truth = "needs your answers above" if value is None else _text(_storable(value))
        table.append((exercise.title, guess, truth, _remark(made.get("value"), value)))
    made_count = sum(row[1] != _MISSING for row in table[1:])
    headline = f"Predictions: {made_count} of {len(table) - 1} made"
    show(Panel("prediction", headline, table=table, sentences=[*unknown, *record.current().take_notes()]))


def _remark(guess: Any, truth: Any) -> str:
    if guess is None or truth is None:
        return ""
    truth = _storable(truth)
    if _is_number(guess) and _is_number(truth):
        return "as computed" if abs(guess - truth) <= 0.05 * abs(truth) else "a surprise"
    return "as computed" if guess == truth else "a surprise"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _storable(value: Any) -> Any:
    """The value as JSON keeps it; anything but numbers, truth values and texts as its repr."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if abs(number) < _MOST else "a number of more than 300 digits"
    if isinstance(value, numbers.Real):
        return float(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) == 1:
        return item()  # a numpy scalar
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def _text(value: Any) -> str:
    """A value as a learner would write it: numbers with four digits, and never a small one as zero."""
    if not _is_number(value) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.1e}"
