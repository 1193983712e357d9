"""The benchmark's verdicts: which medians meet the targets."""

from __future__ import annotations

import pytest

from tests.benchmarks.bench_launch import FORK, OURS, SPAWN, TORCHRUN, missed, table

GOOD = {OURS: 0.2, SPAWN: 3.1, TORCHRUN: 3.1, FORK: 0.14}


def test_good_medians_miss_nothing() -> None:
    assert missed(GOOD) == []


@pytest.mark.parametrize(("name", "seconds"), [(SPAWN, 2.9), (TORCHRUN, 2.9), (FORK, 0.13)])
def test_each_target_can_be_missed(name: str, seconds: float) -> None:
    (miss,) = missed({**GOOD, name: seconds})
    assert name in miss


def test_the_table_has_median_range_and_ratio() -> None:
    line = table({OURS: [0.2, 0.1, 0.4], SPAWN: [3.0, 2.0, 7.0]}).splitlines()[-1]
    assert line.split() == [SPAWN, "3.000", "2.000", "to", "7.000", "15.00"]
