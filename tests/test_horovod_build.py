"""Horovod is built once for what is installed: names, changes to its source, failures, interruptions, the lock.

A small source package of the same layout stands in for Horovod's, in an environment with made-up versions of torch and
TensorFlow. The last tests ask the real Horovod, where it is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from course_utils.errors import CourseError
from course_utils.horovod_build import HorovodBuildFailed, needs, pace, wheels, why
from course_utils.horovod_build.recipe import HOROVOD, Patch
from course_utils.horovod_build.wanted import Wanted, is_installed, wanted

from .conftest import ROOT, go_without

# The lines of the real files that the recipe changes, and their neighbours.
REAL = {
    "CMakeLists.txt": """\
        project(horovod CXX)

        set(CMAKE_CXX_STANDARD 14)
        set(CMAKE_CXX_STANDARD_REQUIRED ON)
        set(CMAKE_SHARED_LINKER_FLAGS "-Wl,--version-script=${CMAKE_SOURCE_DIR}/horovod.lds -Wl,-Bsymbolic-functions")
        string(REPLACE "-O2" "-O3" CMAKE_C_FLAGS_RELWITHDEBINFO "${CMAKE_C_FLAGS_RELWITHDEBINFO}")
        string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
        """,
    "horovod/torch/CMakeLists.txt": """\
        execute_process(COMMAND ${PY_EXE} -c "from distutils.sysconfig import get_python_inc; print(get_python_inc())"
                        OUTPUT_VARIABLE PYTHON_INCLUDE_PATH OUTPUT_STRIP_TRAILING_WHITESPACE)
        if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")
            set(CMAKE_CXX_STANDARD 14)
        endif()
        """,
    "horovod/tensorflow/CMakeLists.txt": """\
        list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
        list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")
        """,
    "cmake/Modules/FindPytorch.cmake": """\
        string(REGEX REPLACE "No (CUDA|ROCm) runtime[^\\n]*\\n?" "" Pytorch_CUDA "${Pytorch_CUDA}")
        string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)
        """,
}
# Plays Horovod's setup.py: compiles one file as make would show it, and packs a wheel of empty libraries.
SETUP = """\
import json, os, subprocess, sys, sysconfig, time, zipfile
from pathlib import Path

if "bdist_wheel" not in sys.argv:  # pip asks for the name and the version
    from setuptools import setup

    setup(name="horovod", version="0.28.1", packages=[])
    sys.exit()

print("MAKEFLAGS", os.environ["MAKEFLAGS"], flush=True)
objects = ["third_party/gloo/a.cc.o", "horovod/torch/mpi_ops_v2.cc.o"]
makefile = Path("build", "temp", "build.make")
makefile.parent.mkdir(parents=True)
makefile.write_text("".join(f'echo "Building CXX object {name}"\\n' for name in objects))
for number, name in enumerate(objects, start=1):
    print(f"[ {50 * number}%] Building CXX object {name}", flush=True)
    Path("a.cc").write_text("int f() { return 0; }\\n")
    subprocess.run([os.environ.get("CXX", "c++"), "-c", "a.cc", "-o", f"{number}.o"], check=True)
if os.environ.get("SLEEPS"):
    Path(os.environ["SLEEPS"]).touch()
    subprocess.run(["sleep", "600"])
ending = sysconfig.get_config_var("EXT_SUFFIX")
files = {"horovod/__init__.py": "", "horovod/torch/__init__.py": os.environ.get("IMPORTED", "")}
files[f"horovod/torch/mpi_lib_v2{ending}"] = ""
noted = {"pytorch": "2.99.0"}
if os.environ.get("HOROVOD_WITH_TENSORFLOW"):
    files |= {"horovod/tensorflow/__init__.py": "", f"horovod/tensorflow/mpi_lib{ending}": ""}
    noted["tensorflow"] = "2.88.0"
files["horovod/metadata.json"] = json.dumps(noted)
for name, text in files.items():
    path = Path("build", "lib", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
tag = sys.argv[sys.argv.index("--build-number") + 1]
info = "horovod-0.28.1.dist-info"
files[f"{info}/METADATA"] = "Metadata-Version: 2.1\\nName: horovod\\nVersion: 0.28.1\\n"
files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\nBuild: {tag}\\n"
files[f"{info}/RECORD"] = "".join(f"{name},,\\n" for name in [*files, f"{info}/RECORD"])
Path("dist").mkdir()
with zipfile.ZipFile(f"dist/horovod-0.28.1-{tag}-py3-none-any.whl", "w") as wheel:
    for name, text in files.items():
        wheel.writestr(name, text)
"""
# Runs in the made-up environment: `ensure_horovod` with the stand-in's recipe.
ENSURE = """\
import dataclasses, os, sys
from course_utils import horovod_build
from course_utils.horovod_build import __main__ as command
from course_utils.horovod_build.recipe import HOROVOD

if os.environ.get("HAS_IMPORTED"):
    sys.modules["horovod"] = sys
recipe = dataclasses.replace(HOROVOD, sha256=os.environ["SHA256"], tools=(), requires=tuple(sys.argv[1:]))
ensure = horovod_build.ensure_horovod
command.ensure_horovod = lambda **options: ensure(**options, recipe=recipe)
sys.exit(command.main([]))
"""


def write_source(folder: Path, **changed: str) -> Path:
    """Unpack the stand-in's source into `folder`; `changed` replaces files."""
    files = {name: textwrap.dedent(text) for name, text in REAL.items()} | {"setup.py": SETUP} | changed
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def pack(source: Path, where: Path) -> str:
    """Make `where`/horovod-0.28.1.tar.gz of `source`; return its hash."""
    path = where / "horovod-0.28.1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(source, "horovod-0.28.1")
        archive.addfile(tarfile.TarInfo("horovod-0.28.1/PKG-INFO"), io.BytesIO())
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Place:
    """An environment of its own with torch 2.99.0 and TensorFlow 2.88.0, an index that holds the stand-in, a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.index = folder / "index"
        self.index.mkdir()
        venv.create(folder / "env", symlinks=True)
        self.python = folder / "env" / "bin" / "python"
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "env")}))
        self.metadata("torch", "2.99.0")
        self.metadata("tensorflow", "2.88.0")
        borrowed = folder / "borrowed"
        borrowed.mkdir()
        for real in map(Path, site.getsitepackages()):
            for name in ("pip", "setuptools", "_distutils_hack", "psutil"):
                for path in [*real.glob(name), *real.glob(f"{name}-*.dist-info")]:
                    (borrowed / path.name).symlink_to(path)
        (self.packages / "borrowed.pth").write_text(f"{borrowed}\n{ROOT}\n")
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "COURSE_HOROVOD_CACHE": str(self.cache),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
            "SHA256": pack(write_source(folder / "source"), self.index),
        }

    def metadata(self, name: str, version: str) -> None:
        """Make believe that a package is installed, in this version alone."""
        for old in self.packages.glob(f"{name}-*.dist-info"):
            shutil.rmtree(old)
        info = self.packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def start(self, *requires: str, **environment: str) -> subprocess.Popen[str]:
        """Start the command, with the packages that the stand-in requires."""
        return subprocess.Popen(
            [self.python, "-c", ENSURE, *requires],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ensure(self, *requires: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        process = self.start(*requires, **environment)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    def wheels(self) -> list[Path]:
        return sorted(self.cache.glob("*.whl"))

    def installed(self, name: str) -> bool:
        code = f"import importlib.metadata as m; m.version({name!r})"
        return not subprocess.run([self.python, "-c", code], env=self.environment, capture_output=True).returncode

    def processes(self) -> list[psutil.Process]:
        """Every process that works below this place's folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd().startswith(str(self.folder)) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@pytest.fixture
def place(tmp_path: Path, require_system) -> Place:
    require_system("c++")
    return Place(tmp_path)


@pytest.fixture
def sleeping(place: Place, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A build that is in the middle of its compilation."""
    sign = tmp_path / "compiling"
    process = place.start(SLEEPS=str(sign))
    while not sign.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    yield process
    process.kill()
    process.communicate()


def until(holds, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(held)


# --- which build -----------------------------------------------------------------------------------------------------

BUILD = Wanted("0.28.1", "recipe", "2.13.0", "2.21.0", ".cpython-311-x86_64-linux-gnu.so", "glibc 2.36")


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("version", "0.28.2"),
        ("recipe", "changed"),
        ("torch", "2.13.0+cpu"),
        ("tensorflow", None),
        ("python", ".cpython-312-x86_64-linux-gnu.so"),
        ("libc", "glibc 2.39"),
    ],
)
def test_a_wheel_of_anything_else_has_another_name(field: str, other: str | None) -> None:
    assert dataclasses.replace(BUILD, **{field: other}).tag != BUILD.tag
    assert dataclasses.replace(BUILD).tag == BUILD.tag


def test_a_build_tag_is_what_wheels_allow() -> None:
    assert BUILD.tag[0].isdigit()
    assert BUILD.tag.isalnum()
    assert str(BUILD) == "Horovod 0.28.1 for torch 2.13.0 and TensorFlow 2.21.0"
    assert str(dataclasses.replace(BUILD, tensorflow=None)) == "Horovod 0.28.1 for torch 2.13.0"


def test_any_change_of_the_recipe_is_another_recipe() -> None:
    patches = (*HOROVOD.patches[:-1], dataclasses.replace(HOROVOD.patches[-1], new="set(Pytorch_CUDA TRUE)"))
    others = [
        dataclasses.replace(HOROVOD, patches=patches),
        dataclasses.replace(HOROVOD, options=HOROVOD.options[1:]),
        dataclasses.replace(HOROVOD, linking=""),
        dataclasses.replace(HOROVOD, tools=HOROVOD.tools[1:]),
    ]
    assert len({recipe.digest() for recipe in [HOROVOD, *others]}) == 5


# --- changes to the source -------------------------------------------------------------------------------------------


def test_the_patches_change_what_stands_in_the_real_files(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    for patch in HOROVOD.patches:
        patch.apply(source)
    top, torch, tensorflow, find = (source.joinpath(name).read_text() for name in REAL)
    assert "set(CMAKE_CXX_STANDARD 17)\nset(CMAKE_SKIP_RPATH ON)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n" in top
    assert 'string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO ' in top
    assert "-Wl,--version-script='${CMAKE_SOURCE_DIR}/horovod.lds' -Wl" in top
    assert 'string(REPLACE "-O2" "-O3" CMAKE_C_FLAGS_RELWITHDEBINFO ' in top
    assert "    set(CMAKE_CXX_STANDARD 17)\n" in torch
    assert "print(sysconfig.get_path('include'))\"\n" in torch
    assert "distutils" not in torch
    assert "/mpi_ops.cc" in tensorflow
    assert "xla_mpi_ops" not in tensorflow
    assert find.splitlines()[-1] == "set(Pytorch_CUDA FALSE)"


@pytest.mark.parametrize("text", ["set(CMAKE_CXX_STANDARD 20)\n", "set(CMAKE_CXX_STANDARD 14)\n" * 2])
def test_a_text_that_is_not_there_once_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "CMakeLists.txt").write_text(text)
    with pytest.raises(HorovodBuildFailed, match=r"CMakeLists\.txt:\n  set\(CMAKE_CXX_STANDARD 14\)"):
        Patch("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)").apply(tmp_path)
    assert (tmp_path / "CMakeLists.txt").read_text() == text


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match=r"no file cmake/Modules/FindPytorch\.cmake"):
        Patch("cmake/Modules/FindPytorch.cmake", "a", "b").apply(tmp_path)


# --- the whole way, with the stand-in --------------------------------------------------------------------------------


def test_the_first_call_builds_and_installs_and_the_second_does_nothing(place: Place) -> None:
    first = place.ensure()
    assert first.returncode == 0, first.stderr
    (wheel,) = place.wheels()
    lines = first.stdout.splitlines()
    assert lines[0] == "Building Horovod 0.28.1 for torch 2.99.0 and TensorFlow 2.88.0, once: this takes some minutes."
    assert [line.partition(":")[0] for line in lines if line.endswith(" s")] == [
        "Fetching Horovod's source",
        "Preparing to compile",
        "Compiling",
        "Trying it",
        "Installing it",
    ]
    assert lines[-2:] == ["Horovod 0.28.1 is ready.", f"Its wheel is kept as {wheel}"]
    assert place.installed("horovod")
    assert {path.suffix for path in place.cache.iterdir()} == {".whl", ".log", ".lock"}

    shutil.rmtree(place.cache)
    place.cache.touch()  # no folder, and none is needed
    start = time.monotonic()
    second = place.ensure()
    assert time.monotonic() - start < 1.0
    assert second.stdout == "Horovod 0.28.1 is ready.\n"
    assert second.returncode == 0


def test_a_kernel_that_has_imported_another_horovod_is_to_be_restarted(place: Place) -> None:
    assert "Horovod 0.28.1 is ready. Restart the kernel" in place.ensure(HAS_IMPORTED="1").stdout


def test_plain_outputs_are_the_first_and_the_last_line(place: Place) -> None:
    lines = place.ensure(COURSE_PLAIN="1").stdout.splitlines()
    assert [line.partition(" for ")[0] for line in lines] == [
        "Building Horovod 0.28.1",
        "Horovod 0.28.1 is ready.",
        f"Its wheel is kept as {place.wheels()[0]}",
    ]


def test_a_kept_wheel_is_used_at_once(place: Place) -> None:
    place.ensure()
    subprocess.run([place.python, "-m", "pip", "uninstall", "-qqy", "horovod"], env=place.environment, check=True)
    assert not place.installed("horovod")
    done = place.ensure(CXX="false")
    assert done.returncode == 0, done.stderr
    assert "Building" not in done.stdout
    assert place.installed("horovod")


def test_a_wheel_in_a_folder_that_cannot_be_written_to_is_used_and_others_are_kept_elsewhere(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels.os, "access", lambda path, mode: Path(path) != tmp_path / "attached")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    attached = tmp_path / "attached"
    (attached / "version 1").mkdir(parents=True)
    whole = attached / "version 1" / BUILD.pattern.replace("*", "cp311-cp311-linux_x86_64")
    place.ensure()
    shutil.copy(place.wheels()[0], whole)
    places = wheels.folders(attached)
    assert wheels.find(places, BUILD) == whole
    assert wheels.find(places, dataclasses.replace(BUILD, torch="2.14.0")) is None
    assert wheels.writable(places) == tmp_path / "own" / "course_utils" / "horovod"


def test_a_cache_may_be_named_from_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert wheels.folders("cache") == [tmp_path / "cache"]


def test_kaggles_attached_data_sets_are_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_HOROVOD_CACHE", raising=False)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert wheels.folders(None)[-1] == Path("/kaggle/input")
    assert wheels.folders(tmp_path) == [tmp_path, Path("/kaggle/input")]


def test_a_cut_wheel_is_built_again(place: Place) -> None:
    place.ensure()
    (wheel,) = place.wheels()
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    place.metadata("horovod", "0.28.0")
    shutil.rmtree(place.packages / "horovod")
    assert "Building" in place.ensure().stdout
    assert len(wheel.read_bytes()) == len(whole)


@pytest.mark.parametrize(("name", "version"), [("torch", "2.100.0"), ("tensorflow", "2.89.0")])
def test_another_version_of_a_framework_gets_a_wheel_of_its_own(place: Place, name: str, version: str) -> None:
    place.ensure()
    place.metadata(name, version)
    again = place.ensure()
    assert f"{name.replace('tensorflow', 'TensorFlow')} {version}" in again.stdout.splitlines()[0]
    assert len(place.wheels()) == 2


def test_without_tensorflow_horovod_is_built_for_torch_alone(place: Place) -> None:
    shutil.rmtree(place.packages / "tensorflow-2.88.0.dist-info")
    assert place.ensure().stdout.startswith("Building Horovod 0.28.1 for torch 2.99.0, once")
    assert not (place.packages / "horovod" / "tensorflow").exists()


def test_without_torch_there_is_nothing_to_build_for(place: Place) -> None:
    shutil.rmtree(place.packages / "torch-2.99.0.dist-info")
    done = place.ensure()
    assert done.returncode == 1
    assert "install torch first" in done.stderr


def test_a_horovod_that_somebody_else_built_for_the_same_versions_is_left_alone(place: Place) -> None:
    place.ensure()
    record = place.packages / "horovod-0.28.1.dist-info" / "WHEEL"
    record.write_text("Wheel-Version: 1.0\n")
    assert place.ensure().stdout == "Horovod 0.28.1 is ready.\n"
    noted = place.packages / "horovod" / "metadata.json"
    noted.write_text(json.dumps({"pytorch": "2.98.0", "tensorflow": "2.88.0"}))
    assert place.ensure().stdout != "Horovod 0.28.1 is ready.\n"


def test_half_an_installation_is_installed_again(place: Place) -> None:
    place.ensure()
    (library,) = place.packages.glob("horovod/tensorflow/mpi_lib*")
    library.unlink()
    assert place.ensure().returncode == 0
    assert library.exists()


def test_only_what_is_missing_of_the_requirements_is_installed(place: Place) -> None:
    place.metadata("cloudpickle", "1.0")
    done = place.ensure("cloudpickle", "nowhere-to-be-found")
    assert done.returncode == 1
    assert "pip could not install nowhere-to-be-found" in done.stderr
    assert "cloudpickle" not in done.stderr
    assert place.ensure("cloudpickle").returncode == 0


def test_options_of_another_build_do_not_reach_this_one(place: Place) -> None:
    shutil.rmtree(place.packages / "tensorflow-2.88.0.dist-info")
    place.ensure(HOROVOD_WITH_TENSORFLOW="1", MAKEFLAGS="--no-builtin-rules", COURSE_FAKE_CORES="1")
    assert not (place.packages / "horovod" / "tensorflow").exists()
    (log,) = place.cache.glob("*.log")
    assert "\nMAKEFLAGS -j1\n" in log.read_text()


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_compiler_that_fails_is_shown_with_its_error_and_the_log(place: Place, tmp_path: Path) -> None:
    compiler = tmp_path / "cc with errors"
    compiler.write_text("#!/bin/sh\necho 'a.cc:7:3: error: no good' >&2\necho '  7 | bad();' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = place.ensure(CXX=str(compiler).replace(" ", "_"))
    compiler.rename(str(compiler).replace(" ", "_"))
    assert "no C++ compiler is there" in done.stderr
    done = place.ensure(CXX=str(compiler).replace(" ", "_"))
    assert done.returncode == 1
    (log,) = place.cache.glob("*.log")
    headline, *errors, advice, where = done.stderr.splitlines()
    assert headline == "Horovod could not be compiled:"
    assert errors[2:4] == ["  a.cc:7:3: error: no good", "    7 | bad();"]
    assert "maintainers" in advice
    assert where == f"Everything that was printed: {log}"
    assert "[ 50%] Building CXX object" in log.read_text()
    assert place.wheels() == []
    assert not place.installed("horovod")
    assert place.ensure().returncode == 0


def test_what_compiles_but_cannot_be_imported_is_not_kept(place: Place) -> None:
    done = place.ensure(IMPORTED="raise ImportError('undefined symbol: f')")
    assert done.returncode == 1
    assert "compiled but cannot be imported:\n" in done.stderr
    assert "\n  ImportError: undefined symbol: f\n" in done.stderr
    assert place.wheels() == []


def test_a_source_package_with_another_hash_is_refused(place: Place) -> None:
    done = place.ensure(SHA256="0" * 64)
    assert done.returncode == 1
    assert "is not Horovod's published source package" in done.stderr


def test_a_source_package_with_another_text_is_refused_by_the_text(place: Place, tmp_path: Path) -> None:
    changed = write_source(tmp_path / "changed", **{"CMakeLists.txt": "set(CMAKE_CXX_STANDARD 20)\n"})
    done = place.ensure(SHA256=pack(changed, place.index))
    assert done.returncode == 1
    assert "in CMakeLists.txt:\n  set(CMAKE_CXX_STANDARD 14)\n" in done.stderr


def test_a_source_that_cannot_be_fetched_asks_for_the_network(place: Place) -> None:
    (place.index / "horovod-0.28.1.tar.gz").unlink()
    done = place.ensure()
    assert done.returncode == 1
    assert "No matching distribution found for horovod==0.28.1" in done.stderr
    assert "Is the network there?" in done.stderr


def test_missing_headers_name_the_package_that_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs.sysconfig, "get_path", lambda name: str(tmp_path / "include"))
    monkeypatch.setattr(needs.shutil, "which", lambda name: name)
    with pytest.raises(HorovodBuildFailed, match=rf"apt install python3\.{sys.version_info.minor}-dev"):
        needs.check_machine(tmp_path)


@pytest.mark.parametrize("missing", ["g++", "make"])
def test_a_missing_program_names_the_package_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    compilers = {"c++", "g++", "clang++"}
    monkeypatch.setattr(
        needs.shutil, "which", lambda name: None if name in (compilers if missing == "g++" else {"make"}) else name
    )
    with pytest.raises(HorovodBuildFailed, match=f"apt install {missing.replace('+', '[+]')}"):
        needs.check_machine(tmp_path)


def test_a_full_disk_is_seen_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require_system) -> None:
    require_system("c++")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda path: usage._replace(free=2**30))
    with pytest.raises(HorovodBuildFailed, match=r"has 1\.0 GiB: make room"):
        needs.check_machine(tmp_path)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "want of memory"),
        ("a.cc:1: fatal error: Python.h: No such file or directory", "apt install python3-dev"),
        ("as: error: No space left on device", "disk is full"),
        ("CMake Error: No CMAKE_CXX_COMPILER could be found.", "apt install g\\+\\+"),
    ],
)
def test_a_known_cause_gets_its_advice(tmp_path: Path, line: str, advice: str) -> None:
    log = tmp_path / "log"
    log.write_text(f"$ pip\nerror: of an earlier step\n$ python setup.py\n{line}\nmake: *** [a.cc.o] Error 1\n")
    explained = why.explain("compile", log)
    assert line in explained
    assert "earlier step" not in explained
    with pytest.raises(AssertionError, match=advice):
        raise AssertionError(explained)


def test_a_cache_that_cannot_be_written_to_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HorovodBuildFailed, match="COURSE_HOROVOD_CACHE names another"):
        wheels.writable([tmp_path / "file" / "cache"])


# --- interruptions, and two at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_build_leaves_nothing(
    place: Place, sleeping: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert len(place.processes()) >= 2  # the stand-in's setup.py and what it runs
    sleeping.send_signal(number)
    sleeping.wait(timeout=10)
    assert place.processes() == []
    assert {path.suffix for path in place.cache.iterdir()} == {".log", ".lock"}
    assert sleeping.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert place.ensure().returncode == 0


def test_what_a_killed_build_left_goes_with_the_next_one(place: Place, sleeping: subprocess.Popen[str]) -> None:
    sleeping.kill()
    sleeping.wait()
    (left,) = place.cache.glob("building-*")
    for process in place.processes():
        process.kill()
    (log,) = place.cache.glob("*.log")
    with zipfile.ZipFile(left / f"{log.stem}-py3-none-any.whl", "w"):
        pass  # packed, never tried
    assert "Building" in place.ensure().stdout
    assert not left.exists()
    assert place.installed("horovod")


def test_a_second_build_waits_and_finds_the_first_ones_work(place: Place, sleeping: subprocess.Popen[str]) -> None:
    second = place.start()
    assert second.stdout
    assert second.stdout.readline() == "Another build of Horovod is running: waiting for it.\n"
    (sleeper,) = [process for process in place.processes() if process.name() == "sleep"]
    sleeper.kill()
    assert sleeping.wait(timeout=60) == 0
    assert second.communicate(timeout=60)[0] == "Horovod 0.28.1 is ready.\n"
    assert second.returncode == 0
    assert len(place.wheels()) == 1


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_the_bar_counts_objects_by_the_time_they_take() -> None:
    objects = ["third_party/gloo/a.cc.o", "horovod/torch/b.cc.o", "horovod/torch/mpi_ops_v2.cc.o"]
    counted = pace.Pace(objects, jobs=1)
    parts = []
    for name in objects:
        counted.see(f"[ 33%] Building CXX object {name}")
        parts.append(counted.part())
    counted.see("[100%] Linking CXX shared library a.so")
    assert [round(37.7 * part, 2) for part in [*parts, counted.part()]] == [0.75, 2.6, 20.7, 20.7]


def test_the_objects_are_read_from_the_makefiles(tmp_path: Path) -> None:
    (tmp_path / "temp").mkdir()
    (tmp_path / "temp" / "build.make").write_text(
        '\t@$(CMAKE_COMMAND) -E cmake_echo_color "--switch=$(COLOR)" "Building CXX object horovod/a.cc.o"\n'
        '\t@$(CMAKE_COMMAND) -E cmake_echo_color "--switch=$(COLOR)" "Linking CXX shared library a.so"\n'
    )
    assert pace.planned(tmp_path) == ["horovod/a.cc.o"]


def test_jobs_are_bounded_by_cores_and_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_FAKE_CORES", "64")
    monkeypatch.setattr(needs.machine, "memory_bytes", lambda: 4 * 2**30)
    assert needs.jobs() == 2
    monkeypatch.setenv("COURSE_FAKE_CORES", "1")
    assert needs.jobs() == 1
    monkeypatch.setattr(needs.machine, "memory_bytes", lambda: 2**20)
    assert needs.jobs() == 1


# --- the real one ----------------------------------------------------------------------------------------------------


@pytest.fixture
def horovod() -> None:
    """The test needs the real Horovod: without it, skip with the reason, or fail under REQUIRE_ALL=1."""
    if not is_installed(wanted(HOROVOD)):
        go_without("needs Horovod, which is not built here (python -m course_utils.horovod_build builds it)")


# One rank: the other ranks' number is added in an all-reduce, and a tape averages gradients over the ranks.
RANK = {
    "torch": """\
import horovod.torch as hvd
import torch

hvd.init()
total = hvd.allreduce(torch.arange(5.0) + hvd.rank(), op=hvd.Sum)
print(hvd.rank(), hvd.size(), total.tolist())
""",
    "tensorflow": """\
import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
total = hvd.allreduce(tf.range(5, dtype=tf.float32) + hvd.rank(), op=hvd.Sum)
weight = tf.Variable(3.0)
with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
    loss = weight * weight * (1.0 + hvd.rank())
(gradient,) = tape.gradient(loss, [weight])
assert float(gradient) == 9.0, gradient
print(hvd.rank(), hvd.size(), total.numpy().tolist())
""",
}


@pytest.mark.usefixtures("horovod")
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_two_ranks_of_the_real_horovod_add_up(framework: str) -> None:
    launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2", "--network-interfaces", "lo"]
    done = subprocess.run(
        [*launcher, sys.executable, "-c", RANK[framework]], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}]<stdout>:{rank} 2 [1.0, 3.0, 5.0, 7.0, 9.0]" for rank in range(2)
    ]


@pytest.mark.usefixtures("horovod")
def test_looking_for_the_real_horovod_takes_no_framework_and_no_time() -> None:
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from course_utils.horovod_build import ensure_horovod\n"
        "assert ensure_horovod() is None\n"
        "assert not {'torch', 'tensorflow', 'numpy', 'horovod'} & sys.modules.keys()\n"
        "print(time.perf_counter() - start)"
    )
    ran = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(done.stdout.splitlines()[-1]) for done in ran) < 0.3
