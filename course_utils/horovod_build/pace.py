"""How far a compilation is: which objects it makes in all, which have begun, and how long each kind takes."""

from __future__ import annotations

import re
from pathlib import Path

_OBJECT = re.compile(r"Building (?:CXX|CUDA) object ([^\s\"]+)")
# Seconds on one core, measured once with torch 2.13 and TensorFlow 2.21: only their ratios count.
_LONG = {
    "mpi_ops_v2.cc.o": 34.0,
    "adapter_v2.cc.o": 26.0,
    "mpi_ops.cc.o": 19.0,
    "gloo_operations.cc.o": 16.0,
    "gaussian_process.cc.o": 9.0,
    "gloo_controller.cc.o": 8.0,
}
_GLOO, _OTHER = 1.5, 2.2


class Pace:
    """Counts the objects of one compilation, each by the time it takes; `jobs` of them are made at once."""

    def __init__(self, objects: list[str], jobs: int) -> None:
        self._whole = sum(map(_seconds, objects))
        self._jobs = jobs
        self._begun: list[str] = []

    def see(self, line: str) -> None:
        """Take note of a line that make printed."""
        found = _OBJECT.search(line)
        if found:
            self._begun.append(found[1])

    def part(self) -> float:
        """Return which part of the work is done, 0 to 1; objects that are being made count half."""
        ended, running = self._begun[: -self._jobs], self._begun[-self._jobs :]
        done = sum(map(_seconds, ended)) + sum(map(_seconds, running)) / 2
        return min(1.0, done / self._whole) if self._whole else 0.0


def planned(build: Path) -> list[str]:
    """Return every object that the makefiles below `build` make."""
    rules = (path.read_text(encoding="utf-8") for path in build.rglob("build.make"))
    return sorted({name for text in rules for name in _OBJECT.findall(text)})


def _seconds(name: str) -> float:
    return _LONG.get(Path(name).name, _GLOO if name.startswith("third_party/") else _OTHER)
