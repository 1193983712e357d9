"""Running notebooks: a fresh kernel of this interpreter, failures with their cell, budgets, machine paths."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from course_utils.authoring import execute as module
from course_utils.authoring.execute import CELL_BYTES, NOTEBOOK_BYTES, execute, machine_paths, oversize
from course_utils.authoring.source import AuthoringError


def notebook(*sources: str) -> NotebookNode:
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{index}") for index, source in enumerate(sources)]
    return nbformat.v4.new_notebook(cells=cells)


def printed(cell: NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs)


def shown(text: str, identity: str = "shown") -> NotebookNode:
    cell = nbformat.v4.new_code_cell(id=identity, outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)])
    return nbformat.v4.new_notebook(cells=[cell])


def test_cells_run_in_this_interpreter_in_plain_mode_with_a_scratch_folder_that_goes(monkeypatch):
    monkeypatch.setattr(module, "machine_paths", lambda *_: [])
    seen = execute(
        notebook(
            "import os, sys; print(sys.executable)",
            "print(os.environ['COURSE_PLAIN'])",
            "print(os.getcwd(), os.path.dirname(os.environ['COURSE_PROGRESS']))",
            "import course_utils; print(course_utils.__file__)",
            "open('left behind', 'w').close()",
        ),
        "n",
    )
    assert [cell.execution_count for cell in seen.cells] == [1, 2, 3, 4, 5]
    assert printed(seen.cells[0]).strip() == sys.executable
    assert printed(seen.cells[1]).strip() == "1"
    folder, progress = printed(seen.cells[2]).split()
    assert folder == progress
    assert not Path(folder).exists()
    assert Path(printed(seen.cells[3]).strip()).parents[1] == Path(module.__file__).parents[2]


def test_the_kernel_that_a_notebook_asks_for_does_not_matter():
    asked = notebook("import sys; print(sys.version_info.major)")
    asked.metadata.kernelspec = {"name": "of-another-machine", "display_name": "Another"}
    assert printed(execute(asked, "n").cells[0]) == "3\n"


def test_nothing_volatile_is_kept_so_a_second_run_gives_the_same_text():
    sources = ("import time; print('a', flush=True); time.sleep(0.2); print('b')", "1 + 1")
    first, second = (nbformat.writes(execute(notebook(*sources), "n")) for _ in range(2))
    assert first == second
    assert '"execution"' not in first
    assert "version" not in nbformat.reads(first, as_version=4).metadata.language_info


def test_a_failing_cell_is_named_with_its_error_without_colours():
    with pytest.raises(AuthoringError) as caught:
        execute(notebook("x = 1", "raise ValueError('boom')"), "solutions/01.ipynb")
    message = str(caught.value)
    assert message.startswith("solutions/01.ipynb: cell 2 (cell-1) failed:")
    assert "ValueError: boom" in message
    assert "\x1b" not in message


def test_a_cell_that_ends_its_kernel_is_named():
    with pytest.raises(AuthoringError, match=r"^n: cell 2 \(cell-1\): the kernel died in it$"):
        execute(notebook("x = 1", "import os; os._exit(3)"), "n")


def test_a_cell_that_takes_too_long_is_named(monkeypatch):
    monkeypatch.setattr(module, "CELL_SECONDS", 1)
    with pytest.raises(AuthoringError, match=r"^n: cell 1 \(cell-0\) took more than 1 s$"):
        execute(notebook("import time; time.sleep(60)"), "n")


@pytest.mark.parametrize(
    "source",
    [
        "from pathlib import Path; print(Path.home())",
        "import course_utils; print(course_utils.__path__)",
        "import os; print('working in', os.getcwd())",
        "import warnings; warnings.warn('see there')",
        "import sys; sys.prefix",
    ],
)
def test_a_path_of_this_machine_in_an_output_is_refused(source):
    with pytest.raises(AuthoringError, match=r"^n: cell 1 \(cell-0\): its output holds '.+', a path of the machine"):
        execute(notebook(source), "n")


@pytest.mark.parametrize("text", ["a tree's ~/root", "/tmp/x", f"x{Path.home()}", f"{Path.home()}-made rest"])
def test_words_that_only_resemble_such_a_path_are_fine(text):
    assert list(machine_paths(shown(text), "n")) == []


@pytest.mark.parametrize(("size", "over"), [(CELL_BYTES - 200, False), (CELL_BYTES + 1, True)])
def test_a_cell_over_the_budget_is_named(size, over):
    found = list(oversize(shown("x" * size), "n"))
    assert found == (["n: cell 1 (shown): 100 KB of outputs; a cell may have 100 KB"] if over else [])


def test_a_notebook_over_the_budget_names_its_largest_cell():
    cells = [
        shown("x" * (CELL_BYTES - 300 - (index != 3)), f"cell-{index}").cells[0]
        for index in range(NOTEBOOK_BYTES // CELL_BYTES + 1)
    ]
    (found,) = oversize(nbformat.v4.new_notebook(cells=cells), "n")
    assert found.startswith("n: 698 KB of outputs; a notebook may have 600 KB (the largest is n: cell 4 ")


def test_no_scratch_folder_is_left_behind_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(AuthoringError):
        execute(notebook("open('file', 'w').close(); 1 / 0"), "n")
    assert [name for name in os.listdir(tmp_path) if name.startswith("lesson-")] == []
