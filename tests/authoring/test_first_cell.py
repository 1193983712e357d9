"""The set-up cell, run by a bare interpreter that has no course_utils, beside a pip that only records and unpacks."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from course_utils.authoring.first_cell import first_cell

# It runs as `python -m pip`: notes its arguments, and unpacks the wheel unless it is told to fail.
FAKE_PIP = """
import json, os, sys, zipfile
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[-1].startswith("https:"):
    sys.exit("could not connect")
zipfile.ZipFile(sys.argv[-1]).extractall(os.environ["FAKE_PIP_TARGET"])
"""
FAKE_COURSE = """
VERSION = {version!r}
def hardware():
    print("Where:    here", "Hardware: this", "Lessons:  version " + VERSION, sep="\\n")
"""


class Machine:
    """A folder for Kaggle's datasets, one beside the notebook, and an interpreter without course_utils."""

    def __init__(self, folder: Path) -> None:
        self.datasets, self.beside, self.site = folder / "datasets", folder / "work", folder / "site"
        self.log = folder / "pip.log"
        for path in (self.datasets, self.beside, self.site / "pip"):
            path.mkdir(parents=True)
        (self.site / "pip" / "__init__.py").touch()
        (self.site / "pip" / "__main__.py").write_text(FAKE_PIP, encoding="utf-8")

    def wheel(self, folder: Path, version: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"course_utils-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("course_utils/__init__.py", FAKE_COURSE.format(version=version))
        return path

    def run(self, before: str = "", url: str = "") -> subprocess.CompletedProcess[str]:
        code = before + first_cell(wheel_url=url, input_folder=str(self.datasets))
        fakes = {"FAKE_PIP_LOG": str(self.log), "FAKE_PIP_TARGET": str(self.site), "PYTHONPATH": str(self.site)}
        # -S: no site-packages, so that an installed course_utils is not seen
        return subprocess.run(
            [sys.executable, "-S", "-c", code],
            cwd=self.beside,
            env={**os.environ, **fakes},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def installed(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_where_course_utils_is_there_it_prints_three_lines_and_installs_nothing(machine):
    with zipfile.ZipFile(machine.wheel(machine.datasets, "0.1.0")) as archive:
        archive.extractall(machine.site)
    ran = machine.run()
    assert ran.returncode == 0, ran.stderr
    assert [line.split(":")[0] for line in ran.stdout.splitlines()] == ["Where", "Hardware", "Lessons"]
    assert machine.installed() == []


def test_on_kaggle_the_wheel_of_an_attached_dataset_is_installed_without_its_dependencies(machine):
    wheel = machine.wheel(machine.datasets / "a course" / "dist", "0.1.0")
    ran = machine.run()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "Lessons:  version 0.1.0"
    assert machine.installed() == [["install", "--quiet", "--no-deps", str(wheel)]]


def test_of_several_wheels_the_newest_version_is_taken_as_numbers_compare(machine):
    for version in ("0.9.0", "0.10.0", "0.2.0"):
        machine.wheel(machine.datasets / version, version)
    assert machine.run().stdout.splitlines()[-1] == "Lessons:  version 0.10.0"


def test_a_wheel_uploaded_beside_the_notebook_is_found(machine):
    machine.wheel(machine.beside, "0.1.0")
    assert machine.run().stdout.splitlines()[-1] == "Lessons:  version 0.1.0"


def test_without_a_wheel_the_project_address_is_asked_and_a_failure_says_what_to_attach(machine):
    ran = machine.run(url="https://example.org/course_utils-0.1.0-py3-none-any.whl")
    assert machine.installed()[0][-1] == "https://example.org/course_utils-0.1.0-py3-none-any.whl"
    assert "course_utils is not installed: on Kaggle attach" in ran.stderr


def test_with_neither_one_sentence_says_what_to_do_and_nothing_is_tried(machine):
    ran = machine.run()
    assert ran.returncode == 1
    assert machine.installed() == []
    (sentence,) = ran.stderr.splitlines()
    for word in ("Kaggle", "Colab", "make lab", "course_utils-*.whl", "run this cell again"):
        assert word in sentence


def test_native_windows_gets_one_sentence(machine):
    ran = machine.run(before='import sys\nsys.platform = "win32"\n')
    (sentence,) = ran.stderr.splitlines()
    assert "install WSL2" in sentence
    assert ran.returncode == 1


def test_it_is_short_and_plain_enough_to_be_read():
    code = first_cell()
    lines = code.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 120
    assert code.startswith("# @first-cell")
    ast.parse(code, feature_version=(3, 11))
    assert not re.search(r"torch|tensorflow", code.replace("# --no-deps: torch, TensorFlow and", ""), re.IGNORECASE)
