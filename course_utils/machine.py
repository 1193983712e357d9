"""What this machine is: platform, GPUs, cores, memory, and what the ranks of a launch should use.

Nothing here imports torch or touches CUDA: a notebook asks before it decides. For tests, COURSE_FAKE_GPUS and
COURSE_FAKE_CORES stand in for the counts; where they are set, that is said in the notes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import BadRequest

BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")
GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One machine, in the words that lessons use.

    `platform` is "kaggle", "colab" or "local"; `gpus` the names of the GPUs; `memory_gib` what this process may use, in
    GiB; `backend` and `ranks` what a lesson should train with here; `notes` what was degraded, and why.
    """

    platform: str
    gpus: tuple[str, ...]
    cores: int
    memory_gib: float
    backend: str
    ranks: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What the ranks of one launch use: the backend, the threads of each rank, and what was degraded."""

    backend: str
    threads: int
    notes: tuple[str, ...]


def hardware(show: bool = True) -> Hardware:
    """Look at this machine; print where it is, what it has and what the lessons will use.

    Returns a `Hardware`. With `show=False` nothing is printed.

    Example:
        >>> hardware(show=False).platform in ("kaggle", "colab", "local")
        True
    """
    names = gpus()
    ranks = len(names) if len(names) >= 2 else 2
    planned = plan(ranks)
    notes = list(planned.notes)
    if cores() < ranks:
        notes.append(f"{ranks} ranks share {_count(cores(), 'core')}: everything works, timings mean less")
    seen = Hardware(platform(), names, cores(), memory_bytes() / GIB, planned.backend, ranks, tuple(notes))
    if show:
        where = {"kaggle": "a Kaggle notebook", "colab": "Colab", "local": "a machine of your own"}[seen.platform]
        has = f"{_count(len(names), 'GPU')}{' (' + ', '.join(names) + ')' if names else ''}"
        print(f"Where:    {where}, Python {sys.version_info.major}.{sys.version_info.minor}")
        print(f"Hardware: {has}, {_count(seen.cores, 'core')}, {seen.memory_gib:.0f} GiB of memory")
        degraded = f" ({'; '.join(notes)})" if notes else ""
        print(f"Lessons:  {ranks} ranks over {seen.backend}{degraded}")
    return seen


def plan(nprocs: int, backend: str | None = None) -> Plan:
    """Choose the backend and the threads for `nprocs` ranks; NCCL only where every rank has a GPU of its own.

    `backend` is what the caller asked for ("gloo", "nccl", "cpu:gloo,cuda:nccl") or None for the best one here.
    Raises BadRequest for any other name.
    """
    if backend is not None and backend not in BACKENDS:
        raise BadRequest(f"backend={backend!r} is unknown; choose one of {', '.join(map(repr, BACKENDS))}, or None")
    count = len(gpus())
    enough = count >= nprocs
    notes = []
    if count and "COURSE_FAKE_GPUS" in os.environ:
        notes.append(f"{_count(count, 'GPU')} faked by COURSE_FAKE_GPUS")
    if backend == "gloo":
        chosen = "gloo"
    elif enough:
        chosen = backend or "cpu:gloo,cuda:nccl"
    else:
        chosen = "gloo"
        if backend or count:
            notes.append(
                f"gloo instead of NCCL: {_count(nprocs, 'rank')} but {_count(count, 'GPU')}, and NCCL needs one each"
            )
    return Plan(chosen, max(1, cores() // nprocs), tuple(notes))


def platform() -> str:
    """Return "kaggle", "colab" or "local"."""
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ or Path("/kaggle/input").is_dir():
        return "kaggle"
    if "COLAB_RELEASE_TAG" in os.environ or "google.colab" in sys.modules:
        return "colab"
    return "local"


def gpus() -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible, without touching CUDA."""
    return tuple(name for _, name in devices())


def devices() -> tuple[tuple[str, str], ...]:
    """Return (what CUDA_VISIBLE_DEVICES calls it, name) of each visible GPU, in CUDA's order."""
    faked = _faked("COURSE_FAKE_GPUS", at_least=0)
    if faked is not None:
        return tuple((str(index), f"fake GPU {index}") for index in range(faked))
    installed = _installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple((str(index), name) for index, (_, name) in enumerate(installed))
    chosen = []
    for entry in (part.strip() for part in visible.split(",")):
        found = [
            name
            for index, (uuid, name) in enumerate(installed)
            if entry and (entry == str(index) or uuid.startswith(entry))
        ]
        if not found:  # as CUDA does: the first entry that is no device ends the list
            break
        chosen.append((entry, found[0]))
    return tuple(chosen)


def cores() -> int:
    """Return how many cores this process may use: its affinity, cut by a container's quota."""
    faked = _faked("COURSE_FAKE_CORES", at_least=1)
    if faked is not None:
        return faked
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def memory_bytes() -> int:
    """Return how much memory this process may use, in bytes: the machine's, cut by a container's limit."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


@lru_cache(maxsize=1)
def _installed_gpus() -> tuple[tuple[str, str], ...]:
    """(uuid, name) of each GPU; asking the driver's tool keeps CUDA out of this process."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid,name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if listed.returncode:
        return ()
    rows = (line.split(",", 1) for line in listed.stdout.splitlines() if "," in line)
    return tuple((uuid.strip(), name.strip()) for uuid, name in rows)


def _faked(variable: str, at_least: int) -> int | None:
    text = os.environ.get(variable, "")
    if not text:
        return None
    if not text.isdigit() or int(text) < at_least:
        raise BadRequest(f"{variable}={text!r}: it takes a whole number of at least {at_least}")
    return int(text)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _count(number: int, noun: str) -> str:
    shown = "no" if number == 0 else str(number)
    return f"{shown} {noun}{'' if number == 1 else 's'}"
