"""The Makefile's set-up: once, again when its inputs change, afresh after a cut, and a clear word without a fit Python.

A stand-in plays Python: it makes a `.venv` whose interpreter is itself, and notes what pip was asked for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

STAND_IN = """#!/bin/sh
case "$*" in
  "-c import sys;"*) exit ${TOO_OLD:-0} ;;
  "-c import ensurepip"*) exit ${NO_VENV:-0} ;;
  "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip"*) echo "$*" >> asked; case "$*" in *"${FAILS:-nothing}"*) exit 1 ;; esac ;;
  *) echo "ran: $*" ;;
esac
"""


class Checkout:
    """A bare checkout of what set-up reads, with a stand-in for Python."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "constraints.txt", "pyproject.toml"):
            shutil.copy(root / name, folder)
        self.python = folder / "python"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def make(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run make with the stand-in."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        return subprocess.run(
            ["make", f"PYTHON={self.python}", *arguments],
            cwd=self.folder,
            env={**outside, **variables},
            capture_output=True,
            text=True,
        )

    def asked(self) -> list[str]:
        """What pip was asked for since the last look."""
        notes = self.folder / "asked"
        lines = notes.read_text().splitlines() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return lines

    def change(self, name: str) -> None:
        """Make `name` newer than everything there is."""
        later = time.time() + 2
        os.utime(self.folder / name, (later, later))

    def stamps(self) -> set[str]:
        """The names of the stages that are done, or cut short."""
        return {path.name for path in (self.folder / ".venv").glob(".*")}


@pytest.fixture
def checkout(tmp_path: Path, root: Path, require_system) -> Checkout:
    """A bare checkout."""
    require_system("make")
    return Checkout(tmp_path, root)


def test_the_first_lab_sets_up_and_opens_lesson_00(checkout: Checkout) -> None:
    done = checkout.make("lab", "ARGS=--no-browser")
    assert done.returncode == 0, done.stderr
    (ran,) = [line for line in done.stdout.splitlines() if line.startswith("ran: ")]
    assert ran.startswith("ran: -m jupyterlab ")
    assert " --ServerApp.root_dir=notebooks --LabApp.default_url=/lab/tree/00_start_here.ipynb " in ran
    assert ran.endswith(" --no-browser")
    assert checkout.stamps() == {".lab-ready"}


def test_every_install_keeps_to_the_constraints(checkout: Checkout) -> None:
    checkout.make("check")
    installs = [line for line in checkout.asked() if " install " in line]
    assert installs
    assert all(" --constraint constraints.txt " in line for line in installs)


def test_a_second_lab_installs_nothing(checkout: Checkout) -> None:
    checkout.make("lab")
    assert checkout.asked()
    checkout.make("lab")
    assert checkout.asked() == []


def test_lab_after_the_tests_set_up_installs_nothing(checkout: Checkout) -> None:
    checkout.make("check")
    assert checkout.stamps() == {".lab-ready", ".dev-ready"}
    checkout.asked()
    checkout.make("lab")
    assert checkout.asked() == []


def test_lab_installs_no_test_tools(checkout: Checkout) -> None:
    checkout.make("lab")
    (course,) = [line for line in checkout.asked() if "--editable" in line]
    assert course.endswith(" .[lab]")


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_a_change_sets_up_again(checkout: Checkout, name: str) -> None:
    checkout.make("check")
    checkout.asked()
    checkout.change(name)
    checkout.make("check")
    assert checkout.asked()


@pytest.mark.parametrize("step", [" torch", "hatchling", ".[lab"])
def test_a_set_up_that_was_cut_short_leaves_no_stamp_and_starts_afresh(checkout: Checkout, step: str) -> None:
    assert checkout.make("lab", FAILS=step).returncode != 0
    assert checkout.stamps() == {".unfinished"}
    (checkout.folder / ".venv" / "half a package").touch()
    again = checkout.make("lab")
    assert again.returncode == 0
    assert "starting afresh" in again.stdout
    assert checkout.stamps() == {".lab-ready"}
    assert not (checkout.folder / ".venv" / "half a package").exists()


def test_a_renewal_that_was_cut_short_leaves_no_stamp(checkout: Checkout) -> None:
    checkout.make("check")
    checkout.change("constraints.txt")
    assert checkout.make("lab", FAILS="torch").returncode != 0
    assert checkout.stamps() == {".unfinished"}


def test_the_index_is_for_torch_alone(checkout: Checkout) -> None:
    checkout.make("lab", "TORCH_INDEX=https://example.org/cpu")
    (with_index,) = [line for line in checkout.asked() if "example.org" in line]
    assert with_index.endswith("--extra-index-url https://example.org/cpu torch")


def test_no_index_is_named_unless_asked(checkout: Checkout) -> None:
    checkout.make("lab")
    assert not [line for line in checkout.asked() if "index" in line]


def test_an_old_python_gets_a_clear_word(checkout: Checkout) -> None:
    done = checkout.make("lab", TOO_OLD="1")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "make lab PYTHON=" in done.stderr
    assert not (checkout.folder / ".venv").exists()


def test_no_python_at_all_gets_the_same_word(checkout: Checkout) -> None:
    checkout.python.unlink()
    assert "needs Python 3.11 or newer" in checkout.make("lab").stderr


def test_a_python_without_venv_gets_a_clear_word(checkout: Checkout) -> None:
    done = checkout.make("lab", NO_VENV="1")
    assert done.returncode != 0
    assert "python3-venv" in done.stderr
