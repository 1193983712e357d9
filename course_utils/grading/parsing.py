"""The Python in a cell: its statements, what each binds and uses, and which of them may run in a rank."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from functools import lru_cache

# What learners call to run, judge and show things: no part of a definition.
VOCABULARY = frozenset(
    ("launch", "check", "hint", "predict", "progress", "hardware", "explore", "compare", "answer_needed", "input")
)
_WRAPPERS = ("time", "timeit", "capture", "prun")  # cell magics whose body is ordinary code


@dataclass(frozen=True)
class Code:
    """A cell's code: the text that Python reads (magics replaced, lines kept), its statements, or what is wrong."""

    text: str
    statements: tuple[ast.stmt, ...]
    mistake: str = ""


@lru_cache(maxsize=512)
def code_of(text: str) -> Code:
    """Parse a cell. Never raises: a cell that is no Python has no statements, and says why."""
    lines = text.split("\n")
    for position, line in enumerate(lines):
        if line.startswith("%%"):
            magic = line[2:].split(maxsplit=1)[0] if line[2:].strip() else ""
            if magic not in _WRAPPERS:
                return Code("", (), f"the cell is for %%{magic}")
            lines[position] = ""
            break
        if line.strip() and not line.lstrip().startswith("#"):
            break
    text = "\n".join(lines)
    parsed = _parse(text)
    if isinstance(parsed, str):
        plain = _without_magics(text)
        again = _parse(plain) if plain is not None and plain != text else parsed
        if isinstance(again, str):
            return Code(text, (), parsed)
        text, parsed = plain or "", again
    return Code(text, tuple(parsed.body))


def _parse(text: str) -> ast.Module | str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        return f"{error.msg} (line {error.lineno})"
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__


def _without_magics(text: str) -> str | None:
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformed: str = TransformerManager().transform_cell(text)
    except Exception:  # it parses too, and stops at what is no Python
        return None
    return transformed


def binds(statement: ast.stmt) -> frozenset[str]:
    """The names that a statement gives a value, when it may run in a rank; none when it may not.

    Imports, functions, classes and assignments may, also inside if and try. `counter.calls = 0` counts as binding
    counter. What calls the learner's vocabulary (launch, check, ...) may not, and neither may any other expression.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return frozenset([statement.name])
    if isinstance(statement, ast.Import):
        return frozenset(alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    if isinstance(statement, ast.ImportFrom):
        return frozenset(alias.asname or alias.name for alias in statement.names)
    if isinstance(statement, ast.If | ast.Try):
        parts = list(statement.body) + list(statement.orelse)
        if isinstance(statement, ast.Try):
            parts += [*statement.finalbody, *(inner for handler in statement.handlers for inner in handler.body)]
        bound = [binds(part) for part in parts if not isinstance(part, ast.Pass)]
        return frozenset().union(*bound) if all(bound) and not _calls_vocabulary(statement) else frozenset()
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and not _calls_vocabulary(statement):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return frozenset(name for target in targets for name in _roots(target))
    return frozenset()


def uses(node: ast.AST) -> frozenset[str]:
    """Every name that is read somewhere in a piece of code."""
    return frozenset(
        part.id for part in ast.walk(node) if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Store)
    )


def is_star_import(statement: ast.stmt) -> bool:
    """Whether this is `from somewhere import *`, which may bind anything."""
    return isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*"


def calls_of(function: str, statements: tuple[ast.stmt, ...], exercise: str) -> list[ast.Call]:
    """The calls such as check("shift", ...) or predict("shift", ...) for one exercise, in their order."""
    return [
        node
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == function
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value == exercise
    ]


def same(one: str, other: str) -> bool:
    """Whether two cells hold the same code, whatever their comments and blank lines; or the same text."""
    if _stripped(one) == _stripped(other):
        return True
    ours, theirs = code_of(one), code_of(other)
    if ours.mistake or theirs.mistake:
        return False
    return [ast.dump(part) for part in ours.statements] == [ast.dump(part) for part in theirs.statements]


def definitions(text: str, name: str) -> list[str]:
    """How a cell defines a name: each of its definitions, comparable with those of another cell."""
    return [ast.dump(statement) for statement in code_of(text).statements if name in binds(statement)]


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().split("\n"))


def _roots(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Tuple | ast.List):
        return [name for part in target.elts for name in _roots(part)]
    if isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
        return _roots(target.value)
    return []


def _calls_vocabulary(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in VOCABULARY
        for part in ast.walk(node)
    )
