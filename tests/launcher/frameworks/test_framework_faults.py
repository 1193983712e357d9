"""The random faults of faults.py in the ranks of Horovod and TensorFlow, which wait for each other in compiled code."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launcher.faults import soak

from . import meetings


@pytest.mark.usefixtures("horovod_is_there")
def test_every_fault_of_a_horovod_rank_ends_in_its_verdict(count: Callable[[int, int], int]) -> None:
    soak("horovod", meetings.horovod, rounds=count(30, 150), seconds=25)


@pytest.mark.usefixtures("tensorflow_is_there")
def test_every_fault_of_a_tensorflow_worker_ends_in_its_verdict(count: Callable[[int, int], int]) -> None:
    soak("tensorflow", meetings.tensorflow, rounds=count(20, 100), seconds=25, patience=8)
