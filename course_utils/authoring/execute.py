"""Run a notebook in a fresh kernel of this interpreter, and judge what it printed: machine paths, sizes."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets import default

from .source import AuthoringError

CELL_SECONDS = 900  # the longest a single cell may take
CELL_BYTES = 100_000
NOTEBOOK_BYTES = 600_000

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class _ThisInterpreter(KernelSpecManager):
    """Whatever kernel a notebook asks for, it gets one of the interpreter that builds it."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


class _KernelManager(AsyncKernelManager):
    @default("kernel_spec_manager")
    def _this_interpreter(self) -> KernelSpecManager:
        return _ThisInterpreter()


def execute(notebook: NotebookNode, name: str, record: Path | None = None) -> NotebookNode:
    """Run all cells of `notebook` in place and return it; the outputs are plain text where the course has a choice.

    The kernel works in a scratch folder, so nothing is left behind; the learner's progress goes there too, or to the
    file `record`. Raises AuthoringError that names the cell (as "`name`: cell 7 (its id)") when one fails, takes too
    long, ends its kernel or prints a path of this machine.
    """
    at = [0]

    def started(cell: NotebookNode, cell_index: int) -> None:
        at[0] = cell_index

    with tempfile.TemporaryDirectory(prefix="lesson-") as scratch:
        client = NotebookClient(
            notebook,
            kernel_manager_class=_KernelManager,
            resources={"metadata": {"path": scratch}},
            timeout=CELL_SECONDS,
            extra_arguments=["--log-level=ERROR"],
            coalesce_streams=True,
            record_timing=False,
            store_widget_state=False,
            on_cell_start=started,
        )
        paths = os.environ.get("PYTHONPATH")
        env = {
            **os.environ,
            "COURSE_PLAIN": "1",
            "COURSE_PROGRESS": str(record or Path(scratch, "progress.json")),
            "IPYTHONDIR": str(Path(scratch, "ipython")),
            "PYTHONPATH": os.pathsep.join([str(_PACKAGE_ROOT), *([paths] if paths else [])]),
        }
        try:
            client.execute(env=env)
        except CellExecutionError as error:
            what = "\n".join(_ANSI.sub("", str(error)).strip().splitlines()[-40:])
            raise AuthoringError(f"{_place(notebook, name, at[0])} failed:\n{what}") from None
        except CellTimeoutError:
            raise AuthoringError(f"{_place(notebook, name, at[0])} took more than {CELL_SECONDS} s") from None
        except DeadKernelError:
            raise AuthoringError(f"{_place(notebook, name, at[0])}: the kernel died in it") from None
        leaks = list(machine_paths(notebook, name, scratch, *([str(record)] if record else [])))
    if leaks:
        raise AuthoringError("\n".join(leaks))
    notebook.metadata.language_info = NotebookNode(name="python")
    return notebook


def machine_paths(notebook: NotebookNode, name: str, *more: str) -> Iterator[str]:
    """Yield a line for each cell whose outputs name a path of this machine (or one of `more`)."""
    folders = {str(Path.home()), str(_PACKAGE_ROOT), sys.prefix, *more} - {"/", "/usr"}
    patterns = [rf"(?<![\w.~-]){re.escape(folder)}(?![\w-])" for folder in sorted(folders)] + [r"\bipykernel_\d+"]
    leak = re.compile("|".join(patterns))
    for index, cell in enumerate(notebook.cells):
        if found := leak.search(_outputs_text(cell)):
            yield f"{_place(notebook, name, index)}: its output holds {found[0]!r}, a path of the machine it ran on"


def oversize(notebook: NotebookNode, name: str) -> Iterator[str]:
    """Yield a line for each cell, and one for the notebook, whose outputs are over the budget."""
    sizes = [len(_outputs_text(cell).encode()) for cell in notebook.cells]
    for index, size in enumerate(sizes):
        if size > CELL_BYTES:
            place, limit = _place(notebook, name, index), CELL_BYTES // 1000
            yield f"{place}: {size / 1000:.0f} KB of outputs; a cell may have {limit} KB"
    if sum(sizes) > NOTEBOOK_BYTES:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        yield (
            f"{name}: {sum(sizes) / 1000:.0f} KB of outputs; a notebook may have {NOTEBOOK_BYTES // 1000} KB "
            f"(the largest is {_place(notebook, name, largest)})"
        )


def _outputs_text(cell: NotebookNode) -> str:
    outputs = cell.get("outputs")
    return json.dumps(outputs, ensure_ascii=False) if outputs else ""


def _place(notebook: NotebookNode, name: str, index: int) -> str:
    return f"{name}: cell {index + 1} ({notebook.cells[index].get('id', 'no id')})"
