"""Where built wheels are kept, how one is found and installed, and the lock that lets one build run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import machine
from .recipe import HorovodBuildFailed
from .wanted import Wanted

WORK = "building-"  # how the name of a build's own folder begins
ATTACHED = Path("/kaggle/input")  # where Kaggle mounts the data sets that a notebook attached


def folders(named: str | os.PathLike[str] | None) -> list[Path]:
    """Return where wheels may lie, the first place first.

    `named` or COURSE_HOROVOD_CACHE stands in for the user's cache folder ($XDG_CACHE_HOME or ~/.cache); one that
    cannot be written to comes before it. On Kaggle the attached data sets come last.
    """
    given = os.fspath(named) if named is not None else os.environ.get("COURSE_HOROVOD_CACHE")
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "course_utils" / "horovod"
    found = [Path(given).expanduser().absolute()] if given else [own.absolute()]
    if given and found[0].is_dir() and not os.access(found[0], os.W_OK):
        found.append(own)
    if machine.platform() == "kaggle":
        found.append(ATTACHED)
    return found


def writable(places: list[Path]) -> Path:
    """Return the first of `places` that can be written to, made if need be. Raises HorovodBuildFailed for none."""
    for place in places:
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            if os.access(place, os.W_OK):
                return place
    raise HorovodBuildFailed(
        f"{places[0]} cannot be written to, and wheels of Horovod are kept there: COURSE_HOROVOD_CACHE names another "
        "folder."
    )


def find(places: list[Path], build: Wanted) -> Path | None:
    """Return a whole wheel of this very build from the first of `places` that has one."""
    for place in places:
        for path in sorted(place.rglob(build.pattern)):
            if _is_whole(path):
                return path
    return None


def _is_whole(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError):
        return False


def install(wheel: Path, requires: tuple[str, ...]) -> None:
    """Install `wheel`, and of what it needs only what is missing, so that no version that is there changes."""
    if requires:
        _pip("install", *requires)
    _pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    importlib.invalidate_caches()


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise HorovodBuildFailed(f"pip could not install {arguments[-1]}:\n{said}")


@contextlib.contextmanager
def one_at_a_time(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process; call `waiting` first where another process holds it.

    What a build that was killed left in the folder is removed.
    """
    with (folder / "build.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        for left in folder.glob(f"{WORK}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
