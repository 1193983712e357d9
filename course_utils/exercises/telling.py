"""How verdicts tell numbers: the same words in the checks of all lessons."""

from __future__ import annotations

from typing import Any


def counted(number: int, noun: str) -> str:
    """Return "1 rank", "2 ranks", "1,000 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_numbers(array: Any, most: int = 6, digits: int = 6) -> str:
    """Return the first `most` numbers of an array of any shape, and how many there are if that is not all."""
    flat = array.reshape(-1)
    shown = ", ".join(f"{number:.{digits}g}" for number in flat[:most].tolist())
    return f"[{shown}, ...] ({flat.size} numbers)" if flat.size > most else f"[{shown}]"


def shown(value: Any, digits: int = 6) -> str:
    """Return what an answer gave, from the plain data that `inside.plain` makes of it."""
    if value[0] == "tensor":
        return f"a {value[1]} tensor: {first_numbers(value[2], digits=digits)}"
    return repr(value[1])[:200] if value[0] == "value" else f"an object of type {value[1]}: {value[2]}"
