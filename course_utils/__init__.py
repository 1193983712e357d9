"""The learner's whole vocabulary: `from course_utils import launch, Link, Ranks, check, hint, predict, progress`.

Names load on first use, so that `import course_utils` costs next to nothing and imports neither torch nor TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exercises import check, hint, predict, progress
    from .launcher import Link, Ranks, launch
    from .machine import hardware

__version__ = "0.1.0"

_HOMES = {
    "Link": "launcher",
    "Ranks": "launcher",
    "launch": "launcher",
    "check": "exercises",
    "hint": "exercises",
    "predict": "exercises",
    "progress": "exercises",
    "hardware": "machine",
}

__all__ = ["Link", "Ranks", "check", "hardware", "hint", "launch", "predict", "progress"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'course_utils' has no attribute '{name}'")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
