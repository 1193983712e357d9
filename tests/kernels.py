"""Drives a real ipykernel as a front end does: cells in, messages out as they come, interrupts to its whole process group."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.blocking import BlockingKernelClient

MARKER = "COURSE_TEST_MARKER"  # every process below a kernel inherits this variable, whatever session it moves to
START_SECONDS = 60.0
CELL_SECONDS = 60.0


@dataclass(frozen=True)
class Message:
    """One message of a cell, and when it came (time.monotonic)."""

    kind: str
    content: dict[str, Any]
    at: float


@dataclass
class Cell:
    """One cell under way or done: what came of it so far."""

    id: str
    messages: list[Message] = field(default_factory=list)
    done: bool = False

    @property
    def streams(self) -> str:
        """All stream output so far."""
        return "".join(message.content["text"] for message in self.messages if message.kind == "stream")

    @property
    def displays(self) -> dict[str, list[dict[str, str]]]:
        """The states of each display that has an id, in the order they came: forms by MIME type."""
        states: dict[str, list[dict[str, str]]] = {}
        for message in self.messages:
            identity = message.content.get("transient", {}).get("display_id")
            if identity is not None and message.kind in ("display_data", "update_display_data"):
                states.setdefault(identity, []).append(message.content["data"])
        return states

    @property
    def text(self) -> str:
        """What can be read in the cell now: its streams, then the text form of each display's present state."""
        return self.streams + "".join(f"{states[-1]['text/plain']}\n" for states in self.displays.values())

    @property
    def result(self) -> str | None:
        """The text form of the cell's value."""
        for message in self.messages:
            if message.kind == "execute_result":
                return str(message.content["data"]["text/plain"])
        return None

    @property
    def error(self) -> str | None:
        """The name of the exception that ended the cell."""
        return next((str(message.content["ename"]) for message in self.messages if message.kind == "error"), None)

    @property
    def error_text(self) -> str:
        """The exception as a front end shows it, without colours."""
        shown = ["\n".join(m.content["traceback"]) for m in self.messages if m.kind == "error"]
        return strip_colours("\n".join(shown))


class Kernel:
    """A kernel in its own process group, started in `folder` with `environment` on top of this process's variables."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.marker = uuid.uuid4().hex
        self.folder = folder
        own = folder / f"kernel-{self.marker}"
        own.mkdir(parents=True)
        connection = own / "connection.json"
        changed = {
            MARKER: self.marker,
            "IPYTHONDIR": str(own / "ipython"),
            "JPY_PARENT_PID": str(os.getpid()),
            **(environment or {}),
        }
        with (own / "kernel.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ipykernel_launcher", "-f", str(connection), "--HistoryManager.enabled=False"],
                cwd=folder,
                env={**os.environ, **changed},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            await_that(lambda: _is_whole(connection), START_SECONDS, "the kernel to write its connection file")
            self._client = BlockingKernelClient(connection_file=str(connection))
            self._client.load_connection_file()
            self._client.start_channels()
            self._client.wait_for_ready(timeout=START_SECONDS)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, source: str) -> Cell:
        """Send a cell and return at once; cells after one that fails are run all the same."""
        return Cell(self._client.execute(source, allow_stdin=False, stop_on_error=False))

    def wait_for(self, cell: Cell, reached: Callable[[Cell], bool], timeout: float = CELL_SECONDS) -> Cell:
        """Take messages until `reached(cell)`; fails when the cell ends or `timeout` passes before that."""
        deadline = time.monotonic() + timeout
        while not reached(cell):
            assert not cell.done, f"the cell ended first: {cell.text}{cell.error_text}"
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"nothing of the kind within {timeout} s; so far: {cell.text!r}{cell.error_text}"
            assert self._process.poll() is None, "the kernel ended"
            self._take(cell, min(remaining, 1.0))
        return cell

    def finish(self, cell: Cell, timeout: float = CELL_SECONDS) -> Cell:
        """Take messages until the cell has ended."""
        return self.wait_for(cell, lambda cell: cell.done, timeout)

    def run(self, source: str, timeout: float = CELL_SECONDS) -> Cell:
        """Run a cell to its end, whatever end that is."""
        return self.finish(self.begin(source), timeout)

    def value(self, expression: str) -> str:
        """Return the text form of an expression; fails if it raises."""
        cell = self.run(expression)
        assert cell.error is None, cell.error_text
        assert cell.result is not None, f"{expression} has no value"
        return cell.result

    def interrupt(self) -> None:
        """Interrupt as Jupyter does: SIGINT to the kernel's whole process group."""
        os.killpg(os.getpgid(self.pid), signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL the kernel alone, as the system does when memory runs out."""
        self._process.kill()
        self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """Every living process that came from this kernel, itself excepted."""
        return [process for process in marked_processes(self.marker) if process.pid != self.pid]

    def ranks(self) -> list[psutil.Process]:
        """Every living process that came from this kernel, itself and the servers it started excepted."""
        return [process for process in self.processes() if process.ppid() != self.pid]

    def close(self) -> None:
        """End the kernel and whatever it left."""
        self._client.stop_channels()
        left = self.processes()
        self.kill()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, cell: Cell, timeout: float) -> None:
        try:
            message = self._client.get_iopub_msg(timeout=timeout)
        except queue.Empty:
            return
        if message["parent_header"].get("msg_id") != cell.id:
            return
        cell.messages.append(Message(message["msg_type"], message["content"], time.monotonic()))
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            cell.done = True


def marked_processes(marker: str) -> list[psutil.Process]:
    """Every living process whose environment carries this marker."""
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if wanted in environment.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def await_that(reached: Callable[[], Any], timeout: float, what: str) -> None:
    """Wait until `reached()` is true; fails after `timeout` seconds, saying what was awaited."""
    deadline = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.01)


def strip_colours(text: str) -> str:
    """Take terminal colour codes out of `text`."""
    plain, *rest = text.split("\x1b[")
    return plain + "".join(part.partition("m")[2] for part in rest)


def _is_whole(connection: Path) -> bool:
    try:
        json.loads(connection.read_text())
    except (OSError, ValueError):
        return False
    return True
