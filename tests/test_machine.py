"""What the machine is said to be, with faked counts where this one has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_utils import hardware, machine
from course_utils.errors import BadRequest


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("COURSE_FAKE_GPUS", "COURSE_FAKE_CORES", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpus_installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(
        machine, "_installed_gpus", lambda: tuple((f"GPU-{n}{n}{n}", name) for n, name in enumerate(names))
    )


def test_three_lines_say_where_what_and_what_for(capsys: pytest.CaptureFixture[str]) -> None:
    seen = hardware()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["Where", "Hardware", "Lessons"]
    assert f"{seen.cores} core" in lines[1]
    assert f"{seen.ranks} ranks over {seen.backend}" in lines[2]


def test_nothing_is_printed_when_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    hardware(show=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("gpus", "ranks", "backend"),
    [(0, 2, "gloo"), (1, 2, "gloo"), (2, 2, "cpu:gloo,cuda:nccl"), (4, 4, "cpu:gloo,cuda:nccl")],
)
def test_lessons_use_a_rank_a_gpu_from_two_gpus_on(
    gpus: int, ranks: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_FAKE_GPUS", str(gpus))
    seen = hardware(show=False)
    assert (seen.ranks, seen.backend, len(seen.gpus)) == (ranks, backend, gpus)


def test_one_gpu_for_two_ranks_is_said_to_go_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_installed(monkeypatch, "Tesla T4")
    seen = hardware(show=False)
    assert seen.gpus == ("Tesla T4",)
    assert any("gloo instead of NCCL: 2 ranks but 1 GPU" in note for note in seen.notes)


def test_a_machine_without_gpus_has_nothing_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_installed(monkeypatch)
    monkeypatch.setenv("COURSE_FAKE_CORES", "4")
    assert hardware(show=False).notes == ()


def test_ranks_that_share_a_core_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_FAKE_CORES", "1")
    assert any("share 1 core" in note for note in hardware(show=False).notes)


def test_faked_gpus_are_said_to_be_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_FAKE_GPUS", "2")
    seen = hardware(show=False)
    assert all("fake" in name for name in seen.gpus)
    assert any("faked" in note for note in seen.notes)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("A", "B")),
        ("", ()),
        ("-1", ()),
        ("1", ("B",)),
        ("1,0", ("B", "A")),
        ("GPU-111", ("B",)),
        ("0,7,1", ("A",)),
    ],
)
def test_cuda_visible_devices_is_respected(
    visible: str | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus_installed(monkeypatch, "A", "B")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpus() == names


def test_gpus_are_read_from_the_drivers_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU-1a, Tesla T4'\necho 'GPU-2b, Tesla T4'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    machine._installed_gpus.cache_clear()
    try:
        assert machine.gpus() == ("Tesla T4", "Tesla T4")
        tool.write_text("#!/bin/sh\nexit 9\n")
        machine._installed_gpus.cache_clear()
        assert machine.gpus() == ()
    finally:
        machine._installed_gpus.cache_clear()


@pytest.mark.parametrize(
    ("variable", "value", "platform"),
    [
        ("KAGGLE_KERNEL_RUN_TYPE", "Interactive", "kaggle"),
        ("COLAB_RELEASE_TAG", "release-colab", "colab"),
        ("X", "", "local"),
    ],
)
def test_the_platform_is_known_by_its_variables(
    variable: str, value: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert machine.platform() == platform


@pytest.mark.parametrize(
    ("variable", "value"), [("COURSE_FAKE_GPUS", "two"), ("COURSE_FAKE_GPUS", "-1"), ("COURSE_FAKE_CORES", "0")]
)
def test_a_count_that_cannot_be_faked_is_refused(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadRequest, match=variable):
        hardware(show=False)


def test_a_containers_quota_cuts_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/fs/cgroup/cpu.max": "100000 100000", "/sys/fs/cgroup/memory.max": str(2**30)}
    monkeypatch.setattr(machine, "_read", lambda path: files[path])
    assert machine.cores() == 1
    assert hardware(show=False).memory_gib == 1.0
    monkeypatch.setattr(machine, "_read", lambda path: "max" if "memory" in path else "max 100000")
    assert machine.cores() == len(os.sched_getaffinity(0))
    assert machine.memory_bytes() > 2**30


def test_looking_imports_neither_torch_nor_tensorflow() -> None:
    source = (
        "import sys; from course_utils import hardware; hardware()\n"
        "print('torch' in sys.modules, 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
