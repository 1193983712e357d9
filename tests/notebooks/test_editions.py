"""The notebooks in the repository: built from their sources, equal but for the answers, within budget, and they run."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from course_utils.authoring.build import Course, check
from course_utils.authoring.execute import execute, machine_paths, oversize

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "notebooks" / "source").glob("*.py"))
lessons = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)

CODE_ANSWER = re.compile(r"^([ ]*)### BEGIN SOLUTION\n(.*?)\n[ ]*### END SOLUTION$", re.MULTILINE | re.DOTALL)
ESSAY_ANSWER = re.compile(r"^()<!-- BEGIN SOLUTION -->\n(.*?)\n<!-- END SOLUTION -->$", re.MULTILINE | re.DOTALL)
SOURCE_ANSWER = re.compile(r"^ *### BEGIN SOLUTION\n(.*?)\n *### END SOLUTION$", re.MULTILINE | re.DOTALL)
SOURCE_ESSAY = re.compile(r"^# <!-- BEGIN SOLUTION -->\n(.*?)\n# <!-- END SOLUTION -->$", re.MULTILINE | re.DOTALL)


def learner(source: Path) -> NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{source.stem}.ipynb", as_version=4)


def solved(source: Path) -> NotebookNode:
    return nbformat.read(ROOT / "notebooks" / "solutions" / f"{source.stem}.ipynb", as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_lessons_and_every_edition_is_as_its_source_says():
    assert SOURCES
    assert check(Course(ROOT)) == []


@lessons
def test_the_two_editions_differ_only_inside_the_markers(source):
    ours, theirs = solved(source), learner(source)
    assert [cell.id for cell in ours.cells] == [cell.id for cell in theirs.cells]
    differing = 0
    for solved_cell, learner_cell in zip(ours.cells, theirs.cells, strict=True):
        assert solved_cell.cell_type == learner_cell.cell_type
        assert solved_cell.metadata == learner_cell.metadata
        if solved_cell.source == learner_cell.source:
            continue
        differing += 1
        if solved_cell.cell_type == "code":
            expected = CODE_ANSWER.sub(
                lambda answer: (
                    f'{answer[1]}raise NotImplementedError("your turn")' if answer[1] else "# your answer here"
                ),
                solved_cell.source,
            )
        else:
            expected = ESSAY_ANSWER.sub("*Your answer:*", solved_cell.source)
        assert learner_cell.source == expected
    assert differing == len(re.findall(r"^#(?: <!--)? @exercise\b", source.read_text(encoding="utf-8"), re.MULTILINE))


@lessons
def test_no_line_of_an_answer_is_in_the_learner_edition(source):
    text = source.read_text(encoding="utf-8")
    answers = [*SOURCE_ANSWER.findall(text), *SOURCE_ESSAY.findall(text)]
    assert answers
    given = {line.strip("# ") for line in SOURCE_ESSAY.sub("", SOURCE_ANSWER.sub("", text)).split("\n")}
    shown = {line.strip("# ") for cell in learner(source).cells for line in cell.source.split("\n")}
    for answer in answers:
        lines = {line.strip("# ") for line in answer.split("\n")}
        telling = {line for line in lines if len(line) > 6}  # not `try:`, `else:`, a bracket
        # what a given cell says too is no secret; an answer of which *every* line is given would be
        assert not (telling - given) & shown
        assert not telling or telling - given, f"all of this answer stands in given cells: {answer}"


@lessons
def test_at_most_fifteen_percent_of_the_code_cells_are_exempt_from_comparison(source):
    cells = code_cells(solved(source))
    exempt = [
        cell
        for cell in cells
        if {"nbval-ignore-output", "nbval-skip"}
        & {tag.lower().replace("_", "-") for tag in cell.metadata.get("tags", [])}
        or re.search(r"NBVAL_(IGNORE_OUTPUT|SKIP)|PYTEST_VALIDATE_IGNORE_OUTPUT", cell.source)
    ]
    assert exempt[0] is cells[0]
    assert len(exempt) <= 0.15 * len(cells)


@lessons
def test_every_solved_cell_ran_in_its_turn_without_an_error_and_within_the_budget(source):
    notebook = solved(source)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        if "raises-exception" not in cell.metadata.get("tags", []):
            assert all(output.output_type != "error" for output in cell.outputs), cell.id
    assert list(oversize(notebook, source.stem)) == []
    assert list(machine_paths(notebook, source.stem)) == []


@lessons
def test_the_learner_edition_runs_untouched_from_top_to_bottom(source):
    notebook = learner(source)
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))
    execute(notebook, f"notebooks/{source.stem}.ipynb")
