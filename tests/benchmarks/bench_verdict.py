"""How long a learner waits for a verdict on a right answer, for every check, once warm; `make bench` runs it.

The right answers are those of tests/exercises, the first of each check. A launch of as many bare ranks is timed in the
same turns: what a verdict takes beyond it is judging and the answer's own work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
AT_MOST = 3.0  # seconds, the median


def right_answers() -> Iterator[tuple[str, Any]]:
    """Each exercise that has a check, with a right answer, lesson by lesson."""
    from tests.exercises.judged import LESSONS, families_of

    for lesson in LESSONS:
        for exercise, family in families_of(lesson).items():
            yield exercise, family.right[0]


def seconds_of(call: Callable[[], Any]) -> float:
    """The seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def launch_each(sizes: Iterable[int]) -> None:
    """Launch as many ranks as a verdict does, with nothing to do."""
    from course_utils import launch

    for nprocs in sizes:
        launch(int, nprocs=nprocs, backend="gloo")


def missed(medians: Mapping[str, float]) -> list[str]:
    """A line for each exercise whose verdict takes longer than it may."""
    return [
        f"a verdict on {exercise} takes {seconds:.1f} s; at most {AT_MOST:g} s are allowed"
        for exercise, seconds in medians.items()
        if seconds > AT_MOST
    ]


def main() -> int:
    """Measure every check; return 1 if one misses the target."""
    sys.path.insert(0, str(ROOT))
    from tests.exercises.judged import verdict_on

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="verdicts on each exercise (default: 5)")
    turns = parser.parse_args().turns
    medians = {}
    print(f"{'a verdict on':24} {'median':>8} {'slowest':>9} {'launches alone':>15}")
    for exercise, answer in right_answers():
        verdict = verdict_on(exercise, answer)  # warms up
        if verdict.state != "passed":
            print(f"{exercise}: a right answer is judged {verdict.state!r}")
            return 1
        calls = (partial(verdict_on, exercise, answer), partial(launch_each, verdict.sizes))
        both = [[seconds_of(call) for call in calls] for _ in range(turns)]
        times, launches = zip(*both, strict=True)
        medians[exercise] = statistics.median(times)
        told = f"{medians[exercise]:6.2f} s {max(times):7.2f} s {statistics.median(launches):13.2f} s"
        print(f"{exercise:24} {told}", flush=True)
    misses = missed(medians)
    print("\n".join(misses) if misses else "every target is met")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
