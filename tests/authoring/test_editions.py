"""Editions before they run: stable ids, nbgrader's metadata, exact text."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from course_utils.authoring import editions
from course_utils.authoring.editions import cell_ids, learner_edition, solved_edition, source_hash, to_text
from course_utils.authoring.first_cell import first_cell
from course_utils.authoring.source import Lesson, read_lesson
from tests.authoring.samples import LESSON


@pytest.fixture
def lesson(tmp_path: Path):
    def parsed(text: str = LESSON) -> Lesson:
        path = tmp_path / "01_small.py"
        path.write_text(text, encoding="utf-8")
        return read_lesson(path)

    return parsed


def by_text(lesson: Lesson) -> dict[str, str]:
    return {cell.text: identity for cell, identity in zip(lesson.cells, cell_ids(lesson), strict=True)}


def test_ids_are_unique_and_valid_in_nbformat_4_5(lesson):
    ids = cell_ids(lesson())
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", identity) for identity in ids)
    for edition in (learner_edition(lesson()), solved_edition(lesson())):
        assert [cell.id for cell in edition.cells] == ids
        assert (edition.nbformat, edition.nbformat_minor) == (4, 5)
        nbformat.validate(edition)


def test_long_and_repeated_headings_still_give_unique_valid_ids(lesson):
    heading = "# ## " + "A heading that goes on and on, " * 6
    text = LESSON.replace("# ## Counting", heading).replace("# ## Add", heading)
    ids = cell_ids(lesson(text))
    assert len(set(ids)) == len(ids)
    assert max(map(len, ids)) <= 64


def test_editing_the_text_of_a_cell_changes_no_id(lesson):
    edited = LESSON.replace("One cell, one number.", "Another sentence.").replace(
        "return answer_of", "return 0 + answer_of"
    )
    assert edited != LESSON
    assert cell_ids(lesson(edited)) == cell_ids(lesson())


def test_a_new_cell_changes_only_ids_further_down_under_its_own_heading(lesson):
    before = by_text(lesson())
    after = by_text(lesson(LESSON.replace("# %%\nx = 3", '# %%\nprint("new")\n\n# %%\nx = 3')))
    moved = {text for text in before if before[text] != after[text]}
    assert moved == {"x = 3\nx * x", "import time\n\nprint(time.time())"}


def test_a_new_section_or_exercise_changes_no_other_id(lesson):
    before = by_text(lesson())
    section = "# %% [markdown]\n# ## In between\n\n# %%\nprint('new')\n\n"
    exercise = "# %%\n# @exercise extra points=1 minutes=1\n### BEGIN SOLUTION\ny = 1\n### END SOLUTION\n\n"
    for new in (section, exercise):
        after = by_text(lesson(LESSON.replace("# %% [markdown]\n# ## Add", f"{new}# %% [markdown]\n# ## Add")))
        assert len(after) > len(before)
        assert {text: after[text] for text in before} == before


def test_a_comment_in_a_fenced_block_is_no_heading(lesson):
    fenced = "# %% [markdown]\n# ```\n# # not a heading\n# ```\n\n"
    ids = cell_ids(lesson(LESSON.replace("# %%\nx = 3", f"{fenced}# %%\nx = 3")))
    assert ids[4:6] == ["01-counting-2", "01-counting-3"]


def test_exercises_carry_what_nbgrader_asks_of_a_manually_graded_answer(lesson):
    for edition in (learner_edition(lesson()), solved_edition(lesson())):
        marked = [cell for cell in edition.cells if "nbgrader" in cell.metadata]
        assert [(cell.metadata.nbgrader.grade_id, cell.metadata.nbgrader.points) for cell in marked] == [
            ("guess", 1),
            ("add_two", 4),
            ("why", 2),
        ]
        for cell in marked:
            assert set(cell.metadata.nbgrader) == {
                "schema_version",
                "grade_id",
                "grade",
                "solution",
                "locked",
                "task",
                "points",
            }
            assert cell.metadata.nbgrader.schema_version == 3
            # a markdown cell must be grade and solution at once, and a cell that is both is read by a person
            assert (cell.metadata.nbgrader.grade, cell.metadata.nbgrader.solution) == (True, True)
            assert (cell.metadata.nbgrader.locked, cell.metadata.nbgrader.task) == (False, False)
            assert re.fullmatch(r"[a-zA-Z0-9_-]+", cell.metadata.nbgrader.grade_id)


def test_both_editions_get_the_set_up_cell_exempt_from_comparison(lesson):
    for edition in (learner_edition(lesson()), solved_edition(lesson())):
        assert edition.cells[1].source == first_cell()
        assert edition.cells[1].metadata.tags == ["nbval-ignore-output"]


def test_the_learner_edition_has_no_outputs_and_no_answers(lesson):
    learner = learner_edition(lesson())
    assert all(not cell.outputs and cell.execution_count is None for cell in learner.cells if cell.cell_type == "code")
    text = to_text(learner)
    assert "answer_of_the_author" not in text
    assert "even sum" not in text
    assert "SOLUTION" not in text


def test_the_hash_follows_the_source_the_set_up_cell_and_the_builder(lesson, monkeypatch):
    hashes = {source_hash(lesson()), source_hash(lesson(LESSON + "\n"))}
    monkeypatch.setattr(editions, "BUILDER", -1)
    hashes.add(source_hash(lesson()))
    monkeypatch.setattr(editions, "first_cell", lambda: "another")
    hashes.add(source_hash(lesson()))
    assert len(hashes) == 4
    assert solved_edition(lesson()).metadata.course.source_hash in hashes


def test_the_text_of_a_file_ends_with_one_newline_and_reads_back_the_same(lesson):
    text = to_text(solved_edition(lesson()))
    assert text.endswith("}\n")
    assert not text.endswith("\n\n")
    assert to_text(nbformat.reads(text, as_version=4)) == text
