"""The ring benchmark's verdicts: which ratios meet the targets, and that it runs the lesson's own rings."""

from __future__ import annotations

import pytest

from course_utils import launch
from tests.benchmarks.bench_ring import AT_MOST, FRAMEWORK, PLAIN, SEGMENTED, contenders, in_turns, missed, table

GOOD = {key: target - 0.01 for key, target in AT_MOST.items()}


def test_good_ratios_miss_nothing() -> None:
    assert missed(GOOD) == []


@pytest.mark.parametrize(("name", "world"), list(AT_MOST))
def test_each_target_can_be_missed(name: str, world: int) -> None:
    (miss,) = missed({**GOOD, (name, world): AT_MOST[name, world] + 0.01})
    assert f"{name} at {world} ranks" in miss


def test_the_table_has_median_ratio_and_target() -> None:
    line = table(2, {FRAMEWORK: 0.05, PLAIN: 0.06}, {FRAMEWORK: 0.1, PLAIN: 0.1}).splitlines()[-1]
    assert line.split() == ["plain", "ring", "60.0", "ms", "1.20", "1.70", "100.0", "ms", "1.00"]


@pytest.mark.parametrize("copy", [False, True])
def test_every_contender_takes_its_turns_and_sums(copy: bool) -> None:
    seconds = launch(in_turns, contenders(), 4_000, 2, copy, nprocs=3).results[0]
    assert {name: len(times) for name, times in seconds.items()} == {FRAMEWORK: 2, PLAIN: 2, SEGMENTED: 2}


def test_a_wrong_sum_is_no_time() -> None:
    with pytest.raises(Exception, match="idle: the sum is wrong"):
        launch(in_turns, {"idle": lambda tensor: None}, 4_000, 1, False, nprocs=2)
