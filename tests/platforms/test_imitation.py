"""The imitation environment really is the platforms' old front end over the course's torch.

Without this, the other tests that run there would prove nothing.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from importlib.metadata import distribution, version
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

REQUIREMENTS = Path(__file__).with_name("requirements.txt").read_text()
PINNED = re.findall(r"^([\w-]+)==(\S+)$", REQUIREMENTS, flags=re.MULTILINE)


@pytest.mark.parametrize(("name", "pinned"), PINNED)
def test_the_old_package_is_the_one_seen(name: str, pinned: str) -> None:
    assert version(name) == pinned
    assert Path(str(distribution(name).locate_file(""))) == Path(sysconfig.get_path("purelib"))


def test_torch_and_pytest_come_from_the_main_environment() -> None:
    for name in ("torch", "pytest", "nbval"):
        assert Path(str(distribution(name).locate_file(""))) != Path(sysconfig.get_path("purelib"))


def test_the_course_comes_from_this_checkout(root: Path) -> None:
    import course_utils

    assert Path(course_utils.__file__).parent == root / "course_utils"


def test_a_kernel_started_here_is_the_old_one() -> None:
    manager, client = start_new_kernel(kernel_name="python3")
    answer = {}
    try:
        client.execute_interactive(
            "import sys, IPython, ipykernel, torch\n"
            "print(sys.prefix, IPython.__version__, ipykernel.__version__, torch.__version__)",
            timeout=120,
            output_hook=lambda message: answer.update(message["content"]) if message["msg_type"] == "stream" else None,
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    prefix, ipython, ipykernel, torch = answer["text"].split()
    assert (prefix, ipython, ipykernel) == (sys.prefix, "7.34.0", "6.17.1")
    assert torch.split("+")[0] == version("torch").split("+")[0]


def test_a_notebook_run_with_nbclient_uses_the_old_kernel() -> None:
    from nbclient import NotebookClient

    cell = nbformat.v4.new_code_cell("import IPython; IPython.version_info[0]")
    NotebookClient(nbformat.v4.new_notebook(cells=[cell]), kernel_name="python3").execute()
    assert cell.outputs[0].data["text/plain"] == "7"
