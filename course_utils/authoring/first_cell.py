"""The set-up cell that opens every lesson; the builder puts it where a source says `# @first-cell`."""

from __future__ import annotations

WHEEL_URL = ""  # the project's public address of its wheel; while it is empty, learners attach the wheel themselves

_TEMPLATE = """\
# @first-cell: sets the course up where this notebook runs; nothing to edit here
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

if sys.platform == "win32":
    raise SystemExit("The course runs on Linux, macOS and WSL2: on Windows, install WSL2 and start Jupyter inside it.")
if importlib.util.find_spec("course_utils") is None:
    wheels = [*Path("@input_folder@").rglob("course_utils-*.whl"), *Path().glob("course_utils-*.whl")]
    wheels.sort(key=lambda wheel: [int(part) for part in re.findall(r"\\d+", wheel.name)])  # the newest version last
    wheel = str(wheels[-1]) if wheels else "@wheel_url@"
    if wheel:  # --no-deps: torch, TensorFlow and all else stay as this machine brought them
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", wheel])
        importlib.invalidate_caches()
    if importlib.util.find_spec("course_utils") is None:
        raise SystemExit(
            "course_utils is not installed: on Kaggle attach the dataset that holds course_utils-*.whl (Add Input), on "
            "Colab upload that file (Files, at the left), elsewhere start with `make lab`; then run this cell again."
        )

from course_utils import hardware

machine = hardware()"""


def first_cell(wheel_url: str = WHEEL_URL, input_folder: str = "/kaggle/input") -> str:
    """Return the code of the first cell.

    It looks for a wheel of course_utils in `input_folder` (where Kaggle mounts attached datasets) and beside the
    notebook, then at `wheel_url`; the newest one is installed, and nothing else is touched.

    Example:
        >>> first_cell().splitlines()[-1]
        'machine = hardware()'
    """
    return _TEMPLATE.replace("@input_folder@", input_folder).replace("@wheel_url@", wheel_url)
