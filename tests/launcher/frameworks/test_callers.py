"""Whoever calls, and whatever is called: the same with torch's, Horovod's and TensorFlow's ranks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from course_utils import launch
from course_utils.errors import BadRequest, WorkerFailed
from tests.kernels import Kernel
from tests.launcher.conftest import within_namespace


@pytest.fixture(params=["torch", "horovod", "tensorflow"])
def framework(request: pytest.FixtureRequest) -> str:
    if request.param != "torch":
        request.getfixturevalue(f"{request.param}_is_there")
    return str(request.param)


def rank() -> int:
    return int(os.environ["RANK"])


class Adds:
    def __init__(self, more: int) -> None:
        self.more = more

    def __call__(self, number: int) -> int:
        return number + self.more + rank()

    method = __call__


CALLABLES: dict[str, Callable[[int], int]] = {
    "a lambda": lambda number: number + 1 + rank(),
    "a partial": functools.partial(lambda more, number: number + more + rank(), 1),
    "an object": Adds(1),
    "a method": Adds(1).method,
}


@pytest.mark.parametrize("what", CALLABLES)
def test_L22_whatever_can_be_called_can_be_launched(framework: str, what: str) -> None:
    assert launch(CALLABLES[what], 10, framework=framework).results == [11, 12]


def test_L22_what_only_makes_a_generator_or_a_coroutine_is_refused(framework: str) -> None:
    def generator() -> Any:
        yield 1

    async def coroutine() -> int:
        return 1

    for fn in (generator, coroutine):
        with pytest.raises(BadRequest, match=fn.__name__):
            launch(fn, framework=framework)


def test_threads_may_launch_at_the_same_time(framework: str) -> None:
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = launch(lambda: (number, rank()), framework=framework).results

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {number: [(number, 0), (number, 1)] for number in range(3)}


def test_a_cell_that_awaits_may_launch(framework: str, own_kernel: Kernel) -> None:
    own_kernel.run("import asyncio, os\nfrom course_utils import launch")
    own_kernel.run(
        f"await asyncio.sleep(0)\nfound = launch(lambda: os.environ['RANK'], framework={framework!r}).results"
    )
    assert own_kernel.value("found") == "['0', '1']"
    own_kernel.run(
        "async def cell():\n    await asyncio.sleep(0)\n"
        f"    return launch(lambda: os.environ['RANK'], framework={framework!r}).results\nfound = await cell()"
    )
    assert own_kernel.value("found") == "['0', '1']"


SCRIPT = """\
import os
from course_utils import launch

def worker():
    return os.environ["RANK"], os.path.basename(os.getcwd()), bytes(5_000_000)

print([result[:2] for result in launch(worker, framework={framework!r}).results])
"""


def script(framework: str, folder: Path, before: str = "", within: Sequence[str] = (), **variables: str) -> str:
    """What a script without a guard, run in a folder with an odd name, prints."""
    folder = folder / "a folder; with 'odd' characters"
    folder.mkdir()
    (folder / "script.py").write_text(before + SCRIPT.format(framework=framework))
    done = subprocess.run(
        [*within, sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


RESULTS = str([(str(number), "a folder; with 'odd' characters") for number in range(2)])


def test_a_script_needs_no_guard_and_no_folder_of_its_own(framework: str, tmp_path: Path) -> None:
    assert script(framework, tmp_path) == RESULTS


def test_few_descriptors_are_enough(framework: str, tmp_path: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    assert script(framework, tmp_path, limit) == RESULTS


def test_shared_memory_of_a_megabyte_is_enough(framework: str, tmp_path: Path) -> None:
    within = within_namespace(
        "--mount",
        "mount -t tmpfs -o size=1m tmpfs /dev/shm",
        without="a process may not mount a small /dev/shm here",
    )
    assert script(framework, tmp_path, within=within) == RESULTS


def test_a_temporary_folder_that_does_not_exist_is_done_without(framework: str, tmp_path: Path) -> None:
    assert script(framework, tmp_path, TMPDIR=str(tmp_path / "gone")) == RESULTS


def test_what_changes_between_launches_reaches_the_ranks(
    framework: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "appeared.py").write_text("VALUE = 5\n")

    def worker() -> Any:
        import appeared

        return appeared.VALUE, os.environ["OF_THE_COURSE"], os.getcwd()

    for value in ("first", "second"):
        monkeypatch.setenv("OF_THE_COURSE", value)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.chdir(tmp_path)
        assert launch(worker, framework=framework).results == [(5, value, str(tmp_path))] * 2


def test_an_exception_that_cannot_be_rebuilt_is_told_in_words(framework: str) -> None:
    class Odd(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"{first} and {second}")

        def __reduce__(self) -> Any:
            raise TypeError("not to be pickled")

    def worker() -> None:
        raise Odd(1, 2)

    with pytest.raises(WorkerFailed) as caught:
        launch(worker, framework=framework)
    assert (caught.value.exception_type, caught.value.exception_message) == ("Odd", "1 and 2")


def test_L10_a_result_of_500_MB_comes_back(framework: str) -> None:
    def worker() -> Any:
        return np.arange(62_500_000) if rank() == 1 else None

    nothing, large = launch(worker, framework=framework).results
    assert nothing is None
    assert large.nbytes == 500_000_000
    assert np.array_equal(large[::999_983], np.arange(0, 62_500_000, 999_983))
