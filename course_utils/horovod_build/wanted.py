"""Which Horovod fits this environment, under what name its wheel is kept, and whether it is installed already.

Nothing here imports a framework: a notebook that has Horovod already waits milliseconds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .recipe import HorovodBuildFailed, Recipe

# A wheel's build tag begins with a digit; this one tells the course's wheels from any other.
_TAG = "1c"


@dataclass(frozen=True)
class Wanted:
    """One build: Horovod's version and recipe, the exact versions of the frameworks, Python and the machine.

    `tensorflow` is None where TensorFlow is not installed; `python` is the ending of Python's extension modules, such
    as ".cpython-311-x86_64-linux-gnu.so"; `libc` the C library and its version.
    """

    version: str
    recipe: str
    torch: str
    tensorflow: str | None
    python: str
    libc: str

    @property
    def tag(self) -> str:
        """The wheel's build tag: a hash of everything above."""
        return _TAG + hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    @property
    def pattern(self) -> str:
        """What the file name of a wheel that fits looks like, as a glob."""
        return f"horovod-{self.version}-{self.tag}-*.whl"

    def __str__(self) -> str:
        frameworks = f"torch {self.torch}" + (f" and TensorFlow {self.tensorflow}" if self.tensorflow else "")
        return f"Horovod {self.version} for {frameworks}"


def wanted(recipe: Recipe) -> Wanted:
    """Return the build that fits the frameworks installed here. Raises HorovodBuildFailed where torch is missing."""
    torch = _version("torch")
    if torch is None:
        raise HorovodBuildFailed("Horovod is built for the torch that is installed, and none is: install torch first.")
    return Wanted(
        version=recipe.version,
        recipe=recipe.digest(),
        torch=torch,
        tensorflow=_version("tensorflow") or _version("tensorflow-cpu"),
        python=str(sysconfig.get_config_var("EXT_SUFFIX")),
        libc=" ".join(platform.libc_ver()),
    )


def is_installed(build: Wanted) -> bool:
    """Whether `import horovod` gives this very build: the course's own, or another one for the same versions."""
    try:
        found = importlib.metadata.distribution("horovod")
    except importlib.metadata.PackageNotFoundError:
        return False
    libraries = [f"horovod/torch/mpi_lib_v2{build.python}"]
    if build.tensorflow:
        libraries.append(f"horovod/tensorflow/mpi_lib{build.python}")
    if not all(Path(str(found.locate_file(library))).is_file() for library in libraries):
        return False
    tag = re.search(rf"^Build: ({_TAG}\w+)$", found.read_text("WHEEL") or "", re.MULTILINE)
    if tag:
        return tag[1] == build.tag
    return found.version.partition("+")[0] == build.version and _built_for(found) == (
        _public(build.torch),
        _public(build.tensorflow),
    )


def _built_for(found: importlib.metadata.Distribution) -> tuple[str | None, str | None]:
    """What a Horovod that somebody else built says it was built for: the versions of torch and TensorFlow."""
    try:
        noted = json.loads(Path(str(found.locate_file("horovod/metadata.json"))).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, None
    return _public(noted.get("pytorch")), _public(noted.get("tensorflow"))


def _public(version: str | None) -> str | None:
    # torch calls itself 2.10.0+cu128 where its package says 2.10.0
    return version.partition("+")[0] if version else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
