"""What the launcher's tests share: both ways to start ranks, a notebook in miniature, and a look at what is left behind."""

from __future__ import annotations

import contextlib
import linecache
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from course_utils import launcher
from tests.kernels import MARKER, Kernel, await_that, marked_processes


@pytest.fixture(scope="session", autouse=True)
def servers_end_with_the_tests() -> Iterator[None]:
    """After the last test, no process that the launcher ever started is left."""
    marker = uuid.uuid4().hex
    os.environ[MARKER] = marker
    yield
    launcher.shutdown()
    await_that(lambda: not marked_processes(marker), 5, "the last process to go")


@pytest.fixture(scope="module", autouse=True)
def test_modules_travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test module defines reaches ranks as what a notebook defines does, and no rank imports the tests."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(autouse=True)
def nothing_of_a_run_is_left() -> Iterator[None]:
    """After each test, the servers of this process have no child left."""
    yield
    await_that(lambda: not below_servers(), 5, f"these to go: {below_servers()}")


def below_servers() -> list[psutil.Process]:
    """Every process below the servers of this process: ranks, and what they started."""
    found = []
    for server in psutil.Process().children():
        try:
            if "course_utils.launcher.server" in " ".join(server.cmdline()):
                found += server.children(recursive=True)
        except psutil.Error:
            continue
    return found


def within_namespace(kind: str, first: str, without: str) -> list[str]:
    """What to put before a command that is to run in a namespace of its own, after the shell command `first`.

    `kind` is an option of unshare, such as "--uts". Skips the test with the reason `without` where that is not allowed.
    """
    for unshare in (["unshare", kind], ["unshare", "--map-root-user", kind]):
        within = [*unshare, "sh", "-c", f'{first} && exec "$@"', "sh"]
        with contextlib.suppress(OSError):
            if subprocess.run([*within, "true"], capture_output=True).returncode == 0:
                return within
    pytest.skip(without)


@pytest.fixture(params=["warm server", "fresh interpreters"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test twice: with ranks forked from the warm server, and with ranks that are fresh interpreters."""
    if request.param == "fresh interpreters":
        monkeypatch.setenv("COURSE_LAUNCHER", "subprocess")
    return str(request.param)


@pytest.fixture
def fresh_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks as fresh interpreters."""
    monkeypatch.setenv("COURSE_LAUNCHER", "subprocess")


class Notebook:
    """Runs source as cells run: in one `__main__`, from files that exist only in linecache."""

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        self._cells = 0

    def run(self, source: str) -> None:
        """Run the next cell."""
        self._cells += 1
        name = f"<ipython-input-{self._cells}-{uuid.uuid4().hex[:12]}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), self.variables)

    def __getitem__(self, name: str) -> Any:
        return self.variables[name]


@pytest.fixture
def notebook() -> Notebook:
    """A notebook in miniature."""
    return Notebook()


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A real kernel, shared by the tests that leave it as they found it."""
    with Kernel(tmp_path_factory.mktemp("shared-kernel")) as kernel:
        yield kernel


@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A real kernel for one test; its temporary files go to `tmp_path / "tmp"`."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with Kernel(tmp_path, {"TMPDIR": str(temporary)}) as kernel:
        yield kernel
