"""A returned file, in whatever state, as cells; or a sentence that says why it cannot be read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_BYTES = 500_000_000


class Unreadable(Exception):
    """The file holds no notebook; the message says why, for the table of marks."""


@dataclass(frozen=True)
class Cell:
    """One cell: its place in the notebook from 1 on, "code" or another kind, its text, and what its metadata call it.

    That is nbgrader's grade_id, or the exercise that the builder put into the cell's id; "" if both are gone.
    """

    number: int
    kind: str
    text: str
    labelled: str = ""


def read(path: Path) -> tuple[Cell, ...]:
    """Return the cells of a notebook file; outputs are dropped, ids and all other metadata may be missing or wrong.

    Raises Unreadable.
    """
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        raise Unreadable(f"The file cannot be opened: {error.strerror}.") from None
    if size > MAX_BYTES:
        raise Unreadable(f"The file has {size / 1e6:.0f} MB; at most {MAX_BYTES / 1e6:.0f} MB are read.")
    if not data.strip():
        raise Unreadable("The file is empty.")
    try:
        notebook = json.loads(data)  # finds UTF-8, 16 and 32 with and without a byte order mark
    except UnicodeDecodeError:
        raise Unreadable("Not a notebook: the file is no text.") from None
    except json.JSONDecodeError as error:
        if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"{":
            raise Unreadable("Not a notebook: the file does not begin as one.") from None
        raise Unreadable(
            f"The notebook is damaged or was cut short: line {error.lineno} is no valid JSON ({error.msg})."
        ) from None
    except RecursionError:
        raise Unreadable("The notebook is damaged: its JSON is nested too deeply.") from None
    cells = _cells_in(notebook)
    if cells is None:
        raise Unreadable("Not a notebook: the file is JSON, but has no list of cells.")
    return tuple(_cell(number, cell) for number, cell in enumerate(cells, start=1))


def _cells_in(notebook: Any) -> list[Any] | None:
    if not isinstance(notebook, dict):
        return None
    cells = notebook.get("cells")
    if cells is None and isinstance(notebook.get("worksheets"), list):  # nbformat 3
        sheets = [sheet.get("cells") for sheet in notebook["worksheets"] if isinstance(sheet, dict)]
        cells = [cell for sheet in sheets if isinstance(sheet, list) for cell in sheet]
    return cells if isinstance(cells, list) else None


def _cell(number: int, cell: Any) -> Cell:
    if not isinstance(cell, dict):
        return Cell(number, "raw", "")
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    text = source if isinstance(source, str) else ""
    return Cell(number, str(cell.get("cell_type")), text.replace("\r\n", "\n").replace("\r", "\n"), _label(cell))


def _label(cell: dict[str, Any]) -> str:
    metadata = cell.get("metadata")
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    label = nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None
    if isinstance(label, str):
        return label
    identity = cell.get("id")
    return identity.partition("-exercise-")[2] if isinstance(identity, str) else ""
