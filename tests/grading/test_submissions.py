"""Whatever comes back from learners gets a score and a reason, and never stops the batch."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from course_utils.exercises.registry import all_exercises
from course_utils.grading import batch, table
from course_utils.grading.batch import Row, learner_of
from tests.grading.returned import (
    AVERAGE,
    BRING_HOME,
    ESSAY,
    IMPORTS,
    INTRODUCE,
    OPEN_INTRODUCE,
    PROCESS_IDS,
    RIGHT_BRING_HOME,
    RIGHT_INTRODUCE,
    SEED,
    SHIFT,
    UNTOUCHED,
    WRONG_INTRODUCE,
    by_exercise,
    cell,
    hand_in,
    handed_out,
    notebook,
    rows_of,
)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return handed_out(tmp_path / "release")


@pytest.fixture
def grade(tmp_path: Path, release: Path) -> Callable[..., dict[str, Row]]:
    """`grade(*cells)`: the rows of one notebook with these cells, by exercise."""

    def grade_one(*texts: str) -> dict[str, Row]:
        hand_in(tmp_path / "in" / "ada.ipynb", *texts)
        return by_exercise(rows_of(tmp_path / "in", release))

    return grade_one


# --- G1: cells copied, split, deleted, moved -------------------------------------------------------------------------


def test_G1_of_a_copied_cell_the_last_version_that_is_not_untouched_counts_and_the_reason_says_so(grade) -> None:
    wrong, right, untouched = (INTRODUCE.format(text) for text in (WRONG_INTRODUCE, RIGHT_INTRODUCE, OPEN_INTRODUCE))
    row = grade(IMPORTS, wrong, right, untouched)["introduce"]
    assert (row.verdict, row.points) == ("passed", 1)
    assert "2 cells answer it; the last one, cell 3, counts." in row.reason
    assert grade(IMPORTS, right, wrong)["introduce"].verdict == "failed"


def test_G1_a_deleted_exercise_is_missing(grade) -> None:
    row = grade(IMPORTS, PROCESS_IDS.format("5"))["introduce"]
    assert (row.verdict, row.points, row.out_of) == ("missing", 0, 1)


def test_G1_an_answer_in_a_new_cell_is_found(grade) -> None:
    row = grade(IMPORTS, INTRODUCE.format(OPEN_INTRODUCE), RIGHT_INTRODUCE)["introduce"]
    assert row.verdict == "passed"
    assert "Found in cell 3, outside the exercise's own cell." in row.reason


def test_G1_a_split_answer_whose_helper_stands_anywhere_in_the_notebook_is_whole(grade) -> None:
    split = "def introduce():\n    return told(dist)"
    helper = "def told(group):\n    return f'rank {group.get_rank()} of {group.get_world_size()}'"
    for cells in ([IMPORTS, helper, INTRODUCE.format(split)], [INTRODUCE.format(split), helper, IMPORTS]):
        assert grade(*cells)["introduce"].verdict == "passed"


def test_G1_code_pasted_above_the_marker_does_not_hide_it(grade) -> None:
    assert grade(f"import json\n{IMPORTS}\n\n" + INTRODUCE.format(RIGHT_INTRODUCE))["introduce"].verdict == "passed"


def test_G1_what_was_given_and_then_deleted_is_taken_from_the_release(grade) -> None:
    # the imports stand in the release alone
    assert grade(INTRODUCE.format(RIGHT_INTRODUCE))["introduce"].verdict == "passed"


# --- G2 and G3: files in every state ---------------------------------------------------------------------------------

PREDICTED = (IMPORTS, PROCESS_IDS.format("5"))


def with_duplicate_ids() -> dict[str, Any]:
    made = notebook(*PREDICTED)
    for one in made["cells"]:
        one["id"] = "the-same"
    return made


def with_everything_stripped() -> dict[str, Any]:
    return {"cells": [{"cell_type": "code", "source": text} for text in PREDICTED]}


def with_an_unknown_kernel() -> dict[str, Any]:
    return {**notebook(*PREDICTED), "metadata": {"kernelspec": {"name": "ir", "language": "R"}, "widgets": None}}


def with_ids_in_a_4_4_file() -> dict[str, Any]:
    return {**notebook(*PREDICTED), "nbformat_minor": 4}


def with_large_outputs() -> dict[str, Any]:
    made = notebook(*PREDICTED)
    made["cells"][0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "x" * 50_000_000}]
    return made


@pytest.mark.parametrize(
    "content",
    [
        *(notebook(*PREDICTED, minor=minor) for minor in range(6)),
        with_duplicate_ids(),
        with_everything_stripped(),
        with_an_unknown_kernel(),
        with_ids_in_a_4_4_file(),
        {"nbformat": 3, "worksheets": [{"cells": [{"cell_type": "code", "input": PREDICTED[1]}]}]},
    ],
    ids=[
        *(f"4.{minor}" for minor in range(6)),
        *["duplicate-ids", "stripped", "unknown-kernel", "ids-in-4.4", "nbformat-3"],
    ],
)
def test_G2_a_notebook_is_read_whatever_its_format_ids_and_metadata(tmp_path, release, content) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "ada.ipynb").write_text(json.dumps(content), encoding="utf-8")
    rows = by_exercise(rows_of(tmp_path / "in", release))
    assert (rows["process_ids"].verdict, rows["process_ids"].points) == ("passed", 1)


def test_G2_an_exercise_without_its_marker_is_known_by_its_metadata(tmp_path, release) -> None:
    bare = PROCESS_IDS.format("5").partition("\n")[2]
    (tmp_path / "in").mkdir()
    for name, label in (
        ("by grade_id", {"metadata": {"nbgrader": {"grade_id": "process_ids"}}}),
        ("by cell id", {"id": "00-exercise-process_ids"}),
    ):
        content = {**notebook(IMPORTS), "cells": [cell(bare, **label)]}
        (tmp_path / "in" / f"{name}.ipynb").write_text(json.dumps(content), encoding="utf-8")
    verdicts = {row.learner: row.verdict for row in rows_of(tmp_path / "in", release) if row.exercise == "process_ids"}
    assert verdicts == {"by grade_id": "passed", "by cell id": "passed"}


def test_G3_a_file_that_cannot_be_read_gets_a_row_that_says_why_and_the_others_are_graded(tmp_path, release) -> None:
    whole = json.dumps(notebook(*PREDICTED))
    files = {
        "a whole.ipynb": whole.encode(),
        "b with a byte order mark.ipynb": b"\xef\xbb\xbf" + whole.encode(),
        "c in utf-16.ipynb": whole.encode("utf-16"),
        "d large.ipynb": json.dumps(with_large_outputs()).encode(),
        "e cut.ipynb": whole[:-40].encode(),
        "f empty.ipynb": b"",
        "g picture.ipynb": b"\x89PNG\r\n\x1a\n\x00\x00\xff\xd8",
        "h page.ipynb": b"<!DOCTYPE html><html></html>",
        "i list.ipynb": b"[1, 2]",
        "j deep.ipynb": b'{"cells": ' + b"[" * 200_000,
        "k unmarked.ipynb": json.dumps(notebook("import os", "Prose and no more")).encode(),
        "l unknown.ipynb": json.dumps(notebook("# @exercise fly points=3 minutes=1\nfly = 1")).encode(),
        "m odd cells.ipynb": b'{"cells": [1, null, {"cell_type": "code", "source": 7}]}',
        "n notes.docx": b"PK\x03\x04",
    }
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_bytes(content)
    rows = rows_of(tmp_path / "in", release)
    passed = [row.learner[0] for row in rows if (row.exercise, row.verdict) == ("process_ids", "passed")]
    assert passed == list("abcd")
    reasons = {row.learner[0]: row.reason for row in rows if row.verdict == "not graded"}
    for letter, words in {
        "e": "cut short: line 1",
        "f": "The file is empty.",
        "g": "Not a notebook",
        "h": "Not a notebook",
        "i": "Not a notebook",
        "j": "damaged",
        "k": "No cell of it carries the marker",
        "l": "no lesson that this release knows: fly",
        "m": "No cell of it carries the marker",
        "n": "Not a notebook",
    }.items():
        assert words in reasons.pop(letter)
    assert reasons == {}


def test_G3_a_renamed_file_is_known_by_what_is_in_it(tmp_path, release) -> None:
    hand_in(tmp_path / "in" / "07_synchronous (1).ipynb", *PREDICTED)
    hand_in(tmp_path / "in" / "homework.ipynb.txt", *PREDICTED)
    assert {row.lesson for row in rows_of(tmp_path / "in", release)} == {"00"}


# --- G5, G7, G8: answers that misbehave ------------------------------------------------------------------------------

MISBEHAVIOUR = {
    "an infinite loop": ("while True: pass", "stopped", "no rank made progress"),
    "a loop that ignores interrupts": (
        "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]\n    while True: pass",
        "stopped",
        "no rank made progress",
    ),
    "os._exit(0)": ("os._exit(0)", "stopped", "ended with exit code 0"),
    "sys.exit()": ("raise SystemExit", "stopped", "called sys.exit"),
    "a crash": ("import ctypes; ctypes.string_at(0)", "stopped", "SIGSEGV"),
    "all the memory": ("return len(bytearray(1 << 36))", "failed", "MemoryError"),
    "its server killed": ("os.kill(os.getppid(), 9)", "stopped", "was killed"),
    "endless printing": ("while True: print('x' * 100_000)", "stopped", "no rank made progress"),
    "a question": ("return input('Which rank? ')", "failed", "asked for keyboard input"),
}


@pytest.mark.parametrize("what", MISBEHAVIOUR)
def test_G5_G7_an_answer_that_misbehaves_ends_in_a_verdict_and_the_next_keeps_its_marks(grade, what: str) -> None:
    body, verdict, words = MISBEHAVIOUR[what]
    start = time.monotonic()
    rows = grade(IMPORTS, INTRODUCE.format(f"def introduce():\n    {body}"), BRING_HOME.format(RIGHT_BRING_HOME))
    assert (rows["introduce"].verdict, rows["introduce"].points) == (verdict, 0)
    assert words in rows["introduce"].reason
    assert (rows["bring_home"].verdict, rows["bring_home"].points) == ("passed", 2)
    assert time.monotonic() - start < 30


def test_G5_a_cell_that_is_no_python_loses_its_own_marks_alone(grade) -> None:
    rows = grade(IMPORTS, INTRODUCE.format("def introduce(:"), BRING_HOME.format(RIGHT_BRING_HOME))
    assert rows["introduce"].verdict == "failed"
    assert "no valid Python" in rows["introduce"].reason
    assert rows["bring_home"].points == 2


def test_G7_a_right_answer_that_prints_20_MB_in_one_line_keeps_its_marks(grade) -> None:
    loud = RIGHT_INTRODUCE.replace("return", "print('x' * 20_000_000)\n    return")
    assert grade(IMPORTS, INTRODUCE.format(loud))["introduce"].points == 1


def test_G8_a_right_answer_that_warns_keeps_its_marks(grade) -> None:
    warns = RIGHT_INTRODUCE.replace(
        "return", "import sys, warnings; warnings.warn('old'); print('careful', file=sys.stderr)\n    return"
    )
    assert grade(IMPORTS, "%matplotlib inline", INTRODUCE.format(warns))["introduce"].points == 1


# --- what an answer is run from --------------------------------------------------------------------------------------


def test_the_learners_own_calls_are_not_run_and_nothing_runs_in_the_judge(grade, tmp_path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    called = f"open({str(traces / 'called')!r}, 'w')\nrun = launch(introduce)"
    answer = RIGHT_INTRODUCE.replace(
        "return", f"open(os.path.join({str(traces)!r}, str(os.getpid())), 'w').close()\n    return"
    )
    defined = f"FOLDER = {str(traces)!r}\nMADE_IN = open(os.path.join(FOLDER, f'made in {{os.getpid()}}'), 'w').close()"
    uses_it = answer.replace("return", "MADE_IN\n    return")
    assert grade(IMPORTS, called, defined, INTRODUCE.format(uses_it), called)["introduce"].points == 1
    left = {path.name for path in traces.iterdir()}
    assert left
    assert not left & {"called", str(os.getpid()), f"made in {os.getpid()}"}


def test_a_broken_cell_that_the_answer_does_not_need_costs_nothing(grade) -> None:
    broken = ("import no_such_module", "x = 1 / 0", "def half(:", "%%bash\nexit 1", "!rm nothing")
    assert grade(IMPORTS, *broken, INTRODUCE.format(RIGHT_INTRODUCE))["introduce"].points == 1


def test_a_name_that_only_a_run_gave_is_missed_in_words(grade) -> None:
    needs_run = "def introduce():\n    return run.results[0]"
    row = grade(IMPORTS, "run = launch(print)", INTRODUCE.format(needs_run))["introduce"]
    assert row.verdict == "failed"
    assert "'run' is not defined" in row.reason


def test_an_answer_that_needs_one_that_is_not_there_is_told_which(tmp_path, root) -> None:
    register = "def register(store, name, world_size, timeout):\n    return assign_rank(store, name), []"
    stub = 'def assign_rank(store, name):\n    """Return."""\n    raise NotImplementedError("your turn")'
    hand_in(
        tmp_path / "in" / "ada.ipynb",
        f"# @exercise assign_rank points=4 minutes=12\n{stub}",
        f"# @exercise register points=6 minutes=20\n{register}",
    )
    rows = by_exercise(rows_of(tmp_path / "in", root / "notebooks"))
    assert rows["assign_rank"].verdict == rows["register"].verdict == "not attempted"
    assert "answer to the exercise 'assign_rank'" in rows["register"].reason


def test_predictions_count_when_they_were_made_right_or_not(grade) -> None:
    for value, verdict in (("5", "passed"), ("-3", "passed"), ("'many'", "passed"), ("None", "not attempted")):
        assert grade(IMPORTS, PROCESS_IDS.format(value))["process_ids"].verdict == verdict
    by_hand = '# @exercise process_ids points=1 minutes=2 kind=predict\npredict("process_ids", 4, unit="processes")'
    assert grade(by_hand)["process_ids"].verdict == "passed"


def test_trouble_of_the_judges_own_is_left_to_a_person_and_costs_nobody_else_anything(grade, tmp_path) -> None:
    spoils_its_report = RIGHT_INTRODUCE.replace(
        "return", "from course_utils.exercises import inside; inside.judged.take_notes = tuple\n    return"
    )
    rows = grade(IMPORTS, INTRODUCE.format(spoils_its_report), BRING_HOME.format(RIGHT_BRING_HOME))
    row = rows["introduce"]
    assert (row.verdict, row.points, row.out_of) == ("needs review", None, 1)
    assert "The judge could not finish (ValueError: " in row.reason
    assert "to be looked at by a person" in row.reason
    assert rows["bring_home"].points == 2
    table.write(rows.values(), SEED, tmp_path / "marks.csv")
    with (tmp_path / "marks.csv").open(encoding="utf-8-sig", newline="") as file:
        assert {line["points"] for line in csv.DictReader(file) if line["exercise"] == "introduce"} == {""}


# --- G11, G12, G13: answers that look right --------------------------------------------------------------------------


def test_G11_an_answer_made_for_the_visible_cases_fails_on_fresh_ones(grade) -> None:
    known = RIGHT_INTRODUCE.replace("{dist.get_world_size()}", "{min(dist.get_world_size(), 4) // 3 * 2 + 2}")
    known = known.replace("    return", "    if dist.get_world_size() == 1:\n        return 'rank 0 of 1'\n    return")
    assert grade(IMPORTS, INTRODUCE.format(known))["introduce"].verdict == "failed"


def test_G12_a_deadlock_is_reported_rank_by_rank_in_bounded_time(grade) -> None:
    both_send = """\
def shift(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = tensor.clone()
    if world > 1:
        dist.send(tensor, (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
    return arrived"""
    start = time.monotonic()
    row = grade(IMPORTS, SHIFT.format(both_send))["shift"]
    assert (row.verdict, row.points, row.out_of) == ("stopped", 0, 4)
    assert "deadlock" in row.reason
    assert "rank 0 waits in send to rank 1, cell 2, line 6: dist.send(" in row.reason.replace("rank 0:", "rank 0")
    assert time.monotonic() - start < 30


def test_G13_an_answer_that_calls_what_it_should_build_is_caught_by_its_calls_not_by_its_text(grade) -> None:
    cheat = """\
def average_by_hand(tensor):
    total = tensor.clone(memory_format=torch.contiguous_format)
    getattr(dist, "all_" + "reduce")(total)
    return total / dist.get_world_size()"""
    row = grade(IMPORTS, AVERAGE.format(cheat))["average_by_hand"]
    assert (row.verdict, row.points) == ("failed", 0)
    assert "all_reduce is not there when it is judged" in row.reason


# --- G14: names, two submissions, essays -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "learner", "copy"),
    [
        ("Ada Lovelace.ipynb", "Ada Lovelace", 0),
        ("Ada Lovelace_01_ranks_and_rendezvous.ipynb", "Ada Lovelace", 0),
        ("01_ranks_and_rendezvous - Ada (2).ipynb", "Ada", 2),
        ("ada-copy.ipynb", "ada", 1),
        ("Ada/01_ranks_and_rendezvous (1).ipynb", "Ada", 1),
        ("group 1/ada.ipynb", "group 1/ada", 0),
        ('O"Neil, Ann.ipynb', 'O"Neil, Ann', 0),
        ("李小龍.ipynb", "李小龍", 0),
        ("Jose\u0301.ipynb", "Jos\u00e9", 0),
        ("01_ranks_and_rendezvous.ipynb", "01_ranks_and_rendezvous", 0),
        ("ada.ipynb.txt", "ada", 0),
    ],
)
def test_G14_a_learners_name_is_in_the_name_of_the_file(path: str, learner: str, copy: int) -> None:
    assert learner_of(Path("in") / path, Path("in")) == (learner, copy)


def test_G14_names_of_every_kind_survive_the_table(tmp_path, release) -> None:
    names = ['O"Neil, Ann', "李小龍", "Zoë; the 2nd", "back\\slash"]
    for name in names:
        hand_in(tmp_path / "in" / f"{name}.ipynb", *PREDICTED)
    undecodable = os.fsdecode(b"caf\xe9.ipynb")
    hand_in(tmp_path / "in" / undecodable, *PREDICTED)
    rows = rows_of(tmp_path / "in", release)
    table.write(rows, SEED, tmp_path / "marks.csv")
    with (tmp_path / "marks.csv").open(encoding="utf-8-sig", newline="") as file:
        read = list(csv.DictReader(file))
    assert {row["learner"] for row in read} == {*names, "caf\\udce9"}
    assert list(read[0])[:4] == ["learner", "file", "lesson", "exercise"]
    assert list(read[0])[4:] == ["verdict", "points", "out of", "reason", "seed"]
    assert {row["seed"] for row in read} == {str(SEED)}
    assert len(read) == len(rows)


def test_G14_of_two_submissions_the_later_counts_and_this_is_said(tmp_path, release) -> None:
    folder = tmp_path / "in"
    now = time.time()
    for name, value, age in (
        ("ada.ipynb", "5", 3600),
        ("ada_00_start_here.ipynb", "None", 7200),
        ("bo.ipynb", "None", 0),
        ("bo (1).ipynb", "5", 0),
    ):
        os.utime(hand_in(folder / name, IMPORTS, PROCESS_IDS.format(value)), (now - age, now - age))
    (folder / "ada (3).ipynb").write_bytes(b"")
    rows = rows_of(folder, release)
    assert {row.learner: (row.file, row.verdict) for row in rows if row.exercise == "process_ids"} == {
        "ada": ("ada.ipynb", "passed"),
        "bo": ("bo (1).ipynb", "passed"),
    }
    superseded = {row.file: row.reason for row in rows if row.verdict == "superseded"}
    assert superseded == {
        "ada_00_start_here.ipynb": "A later submission of this learner counts: ada.ipynb.",
        "bo.ipynb": "A later submission of this learner counts: bo (1).ipynb.",
    }


def test_G14_an_essay_needs_review_when_it_was_written_and_is_not_attempted_when_not(grade) -> None:
    row = grade(ESSAY.format("*Your answer:*\n\nI would rather have the strict one."))["one_size_hangs"]
    assert (row.verdict, row.points, row.out_of) == ("needs review", None, 2)
    for blank in ("*Your answer:*", "", "Your answer:  "):
        row = grade(ESSAY.format(blank))["one_size_hangs"]
        assert (row.verdict, row.points) == ("not attempted", 0)


# --- G15: untouched notebooks ----------------------------------------------------------------------------------------


def test_G15_an_untouched_notebook_scores_nothing_without_a_launch(grade, monkeypatch) -> None:
    monkeypatch.setattr("course_utils.grading.marking.launch_judged", None)
    rows = grade(*UNTOUCHED)
    assert {row.verdict for row in rows.values()} == {"not attempted"}
    assert sum(row.points or 0 for row in rows.values()) == 0
    commented = [text if text.startswith("<!--") else f"{text}\n\n# no time for this" for text in UNTOUCHED[1:]]
    assert {row.verdict for row in grade(*commented).values()} == {"not attempted"}


def test_a_row_carries_the_points_of_the_registry_not_those_of_the_marker(grade) -> None:
    greedy = INTRODUCE.format(RIGHT_INTRODUCE).replace("points=1", "points=100")
    row = grade(IMPORTS, greedy)["introduce"]
    assert row.points == row.out_of == all_exercises()["introduce"].points


def test_a_large_batch_leaves_nothing_behind_and_takes_time_in_proportion(tmp_path, release) -> None:
    for number in range(200):
        answer = RIGHT_INTRODUCE if number % 40 == 0 else OPEN_INTRODUCE
        hand_in(tmp_path / "in" / f"learner {number:03}.ipynb", IMPORTS, *PREDICTED, INTRODUCE.format(answer))
    submissions = batch.collect(tmp_path / "in")
    me = psutil.Process()
    rows: list[Row] = []
    left = []
    for report in batch.grade(submissions, release, SEED):
        rows += report.rows
        if report.seconds > 0.1:
            left.append((len(me.children(recursive=True)), me.num_fds()))
    assert len(left) >= 5
    assert len(set(left[1:])) == 1, left
    assert sum(row.points or 0 for row in rows) == 200 + 5
