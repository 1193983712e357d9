"""After every simulation, torch.distributed is torch's own again and no rank's thread is left."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def nothing_of_a_simulation_is_left() -> Iterator[None]:
    """The names that ranks are given, the output, the random state and torch's threads are put back."""
    names = dict(vars(dist))
    output, threads = sys.stdout, torch.get_num_threads()
    yield
    assert {name for name, value in vars(dist).items() if names.get(name) is not value} == set()
    assert sys.stdout is output
    assert torch.get_num_threads() == threads
    assert [one.name for one in threading.enumerate() if "simulated" in one.name] == []
