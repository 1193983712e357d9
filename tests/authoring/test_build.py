"""build and build --check on a small course in a scratch folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nbformat
import pytest

from course_utils.authoring.__main__ import main
from course_utils.authoring.build import Course, build, check
from course_utils.authoring.source import AuthoringError
from tests.authoring.samples import LESSON, course

SECOND = LESSON.replace("# # 01", "# # 02").replace("@exercise ", "@exercise second_")
LEARNER = "notebooks/01_small.ipynb"
SOLVED = "notebooks/solutions/01_small.ipynb"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A course of two lessons, built once; each test copies what it changes."""
    root = course(tmp_path_factory.mktemp("course"), _01_small=LESSON, _02_second=SECOND)
    assert main(["--root", str(root), "build"]) == 0
    return root


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    for path in built.rglob("*.*"):
        copy = tmp_path / path.relative_to(built)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return tmp_path


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def edit(path: Path, change) -> None:
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    path.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")


def test_a_build_writes_both_editions_of_every_lesson_and_nothing_else(built):
    assert sorted(files(built)) == [
        "notebooks/01_small.ipynb",
        "notebooks/02_second.ipynb",
        "notebooks/solutions/01_small.ipynb",
        "notebooks/solutions/02_second.ipynb",
        "notebooks/source/01_small.py",
        "notebooks/source/02_second.py",
    ]
    assert (built / SOLVED).stat().st_mode & 0o777 == 0o644


def test_the_solved_edition_holds_what_the_answers_print(built):
    solved = nbformat.read(built / SOLVED, as_version=4)
    outputs = json.dumps([cell.get("outputs", []) for cell in solved.cells])
    assert "the answer is there" in outputs
    code = [cell for cell in solved.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


def test_what_was_just_built_passes_the_check(root):
    assert check(Course(root)) == []


def test_a_second_build_changes_only_outputs_that_are_not_compared(root):
    before = files(root)
    build(Course(root), root / "notebooks/source/01_small.py")
    after = files(root)
    assert {name for name in before if before[name] != after[name]} == {SOLVED}
    old, new = (nbformat.reads(text[SOLVED].decode(), as_version=4) for text in (before, after))
    differing = [cell for cell, other in zip(old.cells, new.cells, strict=True) if cell != other]
    assert [cell.metadata.tags for cell in differing] == [["nbval-ignore-output"]]


def test_building_one_lesson_leaves_the_others_alone(root, capsys):
    (root / "notebooks/source/02_second.py").write_text(SECOND + "\n", encoding="utf-8")
    before = files(root)
    assert main(["--root", str(root), "build", "1"]) == 0
    assert "01_small: 20 cells, 3 exercises, 7 points" in capsys.readouterr().out
    assert files(root)["notebooks/solutions/02_second.ipynb"] == before["notebooks/solutions/02_second.ipynb"]


def test_a_lesson_that_fails_leaves_its_files_as_they_were_and_the_others_are_built(root, capsys):
    source = root / "notebooks/source/01_small.py"
    source.write_text(LESSON.replace('print("done")', "print(missing)"), encoding="utf-8")
    (root / "notebooks/source/02_second.py").write_text(SECOND.replace("Two even", "A pair of even"), encoding="utf-8")
    before = files(root)
    assert main(["--root", str(root), "build"]) == 1
    said = capsys.readouterr()
    assert "notebooks/solutions/01_small.ipynb: cell 16 (01-add-6) failed:" in said.err
    assert "NameError: name 'missing' is not defined" in said.err
    assert "01_small stays as it was" in said.err
    after = files(root)
    assert (after[LEARNER], after[SOLVED]) == (before[LEARNER], before[SOLVED])
    assert set(after) == set(before)
    assert b"A pair of even" in after["notebooks/solutions/02_second.ipynb"]


def test_outputs_over_the_budget_are_refused_before_anything_is_written(root):
    source = root / "notebooks/source/01_small.py"
    source.write_text(LESSON.replace('print("done")', 'print(("x" * 98 + chr(10)) * 1_000)'), encoding="utf-8")
    before = files(root)
    with pytest.raises(AuthoringError, match=r"cell 16 \(01-add-6\): 100 KB of outputs; a cell may have 100 KB"):
        build(Course(root), source)
    assert files(root) == before


@pytest.mark.parametrize("verdict", ["failed", "stopped", "passed"])
def test_an_answer_that_does_not_pass_its_own_check_is_refused(verdict, root):
    record = {"exercises": {"add_two": {"verdict": verdict, "passed": verdict == "passed"}, "guess": {"passed": True}}}
    writes = (
        f"import os\n\nwith open(os.environ['COURSE_PROGRESS'], 'w') as file:\n    file.write('{json.dumps(record)}')"
    )
    source = root / "notebooks/source/01_small.py"
    source.write_text(LESSON.replace('print("done")', writes), encoding="utf-8")
    before = files(root)
    if verdict == "passed":
        build(Course(root), source)
        return
    with pytest.raises(AuthoringError, match=rf"01_small.py:39: the answer to add_two does not .* \({verdict}\)$"):
        build(Course(root), source)
    assert files(root) == before


def test_a_write_that_is_cut_short_leaves_the_old_file(root, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    before = files(root)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        build(Course(root), root / "notebooks/source/01_small.py")
    assert files(root) == before


def test_an_edited_source_makes_both_editions_fail_the_check(root, capsys):
    source = root / "notebooks/source/01_small.py"
    source.write_text(LESSON.replace("One cell, one number.", "One cell."), encoding="utf-8")
    before = files(root)
    assert main(["--root", str(root), "build", "--check"]) == 1
    said = capsys.readouterr().err.splitlines()
    mend = "; run: python -m course_utils.authoring build 01"
    assert said == [
        f"{LEARNER}: cell 3 (01-counting-0) differs from its source in source{mend}",
        f"{SOLVED} is stale: it was run from another state of notebooks/source/01_small.py{mend}",
        f"{SOLVED}: cell 3 (01-counting-0) differs from its source in source{mend}",
    ]
    assert files(root) == before


def test_an_edit_that_changes_no_cell_still_makes_the_solved_edition_stale(root):
    (root / "notebooks/source/01_small.py").write_text(LESSON + "\n", encoding="utf-8")
    assert any(f"{SOLVED} is stale" in problem for problem in check(Course(root)))


def first_code(notebook):
    return next(cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.startswith("print"))


TAMPERING = {
    "text": (lambda nb: nb.cells[3].update(source="print(5)"), "differs from its source in source"),
    "id": (lambda nb: nb.cells[3].update(id="another"), "differs from its source in id"),
    "tags": (lambda nb: nb.cells[3].metadata.update(tags=["nbval-skip"]), "differs from its source in metadata"),
    "nbgrader": (
        lambda nb: next(cell for cell in nb.cells if "nbgrader" in cell.metadata).metadata.nbgrader.update(points=9),
        "differs from its source in metadata",
    ),
    "a missing cell": (lambda nb: nb.cells.pop(), "has 19 cells, its source gives 20"),
    "kernel": (lambda nb: nb.metadata.kernelspec.update(name="r"), "the notebook's own metadata differs"),
}


@pytest.mark.parametrize("edition", [LEARNER, SOLVED])
@pytest.mark.parametrize("tampering", TAMPERING)
def test_a_change_by_hand_is_found_in_either_edition(tampering, edition, root):
    change, message = TAMPERING[tampering]
    edit(root / edition, change)
    problems = check(Course(root), ["01"])
    assert any(problem.startswith(edition) and message in problem for problem in problems), problems
    assert check(Course(root), ["02"]) == []


def test_outputs_in_a_learner_edition_are_found(root):
    edit(root / LEARNER, lambda nb: first_code(nb).update(execution_count=1))
    assert "differs from its source in execution_count" in check(Course(root))[0]


def test_a_solved_edition_with_a_cell_that_was_not_run_in_its_turn_is_found(root):
    edit(root / SOLVED, lambda nb: first_code(nb).update(execution_count=None))
    assert f"{SOLVED}: cell 4 (01-counting-1) was not run in its turn" in check(Course(root))[0]


def test_a_machine_path_in_a_solved_edition_is_found(root):
    edit(root / SOLVED, lambda nb: first_code(nb).outputs[0].update(text=f"{Path.home()}/x"))
    assert "cell 4 (01-counting-1): its output holds" in check(Course(root))[0]


@pytest.mark.parametrize("edition", [LEARNER, SOLVED])
def test_the_same_notebook_in_other_bytes_is_found(edition, root):
    path = root / edition
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    assert any(f"{edition} is not formatted as the builder writes it" in problem for problem in check(Course(root)))


@pytest.mark.parametrize("edition", [LEARNER, SOLVED])
@pytest.mark.parametrize("text", ["", "{", "[]", '{"nbformat": 4}'])
def test_a_broken_file_is_said_to_be_no_notebook(edition, text, root):
    (root / edition).write_text(text, encoding="utf-8")
    assert any(f"{edition} is not a notebook" in problem for problem in check(Course(root)))


@pytest.mark.parametrize("edition", [LEARNER, SOLVED])
def test_a_missing_edition_is_found(edition, root):
    (root / edition).unlink()
    assert check(Course(root)) == [f"{edition} is missing; run: python -m course_utils.authoring build 01"]


def test_notebooks_without_a_source_are_found(root):
    (root / "notebooks/source/02_second.py").unlink()
    assert check(Course(root)) == [
        "notebooks/02_second.ipynb has no source; delete it, or add notebooks/source/02_second.py",
        "notebooks/solutions/02_second.ipynb has no source; delete it, or add notebooks/source/02_second.py",
    ]


def test_an_exercise_name_taken_by_another_lesson_is_refused(tmp_path):
    root = course(tmp_path, _01_small=LESSON, _02_second=LESSON.replace("# # 01", "# # 02"))
    said = check(Course(root))
    assert len(said) == 2
    assert said[0].startswith(
        "notebooks/source/01_small.py:30: the exercise name guess is taken by notebooks/source/02_second.py"
    )


def test_a_mistake_in_a_source_is_reported_by_build_and_by_check(tmp_path, capsys):
    root = course(tmp_path, _01_small=LESSON.replace("kind=predict", "kind=quiz"))
    for arguments in (["build"], ["build", "--check"]):
        assert main(["--root", str(root), *arguments]) == 1
        assert "notebooks/source/01_small.py:30: exercise guess: kind=quiz is unknown" in capsys.readouterr().err
    assert not (root / LEARNER).exists()


def test_a_lesson_that_does_not_exist_is_refused_with_those_that_do(root, capsys):
    assert main(["--root", str(root), "build", "7"]) == 1
    assert "there is no lesson 07 in notebooks/source (there are: 01_small, 02_second)" in capsys.readouterr().err


def test_a_folder_that_is_not_a_course_is_refused(tmp_path, capsys):
    assert main(["--root", str(tmp_path), "build"]) == 1
    assert "has no folder notebooks/source" in capsys.readouterr().err
