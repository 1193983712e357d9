"""TensorFlow is brought where it is absent, left alone where it is there, and what goes wrong is said.

Small wheels of the same names stand in for TensorFlow's, in an environment of their own without an index.
"""

from __future__ import annotations

import os
import signal
import subprocess
import venv
import zipfile
from pathlib import Path

import psutil
import pytest

from tests.kernels import await_that

from .conftest import ROOT

BRING = "from course_utils.tensorflow_setup import ensure_tensorflow; ensure_tensorflow()"


def wheel(folder: Path, name: str, version: str, requires: str = "", package: str = "") -> None:
    package = package or name
    folder.mkdir(exist_ok=True)
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{package}/__init__.py", f"__version__ = {version!r}\n")
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/top_level.txt", f"{package}\n")
        file.writestr(f"{about}/RECORD", f"{package}/__init__.py,,\n{about}/METADATA,,\n{about}/RECORD,,\n")


class Place:
    """An environment with pip, this package, and nothing else; pip finds the wheels of one folder."""

    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        venv.create(folder / "env", with_pip=True)
        self.python = folder / "env" / "bin" / "python"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_NO_CACHE_DIR": "1",
            "PYTHONPATH": str(folder / "package"),
        }
        # without the repository's constraints, which name other versions
        (folder / "package").mkdir()
        (folder / "package" / "course_utils").symlink_to(ROOT / "course_utils")

    def pip(self, *arguments: str) -> None:
        subprocess.run([self.python, "-m", "pip", "-q", *arguments], env=self.environment, check=True)

    def run(self, code: str = BRING) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, "-c", code], env=self.environment, capture_output=True, text=True, timeout=120
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_both_packages_are_installed_where_they_are_absent(place: Place) -> None:
    wheel(place.wheels, "tensorflow", "2.21.0")
    wheel(place.wheels, "tf_keras", "2.21.0", requires="tensorflow<2.22,>=2.21")
    done = place.run(f"{BRING}; import tensorflow, tf_keras; print(tf_keras.__version__)")
    assert done.stdout.splitlines()[0] == "Installing TensorFlow: about 600 MB, some minutes.", done.stderr
    assert done.stdout.splitlines()[-2:] == ["TensorFlow 2.21.0 is ready.", "2.21.0"]
    assert place.run().stdout == "TensorFlow 2.21.0 is ready.\n"


def test_a_tensorflow_that_is_there_stays_and_gets_the_tf_keras_that_fits_it(place: Place) -> None:
    wheel(place.wheels, "tensorflow_cpu", "2.20.0", package="tensorflow")
    place.pip("install", "tensorflow_cpu")
    wheel(place.wheels, "tensorflow", "2.21.0")
    wheel(place.wheels, "tf_keras", "2.20.1", requires="tensorflow<2.21,>=2.20")
    wheel(place.wheels, "tf_keras", "2.21.0", requires="tensorflow<2.22,>=2.21")
    done = place.run(f"{BRING}; import tf_keras; print(tf_keras.__version__)")
    assert done.stdout.splitlines()[-2:] == ["TensorFlow 2.20.0 is ready.", "2.20.1"], done.stderr


def test_what_pip_could_not_do_is_said_with_the_way_on(place: Place) -> None:
    done = place.run()
    assert done.returncode
    said = done.stderr.splitlines()[-1]
    assert "FrameworkMissing: TensorFlow could not be installed (ERROR: " in said
    assert "pip install tensorflow tf-keras" in said


def test_an_installation_that_was_cut_short_is_done_again(place: Place) -> None:
    site = next((place.python.parent.parent / "lib").glob("python*")) / "site-packages"
    (site / "tensorflow").mkdir()
    (site / "tensorflow" / "__init__.py").write_text("raise ImportError('half of it')\n")
    wheel(place.wheels, "tensorflow", "2.21.0")
    wheel(place.wheels, "tf_keras", "2.21.0")
    done = place.run(f"{BRING}; import tensorflow; print(tensorflow.__version__)")
    assert done.stdout.splitlines()[-1] == "2.21.0", done.stderr


def test_an_interrupt_ends_pip(place: Place, tmp_path: Path) -> None:
    slow = tmp_path / "package" / "pip"
    slow.mkdir()
    (slow / "__main__.py").write_text("import time\nprint('Collecting tensorflow', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen([place.python, "-c", BRING], env=place.environment, stderr=subprocess.DEVNULL)
    await_that(lambda: len(psutil.Process(process.pid).children()) == 1, 30, "pip to start")
    (pip,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) != 0
    await_that(lambda: not pip.is_running(), 5, "pip to go")


def test_the_lines_of_a_real_pip_become_steps() -> None:
    from course_utils.tensorflow_setup import _step

    assert _step("  Downloading tensorflow-2.21.0-cp311-cp311-manylinux_2_27_x86_64.whl (572.5 MB)") == (
        "Downloading tensorflow (572.5 MB)"
    )
    assert _step("Installing collected packages: namex, tensorflow") == "Installing"
    assert _step("Collecting numpy>=1.26.0 (from tensorflow)") == ""
