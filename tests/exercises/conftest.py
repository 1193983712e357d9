"""What the tests of exercises share: a record of their own, and answers that travel by value as a notebook's do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from course_utils.exercises import record


@pytest.fixture(autouse=True)
def progress_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that this test's record is kept in."""
    path = tmp_path / "progress.json"
    monkeypatch.setenv("COURSE_PROGRESS", str(path))
    monkeypatch.setenv("COURSE_PLAIN", "1")
    yield path
    record._records.pop(path, None)
