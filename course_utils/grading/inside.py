"""Inside a rank while an answer counts for marks: make it from its source text and try it on this rank's inputs."""

from __future__ import annotations

import ast
import contextlib
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

import psutil

from ..exercises import inside
from ..exercises.own import OwnVersion
from ..exercises.standins import StandIn
from .programs import Program, show_sources

MEMORY = 2 << 30  # bytes that an answer may take beyond what a rank has when it begins
PRINTED = 200_000  # characters kept of what a stream takes during one case


def perform(
    program: Program, scenario: Callable[..., Any], batch: list[list[tuple[Any, ...]]], limit: float
) -> list[Any]:
    """Make the answer and run the scenario on each of this rank's cases, as a learner's check does."""
    with contextlib.suppress(OSError, ValueError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + MEMORY,) * 2)
    sys.stdout, sys.stderr = _Capped(sys.stdout), _Capped(sys.stderr)
    return inside.perform(_answer_of(program), scenario, batch, limit)


def _answer_of(program: Program) -> Any:
    notebook = types.ModuleType("__main__")
    sys.modules["__main__"] = notebook
    names = notebook.__dict__
    show_sources(program)  # for inspect.getsource and the like
    for name, instead in program.replaced.items():
        names[name] = OwnVersion(name) if instead == "own" else StandIn(name)
    for part in program.parts:
        body = ast.parse(part.text).body
        module = ast.Module([body[index] for index in part.chosen], [])
        exec(compile(module, part.file, "exec", dont_inherit=True), names)
    return eval(compile(program.entry, "<the answer>", "eval", dont_inherit=True), names)


class _Capped:
    """A stream that keeps a bounded part of what an answer prints, so that no answer can fill the judge's disk."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._room = PRINTED

    def write(self, text: str) -> int:
        if text.startswith(inside.MARK):
            self._room = PRINTED
        if len(text) <= self._room:
            self._stream.write(text)
        elif self._room > 0:
            self._stream.write(f"{text[: self._room]}\n(the rest is not kept)\n")
        self._room -= len(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
