"""The benchmark of frameworks and staying ranks: which times meet the targets."""

from __future__ import annotations

import pytest

from tests.benchmarks.bench_frameworks import HOROVOD, HOROVOD_RUN, POPEN, STAYING, TENSORFLOW, missed, table

GOOD = {
    TENSORFLOW: [0.4] * 3,
    POPEN: [4.1] * 3,
    HOROVOD: [0.2] * 3,
    HOROVOD_RUN: [1.1] * 3,
    STAYING: [0.004] * 90 + [0.014] * 10,
}


def test_good_times_miss_nothing() -> None:
    assert missed(GOOD) == []


@pytest.mark.parametrize(
    ("name", "seconds", "said"),
    [
        (POPEN, [3.9] * 3, "9.8 times"),
        (HOROVOD_RUN, [0.9] * 3, "4.5 times"),
        (STAYING, [0.006] * 100, "median 6.0 ms"),
        (STAYING, [0.004] * 90 + [0.016] * 10, "95th percentile 16.0 ms"),
    ],
)
def test_each_target_can_be_missed(name: str, seconds: list[float], said: str) -> None:
    (miss,) = missed({**GOOD, name: seconds})
    assert name in miss
    assert said in miss


def test_what_was_not_measured_is_not_missed() -> None:
    assert missed({STAYING: GOOD[STAYING]}) == []


def test_the_table_is_in_milliseconds() -> None:
    assert table({TENSORFLOW: [0.4, 0.4, 0.4]}).splitlines()[-1].split() == [*TENSORFLOW.split(), "3", "400.0", "400.0"]
