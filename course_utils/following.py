"""A command of a long set-up: each line that it prints is followed, and an interrupt leaves nothing of it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_TICK = 1.0  # seconds between two looks at a command that says nothing


def run_followed(
    command: Sequence[str],
    follow: Callable[[str], None] | None,
    tick: Callable[[], None],
    *,
    log: BinaryIO | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run a command, give each of its lines to `follow` and all of it to `log`; return its exit status.

    `tick` is called every second or so meanwhile. The command has a session of its own, so that a kernel's interrupt is
    answered here: whatever ends this call, nothing of the command's process group is left.

    Example: `run_followed(["make"], print, lambda: None)`.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        for line in _lines(process, log, tick):
            if follow:
                follow(line)
        return process.wait()
    finally:
        _end(process)


def _lines(process: subprocess.Popen[bytes], log: BinaryIO | None, tick: Callable[[], None]) -> Iterator[str]:
    assert process.stdout
    rest = b""
    with selectors.DefaultSelector() as selector, process.stdout as output:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=_TICK):
                data = os.read(output.fileno(), 65536)
                if not data:
                    break
                if log:
                    log.write(data)
                    log.flush()
                *lines, rest = (rest + data).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in lines)
            tick()
    if rest:
        yield rest.decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of the process's group: ask, then force what has not gone."""
    for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.02)
