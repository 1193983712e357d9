"""The commands: verify on the course's own editions, grade on a folder, and what both say about trust."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from course_utils.exercises.registry import LESSONS
from course_utils.grading import marking
from course_utils.grading.__main__ import main
from course_utils.grading.verification import verify
from tests.grading.returned import (
    BRING_HOME,
    IMPORTS,
    INTRODUCE,
    PROCESS_IDS,
    RIGHT_BRING_HOME,
    RIGHT_INTRODUCE,
    SEED,
    WRONG_INTRODUCE,
    hand_in,
    handed_out,
)

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
BUILT = [lesson for lesson in LESSONS if list((NOTEBOOKS / "solutions").glob(f"{lesson}_*.ipynb"))]


@pytest.mark.parametrize(
    "lesson", [pytest.param(lesson, marks=[pytest.mark.long] * (lesson not in ("00", "01"))) for lesson in BUILT]
)
def test_G15_a_solved_edition_scores_full_marks_and_an_untouched_one_nothing(lesson: str, monkeypatch) -> None:
    monkeypatch.setattr(marking, "PATIENCE", 30.0)  # nothing here gets stuck: on a busy machine it may only be slow
    results = dict(verify(NOTEBOOKS, [lesson], SEED))
    assert results == {f"lesson {lesson}, solved": [], f"lesson {lesson}, untouched": []}


def test_verify_names_what_is_not_as_it_should_be_and_fails(tmp_path, capsys, monkeypatch) -> None:
    notebooks = handed_out(tmp_path / "notebooks")
    hand_in(
        notebooks / "solutions" / "00_start_here.ipynb",
        IMPORTS,
        INTRODUCE.format(WRONG_INTRODUCE),
        BRING_HOME.format(RIGHT_BRING_HOME),
    )
    assert main(["verify", "--release", str(notebooks), "--seed", "3"]) == 1
    shown = capsys.readouterr()
    assert "lesson 00, solved: WRONG" in shown.out
    assert "lesson 00, untouched: as it should be" in shown.out
    assert "  introduce: failed, not passed. Given nprocs=" in shown.err
    assert "  process_ids: missing, not passed." in shown.err
    assert "bring_home" not in shown.err
    assert "solutions/01_*.ipynb: 0 notebooks, not one" in shown.err


def test_grade_writes_the_table_and_says_what_it_does(tmp_path, capsys) -> None:
    hand_in(tmp_path / "in" / "ada.ipynb", IMPORTS, PROCESS_IDS.format("5"), INTRODUCE.format(RIGHT_INTRODUCE))
    (tmp_path / "in" / "bo.ipynb").write_bytes(b"")
    out = tmp_path / "in" / "marks.csv"
    out.write_text("of last week", encoding="utf-8")
    release = handed_out(tmp_path / "release")
    assert main(["grade", str(tmp_path / "in"), "--out", str(out), "--seed", "11", "--release", str(release)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("For trusted submissions:")
    assert "Cases are drawn from seed 11" in shown
    assert re.search(r"\[1/2\] ada.ipynb: lesson 00 start here: 2 of \d+ points \(", shown)
    assert "[2/2] bo.ipynb: The file is empty." in shown
    with out.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    told = [(row["learner"], row["exercise"], row["verdict"], row["points"]) for row in rows]
    assert told[:2] == [("ada", "process_ids", "passed", "1"), ("ada", "introduce", "passed", "1")]
    assert {row[2:] for row in told[2:-1]} == {("missing", "0")}
    assert told[-1] == ("bo", "", "not graded", "")
    assert [path.name for path in (tmp_path / "in").iterdir() if path.name.startswith(".")] == []


def test_one_lesson_alone_can_be_graded(tmp_path) -> None:
    hand_in(tmp_path / "in" / "ada.ipynb", PROCESS_IDS.format("5"))
    out = tmp_path / "marks.csv"
    assert main(["grade", str(tmp_path / "in"), "--out", str(out), "--lesson", "01"]) == 0
    assert "It is lesson 00; asked for: 01." in out.read_text(encoding="utf-8-sig")


@pytest.mark.parametrize("arguments", [["--help"], ["grade", "--help"], ["verify", "--help"]])
def test_help_says_that_it_is_for_trusted_submissions(arguments, capsys) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "trusted submissions" in " ".join(capsys.readouterr().out.split())


def test_a_call_that_cannot_be_carried_out_is_answered_in_a_line(tmp_path, capsys) -> None:
    assert main(["grade", str(tmp_path / "nowhere"), "--out", str(tmp_path / "marks.csv")]) == 2
    assert main(["grade", str(tmp_path), "--out", str(tmp_path / "nowhere" / "marks.csv")]) == 2
    assert [line.partition(" is no folder")[1] for line in capsys.readouterr().err.splitlines()] == [
        " is no folder"
    ] * 2


def test_an_interrupted_batch_keeps_what_was_done(tmp_path, monkeypatch) -> None:
    for name in ("ada", "bo"):
        hand_in(tmp_path / "in" / f"{name}.ipynb", PROCESS_IDS.format("5"))
    from course_utils.grading import batch

    whole = batch._rows

    def interrupted(one, *rest):
        if one.learner == "bo":
            raise KeyboardInterrupt
        return whole(one, *rest)

    monkeypatch.setattr(batch, "_rows", interrupted)
    assert main(["grade", str(tmp_path / "in"), "--out", str(tmp_path / "marks.csv")]) == 130
    assert "ada" in (tmp_path / "marks.csv").read_text(encoding="utf-8-sig")
    assert json.loads((tmp_path / "in" / "ada.ipynb").read_text(encoding="utf-8"))
