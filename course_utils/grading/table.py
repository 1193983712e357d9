"""The table of marks as a CSV file that a spreadsheet opens: whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .batch import Row

HEADER = ("learner", "file", "lesson", "exercise", "verdict", "points", "out of", "reason", "seed")


def write(rows: Iterable[Row], seed: int, path: Path) -> None:
    """Write the rows, in place of what was there. The seed that the cases were drawn from stands in each of them."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        # the byte order mark tells spreadsheets that it is UTF-8; file names may hold bytes that are not
        with os.fdopen(descriptor, "w", encoding="utf-8-sig", errors="backslashreplace", newline="") as file:
            table = csv.writer(file)
            table.writerow(HEADER)
            for row in rows:
                points = "" if row.points is None else row.points
                out_of = "" if row.out_of is None else row.out_of
                table.writerow(
                    (row.learner, row.file, row.lesson, row.exercise, row.verdict, points, out_of, row.reason, seed)
                )
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
