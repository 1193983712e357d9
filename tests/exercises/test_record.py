"""The record of progress survives crashes, broken files, read-only folders and two notebooks at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_utils import hint, predict, progress
from course_utils.exercises import record


def test_it_is_kept_where_course_progress_says(progress_file):
    predict("lost_updates", 4)
    assert json.loads(progress_file.read_text())["predictions"]["lost_updates"]["value"] == 4


def test_without_that_it_lies_in_the_users_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_PROGRESS")
    monkeypatch.delenv("COURSE_PLAIN")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert record.where() == tmp_path / "course_utils" / "progress.json"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert record.where() == tmp_path / ".local" / "share" / "course_utils" / "progress.json"


def test_on_kaggle_it_lies_among_the_outputs_that_kaggle_keeps(monkeypatch):
    monkeypatch.delenv("COURSE_PROGRESS")
    monkeypatch.delenv("COURSE_PLAIN")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert record.where() == Path("/kaggle/working/progress.json")


def test_a_plain_execution_neither_reads_nor_writes_a_file(monkeypatch):
    monkeypatch.delenv("COURSE_PROGRESS")
    assert record.where() is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": 99, "exercises": {}, "predictions": {}}', '{"format": 1, "exercises": 3}', "\x00\xff"],
)
def test_a_file_that_cannot_be_read_is_kept_aside_and_a_new_one_begun(content, progress_file, capsys):
    progress_file.write_text(content, encoding="latin-1")
    predict("lost_updates", 4)
    said = capsys.readouterr().out
    aside = progress_file.with_name("progress.json.unreadable-1")
    assert f"It is kept as {aside}; a new one has begun." in said
    assert aside.read_text(encoding="latin-1") == content
    assert json.loads(progress_file.read_text())["predictions"]["lost_updates"]["value"] == 4
    predict("lost_updates", 5)
    assert "unreadable" not in capsys.readouterr().out


def test_two_broken_files_are_both_kept(progress_file):
    for _ in range(2):
        progress_file.write_text("{")
        predict("lost_updates", 4)
    assert progress_file.with_name("progress.json.unreadable-2").exists()


def test_where_nothing_can_be_written_it_lasts_as_long_as_the_kernel(monkeypatch, tmp_path, capsys):
    blocked = tmp_path / "a file" / "progress.json"
    blocked.parent.write_text("no folder")
    monkeypatch.setenv("COURSE_PROGRESS", str(blocked))
    predict("lost_updates", 4)
    said = capsys.readouterr().out
    assert f"Your progress cannot be kept in {blocked}" in said
    assert "it lasts as long as this kernel" in said
    predict("lost_updates")
    assert "Your prediction: 4" in capsys.readouterr().out


def test_a_write_that_fails_half_way_leaves_the_old_file(progress_file, monkeypatch):
    predict("lost_updates", 4)
    before = progress_file.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    predict("lost_updates", 5)
    assert progress_file.read_bytes() == before
    assert sorted(path.name for path in progress_file.parent.iterdir()) == ["progress.json", "progress.lock"]


def test_two_notebooks_at_once_lose_nothing(progress_file):
    code = (
        "from course_utils.exercises import record\n"
        "for i in range(40):\n"
        "    record.current().change(lambda kept: kept['predictions'].update({'NAME%d' % i: {'value': i}}))"
    )
    environment = {**os.environ, "COURSE_PROGRESS": str(progress_file)}
    running = [subprocess.Popen([sys.executable, "-c", code.replace("NAME", name)], env=environment) for name in "abc"]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(json.loads(progress_file.read_text())["predictions"]) == 120


def test_odd_values_in_a_readable_file_do_not_stop_a_hint(progress_file, capsys):
    kept = {"format": 1, "exercises": {"introduce": {"hints": "many"}}, "predictions": {}}
    progress_file.write_text(json.dumps(kept))
    hint("introduce")
    assert "Hint 1 of 3" in capsys.readouterr().out


def test_progress_counts_what_passed_once_and_predictions_made(progress_file, capsys):
    kept = {
        "format": 1,
        "exercises": {
            "assign_rank": {"passed": True, "verdict": "failed"},
            "register": {"passed": False, "verdict": "failed"},
            "of another release": {"passed": True},
        },
        "predictions": {"finishers": {"value": 2, "unit": ""}},
    }
    progress_file.write_text(json.dumps(kept))
    progress()
    assert capsys.readouterr().out.splitlines() == [
        "Progress: 5 of 23 points",
        "  lesson                   exercises done  points",
        "  01 ranks and rendezvous  2 of 8          5 of 23  and one essay, read by a person",
    ]


def test_progress_adds_up_the_lessons_begun(capsys):
    predict("process_ids", 5)
    predict("finishers", 0)
    capsys.readouterr()
    progress()
    headline, _, *rows = capsys.readouterr().out.splitlines()
    assert headline == "Progress: 2 of 28 points"
    assert [row.split()[0] for row in rows] == ["00", "01"]


def test_before_anything_was_done_progress_says_so(capsys):
    progress()
    assert capsys.readouterr().out == "Progress: nothing yet\n"


def test_progress_says_where_the_record_is_kept(progress_file, capsys, monkeypatch):
    monkeypatch.delenv("COURSE_PLAIN")
    progress()
    assert f"Kept in {progress_file}." in capsys.readouterr().out


def test_what_passed_once_stays_passed(progress_file):
    from course_utils.exercises import answers, judging, registry

    exercise = registry.all_exercises()["introduce"]
    for state in ("passed", "failed", "not attempted"):
        answers._note(judging.Verdict(exercise, state))
    kept = json.loads(progress_file.read_text())["exercises"]["introduce"]
    assert kept == {"passed": True, "verdict": "not attempted", "attempts": 2}
