"""TensorFlow for the lessons that need it: what is installed is used as it is, elsewhere pip brings it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from pathlib import Path

from .errors import FrameworkMissing
from .following import run_followed
from .front_end import nothing_printed
from .showing import Progress

PACKAGES = {"tensorflow": "tensorflow>=2.20", "tf_keras": "tf-keras>=2.20"}  # what is imported -> what pip installs


def ensure_tensorflow(show: bool = True) -> None:
    """Make `import tensorflow` and `import tf_keras` work, and import TensorFlow; with `show`, the progress is shown.

    What its libraries write while they are loaded (that there is no GPU, say) and what it logs at its start is kept
    from the notebook; set TF_CPP_MIN_LOG_LEVEL to see the latter.

    A TensorFlow that is there, as on Kaggle and Colab, stays as it is; where tf_keras alone is absent, the one that
    fits it is added and nothing else. In a clone of the repository pip takes the versions the course was tested with.

    Raises FrameworkMissing, which says what pip said and how to go on. An interrupt ends pip.

    Example:
        >>> ensure_tensorflow()  # doctest: +SKIP
        TensorFlow 2.21.0 is ready.
    """
    progress = Progress(show)
    before = _versions()
    if set(PACKAGES) - set(before):
        about = "tf_keras" if "tensorflow" in before else "TensorFlow: about 600 MB, some minutes"
        progress.say(f"Installing {about}.")
        try:
            _install(_wanted(before), progress)
        finally:
            progress.close()
    importlib.invalidate_caches()
    now = _versions()
    if set(PACKAGES) - set(now):
        raise FrameworkMissing("TensorFlow was installed, but this Python does not see it: restart the kernel.")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # it reorders sums, and says so
    with nothing_printed():
        importlib.import_module("tensorflow")
    progress.say(f"TensorFlow {now['tensorflow']} is ready.")


def _versions() -> dict[str, str]:
    """The version of each package that is installed whole, by the name that it is imported with.

    pip writes what names a package last: of an installation that was cut short nothing is found, and it starts anew.
    """
    whole = importlib.metadata.packages_distributions()  # TensorFlow is also installed under other names than its own
    return {name: importlib.metadata.version(whole[name][0]) for name in PACKAGES if name in whole}


def _wanted(there: dict[str, str]) -> list[str]:
    """What pip is asked for."""
    if "tensorflow" in there:
        major, minor, *_ = there["tensorflow"].split(".")
        return ["--no-deps", f"tf-keras=={major}.{minor}.*"]  # it would bring a TensorFlow of its own
    constraints = Path(__file__).parent.parent / "constraints.txt"
    return [*(["--constraint", str(constraints)] if constraints.exists() else []), *PACKAGES.values()]


def _install(wanted: list[str], progress: Progress) -> None:
    """Run pip, showing what it does."""
    said: list[str] = []

    def follow(line: str) -> None:
        said.append(line)
        if step := _step(line):
            progress.step(step)

    progress.step("Looking for it")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--progress-bar", "off"]
    if run_followed([*pip, *wanted], follow, progress.tick):
        errors = [line for line in said if line.startswith("ERROR")] or said[-1:]
        raise FrameworkMissing(
            f"TensorFlow could not be installed ({' '.join(errors)}). This lesson needs it: once there is an internet "
            "connection, run this cell again, or `pip install tensorflow tf-keras`. Lessons 00 to 07 and 10 do not."
        )


def _step(line: str) -> str:
    """What pip is doing, from a line that it prints; "" for lines that say nothing new."""
    if found := re.match(r"\s*Downloading (?:\S*/)?(\w+)-\S+ (\(.*\))", line):
        return f"Downloading {found[1]} {found[2]}"
    return "Installing" if line.startswith("Installing collected packages") else ""
