"""A parsed lesson -> the learner edition and the solved edition, before it runs: cell ids, metadata, exact text."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import nbformat
from nbformat import NotebookNode

from .first_cell import first_cell
from .source import EXEMPT_TAG, Cell, Lesson

BUILDER = 1  # raise it when the same source should give other notebooks: every solved edition is then stale

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6}\s+(.+)$", re.MULTILINE)


def learner_edition(lesson: Lesson) -> NotebookNode:
    """Return the notebook that learners get: no outputs, a stub for each answer."""
    return _notebook(lesson, "learner")


def solved_edition(lesson: Lesson) -> NotebookNode:
    """Return the notebook with every answer in it, its code cells not yet run."""
    return _notebook(lesson, "solved")


def source_hash(lesson: Lesson) -> str:
    """Return the hash of all that a notebook is made from: the source, the set-up cell, the builder's version."""
    parts = (str(BUILDER), first_cell(), lesson.text)
    return "sha256:" + hashlib.sha256("\0".join(parts).encode()).hexdigest()


def to_text(notebook: NotebookNode) -> str:
    """Return the exact text of a notebook's file."""
    return nbformat.v4.writes(notebook).rstrip("\n") + "\n"


def cell_ids(lesson: Lesson) -> list[str]:
    """Return one id per cell, taken from the slot that the cell stands in.

    A slot is an exercise's name, or a heading and the position below it (exercises do not count). So editing a cell
    changes no id, and a new cell changes only ids further down under the same heading.
    """
    headings: Counter[str] = Counter()
    section, position = "top", 0
    ids = []
    for cell in lesson.cells:
        if cell.exercise:
            ids.append(f"{lesson.number}-exercise-{cell.exercise.name}"[:64])
            continue
        if cell.is_first:
            ids.append(f"{lesson.number}-first-cell")
            continue
        if heading := _heading(cell):
            headings[heading] += 1
            section, position = heading if headings[heading] == 1 else f"{heading}--{headings[heading]}", 0
        ids.append(f"{lesson.number}-{section}-{position}")
        position += 1
    return ids


def _heading(cell: Cell) -> str | None:
    if cell.kind != "markdown":
        return None
    found = _HEADING.search(_FENCE.sub("", cell.text))
    if not found:
        return None
    return re.sub(r"[^a-z0-9]+", "-", found[1].lower()).strip("-")[:48].rstrip("-") or "heading"


def _notebook(lesson: Lesson, edition: str) -> NotebookNode:
    notebook = nbformat.v4.new_notebook(
        metadata={
            "course": {"edition": edition, "lesson": lesson.name, "source_hash": source_hash(lesson)},
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        cells=[_cell(cell, identity, edition) for cell, identity in zip(lesson.cells, cell_ids(lesson), strict=True)],
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return notebook


def _cell(cell: Cell, identity: str, edition: str) -> NotebookNode:
    text = first_cell() if cell.is_first else cell.learner_text if edition == "learner" else cell.text
    tags = [EXEMPT_TAG] if cell.is_first else list(cell.tags)
    metadata: dict[str, object] = {"tags": tags} if tags else {}
    if cell.exercise:
        metadata["nbgrader"] = {
            "schema_version": 3,
            "grade_id": cell.exercise.name,
            "grade": True,
            "solution": True,
            "locked": False,
            "task": False,
            "points": cell.exercise.points,
        }
    new = nbformat.v4.new_code_cell if cell.kind == "code" else nbformat.v4.new_markdown_cell
    return new(text, id=identity, metadata=metadata)
