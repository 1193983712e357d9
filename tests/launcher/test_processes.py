"""Nothing outlives its run: ranks, what they start, descriptors, shared memory, temporary files, and the server itself."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from course_utils import launch, launcher
from course_utils.errors import LaunchError, WorkerFailed, WorkerTimeout
from tests.kernels import await_that

from .conftest import below_servers


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


# ---- L6: what a rank starts goes with it


def offspring() -> dict[str, Callable[[Path], Any]]:
    """Processes that a rank may start; each leaves a file named after its pid in a folder."""

    def loader_workers(folder: Path) -> Any:
        class Numbers(torch.utils.data.Dataset[int]):
            def __len__(self) -> int:
                return 1000

            def __getitem__(self, index: int) -> int:
                (folder / str(os.getpid())).touch()
                return index

        iterator = iter(torch.utils.data.DataLoader(Numbers(), num_workers=2, persistent_workers=True))
        next(iterator)
        return iterator

    def a_shell_and_its_child(folder: Path) -> Any:
        child = subprocess.Popen(["sh", "-c", f"touch {folder}/$$; sleep 600 & touch {folder}/$!; wait"])
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        return child

    def a_fork(folder: Path) -> Any:
        child = os.fork()
        if child == 0:
            time.sleep(600)
        (folder / str(child)).touch()

    def a_daemon_in_its_own_session(folder: Path) -> Any:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                (folder / str(os.getpid())).touch()
                time.sleep(600)
            os._exit(0)
        os.wait()
        while not list(folder.iterdir()):
            time.sleep(0.01)

    def a_process_of_multiprocessing(folder: Path) -> Any:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        (folder / str(child.pid)).touch()
        return child

    return {
        function.__name__: function
        for function in (
            loader_workers,
            a_shell_and_its_child,
            a_fork,
            a_daemon_in_its_own_session,
            a_process_of_multiprocessing,
        )
    }


ENDINGS = ["returns", "raises", "dies", "is killed", "hangs", "ignores everything"]


def end_in(ending: str) -> None:
    if ending == "raises":
        raise ValueError("boom")
    if ending == "dies":
        os._exit(3)
    if ending == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "ignores everything":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
    if ending in ("hangs", "ignores everything"):
        time.sleep(600)


def run_to_its_end(worker: Callable[..., Any], ending: str, *args: Any, **options: Any) -> None:
    if ending == "returns":
        launch(worker, *args, **options)
    elif ending in ("hangs", "ignores everything"):
        with pytest.raises(WorkerTimeout):
            launch(worker, *args, **options, timeout=1.5)
    else:
        with pytest.raises(WorkerFailed):
            launch(worker, *args, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ending", ["returns", "is killed", "hangs"])
@pytest.mark.parametrize("what", list(offspring()))
def test_L6_what_a_rank_started_goes_with_it(what: str, ending: str, tmp_path: Path) -> None:
    start = offspring()[what]
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()

    def worker() -> None:
        started = start(folders[int(os.environ["RANK"])])
        end_in(ending)
        del started

    run_to_its_end(worker, ending, framework="torch" if what == "loader_workers" else "python", init=False)
    for folder in folders:
        started = pids_in(folder)
        assert started
        assert [pid for pid in started if is_alive(pid)] == []


def test_L6_a_process_that_a_rank_left_goes_with_fresh_interpreters_too(
    tmp_path: Path, fresh_interpreters: None
) -> None:
    daemon = offspring()["a_daemon_in_its_own_session"]
    launch(daemon, tmp_path, nprocs=1, framework="python")
    (pid,) = pids_in(tmp_path)
    assert not is_alive(pid)


def test_L6_data_loader_workers_deliver(each_way: str) -> None:
    def worker() -> Any:
        data = torch.utils.data.TensorDataset(torch.arange(8))
        sampler: Any = torch.utils.data.distributed.DistributedSampler(data, shuffle=False)
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler, num_workers=2)
        return [batch[0].tolist() for batch in loader]

    assert launch(worker).results == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


# ---- L16: a rank that does not want to go


@pytest.mark.parametrize("ending", ["returns", "ignores everything"])
def test_L16_a_rank_that_ignores_sigterm_is_killed_after_two_seconds(ending: str, tmp_path: Path) -> None:
    def worker() -> None:
        (tmp_path / str(os.getpid())).touch()
        if os.environ["RANK"] == "0":
            end_in("ignores everything")
        end_in("returns" if ending == "returns" else "raises")

    launch(abs, 1, framework="python")
    start = time.monotonic()
    run_to_its_end(worker, "hangs" if ending == "returns" else "raises", framework="python")
    assert time.monotonic() - start < 6
    assert [pid for pid in pids_in(tmp_path) if is_alive(pid)] == []


def test_L16_a_rank_that_obeys_is_not_kept_waiting() -> None:
    launch(abs, 1, framework="python")
    start = time.monotonic()
    with pytest.raises(WorkerTimeout):
        launch(lambda: time.sleep(600), framework="python", timeout=0.3)
    assert time.monotonic() - start < 2


def test_L16_what_a_rank_registered_for_its_end_runs_and_cannot_hold_it() -> None:
    def worker() -> None:
        import atexit

        atexit.register(time.sleep, 600)

    start = time.monotonic()
    assert launch(worker, framework="python").results == [None, None]
    assert time.monotonic() - start < 10


def test_L16_threads_that_go_on_do_not_hold_a_rank() -> None:
    def worker() -> int:
        threading.Thread(target=time.sleep, args=(600,)).start()
        return 1

    start = time.monotonic()
    assert launch(worker, framework="python").results == [1, 1]
    assert time.monotonic() - start < 8


# ---- L28: a hundred launches leave nothing


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").exists() else set()


def resources() -> dict[str, Any]:
    """Everything that could grow."""
    gc.collect()
    servers = [child for child in psutil.Process().children() if "launcher.server" in " ".join(child.cmdline())]
    return {
        "processes": len(psutil.Process().children(recursive=True)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "shared memory": shared_memory(),
        "descriptors of servers": sorted(server.num_fds() for server in servers),
        "threads of servers": sorted(server.num_threads() for server in servers),
    }


def test_L28_a_hundred_launches_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.shutdown()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def worker(turn: int) -> Any:
        tensor = torch.ones(1000).share_memory_()
        dist.all_reduce(tensor)
        print("turn", turn)
        return tensor

    def files() -> set[Path]:
        return set(tmp_path.rglob("*"))

    launch(worker, 0)
    before, files_before = resources(), files()
    for turn in range(100):
        assert launch(worker, turn).results[1][0] == 2
    await_that(lambda: resources() == before, 5, "resources to be what they were")
    assert files() == files_before
    launcher.shutdown()
    await_that(lambda: not files(), 5, "all files to go")


def test_L28_launches_that_fail_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.shutdown()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def worker(ending: str) -> None:
        if os.environ["RANK"] == "1":
            end_in(ending)

    run_to_its_end(worker, "raises", "raises", framework="python")
    before, files_before = resources(), set(tmp_path.rglob("*"))
    for ending in ("raises", "dies", "is killed", "hangs", "raises", "dies"):
        run_to_its_end(worker, ending, ending, framework="python")
    await_that(lambda: resources() == before, 5, "resources to be what they were")
    assert set(tmp_path.rglob("*")) == files_before


def test_L28_a_failed_runs_logs_go_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker() -> None:
        print("x" * 1000)
        raise ValueError("boom")

    with pytest.raises(WorkerFailed) as caught:
        launch(worker, framework="python")
    assert all(len(log) == 1001 for log in caught.value.logs)


def test_L28_memory_of_the_server_does_not_grow(count: Callable[[int, int], int]) -> None:
    def worker() -> None:
        bytearray(10_000_000)

    def resident() -> int:
        pid = launcher.server_pid("python")
        assert pid is not None
        return int(psutil.Process(pid).memory_info().rss)

    for _ in range(20):
        launch(worker, framework="python")
    before = resident()
    for _ in range(count(60, 600)):
        launch(worker, framework="python")
    assert resident() - before < 1_000_000


# ---- the server


def test_the_server_is_kept_between_launches_and_ends_when_told() -> None:
    launch(abs, 1, framework="python")
    pid = launcher.server_pid("python")
    assert pid is not None
    launch(abs, 1, framework="python")
    assert launcher.server_pid("python") == pid
    launcher.shutdown()
    assert launcher.server_pid("python") is None
    assert not is_alive(pid)
    assert launch(abs, -1, framework="python").results == [1, 1]


def test_a_server_started_ahead_is_used() -> None:
    launcher.shutdown()
    launcher.warm("torch")
    pid = launcher.server_pid("torch")
    assert pid is not None
    assert launch(lambda: os.getppid()).results == [pid, pid]


def test_the_server_is_clean_enough_to_fork() -> None:
    launch(lambda: None)
    pid = launcher.server_pid("torch")
    assert pid is not None
    server = psutil.Process(pid)
    assert server.num_threads() == 1
    assert "/dev/nvidia" not in Path(f"/proc/{pid}/maps").read_text()
    assert os.getsid(pid) == pid  # an interrupt of the kernel's process group does not reach it
    run = launch(lambda: None)
    assert run.notes == []


def test_forking_can_be_turned_off(fresh_interpreters: None) -> None:
    def worker() -> tuple[int, bool]:
        return os.getppid(), "torch" in sys.modules

    warm = launcher.server_pid("python")
    (parent, has_torch), _ = launch(worker, framework="python").results
    assert parent != warm
    assert not has_torch


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_killed_between_launches_is_replaced(number: int, each_way: str) -> None:
    (pid, _) = launch(lambda: os.getppid(), framework="python").results
    os.kill(pid, number)
    assert launch(abs, -3, framework="python").results == [3, 3]


def test_a_server_killed_at_the_moment_of_a_launch_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        (pid, _) = launch(lambda: os.getppid(), framework="python").results
        thread = threading.Thread(target=os.kill, args=(pid, signal.SIGKILL))
        thread.start()
        try:
            launch(abs, 1, framework="python", timeout=10)
        except LaunchError as error:
            assert "killed" in str(error)
        thread.join()
    assert launch(abs, -3, framework="python").results == [3, 3]


def test_a_server_killed_during_a_run_takes_its_ranks_along(each_way: str, tmp_path: Path) -> None:
    def worker() -> None:
        (tmp_path / str(os.getpid())).touch()
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    start = time.monotonic()
    with pytest.raises(LaunchError):
        launch(worker, framework="python")
    assert time.monotonic() - start < 5
    ranks = pids_in(tmp_path)
    assert len(ranks) == 2
    await_that(lambda: not any(map(is_alive, ranks)), 2, "the ranks to go")
    assert launch(abs, -3, framework="python").results == [3, 3]


def test_a_vanished_temporary_folder_does_not_end_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.shutdown()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launch(abs, 1, framework="python")
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    try:
        assert launch(abs, -3, framework="python").results == [3, 3]
    finally:
        launcher.shutdown()


# ---- where launches come from


def test_two_threads_may_make_the_first_launch_at_the_same_time(each_way: str) -> None:
    launcher.shutdown()

    def worker(name: str) -> str:
        value = torch.ones(1)
        dist.all_reduce(value)
        time.sleep(0.2)
        return f"{name}{int(value)}"

    results: dict[str, Any] = {}

    def start(name: str, nprocs: int) -> None:
        results[name] = launch(worker, name, nprocs=nprocs).results

    threads = [
        threading.Thread(target=start, args=(name, nprocs), daemon=True) for name, nprocs in (("a", 2), ("b", 3))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {"a": ["a2", "a2"], "b": ["b3", "b3", "b3"]}


def test_one_of_two_simultaneous_runs_may_fail() -> None:
    outcomes: dict[str, Any] = {}

    def good() -> int:
        time.sleep(0.6)
        return 1

    def bad() -> None:
        raise ValueError("boom")

    def start(name: str, fn: Callable[[], Any]) -> None:
        try:
            outcomes[name] = launch(fn, framework="python").results
        except WorkerFailed as error:
            outcomes[name] = error.exception_message

    threads = [threading.Thread(target=start, args=(fn.__name__, fn)) for fn in (good, bad)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == {"good": [1, 1], "bad": "boom"}


def test_a_run_of_one_thread_keeps_its_processes_when_another_threads_run_ends(tmp_path: Path) -> None:
    def long_one() -> int:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "ready").touch()
        while not (tmp_path / "other run is over").exists():
            time.sleep(0.01)
        alive = child.poll() is None
        child.kill()
        child.wait()
        return alive

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(launch(long_one, nprocs=1, framework="python").results))
    thread.start()
    await_that((tmp_path / "ready").exists, 20, "the long run")
    launch(abs, 1, framework="python")
    (tmp_path / "other run is over").touch()
    thread.join(20)
    assert results == [[True]]


@pytest.mark.filterwarnings("ignore")
def test_a_fork_of_the_kernel_may_launch_too(each_way: str) -> None:
    launch(abs, 1, framework="python")
    mine = {child.pid for child in psutil.Process().children()}
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def in_child() -> None:
        sender.send(launch(lambda: (os.getppid(), 5), nprocs=1, framework="python").results)

    child = multiprocessing.get_context("fork").Process(target=in_child)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert receiver.poll()
    ((server, five),) = receiver.recv()
    assert five == 5
    assert server not in mine
    await_that(lambda: not is_alive(server), 5, "the server of the child to go")
    assert launch(abs, -3, framework="python").results == [3, 3]
    receiver.close()
    sender.close()


def test_a_launch_inside_a_rank_works(each_way: str) -> None:
    def inner() -> str:
        return f"inner {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"

    def outer() -> Any:
        from course_utils import launch

        return os.environ["RANK"], launch(inner, nprocs=2, framework="python").results

    results = launch(outer, framework="python", timeout=30).results
    assert results == [("0", ["inner 0 of 2", "inner 1 of 2"]), ("1", ["inner 0 of 2", "inner 1 of 2"])]


def test_an_inner_launch_goes_with_its_rank(tmp_path: Path) -> None:
    def inner() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    def outer() -> None:
        from course_utils import launch

        if os.environ["RANK"] == "0":
            launch(inner, nprocs=2, framework="python")
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        raise ValueError("boom")

    with pytest.raises(WorkerFailed, match="boom"):
        launch(outer, framework="python", timeout=30)
    ranks = pids_in(tmp_path)
    assert len(ranks) == 2
    await_that(lambda: not any(map(is_alive, ranks)), 2, "the inner ranks to go")


def test_the_parent_of_ranks_is_named_the_same_for_all() -> None:
    run = launch(lambda: os.getppid(), nprocs=4, framework="python")
    assert len(set(run.results)) == 1
    assert below_servers() == []


def test_many_ranks_start_and_go() -> None:
    run = launch(lambda: int(os.environ["RANK"]), nprocs=64, framework="python", timeout=60)
    assert run.results == list(range(64))


def test_a_process_that_ends_without_a_word_takes_its_server_along(tmp_path: Path) -> None:
    source = """
import os, sys
from course_utils import launch, launcher
launch(lambda: 1, framework="python")
print(launcher.server_pid("python"), flush=True)
os._exit(0) if sys.argv[1] == "at once" else None
"""
    for how in ("at once", "in order"):
        done = subprocess.run(
            [sys.executable, "-c", source, how],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        pid = int(done.stdout)
        await_that(lambda pid=pid: not is_alive(pid), 2, "the server to go")
        await_that(lambda: not list(tmp_path.iterdir()), 2, "its folder to go")


def test_a_process_that_ends_while_its_server_starts_takes_it_along(tmp_path: Path) -> None:
    source = """
import os
from course_utils import launcher
launcher.warm("torch")
print(launcher.server_pid("torch"), flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    pid = int(done.stdout)
    await_that(lambda: not is_alive(pid), 2, "the server to go")
    await_that(lambda: not list(tmp_path.iterdir()), 2, "its folder to go")
