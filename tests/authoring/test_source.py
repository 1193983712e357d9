"""Parsing percent sources: what a lesson turns into, and every mistake with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from course_utils.authoring.source import AuthoringError, Exercise, Lesson, read_lesson
from tests.authoring.samples import LESSON, line_of


def parsed(folder: Path, text: str, name: str = "01_small.py") -> Lesson:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_lesson(path, folder)


def mistakes(folder: Path, text: str, name: str = "01_small.py") -> list[str]:
    with pytest.raises(AuthoringError) as caught:
        parsed(folder, text, name)
    return str(caught.value).split("\n")


def test_a_lesson_gives_its_cells_in_order_with_the_line_of_their_text(tmp_path):
    lesson = parsed(tmp_path, LESSON)
    assert (lesson.name, lesson.number) == ("01_small", "01")
    lines = LESSON.split("\n")
    for cell in lesson.cells:
        first = cell.text.split("\n")[0]
        assert lines[cell.line - 1] == (first if cell.kind == "code" else f"# {first}")
    assert [cell.kind for cell in lesson.cells[:4]] == ["markdown", "code", "markdown", "code"]
    assert [cell.tags for cell in lesson.cells if cell.tags] == [("nbval-ignore-output",)]


def test_the_exercises_carry_what_their_markers_say(tmp_path):
    assert parsed(tmp_path, LESSON).exercises == (
        Exercise("guess", points=1, minutes=2, kind="predict"),
        Exercise("add_two", points=4, minutes=15, kind="implement"),
        Exercise("why", points=2, minutes=5, kind="explain"),
    )


def test_an_answer_in_a_function_becomes_a_raise_at_its_own_indentation(tmp_path):
    lesson = parsed(tmp_path, LESSON)
    cell = next(cell for cell in lesson.cells if cell.exercise and cell.exercise.name == "add_two")
    assert cell.learner_text.split("\n")[1:5] == [
        "def add_two(number):",
        '    """Return `number` plus two."""',
        '    raise NotImplementedError("your turn")',
        "",
    ]
    assert "answer_of_the_author" in cell.text
    assert "answer_of_the_author" not in cell.learner_text


def test_an_answer_at_the_left_margin_becomes_a_comment(tmp_path):
    cell = next(cell for cell in parsed(tmp_path, LESSON).cells if cell.exercise)
    assert cell.learner_text == "# @exercise guess points=1 minutes=2 kind=predict\n# your answer here"


def test_an_essay_keeps_its_marker_and_asks_for_an_answer(tmp_path):
    cell = parsed(tmp_path, LESSON).cells[-1]
    assert cell.learner_text == "<!-- @exercise why points=2 minutes=5 kind=explain -->\n*Your answer:*"


def test_every_answer_of_a_cell_with_several_is_replaced(tmp_path):
    twice = LESSON.replace(
        "### END SOLUTION\n\n\ndef tried",
        "### END SOLUTION\n\n\ndef more():\n    ### BEGIN SOLUTION\n    return 77\n    ### END SOLUTION\n\n\ndef tried",
    )
    cell = next(cell for cell in parsed(tmp_path, twice).cells if cell.exercise and cell.exercise.name == "add_two")
    assert cell.learner_text.count("your turn") == 2
    assert "77" not in cell.learner_text


CHANGES = {
    "an unclosed answer": (
        ("guess = 4\n### END SOLUTION", "guess = 4"),
        "### BEGIN SOLUTION",
        "'### BEGIN SOLUTION' is never closed by '### END SOLUTION'",
    ),
    "an end without a begin": (
        ("### BEGIN SOLUTION\nguess", "guess"),
        "### END SOLUTION",
        "'### END SOLUTION' without a '### BEGIN SOLUTION' above it",
    ),
    "a begin inside an answer": (
        ("guess = 4\n", "### BEGIN SOLUTION\nguess = 4\n"),
        "### BEGIN SOLUTION\nguess",
        "a second '### BEGIN SOLUTION'",
    ),
    "a misspelt marker": (
        ("### BEGIN SOLUTION\nguess", "## begin solution\nguess"),
        "## begin solution",
        "'## begin solution' is nearly a marker",
    ),
    "an empty answer": (("guess = 4\n", "\n"), "### BEGIN SOLUTION", "the solution is empty"),
    "an exercise without an answer": (
        ("### BEGIN SOLUTION\nguess = 4\n### END SOLUTION", "guess = 4"),
        "# @exercise guess",
        "the exercise has no solution",
    ),
    "an answer without an exercise": (
        ("# @exercise guess points=1 minutes=2 kind=predict\n", "x = 1\n"),
        "x = 1\n###",
        "a solution in a cell whose first line is no exercise marker",
    ),
    "a name used twice": (
        ("@exercise why", "@exercise guess"),
        "# <!-- @exercise guess",
        "the exercise name guess is taken by the one on line",
    ),
    "no points": (("guess points=1", "guess"), "# @exercise guess", "points= is missing"),
    "no minutes": (("points=1 minutes=2", "points=1"), "# @exercise guess", "minutes= is missing"),
    "no points worth the name": (
        ("guess points=1", "guess points=0"),
        "# @exercise guess",
        "points= is missing or not",
    ),
    "an unknown kind": (("kind=predict", "kind=quiz"), "# @exercise guess", "kind=quiz is unknown"),
    "an unknown option": (("minutes=2", "minuts=2"), "# @exercise guess", "'minuts=2' is not one of points="),
    "no name": (("@exercise guess points", "@exercise points"), "# @exercise points", "needs a name in lower_case"),
    "a marker below the first line": (
        ("# @exercise guess", "x = 1\n# @exercise guess"),
        "# @exercise guess",
        "an exercise marker is a cell's whole first line",
    ),
    "a question inside the essay's cell": (
        ("kind=explain -->\n", "kind=explain -->\n# Why?\n"),
        "# <!-- @exercise why",
        "put the question in the cell above",
    ),
    "a learner's cell that does not parse": (
        ("guess = 4\n", "if True:\n    guess = 4\n### END SOLUTION\n    print(guess)\n### BEGIN SOLUTION\nguess = 5\n"),
        "# @exercise guess",
        "the learner edition of the cell is not valid Python",
    ),
    "a solved cell that does not parse": (
        ("guess = 4", "guess ="),
        "# @exercise guess",
        "the solved edition of the cell",
    ),
    "an unknown tag": (('"nbval-ignore-output"', '"nbval-skip"'), "# %% tags", "the tag 'nbval-skip' means nothing"),
    "a comment that exempts": (
        ("import time\n", "# NBVAL_IGNORE_OUTPUT\nimport time\n"),
        "# NBVAL_IGNORE_OUTPUT",
        "NBVAL_IGNORE_OUTPUT as a comment",
    ),
    "a misspelt kind of cell": (
        ("# %% [markdown]\n# ## Add", "# %% [markdwon]\n# ## Add"),
        "# %% [markdwon]",
        "a cell opens",
    ),
    "an empty cell": (("print(len(fields))", ""), "# %%\n\n\n", "the cell is empty"),
    "text above the first cell": (
        ("# %% [markdown]\n# # 01", '"""Doc."""\n# %% [markdown]\n# # 01'),
        '"""Doc',
        "text before",
    ),
    "a title of another lesson": (("# # 01 A", "# # 02 A"), "# # 02", "opens with the title, '# 01 Title'"),
    "no set-up cell": (("# @first-cell", "x = 1"), "x = 1", "the second cell is the single line '# @first-cell'"),
    "two set-up cells": (("total = 10", "# @first-cell"), "# @first-cell\n\n# %%\nprint", "a second '# @first-cell'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_mistake_is_named_with_its_file_and_line(change, tmp_path):
    (old, new), at, message = CHANGES[change]
    assert LESSON.count(old) == 1
    text = LESSON.replace(old, new)
    found = mistakes(tmp_path, text)
    assert any(line.startswith(f"01_small.py:{line_of(at, text)}: ") and message in line for line in found), found


def test_several_mistakes_are_reported_at_once_in_the_order_of_the_file(tmp_path):
    found = mistakes(tmp_path, LESSON.replace("minutes=2 ", "").replace("kind=explain", "kind=essay"))
    assert len(found) == 2
    assert "guess: minutes=" in found[0]
    assert "why: kind=essay" in found[1]


def test_at_most_fifteen_percent_of_the_code_cells_are_exempt(tmp_path):
    code_cells = sum(cell.kind == "code" for cell in parsed(tmp_path, LESSON).cells)
    assert 2 <= 0.15 * code_cells < 3  # the first cell and one more: a third is too many
    text = LESSON.replace('# %%\nprint("done")', '# %% tags=["nbval-ignore-output"]\nprint("done")')
    (found,) = mistakes(tmp_path, text)
    line = line_of('print("done")', text)
    assert found.startswith(f"01_small.py:{line}: 3 of {code_cells} code cells")


def test_a_marker_of_cells_inside_a_string_is_refused_rather_than_guessed_at(tmp_path):
    (found,) = mistakes(tmp_path, LESSON.replace("total = 10", 'total = """\n# %% no cell\n"""'))
    assert "one is in a string" in found


def test_a_cell_magic_belongs_to_its_cell(tmp_path):
    lesson = parsed(tmp_path, LESSON.replace('print("done")', '# %%writefile small.py\nprint("done")'))
    assert len(lesson.cells) == len(parsed(tmp_path, LESSON).cells)
    assert any(cell.text == '%%writefile small.py\nprint("done")' for cell in lesson.cells)


def test_a_file_that_is_not_called_like_a_lesson_is_refused(tmp_path):
    assert "is called lesson-one.py" in mistakes(tmp_path, LESSON, "lesson-one.py")[0]
