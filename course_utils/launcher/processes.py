"""Small questions and orders about processes that both sides of a launch share."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def python_command(then: str, path: Iterable[str]) -> list[str]:
    """Return the command of a fresh interpreter that runs `then` with this very copy of the package.

    The interpreter's own path comes first and `path` after it: a learner's folder may hold a file named like a library.
    """
    package = Path(__file__).parent.parent
    start = f"""
import importlib.util, sys
sys.path += [entry for entry in {list(path)!r} if entry not in sys.path]
spec = importlib.util.spec_from_file_location("course_utils", {str(package / "__init__.py")!r})
sys.modules["course_utils"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["course_utils"])
{then}
"""
    return [sys.executable, "-P", "-c", start]


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when `parent` ends; leave at once if it already has.

    The signal is tied to the parent's *thread* that started us. That is safe below our server, which has one thread.
    """
    if LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(71)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, so that none can slip away."""
    if LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of_this_process() -> set[int]:
    """Return the pids of this process's children, adopted ones and zombies included."""
    pid = os.getpid()
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:  # no such file on macOS or in a kernel built without it
        return {child.pid for child in psutil.Process(pid).children()}


def descendants(pids: Iterable[int]) -> list[psutil.Process]:
    """Return every process below `pids`, whatever its session or group."""
    found: list[psutil.Process] = []
    for pid in pids:
        try:
            found += psutil.Process(pid).children(recursive=True)
        except psutil.Error:
            continue
    return found


def is_running(process: psutil.Process) -> bool:
    """Say whether `process` still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def signal_group(leader: int, number: int) -> None:
    """Signal the process group that `leader` leads, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def signal_each(processes: Iterable[psutil.Process], number: int) -> None:
    """Signal each of `processes` that is still the process it was."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue


def why_forking_is_unsafe() -> str | None:
    """Return what makes forking this process unsafe, or None: other threads, or an open GPU."""
    if not LINUX:
        return "forked processes are only safe on Linux"
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"a preloaded module started {threads - 1} thread(s)"
    descriptors = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    if any(target.startswith("/dev/nvidia") for target in descriptors) or "/dev/nvidia" in _maps():
        return "a preloaded module opened a GPU"
    return None


def _maps() -> str:
    return Path("/proc/self/maps").read_text()


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
