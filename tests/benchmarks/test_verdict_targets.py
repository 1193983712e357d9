"""The verdict benchmark: what misses its target, and that every check is in it."""

from __future__ import annotations

from course_utils.exercises.registry import all_exercises
from tests.benchmarks.bench_verdict import AT_MOST, missed, right_answers


def test_a_slow_verdict_misses_the_target_and_a_quick_one_does_not() -> None:
    (miss,) = missed({"shift": AT_MOST - 0.1, "register": AT_MOST + 0.1})
    assert miss.startswith("a verdict on register takes 3.1 s")


def test_every_exercise_with_a_check_is_measured() -> None:
    assert sorted(name for name, _ in right_answers()) == sorted(
        name for name, exercise in all_exercises().items() if exercise.cases
    )
