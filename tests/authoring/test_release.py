"""The bundle that an instructor hands out."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

import course_utils
from course_utils.authoring.__main__ import main
from tests.authoring.samples import LESSON, course


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = course(tmp_path_factory.mktemp("course"), _01_small=LESSON)
    (root / "data").mkdir()
    (root / "data" / "README.md").write_text("where the data comes from\n", encoding="utf-8")
    assert main(["--root", str(root), "build"]) == 0
    return root


def released(root: Path, out: Path) -> Path:
    assert main(["--root", str(root), "release", "--out", str(out)]) == 0
    (bundle,) = out.iterdir()
    return bundle


def test_it_holds_the_learner_editions_the_readme_and_a_manifest(root, tmp_path):
    bundle = released(root, tmp_path / "dist")
    assert bundle.name == f"course_lessons-{course_utils.__version__}.zip"
    with zipfile.ZipFile(bundle) as archive:
        assert archive.namelist() == ["MANIFEST.json", "data/README.md", "notebooks/01_small.ipynb"]
        notebook = archive.read("notebooks/01_small.ipynb")
        manifest = json.loads(archive.read("MANIFEST.json"))
        assert b"answer_of_the_author" not in b"".join(map(archive.read, archive.namelist()))
    assert notebook == (root / "notebooks/01_small.ipynb").read_bytes()
    entry = manifest["lessons"]["01_small"]
    assert entry["sha256"] == hashlib.sha256(notebook).hexdigest()
    assert entry["source_hash"] == json.loads(notebook)["metadata"]["course"]["source_hash"]
    assert entry["exercises"][1] == {"name": "add_two", "points": 4, "minutes": 15, "kind": "implement"}


def test_the_same_lessons_give_the_same_bundle(root, tmp_path):
    first, second = released(root, tmp_path / "one"), released(root, tmp_path / "two")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:  # both were written in the same second: no moment may be in them
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_nothing_is_released_while_an_edition_differs_from_its_source(root, tmp_path, capsys):
    learner = root / "notebooks/01_small.ipynb"
    kept = learner.read_text(encoding="utf-8")
    learner.write_text(kept.replace("two and two", "2 and 2"), encoding="utf-8")
    try:
        assert main(["--root", str(root), "release", "--out", str(tmp_path / "dist")]) == 1
    finally:
        learner.write_text(kept, encoding="utf-8")
    assert "nothing is released" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


def test_nothing_is_released_without_the_readme_of_the_data(root, tmp_path, capsys):
    readme = root / "data" / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.unlink()
    try:
        assert main(["--root", str(root), "release", "--out", str(tmp_path / "dist")]) == 1
    finally:
        readme.write_text(text, encoding="utf-8")
    assert "data/README.md is missing" in capsys.readouterr().err
