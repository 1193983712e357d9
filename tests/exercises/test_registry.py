"""The registry and the lessons' sources describe the same exercises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from course_utils.exercises import registry

MARKER = re.compile(r"^# (?:<!-- )?@exercise (\w+) points=(\d+) minutes=(\d+)(?: kind=(\w+))?(?: -->)?$", re.MULTILINE)


@pytest.mark.parametrize("lesson", registry.LESSONS)
def test_names_kinds_and_points_are_those_of_the_lessons_markers_in_their_order(lesson, root: Path):
    (source,) = (root / "notebooks" / "source").glob(f"{lesson}_*.py")
    text = source.read_text(encoding="utf-8")
    marked = [(name, kind or "implement", int(points)) for name, points, _, kind in MARKER.findall(text)]
    assert len(marked) == len(re.findall(r"^# (?:<!-- )?@exercise", text, re.MULTILINE))
    assert marked == [(e.name, e.kind, e.points) for e in registry.exercises_of(lesson)]


@pytest.mark.parametrize("lesson", registry.LESSONS)
def test_the_titles_of_lessons_are_those_of_their_sources(lesson, root: Path):
    (source,) = (root / "notebooks" / "source").glob(f"{lesson}_*.py")
    title = re.search(r"^# # (.+)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    assert title is not None
    named = registry.LESSONS[lesson]
    assert title[1] == f"{lesson} {named[0].upper()}{named[1:]}"


def test_a_name_belongs_to_one_lesson():
    names = [exercise.name for lesson in registry.LESSONS for exercise in registry.exercises_of(lesson)]
    assert len(names) == len(set(names))


def test_every_exercise_that_is_judged_has_hints_that_climb():
    judged = [exercise for exercise in registry.all_exercises().values() if exercise.kind in ("implement", "debug")]
    assert all(exercise.cases and len(exercise.hints) >= 3 for exercise in judged)
    assert all(len(set(exercise.hints)) == len(exercise.hints) for exercise in judged)


def test_a_lesson_has_one_essay():
    for lesson in registry.LESSONS:
        assert [exercise.kind for exercise in registry.exercises_of(lesson)].count("explain") == 1


def test_the_registry_loads_without_torch():
    load = "from course_utils.exercises import registry; registry.all_exercises()"
    code = f"{load}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
