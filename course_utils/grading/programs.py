"""What an answer is run from: source text, with the definitions that it needs from the notebook and no more."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..exercises.registry import Exercise
from .finding import Release
from .parsing import Code, binds, calls_of, code_of, definitions, is_star_import, uses
from .reading import Cell


@dataclass(frozen=True)
class Part:
    """Statements of one cell: its whole text, under a name that tracebacks know it by, and which of them to run."""

    file: str
    text: str
    chosen: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """An answer as text: parts to run in order, then `entry`, an expression whose value is the answer.

    `replaced` says which names of other exercises stand for the course's own version ("own") or for a missing answer
    ("missing"), as in a lesson that goes on without them.
    """

    parts: tuple[Part, ...]
    entry: str
    replaced: Mapping[str, str]


def program_for(
    exercise: Exercise,
    answer: Cell,
    cells: Sequence[Cell],
    release: Release,
    others: Mapping[str, Cell],
    replaced: Mapping[str, str],
) -> Program:
    """Gather an answer's program, following the names that it uses.

    A name is looked for in the answer's own cell, then upwards, then downwards, then among the cells that were handed
    out with the lesson. `others` are the cells that count for other exercises, `replaced` the exercises without a
    right answer.
    """
    above = [cell for cell in reversed(cells) if cell.number < answer.number]
    below = [cell for cell in cells if cell.number > answer.number]
    places = [("submission", cell) for cell in [answer, *above, *below] if _may_hold_code(cell)]
    given = release.before(exercise.name)
    places += [("release", cell) for cell in reversed(given) if _may_hold_code(cell)]
    entry, wanted = _entry(exercise, answer)
    gathered = _Gathered(places, others, replaced)
    gathered.star_imports(answer.number)
    gathered.names(wanted)
    return Program(gathered.parts(), entry, gathered.replaced)


def show_sources(program: Program) -> None:
    """Let tracebacks and reports in this process quote the program's lines."""
    for part in program.parts:
        linecache.cache[part.file] = (len(part.text), None, part.text.splitlines(keepends=True), part.file)


def forget_sources(program: Program) -> None:
    """Undo `show_sources`."""
    for part in program.parts:
        linecache.cache.pop(part.file, None)


def _may_hold_code(cell: Cell) -> bool:
    return cell.kind == "code" or "@exercise" in cell.text


def _entry(exercise: Exercise, answer: Cell) -> tuple[str, frozenset[str]]:
    """The expression that gives the answer: the exercise's name, or what the learner hands to check under it."""
    if not definitions(answer.text, exercise.name):
        for call in reversed(calls_of("check", code_of(answer.text).statements, exercise.name)):
            if len(call.args) > 1:
                return ast.unparse(call.args[1]), uses(call.args[1])
    return exercise.name, frozenset([exercise.name])


class _Gathered:
    """Statements chosen so far, by place."""

    def __init__(
        self, places: Sequence[tuple[str, Cell]], others: Mapping[str, Cell], replaced: Mapping[str, str]
    ) -> None:
        self._places = places
        self._others = others
        self._may_replace = replaced
        self._chosen: dict[int, set[int]] = {}
        self.replaced: dict[str, str] = {}

    def star_imports(self, until: int) -> None:
        for place, (origin, cell) in enumerate(self._places):
            if origin == "submission" and cell.number <= until:
                self._choose(place, [i for i, s in enumerate(code_of(cell.text).statements) if is_star_import(s)])

    def names(self, wanted: Collection[str]) -> None:
        pending, seen = list(wanted), set(wanted)
        while pending:
            for used in self._name(pending.pop()):
                if used not in seen:
                    seen.add(used)
                    pending.append(used)

    def parts(self) -> tuple[Part, ...]:
        """The chosen statements: what was handed out, then what stands below the answer, then down to the answer."""
        answer = self._places[0][1].number

        def order(place: int) -> tuple[int, int]:
            origin, cell = self._places[place]
            return (0 if origin == "release" else 1 if cell.number > answer else 2, cell.number)

        return tuple(
            Part(_file(*self._places[place]), self._code(place).text, tuple(sorted(self._chosen[place])))
            for place in sorted(self._chosen, key=order)
        )

    def _name(self, name: str) -> frozenset[str]:
        """Choose what binds a name; return the names that this uses."""
        if name in self._may_replace:
            self.replaced[name] = self._may_replace[name]
            return frozenset()
        for place, (origin, cell) in enumerate(self._places):
            if name in self._others and (origin, cell) != ("submission", self._others[name]):
                continue
            statements = self._code(place).statements
            binding = [index for index, statement in enumerate(statements) if name in binds(statement)]
            if binding:
                self._choose(place, binding)
                return frozenset().union(*(uses(statements[index]) for index in binding))
        return frozenset()

    def _choose(self, place: int, statements: Sequence[int]) -> None:
        if statements:
            self._chosen.setdefault(place, set()).update(statements)

    def _code(self, place: int) -> Code:
        return code_of(self._places[place][1].text)


def _file(origin: str, cell: Cell) -> str:
    return f"<ipython-input-{cell.number}-{origin}>"  # IPython's way to name a cell: reports then say "cell 12"
