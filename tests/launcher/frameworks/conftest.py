"""Tests of ranks that need a framework besides torch; they have nothing to do with the kernel's age and run once."""

from __future__ import annotations

import importlib.util

import cloudpickle
import pytest

from tests.conftest import go_without

from . import ends, meetings

for shared in (ends, meetings):
    cloudpickle.register_pickle_by_value(shared)  # no rank imports the tests


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
