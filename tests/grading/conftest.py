"""What the tests of grading share: a judge that loses patience sooner, and names that resolve at once."""

from __future__ import annotations

import pytest

from course_utils.grading import marking


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlocks are found after some seconds."""
    monkeypatch.setattr(marking, "PATIENCE", 4.0)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
