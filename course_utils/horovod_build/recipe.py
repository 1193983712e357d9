"""What makes Horovod's last release build against today's frameworks: its source, the changes to it, the options."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ..errors import CourseError


class HorovodBuildFailed(CourseError):
    """Horovod could not be built or installed; the message says why, where the log is and what to do.

    `log` is the file with everything that the build printed, None where nothing had been run yet.
    """

    def __init__(self, message: str, log: Path | None = None) -> None:
        self.log = log
        super().__init__(message)


@dataclass(frozen=True)
class Patch:
    """One change to the source package: in `file`, the text `old`, which stands there once, becomes `new`."""

    file: str
    old: str
    new: str

    def apply(self, source: Path) -> None:
        """Change the file below `source`. Raises HorovodBuildFailed where the text is not there exactly once."""
        path = source / self.file
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise HorovodBuildFailed(f"{self._unknown()} has no file {self.file}") from None
        found = text.count(self.old)
        if found != 1:
            raise HorovodBuildFailed(f"{self._unknown()} has {found} times, not once, in {self.file}:\n  {self.old}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")

    @staticmethod
    def _unknown() -> str:
        return "this source package of Horovod is not the one that the course knows how to build: it"


@dataclass(frozen=True)
class Recipe:
    """How one release is built.

    `options` are environment variables, `linking` what GNU's linker is told and `tools` what pip brings, all for the
    build alone; `requires` is needed to run Horovod.
    """

    version: str
    sha256: str
    patches: tuple[Patch, ...]
    options: tuple[tuple[str, str], ...]
    linking: str
    tools: tuple[str, ...]
    requires: tuple[str, ...]

    def digest(self) -> str:
        """Return a hash of the whole recipe: a wheel of another recipe is another wheel."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


_PROJECT = "${PROJECT_SOURCE_DIR}"
_FLAGS = '"${CMAKE_CXX_FLAGS_RELWITHDEBINFO}"'

HOROVOD = Recipe(
    version="0.28.1",
    sha256="92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0",
    patches=(
        # torch since 2.1 and the abseil of TensorFlow need C++17 (horovod issues 3941 and 3996). Without run paths the
        # wheel names no folder of the environment that it was built in: Horovod imports each framework first.
        Patch("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)\nset(CMAKE_SKIP_RPATH ON)"),
        Patch("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
        # Debug symbols make the build a third slower and the wheel twenty times as large.
        Patch(
            "CMakeLists.txt",
            f'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO {_FLAGS})',
            f'string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO {_FLAGS})',
        ),
        # A cache may lie below a folder with a space in its name.
        Patch(
            "CMakeLists.txt",
            "-Wl,--version-script=${CMAKE_SOURCE_DIR}/horovod.lds",
            "-Wl,--version-script='${CMAKE_SOURCE_DIR}/horovod.lds'",
        ),
        # It includes a header, highwayhash's, that TensorFlow's wheel lacks; XLA's collectives are not needed.
        Patch(
            "horovod/tensorflow/CMakeLists.txt",
            f'list(APPEND TF_SOURCES "{_PROJECT}/horovod/tensorflow/xla_mpi_ops.cc")',
            "",
        ),
        # Python 3.12 has no distutils any more.
        Patch(
            "horovod/torch/CMakeLists.txt",
            "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
            "import sysconfig; print(sysconfig.get_path('include'))",
        ),
        # A CUDA build of torch beside an incomplete CUDA toolkit stops the configuration, and these are CPU operations.
        Patch(
            "cmake/Modules/FindPytorch.cmake",
            'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)',
            "set(Pytorch_CUDA FALSE)",
        ),
    ),
    options=(
        ("HOROVOD_WITH_PYTORCH", "1"),
        ("HOROVOD_WITHOUT_MXNET", "1"),
        ("HOROVOD_WITH_GLOO", "1"),
        ("HOROVOD_WITHOUT_MPI", "1"),
        ("HOROVOD_WITHOUT_NVTX", "1"),
    ),
    linking="-Wl,--as-needed,--strip-all",
    tools=("cmake>=3.18,<4", "setuptools>=70.1,<80", "packaging", "cffi", "cloudpickle", "psutil", "pyyaml"),
    requires=("cloudpickle", "psutil", "pyyaml", "packaging", "cffi"),
)
