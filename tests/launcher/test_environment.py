"""What a rank finds around it: variables, folder, modules, threads, random state, backend, and nothing of the kernel's own."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_utils import launch, launcher

from .conftest import within_namespace

# ---- the variables of a rank


def test_the_variables_of_a_rank_are_set_with_and_without_a_process_group(each_way: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

    def worker() -> Any:
        return tuple(os.environ[name] for name in names), dist.is_initialized()

    for options in ({"framework": "python"}, {"init": False}, {}):
        results = launch(worker, **options).results
        ports = {variables[4] for variables, _ in results}
        assert len(ports) == 1
        assert [variables[:4] for variables, _ in results] == [(str(r), "2", str(r), "127.0.0.1") for r in range(2)]
        assert {initialised for _, initialised in results} == {options == {}}


def test_the_reserved_port_is_free_for_rank_0(each_way: str) -> None:
    def worker() -> Any:
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, os.environ["RANK"] == "0")
        store.set(os.environ["RANK"], "here")
        seen = store.get("0"), store.get("1")
        store.set("done" + os.environ["RANK"], "")
        if os.environ["RANK"] == "0":  # the store goes when this function returns
            store.wait(["done1"])
        return seen

    assert launch(worker, init=False).results == [(b"here", b"here")] * 2


def test_a_process_group_can_be_set_up_by_hand() -> None:
    def worker() -> Any:
        dist.init_process_group("gloo")
        value = torch.ones(2)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value.tolist()

    assert launch(worker, init=False).results == [[2.0, 2.0]] * 2


def test_ports_of_runs_at_the_same_time_differ() -> None:
    def outer() -> Any:
        from course_utils import launch

        return os.environ["MASTER_PORT"], launch(
            lambda: os.environ["MASTER_PORT"], nprocs=1, framework="python"
        ).results[0]

    run = launch(outer, framework="python")
    assert len({port for pair in run.results for port in pair}) == 3


def test_the_backend_is_told() -> None:
    def worker() -> str:
        return dist.get_backend()

    run = launch(worker)
    assert run.backend == "gloo"
    assert run.results == ["gloo", "gloo"]
    assert launch(worker, backend="gloo").backend == "gloo"
    assert launch(lambda: None, init=False).backend is None
    assert launch(lambda: None, framework="python").backend is None


def test_variables_that_the_kernel_has_of_another_cluster_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, each_way: str
) -> None:
    for name, value in {
        "RANK": "7",
        "WORLD_SIZE": "99",
        "LOCAL_RANK": "5",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1",
        "GLOO_SOCKET_IFNAME": "nowhere0",
        "TORCHELASTIC_RUN_ID": "x",
        "OMPI_COMM_WORLD_RANK": "3",
    }.items():
        monkeypatch.setenv(name, value)
    assert launch(lambda: (dist.get_rank(), dist.get_world_size())).results == [(0, 2), (1, 2)]


def test_variables_of_the_kernel_reach_the_ranks_as_they_are_now(
    monkeypatch: pytest.MonkeyPatch, each_way: str
) -> None:
    def worker() -> Any:
        return os.environ.get("COURSE_TEST_VALUE"), os.environ.get("PATH")

    assert launch(worker, framework="python").results[1] == (None, os.environ["PATH"])
    monkeypatch.setenv("COURSE_TEST_VALUE", "größe\nwith a second line")
    assert launch(worker, framework="python").results[1] == ("größe\nwith a second line", os.environ["PATH"])
    monkeypatch.setenv("COURSE_TEST_VALUE", "now")
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch(worker, framework="python").results[1] == ("now", "/nowhere")
    monkeypatch.delenv("COURSE_TEST_VALUE")
    assert launch(worker, framework="python").results[1] == (None, "/nowhere")


def test_env_adds_variables_for_the_ranks_alone(each_way: str) -> None:
    run = launch(lambda: os.environ["COURSE_TEST_VALUE"], framework="python", env={"COURSE_TEST_VALUE": "x"})
    assert run.results == ["x", "x"]
    assert "COURSE_TEST_VALUE" not in os.environ


def test_env_that_is_read_when_torch_or_python_starts_is_seen() -> None:
    def worker() -> Any:
        return sys.flags.optimize, dist.get_debug_level().name

    run = launch(worker, env={"PYTHONOPTIMIZE": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert run.results == [(1, "DETAIL")] * 2
    run = launch(worker, env={"TORCH_DISTRIBUTED_DEBUG": "INFO"})
    assert run.results == [(0, "INFO")] * 2


# ---- where a rank is and what it can import


def test_a_rank_works_in_the_kernels_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_way: str) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.txt").write_text(name)
        monkeypatch.chdir(tmp_path / name)
        run = launch(lambda: (os.getcwd(), Path("data.txt").read_text()), framework="python")
        assert run.results == [(str(tmp_path / name), name)] * 2


def test_a_deleted_folder_does_not_keep_ranks_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_way: str
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    launcher.shutdown()
    gone.rmdir()
    assert launch(lambda: 1, framework="python").results == [1, 1]
    assert launch(lambda: dist.get_world_size()).results == [2, 2]


def test_the_kernels_module_path_is_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_way: str) -> None:
    (tmp_path / "course_test_path.py").write_text("VALUE = 5\n")

    def worker() -> Any:
        import course_test_path  # type: ignore[import-not-found]

        return course_test_path.VALUE, sys.path

    launch(lambda: 1, framework="python")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert launch(worker, framework="python").results == [(5, sys.path)] * 2


SHADOWS = (
    "random",
    "queue",
    "torch",
    "socket",
    "select",
    "json",
    "signal",
    "types",
    "string",
    "copy",
    "numpy",
    "psutil",
)


@pytest.mark.parametrize("how", ["an empty entry", "the folder's name"])
def test_files_named_like_modules_in_the_learners_folder_do_not_break_the_launcher(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_way: str
) -> None:
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the learner has a {name}.py')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["" if how == "an empty entry" else str(tmp_path), *sys.path])
    launcher.shutdown()  # its replacement starts with this path

    def worker() -> Any:
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    assert launch(worker).results == [2.0, 2.0]
    assert launch(lambda: 1, framework="python").results == [1, 1]


@pytest.mark.parametrize("way", ["warm", "subprocess"])
def test_server_and_ranks_run_the_kernels_own_copy_of_the_package(way: str, tmp_path: Path) -> None:
    import course_utils

    copy = tmp_path / "course_utils"
    shutil.copytree(Path(course_utils.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from course_utils import launch
def worker():
    import course_utils.launcher.rank
    return sys.modules["course_utils"].__file__, course_utils.launcher.rank.__file__
print(set(launch(worker, framework="python").results))
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COURSE_LAUNCHER": way, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.stdout.strip() == str({(str(copy / "__init__.py"), str(copy / "launcher" / "rank.py"))}), done.stderr


# ---- L14: nothing of the kernel's memory or files is in a rank


def test_L14_a_rank_is_no_copy_of_the_kernel(tmp_path: Path, each_way: str) -> None:
    """What a driver would leave in the kernel: an open device, mapped memory, state in a module."""
    device = tmp_path / "device"
    device.write_bytes(bytes(4096))
    marker = "course_test_marker"
    sys.modules[marker] = type(sys)(marker)

    def worker() -> Any:
        descriptors = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        mapped = Path("/proc/self/maps").read_text()
        return any("device" in target for target in descriptors), "/device" in mapped, marker in sys.modules

    try:
        with device.open("r+b") as opened, mmap.mmap(opened.fileno(), 4096):
            os.set_inheritable(opened.fileno(), True)
            assert "/device" in Path("/proc/self/maps").read_text()
            assert launch(worker, framework="python").results == [(False, False, False)] * 2
    finally:
        del sys.modules[marker]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_L14_with_a_real_gpu(each_way: str) -> None:
    held = torch.ones(3, device="cuda")

    def worker() -> Any:
        value = torch.full((3,), dist.get_rank() + 1.0, device="cuda")
        moved = value.cpu()
        dist.all_reduce(moved)
        return value, moved.tolist()

    for rank, (value, total) in enumerate(launch(worker, backend="gloo").results):
        assert value.device.type == "cpu"  # results are read without touching the GPU
        assert value.tolist() == [rank + 1.0] * 3
        assert total == [3.0] * 3
    assert held.sum().item() == 3


# ---- L20: the host name


HOST = """
import socket
from course_utils import launch
import torch, torch.distributed as dist
try:
    socket.gethostbyname(socket.gethostname())
    raise SystemExit("the host name resolves")
except OSError:
    pass
def worker():
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.send(value, 1) if dist.get_rank() == 0 else dist.recv(value, 0)
    return value.item()
def by_hand():
    dist.init_process_group("gloo")
    return worker()
print(launch(worker).results, launch(by_hand, init=False).results, launch(worker, trace=True).results)
"""


def test_L20_a_host_name_that_does_not_resolve() -> None:
    within = within_namespace(
        "--uts", "hostname nowhere.invalid", without="a process may not have a host name of its own here"
    )
    done = subprocess.run(
        [*within, sys.executable, "-c", HOST],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.stdout == "[2.0, 2.0] [2.0, 2.0] [2.0, 2.0]\n", done.stderr


def test_L20_local_runs_listen_on_loopback_alone() -> None:
    def worker() -> Any:
        import psutil

        process = psutil.Process()
        connections = getattr(process, "net_connections", None) or process.connections  # psutil 5 has the old name
        return sorted({connection.laddr.ip for connection in connections() if not connection.raddr})

    for addresses in launch(worker).results:
        assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1", "::", "0.0.0.0"}


# ---- L21: NCCL needs a GPU for each rank


def shown_by_launch(**options: Any) -> tuple[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        run = launch(lambda: (dist.get_world_size(), dist.get_backend()), **options)
    return shown.getvalue(), run


@pytest.mark.parametrize(
    ("gpus", "nprocs", "backend"),
    [
        (0, 2, "nccl"),
        (0, 2, "cpu:gloo,cuda:nccl"),
        (1, 2, "nccl"),
        (1, 2, None),
        (2, 3, "nccl"),
        (2, 3, None),
        (1, 2, "cpu:gloo,cuda:nccl"),
    ],
)
def test_L21_fewer_gpus_than_ranks_is_gloo_with_a_note(
    gpus: int, nprocs: int, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_FAKE_GPUS", str(gpus))
    shown, run = shown_by_launch(nprocs=nprocs, backend=backend)
    assert run.backend == "gloo"
    assert run.results == [(nprocs, "gloo")] * nprocs
    assert any("gloo" in note and "NCCL" in note for note in run.notes)
    note = next(note for note in run.notes if "NCCL" in note)
    assert note in shown
    assert shown.count(note) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_L21_gpus_that_torch_cannot_use_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_FAKE_GPUS", "2")
    shown, run = shown_by_launch(nprocs=2)
    assert run.backend == "gloo"
    assert run.results == [(2, "gloo")] * 2
    assert sum("gloo instead of NCCL" in note for note in run.notes) == 1
    assert shown.count("gloo instead of NCCL") == 1


def test_L21_the_note_is_there_under_course_plain_and_when_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from course_utils.errors import WorkerFailed

    def fails() -> None:
        raise ValueError("boom")

    monkeypatch.setenv("COURSE_FAKE_GPUS", "1")
    monkeypatch.setenv("COURSE_PLAIN", "1")
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(WorkerFailed):
        launch(fails, backend="nccl")
    assert "gloo instead of NCCL" in shown.getvalue()


def test_L21_what_was_asked_for_and_given_needs_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_FAKE_GPUS", "0")
    for backend in (None, "gloo"):
        shown, run = shown_by_launch(backend=backend)
        assert (shown, run.notes) == ("", [])


# ---- L24: threads


@pytest.mark.parametrize(
    ("cores", "nprocs", "threads"), [(1, 2, 1), (2, 2, 1), (3, 2, 1), (8, 2, 4), (9, 4, 2), (4, 1, 4)]
)
def test_L24_each_rank_has_its_share_of_the_cores(
    cores: int, nprocs: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_FAKE_CORES", str(cores))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def worker() -> Any:
        import threadpoolctl

        numpy_threads = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], numpy_threads

    run = launch(worker, nprocs=nprocs)
    for torch_threads, variable, numpy_threads in run.results:
        assert torch_threads == threads
        assert variable == str(threads)
        assert all(number <= max(threads, 1) for number in numpy_threads)


def test_L24_the_same_with_fresh_interpreters(monkeypatch: pytest.MonkeyPatch, fresh_interpreters: None) -> None:
    monkeypatch.setenv("COURSE_FAKE_CORES", "4")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(lambda: torch.get_num_threads()).results == [2, 2]


def test_L24_a_learner_may_choose_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_FAKE_CORES", "2")
    assert launch(lambda: torch.get_num_threads(), env={"OMP_NUM_THREADS": "3"}).results == [3, 3]


def test_L24_the_kernels_own_threads_are_left_alone() -> None:
    before = torch.get_num_threads()
    launch(lambda: None)
    assert torch.get_num_threads() == before


# ---- L30: random state


def draw() -> Any:
    import random

    import numpy
    import torch

    return (
        random.random(),
        float(numpy.random.rand()),
        torch.rand(1).item(),
        torch.nn.Linear(3, 1).weight[0, 0].item(),
        float(numpy.random.default_rng().random()),
        torch.initial_seed(),
    )


def test_L30_unseeded_ranks_draw_different_numbers_each_time(each_way: str) -> None:
    drawn = [each for _ in range(2) for each in launch(draw, nprocs=3, init=False).results]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 6


def test_L30_the_same_where_numpy_and_torch_are_imported_by_the_function(each_way: str) -> None:
    drawn = [each for _ in range(2) for each in launch(draw, framework="python").results]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 4


def test_L30_a_seed_in_the_kernel_changes_nothing(each_way: str) -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        np.random.seed(5)
        drawn += launch(draw, init=False).results
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 4


def test_L30_the_kernels_own_random_state_is_left_alone() -> None:
    import random

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    launch(draw)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_L30_equal_seeds_give_equal_numbers(each_way: str) -> None:
    def seeded() -> Any:
        import random

        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        return draw()[:4]

    drawn = launch(seeded, init=False).results + launch(seeded, init=False).results
    assert len(set(drawn)) == 1
    state = torch.get_rng_state()
    torch.manual_seed(7)
    assert drawn[0][2] == torch.rand(1).item()
    torch.set_rng_state(state)


def test_L30_names_that_come_from_random_draws_differ_too() -> None:
    def worker() -> Any:
        import uuid

        return uuid.uuid4().hex, tempfile.mkdtemp()

    first, second = launch(worker, framework="python").results
    for path in (first[1], second[1]):
        shutil.rmtree(path)
    assert first[0] != second[0]
    assert first[1] != second[1]


# ---- what a launch leaves as it was


def test_modules_of_the_kernel_are_not_reloaded_and_nothing_is_imported_for_it() -> None:
    source = """
import sys
from course_utils import launch
print(launch(lambda: 1, framework="torch").results, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.stdout == "[1, 1] False\n", done.stderr


def test_seconds_are_those_of_the_function() -> None:
    run = launch(lambda: time.sleep(0.2), framework="python")
    assert all(0.2 <= seconds < 2 for seconds in run.seconds)
