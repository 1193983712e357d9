"""What ranks print: live in the cell with the rank, whole in the logs, capped where it would flood, in order when plain."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from course_utils import launch
from course_utils.errors import WorkerFailed
from course_utils.launcher import Run
from tests.kernels import Kernel, strip_colours

from .conftest import Notebook


def shown_by(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, Run]:
    """What a launch shows, and its run."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        run = launch(fn, *args, framework="python", **{"nprocs": 2, **options})
    return shown.getvalue(), run


# ---- L9: too much, too long, not whole


def test_L9_every_line_carries_its_rank_and_logs_are_whole(each_way: str) -> None:
    def worker() -> None:
        rank = os.environ["RANK"]
        print(f"one of {rank}\ntwo of {rank}\n\nafter an empty line")

    shown, run = shown_by(worker)
    assert sorted(shown.splitlines()) == sorted(
        f"[rank {rank}] {line}"
        for rank in (0, 1)
        for line in (f"one of {rank}", f"two of {rank}", "", "after an empty line")
    )
    assert list(run.logs) == [f"one of {rank}\ntwo of {rank}\n\nafter an empty line\n" for rank in (0, 1)]


def test_L9_300_kilobytes_are_capped_in_the_cell_and_whole_in_the_log(each_way: str) -> None:
    def worker() -> None:
        for number in range(6_000):
            print(f"line {number:05d} " + "x" * 38)

    shown, run = shown_by(worker)
    assert len(shown) < 60_000
    for rank in (0, 1):
        assert run.logs[rank] == "".join(f"line {number:05d} {'x' * 38}\n" for number in range(6_000))
        of_rank = [line for line in shown.splitlines() if line.startswith(f"[rank {rank}]")]
        assert of_rank[0] == f"[rank {rank}] line 00000 {'x' * 38}"
        assert f"run.logs[{rank}]" in of_rank[-1]
        assert sum("run.logs" in line for line in of_rank) == 1


def test_L9_one_rank_that_floods_does_not_silence_another() -> None:
    def worker() -> None:
        if os.environ["RANK"] == "0":
            print("x\n" * 100_000)
        else:
            print("I am heard")

    shown, _ = shown_by(worker)
    assert "[rank 1] I am heard\n" in shown


def test_L9_a_line_of_100_kilobytes() -> None:
    def worker() -> None:
        print("a" * 100_000)
        print("after")

    shown, run = shown_by(worker, nprocs=1)
    first, second = shown.splitlines()
    assert len(first) < 5_000
    assert first.startswith("[rank 0] aaa")
    assert "100000 characters" in first
    assert second == "[rank 0] after"
    assert run.logs[0] == "a" * 100_000 + "\nafter\n"


def test_L9_a_line_of_20_megabytes_without_an_end() -> None:
    def worker() -> None:
        sys.stdout.write("b" * 20_000_000)

    start = time.monotonic()
    shown, run = shown_by(worker, nprocs=1)
    assert time.monotonic() - start < 20
    assert len(shown) < 5_000
    assert len(run.logs[0]) == 20_000_000


def test_L9_half_a_line_is_shown_at_the_end() -> None:
    def worker() -> None:
        print("half of", os.environ["RANK"], end="")

    shown, run = shown_by(worker)
    assert sorted(shown.splitlines()) == ["[rank 0] half of 0", "[rank 1] half of 1"]
    assert run.logs[1] == "half of 1"


def test_L9_half_lines_of_two_ranks_do_not_mix() -> None:
    def worker(folder: Path) -> None:
        rank = int(os.environ["RANK"])
        for turn in range(4):
            while turn % 2 != rank and not (folder / str(turn)).exists():
                time.sleep(0.005)
            if turn % 2 == rank:
                print(f"{rank}{turn}", end="\n" if turn > 1 else " ", flush=True)
                (folder / str(turn)).touch()

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        shown, _ = shown_by(worker, Path(folder))
    assert sorted(shown.splitlines()) == ["[rank 0] 00 02", "[rank 1] 11 13"]


def test_L9_a_progress_bar_shows_its_last_state() -> None:
    def worker() -> None:
        for done in range(101):
            print(f"\r{done}%|" + "#" * (done // 10), end="", flush=True)
        print()
        print("windows line\r")

    shown, run = shown_by(worker, nprocs=1)
    assert shown.splitlines() == ["[rank 0] 100%|##########", "[rank 0] windows line"]
    assert "\r50%|" in run.logs[0]


def test_L9_a_progress_bar_of_tqdm() -> None:
    tqdm = pytest.importorskip("tqdm")

    def worker() -> None:
        for _ in tqdm.tqdm(range(50), mininterval=0):
            pass

    shown, _ = shown_by(worker, nprocs=1)
    assert len(shown.splitlines()) <= 2
    assert "50/50" in shown


def test_L9_bytes_that_are_no_text() -> None:
    def worker() -> None:
        os.write(1, b"caf\xe9 \xff\xfe\x00 end\n")
        print("after")

    shown, run = shown_by(worker, nprocs=1)
    assert shown.splitlines()[-1] == "[rank 0] after"
    assert shown.startswith("[rank 0] caf")
    assert run.logs[0].endswith(" end\nafter\n")
    shown.encode()


def test_L9_characters_cut_in_half_between_writes() -> None:
    def worker() -> None:
        for byte in "größe — 次元 🙂\n".encode():
            os.write(1, bytes([byte]))
            time.sleep(0.002)

    shown, run = shown_by(worker, nprocs=1)
    assert shown == "[rank 0] größe — 次元 🙂\n"
    assert run.logs[0] == "größe — 次元 🙂\n"


def test_L9_unicode_and_half_characters_can_be_printed(monkeypatch: pytest.MonkeyPatch, each_way: str) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("LANG", "C")

    def worker() -> None:
        print("größe — 次元 🙂")
        print("half \udcff")

    shown, _ = shown_by(worker, nprocs=1)
    assert shown.startswith("[rank 0] größe — 次元 🙂\n[rank 0] half ")
    shown.encode()


def test_L9_output_from_below_python_and_from_grandchildren() -> None:
    def worker() -> None:
        print("from print")
        os.write(1, b"from descriptor 1\n")
        os.write(2, b"from descriptor 2\n")
        subprocess.run(["sh", "-c", "echo from a shell; echo its complaint >&2"], check=True)
        os.system("echo from system")
        child = os.fork()
        if child == 0:
            print("from a fork", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        import ctypes

        libc = ctypes.CDLL(None)
        libc.puts(b"from C")
        libc.fflush(None)

    shown, run = shown_by(worker, nprocs=1)
    expected = ["print", "descriptor 1", "descriptor 2", "a shell", "system", "a fork", "C"]
    for what in expected:
        assert f"[rank 0] from {what}\n" in shown
    assert "[rank 0] its complaint\n" in shown
    assert run.logs[0].count("from ") == len(expected)


def test_L9_stderr_warnings_and_logging_are_shown_too(each_way: str) -> None:
    def worker() -> None:
        print("to stderr", file=sys.stderr)
        warnings.warn("be careful", stacklevel=1)
        logging.warning("logged")
        logging.basicConfig(level=logging.INFO, force=True)
        logging.info("configured")
        threading.Thread(target=print, args=("from a thread",)).start()

    shown, run = shown_by(worker, nprocs=1)
    for text in ("to stderr", "be careful", "WARNING:root:logged", "INFO:root:configured", "from a thread"):
        assert text in shown
        assert text in run.logs[0]
    assert all(line.startswith("[rank 0] ") for line in shown.splitlines())


def test_L9_what_is_printed_while_a_rank_leaves_is_kept() -> None:
    def worker() -> None:
        import atexit

        atexit.register(print, "goodbye")

    shown, run = shown_by(worker, nprocs=1)
    assert shown == "[rank 0] goodbye\n"
    assert run.logs[0] == "goodbye\n"


def test_L9_the_order_of_one_ranks_lines_is_kept() -> None:
    def worker() -> None:
        for number in range(50):
            print(number, file=(sys.stdout, sys.stderr)[number % 2])

    _, run = shown_by(worker, nprocs=3)
    for log in run.logs:
        assert log.split() == [str(number) for number in range(50)]


def test_L9_a_rank_may_replace_its_own_stdout() -> None:
    def worker() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as kept:
            print("kept")
        print("shown")
        return kept.getvalue()

    shown, run = shown_by(worker, nprocs=1)
    assert shown == "[rank 0] shown\n"
    assert run.results == ["kept\n"]


def test_a_silent_run_shows_nothing() -> None:
    shown, run = shown_by(lambda: 3)
    assert shown == ""
    assert list(run.logs) == ["", ""]
    assert run.logs[-1] == ""
    assert run.logs[0:2] == ["", ""]
    with pytest.raises(IndexError):
        run.logs[2]


def test_logs_outlive_what_comes_after_their_run() -> None:
    from course_utils import launcher

    _, first = shown_by(lambda: print("first"), nprocs=1)
    _, second = shown_by(lambda: print("second"), nprocs=1)
    launcher.shutdown()
    _, third = shown_by(lambda: print("third"), nprocs=1)
    assert [run.logs[0] for run in (first, second, third)] == ["first\n", "second\n", "third\n"]


def test_a_run_shows_itself_in_one_line() -> None:
    _, run = shown_by(lambda: [0] * 1_000_000)
    assert len(repr(run)) < 200
    assert "2 ranks" in repr(run)
    assert len(repr(run.logs)) < 200


# ---- COURSE_PLAIN=1


def test_plain_output_comes_at_the_end_ordered_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_PLAIN", "1")

    def worker() -> None:
        rank = int(os.environ["RANK"])
        time.sleep((2 - rank) * 0.05)
        print(f"first of {rank}")
        time.sleep(rank * 0.05)
        print(f"second of {rank}", end="")

    shown, _ = shown_by(worker, nprocs=3)
    assert shown.splitlines() == [
        f"[rank {rank}] {which} of {rank}" for rank in range(3) for which in ("first", "second")
    ]


def test_plain_output_comes_also_when_a_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_PLAIN", "1")

    def worker() -> None:
        print("before")
        raise ValueError("boom")

    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(WorkerFailed):
        launch(worker, framework="python")
    assert shown.getvalue().splitlines() == ["[rank 0] before", "[rank 1] before"]


def test_plain_output_is_capped_as_live_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_PLAIN", "1")
    shown, _ = shown_by(lambda: print("x\n" * 100_000))
    assert len(shown) < 60_000
    assert "run.logs[1]" in shown


def test_output_outside_a_notebook_has_no_colours() -> None:
    shown, _ = shown_by(lambda: print("hi"), nprocs=1)
    assert shown == "[rank 0] hi\n"


# ---- L29: the output reaches the cell that launched the ranks, while they run

PRINTS = """
import os, time
from course_utils import launch
def worker():
    print("rank", os.environ["RANK"], end=" ")
    time.sleep(0.3)
    print("was here")
_ = launch(worker, nprocs=3)
"""
# The rank prints and then waits for somebody who has seen the line.
CELL_THAT_WAITS = """
import os, time
from pathlib import Path
from course_utils import launch

def worker(seen):
    print("first line of", os.environ["RANK"])
    while not Path(seen).exists():
        time.sleep(0.01)
    print("last line")

run = launch(worker, {seen!r}, framework={framework!r}, timeout=30)
"""


@pytest.mark.parametrize("framework", ["torch", "python"])
def test_L29_a_line_reaches_the_front_end_while_its_rank_still_runs(
    framework: str, kernel: Kernel, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    cell = kernel.begin(CELL_THAT_WAITS.format(seen=str(seen), framework=framework))
    kernel.wait_for(cell, lambda cell: cell.text.count("first line") == 2)
    assert "last line" not in cell.text
    assert not cell.done
    seen.touch()
    kernel.finish(cell)
    assert cell.error is None, cell.error_text
    assert sorted(strip_colours(cell.text).splitlines()) == [
        "[rank 0] first line of 0",
        "[rank 0] last line",
        "[rank 1] first line of 1",
        "[rank 1] last line",
    ]


def test_L29_a_launch_is_one_display_of_two_forms(kernel: Kernel) -> None:
    cell = kernel.run("from course_utils import launch\nlaunch(lambda: print('hi'), framework='python')")
    assert {message.kind for message in cell.messages} <= {
        *("status", "execute_input", "display_data", "update_display_data", "execute_result")
    }
    (states,) = cell.displays.values()
    assert set(states[-1]) == {"text/html", "text/plain"}
    assert states[-1]["text/plain"] == "[rank 0] hi\n[rank 1] hi"
    assert re.findall(r">rank (\d)</div><pre[^>]*>hi</pre>", states[-1]["text/html"]) == ["0", "1"]
    assert cell.result is not None
    assert cell.result.startswith("<Run of 2 ranks")


def test_L29_lanes_have_the_colours_of_their_ranks(kernel: Kernel) -> None:
    cell = kernel.run("from course_utils import launch\nrun = launch(print, 'hi', framework='python')")
    (states,) = cell.displays.values()
    assert len(set(re.findall(r"border-left:3px solid (#\w+)", states[-1]["text/html"]))) == 2


def test_L29_what_is_printed_cannot_become_html(kernel: Kernel) -> None:
    cell = kernel.run(
        "from course_utils import launch\nrun = launch(print, '<b>&amp;</b><script>', framework='python')"
    )
    (states,) = cell.displays.values()
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;&lt;script&gt;" in states[-1]["text/html"]
    assert "<script" not in states[-1]["text/html"]
    assert "[rank 0] <b>&amp;</b><script>" in states[-1]["text/plain"]


def test_L29_nothing_is_displayed_where_nothing_is_printed(kernel: Kernel) -> None:
    cell = kernel.run("from course_utils import launch\nrun = launch(int, framework='python')")
    assert not cell.displays
    assert cell.streams == ""


def test_L29_a_flood_leaves_a_small_notebook_and_few_updates(kernel: Kernel) -> None:
    cell = kernel.run("""
import os, time
from course_utils import launch
def worker():
    for number in range(12_500):
        print("line", number, "of rank", os.environ["RANK"])
start = time.monotonic()
run = launch(worker, nprocs=8, framework="python")
took = time.monotonic() - start
""")
    (states,) = cell.displays.values()
    assert sum(len(form) for form in states[-1].values()) < 60_000
    took = float(kernel.value("took"))
    assert len(states) <= took / 0.1 + 3
    for rank in range(8):
        lane = [line for line in states[-1]["text/plain"].splitlines() if line.startswith(f"[rank {rank}]")]
        assert lane[0].endswith(f"line 0 of rank {rank}")
        assert lane[-1].endswith(f"line 12499 of rank {rank}")
        (gap,) = [line for line in lane if "left out" in line]
        assert f"run.show(rank={rank})" in gap
        assert len(lane) - 1 + int(re.findall(r"\(([\d,]+) lines", gap)[0].replace(",", "")) == 12_500
    assert kernel.value("run.logs[7].count(chr(10))") == "12500"


def test_L29_a_progress_bar_moves_in_its_place(kernel: Kernel, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    cell = kernel.begin(f"""
import time
from pathlib import Path
from course_utils import launch
def worker():
    print("before")
    print("10%|#", end="")
    print("\\r50%|#####", end="")
    while not Path({str(seen)!r}).exists():
        time.sleep(0.01)
    print("\\r100%|##########")
run = launch(worker, nprocs=1, framework="python")
""")
    kernel.wait_for(cell, lambda cell: "50%" in cell.text)
    assert cell.text == "[rank 0] before\n[rank 0] 50%|#####\n"
    seen.touch()
    kernel.finish(cell)
    assert cell.text == "[rank 0] before\n[rank 0] 100%|##########\n"


def test_L29_a_failure_and_an_interrupt_leave_the_last_state(kernel: Kernel) -> None:
    cell = kernel.run("""
from course_utils import launch
def worker():
    print("last words")
    raise ValueError("boom")
launch(worker, nprocs=1, framework="python")
""")
    assert cell.error == "WorkerFailed"
    assert cell.text == "[rank 0] last words\n"
    cell = kernel.begin("""
import time
def worker():
    print("asleep")
    time.sleep(600)
launch(worker, nprocs=1, framework="python")
""")
    kernel.wait_for(cell, lambda cell: "asleep" in cell.text)
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.error == "KeyboardInterrupt"
    assert re.search(r"interrupted, while .*\n  rank .*\n  0 +running +cell \d+, line 4 +time.sleep\(600\)", cell.text)
    assert "[rank 0] asleep" in cell.text


def test_L29_a_notebook_that_cannot_display_gets_lines(kernel: Kernel) -> None:
    cell = kernel.run("""
import IPython.display
from course_utils import launch
kept = IPython.display.display
def fails(*_, **__): raise OSError("no front end")
IPython.display.display = fails
try:
    run = launch(print, "hi", framework="python")
finally:
    IPython.display.display = kept
""")
    assert cell.error is None, cell.error_text
    assert "no front end" in cell.streams
    assert {"[rank 0] hi", "[rank 1] hi"} <= set(strip_colours(cell.streams).splitlines())


def test_show_prints_the_whole_log_of_one_rank_or_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    _, run = shown_by(lambda: print(f"a\n{os.environ['RANK']}"))
    run.show(rank=1)
    assert capsys.readouterr().out == "[rank 1] a\n[rank 1] 1\n"
    run.show()
    assert capsys.readouterr().out == "[rank 0] a\n[rank 0] 0\n[rank 1] a\n[rank 1] 1\n"
    for wrong in (2, -1):
        with pytest.raises(IndexError, match=rf"rank {wrong}.* ranks 0 to 1"):
            run.show(rank=wrong)


def test_L29_under_course_plain_a_cell_shows_the_same_text_each_time(kernel: Kernel) -> None:
    source = """
import os
from course_utils import launch
os.environ["COURSE_PLAIN"] = "1"
def worker():
    for n in range(3):
        print("line", n, "of", os.environ["RANK"])
try:
    launch(worker, nprocs=4, framework="python")
finally:
    del os.environ["COURSE_PLAIN"]
"""
    expected = "".join(f"[rank {rank}] line {n} of {rank}\n" for rank in range(4) for n in range(3))
    for _ in range(5):
        assert kernel.run(source).text == expected


def notebook_of(*cells: str) -> Any:
    import nbformat

    made = [nbformat.v4.new_code_cell(source.strip()) for source in cells]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=made, metadata=metadata)


def text_of(cell: Any) -> str:
    forms = [output["text"] if output.output_type == "stream" else output.data["text/plain"] for output in cell.outputs]
    return "\n".join(forms)


def test_L29_under_nbclient(tmp_path: Path) -> None:
    from nbclient import NotebookClient

    seen = tmp_path / "seen"

    class Watching(NotebookClient):  # type: ignore[misc]
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            output = super().process_message(msg, cell, cell_index)
            if text_of(cell).count("first line") == 2:
                seen.touch()
            return output

    book = notebook_of(CELL_THAT_WAITS.format(seen=str(seen), framework="torch"), "print(len(run.results))")
    Watching(book, kernel_name="python3", timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (output,) = book.cells[0].outputs
    assert output.data["text/plain"].count("last line") == 2
    assert text_of(book.cells[1]) == "2\n"


def test_L29_under_papermill(tmp_path: Path) -> None:
    papermill = pytest.importorskip("papermill")
    import nbformat

    source = tmp_path / "in.ipynb"
    nbformat.write(notebook_of(PRINTS), source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # papermill's own
        done = papermill.execute_notebook(
            str(source), str(tmp_path / "out.ipynb"), kernel_name="python3", progress_bar=False, cwd=str(tmp_path)
        )
    (output,) = done.cells[-1].outputs  # the last state of the one display, once
    assert output.data["text/plain"] == "".join(f"[rank {rank}] rank {rank} was here\n" for rank in range(3)).rstrip()


def test_L29_two_launches_at_once_reach_the_cell_that_started_them(kernel: Kernel) -> None:
    cell = kernel.run("""
import threading
from course_utils import launch
threads = [threading.Thread(target=launch, args=(print, name), kwargs=dict(framework="python")) for name in "ab"]
for thread in threads: thread.start()
for thread in threads: thread.join()
""")
    lines = sorted(strip_colours(cell.text).splitlines())
    assert lines == ["[rank 0] a", "[rank 0] b", "[rank 1] a", "[rank 1] b"]


def test_L29_display_in_a_rank_is_at_least_text(kernel: Kernel) -> None:
    cell = kernel.run("""
from course_utils import launch
def worker():
    display({"a": 1})
run = launch(worker, nprocs=1, framework="python")
""")
    assert cell.error is None, cell.error_text
    assert "{'a': 1}" in cell.text


def test_L29_output_captured_by_the_cell_is_the_cells(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%capture kept\nfrom course_utils import launch\nrun = launch(lambda: print('hi'), nprocs=1, framework='python')"
    )
    assert cell.text == ""
    assert not cell.displays
    assert "[rank 0]" in strip_colours(kernel.run("print(kept.stdout)").text)


def test_the_notebook_in_miniature_names_its_cells(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("def worker():\n    raise ValueError('boom')\n")
    with pytest.raises(WorkerFailed, match="cell 2, line 2"):
        launch(notebook["worker"], framework="python")
