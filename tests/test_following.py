"""A command of a set-up is followed line by line, and whatever ends the call, nothing of the command is left."""

from __future__ import annotations

import io
import sys

import psutil
import pytest

from course_utils.following import run_followed


def python(source: str) -> list[str]:
    return [sys.executable, "-u", "-c", source]


def test_lines_come_one_by_one_the_log_gets_all_and_the_status_is_returned() -> None:
    lines: list[str] = []
    log = io.BytesIO()
    source = "import sys; print('one'); print('two', file=sys.stderr); print('half', end=''); sys.exit(3)"
    assert run_followed(python(source), lines.append, lambda: None, log=log) == 3
    assert lines == ["one", "two", "half"]
    assert log.getvalue() == b"one\ntwo\nhalf"


def test_the_clock_goes_on_while_a_command_says_nothing() -> None:
    ticks: list[int] = []
    assert run_followed(python("import time; time.sleep(1.5)"), None, lambda: ticks.append(1)) == 0
    assert ticks


def test_an_exception_while_following_ends_the_command_and_what_it_started() -> None:
    source = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)\n"
        "time.sleep(600)"
    )
    seen: list[int] = []

    def interrupt(line: str) -> None:
        seen.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_followed(python(source), interrupt, lambda: None)
    assert not psutil.pid_exists(seen[0]) or psutil.Process(seen[0]).status() == psutil.STATUS_ZOMBIE
