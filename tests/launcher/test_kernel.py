"""Launching from a real kernel: what it had done before, interrupts, sudden death, and where output goes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from tests.kernels import Kernel, await_that

SUM = """
import torch
import torch.distributed as dist
from course_utils import launch

def total():
    tensor = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return tensor.item()
"""
SLEEP = """
import os, time
from course_utils import launch

def sleep():
    print("asleep", flush=True)
    time.sleep(600)
"""


def test_L1_a_launch_works_after_a_parallel_operation_in_the_kernel(own_kernel: Kernel) -> None:
    own_kernel.run("import torch\nx = torch.randn(1500, 1500)\ny = x @ x\ntorch.set_num_threads(2)\n_ = (x @ x).sum()")
    own_kernel.run(SUM)
    assert own_kernel.value("launch(total, nprocs=3).results") == "[6.0, 6.0, 6.0]"
    assert own_kernel.value("(x @ x).shape, launch(lambda: (x @ x).sum().item() == (x @ x).sum().item()).results") == (
        "(torch.Size([1500, 1500]), [True, True])"
    )


def test_L1_a_launch_works_beside_threads_of_the_kernel(own_kernel: Kernel) -> None:
    own_kernel.run(SUM)
    own_kernel.run(
        "import threading\nstop = threading.Event()\n"
        "threads = [threading.Thread(target=stop.wait) for _ in range(8)]\n_ = [thread.start() for thread in threads]"
    )
    assert own_kernel.value("launch(total).results") == "[3.0, 3.0]"
    own_kernel.run("stop.set()")


@pytest.mark.parametrize("way", ["warm server", "fresh interpreters"])
def test_L3_an_interrupt_ends_the_ranks_and_the_next_launch_works(own_kernel: Kernel, way: str) -> None:
    if way == "fresh interpreters":
        own_kernel.run("import os; os.environ['COURSE_LAUNCHER'] = 'subprocess'")
    own_kernel.run(SUM + SLEEP)
    cell = own_kernel.begin("launch(sleep, nprocs=3)")
    own_kernel.wait_for(cell, lambda cell: cell.text.count("asleep") == 3)
    before = time.monotonic()
    own_kernel.interrupt()
    own_kernel.finish(cell, timeout=10)
    assert time.monotonic() - before < 3
    assert cell.error == "KeyboardInterrupt"
    assert own_kernel.ranks() == []
    assert own_kernel.value("launch(total).results") == "[3.0, 3.0]"


def test_L3_ranks_that_ignore_sigterm_do_not_hold_an_interrupt_up(own_kernel: Kernel) -> None:
    own_kernel.run(
        SLEEP + "\nimport signal\ndef stubborn():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    sleep()"
    )
    cell = own_kernel.begin("launch(stubborn)")
    own_kernel.wait_for(cell, lambda cell: cell.text.count("asleep") == 2)
    before = time.monotonic()
    own_kernel.interrupt()
    own_kernel.finish(cell, timeout=10)
    assert time.monotonic() - before < 3
    assert cell.error == "KeyboardInterrupt"
    assert own_kernel.ranks() == []


def test_L3_a_second_interrupt_changes_nothing(own_kernel: Kernel) -> None:
    own_kernel.run(
        SUM + SLEEP + "\nimport signal\ndef stubborn():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    sleep()"
    )
    cell = own_kernel.begin("launch(stubborn)")
    own_kernel.wait_for(cell, lambda cell: cell.text.count("asleep") == 2)
    own_kernel.interrupt()
    time.sleep(0.3)  # into the time in which the ranks are being ended
    own_kernel.interrupt()
    own_kernel.finish(cell, timeout=10)
    assert cell.error == "KeyboardInterrupt"
    await_that(lambda: own_kernel.ranks() == [], 4, "the ranks to go")
    assert own_kernel.value("launch(total).results") == "[3.0, 3.0]"


@pytest.mark.parametrize("wait", [0.0, 0.05, 0.3, 1.0])
def test_L3_an_interrupt_while_ranks_are_still_starting(own_kernel: Kernel, wait: float) -> None:
    own_kernel.run(SUM)
    cell = own_kernel.begin("print('begun')\nlaunch(total)\nimport time\ntime.sleep(5)")
    own_kernel.wait_for(cell, lambda cell: "begun" in cell.text)
    time.sleep(wait)
    own_kernel.interrupt()
    own_kernel.finish(cell, timeout=10)
    assert cell.error == "KeyboardInterrupt"
    await_that(lambda: own_kernel.ranks() == [], 4, "the ranks to go")
    assert own_kernel.value("launch(total).results") == "[3.0, 3.0]"


def test_L4_signal_handlers_and_environment_are_what_they_were(own_kernel: Kernel) -> None:
    own_kernel.run(
        SUM + SLEEP + "import random, signal, sys, threading\n"
        "def state():\n"
        "    handlers = {n: signal.getsignal(n) for n in signal.valid_signals() if n not in (9, 19)}\n"
        "    streams = id(sys.stdin), id(sys.stdout), id(sys.stderr)\n"
        "    drawn = random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads()\n"
        "    return handlers, dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv), streams, drawn, "
        "threading.active_count(), signal.set_wakeup_fd(signal.set_wakeup_fd(-1))\n"
        "before = state()\n"
        "def fails():\n    raise ValueError\n"
        "launch(total)"
    )
    assert own_kernel.value("before == state()") == "True"
    own_kernel.run("launch(fails, env={'EXTRA': 'x'})")
    own_kernel.run("launch(sleep, timeout=0.5)")
    cell = own_kernel.begin("launch(sleep)")
    own_kernel.wait_for(cell, lambda cell: cell.text.count("asleep") == 2)
    own_kernel.interrupt()
    own_kernel.finish(cell)
    assert cell.error == "KeyboardInterrupt"
    assert own_kernel.value("before == state()") == "True"
    assert own_kernel.value("'EXTRA' in os.environ or 'RANK' in os.environ or 'MASTER_PORT' in os.environ") == "False"


@pytest.mark.parametrize("way", ["warm server", "fresh interpreters"])
def test_L5_nothing_is_left_when_the_kernel_is_killed(own_kernel: Kernel, tmp_path: Path, way: str) -> None:
    if way == "fresh interpreters":
        own_kernel.run("import os; os.environ['COURSE_LAUNCHER'] = 'subprocess'")
    own_kernel.run(SLEEP)
    cell = own_kernel.begin("launch(sleep, nprocs=3)")
    own_kernel.wait_for(cell, lambda cell: cell.text.count("asleep") == 3)
    own_kernel.kill()
    await_that(lambda: own_kernel.processes() == [], 2, "every process of the kernel to go")
    assert list((tmp_path / "tmp").glob("course_utils-*")) == []


def test_L5_stubborn_ranks_their_children_and_an_idle_server_go_too(own_kernel: Kernel) -> None:
    own_kernel.run(
        SLEEP + "\nimport signal, subprocess, sys\n"
        "def stubborn():\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "    print('asleep', flush=True)\n"
        "    while True: pass"
    )
    cell = own_kernel.begin("launch(stubborn)")
    own_kernel.wait_for(cell, lambda cell: cell.text.count("asleep") == 2)
    own_kernel.kill()
    await_that(lambda: own_kernel.processes() == [], 2, "every process of the kernel to go")


def test_L5_an_idle_server_goes_although_a_forked_child_still_holds_its_socket(own_kernel: Kernel) -> None:
    own_kernel.run(SUM)
    own_kernel.run(
        "launch(total)\nimport os, time\nchild = os.fork()\nif child == 0:\n    time.sleep(30)\n    os._exit(0)"
    )
    child = int(own_kernel.value("child"))
    own_kernel.kill()
    try:
        await_that(lambda: [p.pid for p in own_kernel.processes()] == [child], 2, "the server to go")
    finally:
        psutil.Process(child).kill()


def test_L15_the_same_cell_runs_twice(kernel: Kernel) -> None:
    kernel.run(SUM)
    assert [kernel.value("launch(total).results") for _ in range(3)] == ["[3.0, 3.0]"] * 3


def test_L15_a_stale_process_that_holds_the_usual_ports_does_not_matter(kernel: Kernel) -> None:
    kernel.run(
        SUM + "import socket\nheld = []\n"
        "for port in (29400, 29500, 29501, 12345):\n"
        "    held.append(socket.socket())\n"
        "    try:\n        held[-1].bind(('0.0.0.0', port)); held[-1].listen()\n    except OSError:\n        pass"
    )
    assert kernel.value("launch(total).results") == "[3.0, 3.0]"
    kernel.run("for one in held:\n    one.close()")


PRINTS = """
import os
from course_utils import launch
_ = launch(lambda: print("rank", os.environ["RANK"], "was here"), nprocs=3)
"""
SHOWN = "".join(f"[rank {rank}] rank {rank} was here\n" for rank in range(3))


def written(path: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return path


def test_L29_output_reaches_the_cell_under_nbval(tmp_path: Path) -> None:
    def nbval(notebook: Path) -> subprocess.CompletedProcess[str]:
        options = ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "-W", "default", "-c", os.devnull]
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(notebook)],
            env={**os.environ, "COURSE_PLAIN": "1"},
            capture_output=True,
            text=True,
            timeout=180,
        )

    path = written(tmp_path / "prints.ipynb", PRINTS)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].execution_count = 1
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", name="stdout", text=SHOWN)]
    nbformat.write(notebook, path)
    agreed = nbval(path)
    assert agreed.returncode == 0, agreed.stdout
    notebook.cells[0].outputs[0].text = SHOWN.replace("rank 2 was", "rank 7 was")
    nbformat.write(notebook, path)
    assert nbval(path).returncode == 1


def test_L26_a_failure_raises_so_that_run_all_stops_there(kernel: Kernel) -> None:
    cell = kernel.run("from course_utils import launch\ndef fails():\n    raise ValueError('boom')\nlaunch(fails)")
    assert cell.error == "WorkerFailed"
    assert "ValueError: boom" in cell.error_text
    assert "raise ValueError('boom')" in cell.error_text
    assert "course_utils/launcher" not in cell.error_text
    assert "line 3, in fails" in cell.error_text
    assert "cell " in cell.error_text


def test_L14_cuda_initialised_in_the_kernel_does_not_reach_the_ranks(own_kernel: Kernel) -> None:
    # A stand-in where there is no GPU: CUDA leaves a state in torch that forking the kernel would copy.
    own_kernel.run(
        SUM + "import torch.cuda\ntorch.cuda._initialized = True\ntorch.cuda._is_in_bad_fork = lambda: True\n"
        "def fresh():\n    import torch.cuda\n    return torch.cuda._initialized, os.getppid() != kernel\n"
        "import os\nkernel = os.getpid()"
    )
    assert own_kernel.value("launch(fresh).results") == "[(False, True), (False, True)]"
    assert own_kernel.value("launch(total).results") == "[3.0, 3.0]"


def test_marked_processes_are_found_in_any_session(own_kernel: Kernel) -> None:
    """The tests above trust this: a process that moved to a session of its own is still seen."""
    own_kernel.run(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
    )
    child = int(own_kernel.value("child.pid"))
    await_that(lambda: [p.pid for p in own_kernel.processes()] == [child], 5, "the child to be seen")
