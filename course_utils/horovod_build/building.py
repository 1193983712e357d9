"""One build: the source package from pip's index, changed as the recipe says, compiled, tried, and kept as a wheel.

Everything happens in one folder beside the wheels, under the lock of `wheels.one_at_a_time`. Build tools are put into
that folder too and seen through PYTHONPATH, so the environment's own setuptools and cmake stay what they are, and no
venv is needed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ..following import run_followed
from ..showing import Progress
from .needs import check_machine, jobs
from .pace import Pace, planned
from .recipe import HorovodBuildFailed, Recipe
from .wanted import Wanted
from .wheels import WORK
from .why import explain

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def build(recipe: Recipe, wanted: Wanted, folder: Path, progress: Progress) -> Path:
    """Build the wheel into `folder` and return it. Raises HorovodBuildFailed; an interruption leaves no process."""
    check_machine(folder)
    log = folder / f"horovod-{wanted.version}-{wanted.tag}.log"
    work = Path(tempfile.mkdtemp(prefix=WORK, dir=folder))
    try:
        with log.open("wb") as file:
            return _Build(recipe, wanted, work, file, progress).wheel(folder)
    except _Failed as failure:
        raise HorovodBuildFailed(explain(failure.step, log), log) from None
    except OSError as error:
        raise HorovodBuildFailed(
            f"the build of Horovod stopped: {error}\nEverything that was printed: {log}", log
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Build:
    """The steps of one build in the folder `work`; what they print goes to `log`."""

    def __init__(self, recipe: Recipe, wanted: Wanted, work: Path, log: BinaryIO, progress: Progress) -> None:
        self._recipe = recipe
        self._wanted = wanted
        self._work = work
        self._log = log
        self._progress = progress
        self._jobs = jobs()
        self._tools = work / "tools"
        self._source = work / f"horovod-{recipe.version}"
        self._environment = self._as_the_build_sees_it()

    def wheel(self, folder: Path) -> Path:
        """Fetch, change, compile and try Horovod, and put its wheel into `folder`."""
        self._fetch()
        for patch in self._recipe.patches:
            patch.apply(self._source)
        self._compile()
        self._try()
        (wheel,) = (self._source / "dist").glob(self._wanted.pattern)
        kept = folder / wheel.name
        wheel.replace(kept)  # at once and whole: both are on one file system
        return kept

    def _fetch(self) -> None:
        if self._recipe.tools:
            self._progress.step("Fetching the build tools")
            self._run("fetch", *_PIP, "install", "--target", str(self._tools), *self._recipe.tools)
        self._progress.step("Fetching Horovod's source")
        wanted = self._work / "wanted.txt"
        wanted.write_text(f"horovod=={self._recipe.version} --hash=sha256:{self._recipe.sha256}\n")
        as_source = ("--no-deps", "--no-binary", "horovod", "--no-build-isolation")
        self._run("fetch", *_PIP, "download", *as_source, "--dest", str(self._work), "--requirement", str(wanted))
        with tarfile.open(next(self._work.glob("horovod-*.tar.gz"))) as archive:
            archive.extractall(self._work, filter="data")

    def _compile(self) -> None:
        self._progress.step("Preparing to compile")
        pace: Pace | None = None

        def follow(line: str) -> None:
            nonlocal pace
            if not line.startswith("["):  # "[ 12%] Building ..."
                return
            if pace is None:
                self._progress.step("Compiling")
                pace = Pace(planned(self._source / "build"), self._jobs)
            pace.see(line)
            self._progress.part(pace.part())

        command = (sys.executable, "setup.py", "-q", "bdist_wheel", "--build-number", self._wanted.tag)
        self._run("compile", *command, folder=self._source, follow=follow)

    def _try(self) -> None:
        self._progress.step("Trying it")
        frameworks = ["horovod.torch"] + ["horovod.tensorflow"] * bool(self._wanted.tensorflow)
        (library,) = (self._source / "build").glob("lib*")
        self._run("try", sys.executable, "-c", f"import {', '.join(frameworks)}", folder=library)

    def _as_the_build_sees_it(self) -> dict[str, str]:
        """This environment without what would change the build, and with the recipe's options."""
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HOROVOD_", "MAKE", "MFLAGS", "CMAKE")) and name != "PYTHONSAFEPATH"
        }
        linking = [ours.get("LDFLAGS"), None if sys.platform == "darwin" else self._recipe.linking]
        return {
            **ours,
            **dict(self._recipe.options),
            "LDFLAGS": " ".join(filter(None, linking)),
            "HOROVOD_WITH_TENSORFLOW" if self._wanted.tensorflow else "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_CMAKE": str(self._tools / "bin" / "cmake"),
            "MAKEFLAGS": f"-j{self._jobs}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self._tools), ours.get("PYTHONPATH")])),
            "TMPDIR": str(self._work),
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

    def _run(
        self, step: str, *command: str, folder: Path | None = None, follow: Callable[[str], None] | None = None
    ) -> None:
        """Run `command`, give each of its lines to `follow`. Raises _Failed where it does not end well."""
        self._log.write(f"$ {' '.join(command)}\n".encode())
        if run_followed(
            command, follow, self._progress.tick, log=self._log, folder=folder, environment=self._environment
        ):
            raise _Failed(step)


class _Failed(Exception):
    """A process of the build failed; `step` says in which step: fetch, compile or try."""

    def __init__(self, step: str) -> None:
        self.step = step
        super().__init__(step)
