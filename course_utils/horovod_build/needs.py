"""What a build needs of the machine: a compiler, make, Python's headers, room on the disk and in memory."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from .. import machine
from .recipe import HorovodBuildFailed

GIB = 2**30
DISK = 2 * GIB
MEMORY_PER_JOB = 1.5 * GIB


def check_machine(folder: Path) -> None:
    """Raise HorovodBuildFailed where this machine lacks what a build needs: a compiler, headers or room."""
    named = os.environ.get("CXX", "").split()
    if not any(map(shutil.which, named[:1] or ["c++", "g++", "clang++"])):
        what = f"no C++ compiler is there: CXX names {named[0]!r}" if named else "no C++ compiler is installed"
        raise HorovodBuildFailed(f"Horovod has to be compiled, and {what}. {_apt('g++')}")
    if not shutil.which("make"):
        raise HorovodBuildFailed(f"Horovod has to be compiled, and make is not installed. {_apt('make')}")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise HorovodBuildFailed(
            f"Horovod has to be compiled, and Python's headers are not installed: there is no {headers}. "
            f"{_apt(package)} (Debian's own Python: python3-dev)"
        )
    free = shutil.disk_usage(folder).free
    if free < DISK:
        raise HorovodBuildFailed(
            f"a build of Horovod needs about {DISK / GIB:.0f} GiB of disk for a while, and {folder} has "
            f"{free / GIB:.1f} GiB: make room, or name a folder elsewhere with COURSE_HOROVOD_CACHE."
        )


def jobs() -> int:
    """Return how many compilers run at once: one a core, as far as the memory that is free allows."""
    import psutil

    memory = min(machine.memory_bytes(), int(psutil.virtual_memory().available))
    return max(1, min(machine.cores(), int(memory / MEMORY_PER_JOB)))


def _apt(package: str) -> str:
    return f"On Debian and Ubuntu: apt install {package}"
