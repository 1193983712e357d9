"""Strict nbval on the solved editions, and the proof that it is strict: each stored number, altered, makes it fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from course_utils.authoring.execute import execute
from tests.notebooks.altered_numbers import altered, stored_texts

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SANITIZE = HERE / "sanitize.cfg"
SOLVED = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
SMALL = ("print('two and two:', 2 + 2)", "[1.5, 2]", "x = 3", "print('port 49152 pid 77 after 0.25 s, timeout 5.5 s')")


class Nbval:
    """One nbval run over copies of notebooks in a folder; `failed[name]` lists the code cells that differ."""

    def __init__(self, folder: Path, notebooks: dict[str, NotebookNode], *options: str) -> None:
        for name, notebook in notebooks.items():
            nbformat.write(notebook, folder / f"{name}.ipynb")
        report = folder / "report.json"
        ours = {
            "ALTERED_NUMBERS_REPORT": str(report),
            "COURSE_PLAIN": "1",
            "COURSE_PROGRESS": str(folder / "progress.json"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        }
        nbval = ["--nbval", "--nbval-current-env", f"--nbval-sanitize-with={SANITIZE}", "--nbval-cell-timeout=900"]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *nbval, *options, "-p", "no:cacheprovider", "--color=no", "-rf"],
            cwd=folder,
            env={**{name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}, **ours},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ran.stdout
        failures = re.findall(r"^FAILED (.+)\.ipynb::Cell (\d+)", self.said, re.MULTILINE)
        assert ran.returncode == (1 if failures else 0), self.said
        self.failed = {name: [int(cell) for file, cell in failures if file == name] for name in notebooks}
        self.report = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}


ALTERING = ("-p", "altered_numbers")


def test_there_are_solved_editions():
    assert SOLVED


@pytest.mark.parametrize("path", SOLVED, ids=lambda path: path.stem)
def test_a_lesson_prints_again_what_is_stored_and_no_stored_number_could_be_another(path, tmp_path):
    run = Nbval(tmp_path, {path.stem: nbformat.read(path, as_version=4)}, *ALTERING)
    assert run.failed == {path.stem: []}, run.said
    assert run.report["noticed"] > 20
    # what the sanitize file hides stays the exception
    assert len(run.report["sanitized"]) <= 0.1 * run.report["noticed"], run.report["sanitized"]


@pytest.fixture(scope="module")
def stored() -> NotebookNode:
    """A small notebook as it ran."""
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{index}") for index, source in enumerate(SMALL)]
    return execute(nbformat.v4.new_notebook(cells=cells), "small")


def with_one_number_altered(notebook: NotebookNode) -> Iterator[tuple[str, int, NotebookNode]]:
    """Yield (number, index of its cell, a copy of the notebook in which that one stored number is another)."""
    text = nbformat.writes(notebook)
    for index, cell in enumerate(notebook.cells):
        for place, (holder, key) in enumerate(stored_texts(cell.get("outputs", []))):
            for number, other in altered(holder[key]):
                changed = nbformat.reads(text, as_version=4)
                target, _ = list(stored_texts(changed.cells[index].outputs))[place]
                target[key] = other
                yield number[0], index, changed


def test_nbval_itself_misses_each_altered_number_but_the_sanitized_ones(stored, tmp_path):
    copies = {f"with another {number}": changed for number, _, changed in with_one_number_altered(stored)}
    assert Nbval(tmp_path, copies | {"as it is": stored}).failed == {
        "as it is": [],
        "with another 4": [0],
        "with another 1.5": [1],
        "with another 2": [1],
        "with another 49152": [],
        "with another 77": [],
        "with another 0.25": [],
        "with another 5.5": [3],
    }


def test_altering_inside_one_run_comes_to_the_same_result(stored, tmp_path):
    run = Nbval(tmp_path, {"small": stored}, *ALTERING)
    assert run.failed == {"small": []}, run.said
    assert run.report["noticed"] == 4
    assert len(run.report["sanitized"]) == 3


def test_altering_tells_when_nbval_would_not_miss_a_number(stored, tmp_path):
    blind = "from nbval.plugin import IPyNbCell\nIPyNbCell.compare_outputs = lambda *_: True\n"
    (tmp_path / "blind.py").write_text(blind, encoding="utf-8")
    run = Nbval(tmp_path, {"small": stored}, "-p", "blind", *ALTERING)
    assert run.failed == {"small": [0, 1, 3]}
    assert "these stored numbers were not missed: ['1.5', '2']" in run.said


def test_altering_leaves_a_real_difference_a_difference(stored, tmp_path):
    changed = nbformat.reads(nbformat.writes(stored), as_version=4)
    changed.cells[0].outputs[0].text = "two and two: 5\n"
    assert Nbval(tmp_path, {"small": changed}, *ALTERING).failed == {"small": [0]}


def test_one_altered_number_in_a_real_lesson_fails_that_cell_alone(tmp_path):
    lesson = nbformat.read(SOLVED[0], as_version=4)
    code = [index for index, cell in enumerate(lesson.cells) if cell.cell_type == "code"]
    index, changed = next(
        (index, changed)
        for _, index, changed in with_one_number_altered(lesson)
        if "nbval-ignore-output" not in lesson.cells[index].metadata.get("tags", [])
    )
    assert Nbval(tmp_path, {"lesson": changed}).failed == {"lesson": [code.index(index)]}
