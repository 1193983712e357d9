"""Hundreds of launches of torch's ranks with random faults; see faults.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from .faults import soak


def all_reduce() -> Callable[[], None]:
    return lambda: dist.all_reduce(torch.ones(100))


def test_every_fault_ends_in_its_verdict_in_time_and_leaves_nothing(count: Callable[[int, int], int]) -> None:
    soak("torch", all_reduce, rounds=count(120, 500), seconds=60)
