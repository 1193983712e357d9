"""What every test can ask for: a program of the system, and whether the long soaks run whole."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONG = os.environ.get("COURSE_LONG") == "1"
REQUIRE_ALL = os.environ.get("REQUIRE_ALL") == "1"

# A shell starts what it sends to the background with interrupts ignored, and children inherit that: tests send some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests of the imitation environment mean something only inside it; `make test` names them there.
collect_ignore = [] if Path(sys.prefix).name == ".venv-platforms" else ["platforms"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests marked `long` to `make test-long`."""
    if LONG:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def find_system(name: str) -> str:
    """Path of the program `name`; where it is absent, skip the test with the reason, or fail it under REQUIRE_ALL=1."""
    path = shutil.which(name)
    if path is None:
        go_without(f"needs {name}, which is not installed (.ci/run installs it)")
    return path


def go_without(reason: str) -> NoReturn:
    """Skip the test with the reason, or fail it under REQUIRE_ALL=1."""
    if REQUIRE_ALL:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def require_system() -> Callable[[str], str]:
    """`require_system("chromium")` gives the program's path, or ends the test with the reason."""
    return find_system


@pytest.fixture(scope="session")
def count() -> Callable[[int, int], int]:
    """`count(10, 100)`: 10 rounds of a soak in `make test`, 100 in `make test-long`."""
    return lambda reduced, whole: whole if LONG else reduced


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


def _need(package: str, how: str) -> None:
    if importlib.util.find_spec(package) is None:
        go_without(f"needs {package}, which is not installed ({how})")


@pytest.fixture(scope="session")
def tensorflow_is_there() -> None:
    """Skip, or under REQUIRE_ALL=1 fail, where TensorFlow is absent."""
    _need("tensorflow", "make test installs it")


@pytest.fixture(scope="session")
def horovod_is_there() -> None:
    """Skip, or under REQUIRE_ALL=1 fail, where Horovod has not been built."""
    _need("horovod", "python -m course_utils.horovod_build builds it")
