"""A lesson's percent source, parsed into cells and exercises; each mistake is named with its file and line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jupytext
from nbformat import NotebookNode

from ..errors import CourseError

KINDS = ("predict", "implement", "debug", "explain")
EXEMPT_TAG = "nbval-ignore-output"
TAGS = (EXEMPT_TAG, "raises-exception")
EXEMPT_SHARE = 0.15
FIRST_CELL = "# @first-cell"

CODE_STUB = 'raise NotImplementedError("your turn")'
OPEN_STUB = "# your answer here"
ESSAY_STUB = "*Your answer:*"

_CELL = re.compile(r"#\s*%%(?!\w)")  # not a cell magic, such as # %%writefile
_FILE_NAME = re.compile(r"(\d\d)_[a-z0-9_]+")
_EXERCISE = {
    "code": re.compile(r"# @exercise\b(?P<options>.*)"),
    "markdown": re.compile(r"<!-- @exercise\b(?P<options>.*?)-->"),
}
_MARKERS = {
    "code": ("### BEGIN SOLUTION", "### END SOLUTION"),
    "markdown": ("<!-- BEGIN SOLUTION -->", "<!-- END SOLUTION -->"),
}
_LOOKS_LIKE_MARKER = re.compile(r"^\W*(BEGIN|END)\s+SOLUTION\W*$", re.IGNORECASE)
_LOOKS_LIKE_EXERCISE = re.compile(r"^\W*@\s*exercise\b", re.IGNORECASE)
_COMMENT_EXEMPTION = re.compile(r"^\s*#\s*(NBVAL_\w+|PYTEST_VALIDATE_IGNORE_OUTPUT)\s*$", re.MULTILINE)


class AuthoringError(CourseError):
    """A source, a notebook or a run that a maintainer has to mend; the message names file, line or cell."""


@dataclass(frozen=True)
class Exercise:
    """What one marker line declares: `points` for a mark, `minutes` a learner should plan, `kind` one of KINDS."""

    name: str
    points: int
    minutes: int
    kind: str = "implement"


@dataclass(frozen=True)
class Cell:
    """One cell of a source. `text` is what stands in the solved edition; `line` is the line of its first text line."""

    kind: str
    text: str
    line: int
    tags: tuple[str, ...] = ()
    exercise: Exercise | None = None

    @property
    def is_first(self) -> bool:
        """Whether the shared set-up cell goes here."""
        return self.kind == "code" and self.text.strip() == FIRST_CELL

    @property
    def learner_text(self) -> str:
        """The text with every answer replaced by its stub, markers included."""
        if self.exercise is None:
            return self.text
        begin, end = _MARKERS[self.kind]
        kept: list[str] = []
        inside = False
        for line in self.text.split("\n"):
            if line.strip() == begin:
                inside = True
                indent = line[: len(line) - len(line.lstrip())]
                kept.append(indent + (ESSAY_STUB if self.kind == "markdown" else CODE_STUB if indent else OPEN_STUB))
            elif line.strip() == end:
                inside = False
            elif not inside:
                kept.append(line)
        return "\n".join(kept)


@dataclass(frozen=True)
class Lesson:
    """One parsed source: its path, its text, its cells."""

    path: Path
    text: str
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """The stem that source, learner edition and solved edition share."""
        return self.path.stem

    @property
    def number(self) -> str:
        """The lesson's two digits."""
        return self.name[:2]

    @property
    def exercises(self) -> tuple[Exercise, ...]:
        """The exercises, in the order of the lesson."""
        return tuple(cell.exercise for cell in self.cells if cell.exercise)


def read_lesson(path: Path, folder: Path | None = None) -> Lesson:
    """Parse one source and refuse what the editions could not be built from.

    `folder` is what paths in messages are relative to. Raises AuthoringError, one line per mistake: "file:line: what".

    Example:
        >>> read_lesson(Path("notebooks/source/01_ranks_and_rendezvous.py")).number   # doctest: +SKIP
        '01'
    """
    shown = path.relative_to(folder) if folder and path.is_relative_to(folder) else path
    text = path.read_text(encoding="utf-8")
    mistakes: list[tuple[int, str]] = []
    if not _FILE_NAME.fullmatch(path.stem):
        mistakes.append((1, f"the file is called {path.name}; a source is called NN_lower_case_name.py"))
    cells = _cells(text, mistakes)
    if not mistakes:
        mistakes += _lesson_mistakes(path.stem[:2], cells)
    if mistakes:
        raise AuthoringError("\n".join(f"{shown}:{line}: {what}" for line, what in sorted(set(mistakes))))
    return Lesson(path, text, tuple(cells))


def _cells(text: str, mistakes: list[tuple[int, str]]) -> list[Cell]:
    starts = [number for number, line in enumerate(text.split("\n"), start=1) if _CELL.match(line)]
    parsed = jupytext.reads(text, fmt="py:percent").cells
    before = text.split("\n")[: starts[0] - 1] if starts else text.split("\n")
    if any(line.strip() for line in before):
        mistakes.append((1, "text before the first cell; a source starts with a line '# %% [markdown]'"))
        return []
    if len(parsed) != len(starts):
        mistakes.append(
            (1, f"{len(starts)} lines start with '# %%' but only {len(parsed)} open a cell: one is in a string")
        )
        return []
    cells = []
    for start, node in zip(starts, parsed, strict=True):
        unknown = set(node.metadata) - {"tags", "lines_to_next_cell"}  # the second is jupytext's own note
        if node.cell_type not in ("code", "markdown") or unknown:
            mistakes.append((start, "a cell opens with '# %%', '# %% [markdown]' or '# %% tags=[\"...\"]' and no more"))
            continue
        if not node.source.strip():
            mistakes.append((start, "the cell is empty"))
            continue
        lead = len(node.source) - len(node.source.lstrip("\n"))
        cells.append(_cell(node, start + 1 + lead, mistakes))
    return cells


def _cell(node: NotebookNode, line: int, mistakes: list[tuple[int, str]]) -> Cell:
    source = node.source.strip("\n")
    lines = source.split("\n")
    tags = tuple(node.metadata.get("tags", ()))
    for tag in tags:
        if tag not in TAGS or node.cell_type != "code":
            mistakes.append(
                (line - 1, f"the tag {tag!r} means nothing here; a code cell may carry {' or '.join(TAGS)}")
            )
    if node.cell_type == "code" and (comment := _COMMENT_EXEMPTION.search(source)):
        where = line + source[: comment.start()].count("\n")
        mistakes.append((where, f"{comment.group(1)} as a comment; use the tag {EXEMPT_TAG} on the cell's first line"))
    exercise = None
    if opener := _EXERCISE[node.cell_type].fullmatch(lines[0].rstrip()):
        exercise = _exercise(opener["options"], line, mistakes)
    for number, text in enumerate(lines[1 if opener else 0 :], start=line + (1 if opener else 0)):
        if _LOOKS_LIKE_EXERCISE.match(text):
            mistakes.append(
                (number, "an exercise marker is a cell's whole first line, '# @exercise NAME points=4 minutes=15'")
            )
    cell = Cell(node.cell_type, source, line, tags, exercise)
    mistakes += _marker_mistakes(cell, has_marker=opener is not None)
    return cell


def _exercise(options: str, line: int, mistakes: list[tuple[int, str]]) -> Exercise | None:
    name, *pairs = options.split() or [""]
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,47}", name):
        mistakes.append(
            (line, f"an exercise needs a name in lower_case (at most 48 letters) right after '@exercise', not {name!r}")
        )
        return None
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key not in ("points", "minutes", "kind") or not equals or key in given:
            mistakes.append((line, f"exercise {name}: {pair!r} is not one of points=, minutes=, kind="))
            return None
        given[key] = value
    for key in ("points", "minutes"):
        if not given.get(key, "").isdigit() or int(given[key]) == 0:
            mistakes.append((line, f"exercise {name}: {key}= is missing or not a whole number above 0"))
            return None
    kind = given.get("kind", "implement")
    if kind not in KINDS:
        mistakes.append((line, f"exercise {name}: kind={kind} is unknown; choose one of {', '.join(KINDS)}"))
        return None
    return Exercise(name, int(given["points"]), int(given["minutes"]), kind)


def _marker_mistakes(cell: Cell, has_marker: bool) -> Iterator[tuple[int, str]]:
    begin, end = _MARKERS[cell.kind]
    opened = 0
    answer: list[str] = []
    answers = 0
    outside: list[str] = []
    for number, line in enumerate(cell.text.split("\n"), start=cell.line):
        stripped = line.strip()
        if stripped == begin:
            if opened:
                yield number, f"a second '{begin}'; the one on line {opened} is still open"
            opened, answer = number, []
        elif stripped == end:
            if not opened:
                yield number, f"'{end}' without a '{begin}' above it"
            elif not any(text.strip() for text in answer):
                yield opened, "the solution is empty"
            opened, answers = 0, answers + 1
        elif _LOOKS_LIKE_MARKER.match(line):
            yield number, f"{stripped!r} is nearly a marker; in a {cell.kind} cell write '{begin}' and '{end}'"
        elif opened:
            answer.append(line)
        elif number > cell.line:
            outside.append(stripped)
    if opened:
        yield opened, f"'{begin}' is never closed by '{end}'"
    elif answers and not has_marker:
        yield cell.line, "a solution in a cell whose first line is no exercise marker"
    elif has_marker and not answers:
        yield cell.line, f"the exercise has no solution between '{begin}' and '{end}'"
    elif cell.exercise and cell.kind == "markdown" and any(outside):
        # a marking tool such as nbgrader replaces an essay cell whole
        yield cell.line, "an essay cell holds the marker and the answer alone; put the question in the cell above"
    elif cell.exercise and cell.kind == "code":
        yield from _syntax_mistakes(cell)


def _syntax_mistakes(cell: Cell) -> Iterator[tuple[int, str]]:
    for edition, text in (("solved", cell.text), ("learner", cell.learner_text)):
        if any(line.lstrip().startswith(("%", "!")) for line in text.split("\n")):
            continue  # a line for IPython, not for Python's parser
        try:
            ast.parse(text)
        except SyntaxError as error:
            yield (
                cell.line,
                f"the {edition} edition of the cell is not valid Python: {error.msg} (its line {error.lineno})",
            )
            return


def _lesson_mistakes(number: str, cells: list[Cell]) -> Iterator[tuple[int, str]]:
    if not cells or cells[0].kind != "markdown" or not cells[0].text.startswith(f"# {number} "):
        yield cells[0].line if cells else 1, f"the first cell is markdown and opens with the title, '# {number} Title'"
    if len(cells) < 2 or not cells[1].is_first:
        yield cells[1].line if len(cells) > 1 else 1, f"the second cell is the single line '{FIRST_CELL}'"
    for cell in cells[2:]:
        if cell.is_first:
            yield cell.line, f"a second '{FIRST_CELL}'"
    lines: dict[str, int] = {}
    for cell in cells:
        if cell.exercise and cell.exercise.name in lines:
            where = lines[cell.exercise.name]
            yield cell.line, f"the exercise name {cell.exercise.name} is taken by the one on line {where}"
        elif cell.exercise:
            lines[cell.exercise.name] = cell.line
    code = [cell for cell in cells if cell.kind == "code"]
    exempt = [cell for cell in code if cell.is_first or EXEMPT_TAG in cell.tags]
    if len(exempt) > EXEMPT_SHARE * len(code):
        places = ", ".join(str(cell.line) for cell in exempt)
        yield (
            exempt[-1].line,
            f"{len(exempt)} of {len(code)} code cells have outputs that are not compared (lines {places}); "
            f"at most {EXEMPT_SHARE:.0%} may, and the first cell counts",
        )
