"""The bundle an instructor hands out: learner editions, the data's README, a manifest with a hash for each lesson."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import asdict
from pathlib import Path

from .. import __version__
from .build import Course, check
from .editions import source_hash
from .source import AuthoringError

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date a zip can hold: the same lessons give the same file


def release(course: Course, out: Path) -> Path:
    """Write `course_lessons-VERSION.zip` into `out` and return its path.

    MANIFEST.json in it names each lesson's file, its sha256, the hash of its source and its exercises. Raises
    AuthoringError if any edition is not what its source gives, or if data/README.md is missing.
    """
    if problems := check(course):
        raise AuthoringError("\n".join([*problems, "nothing is released until every edition is as its source says"]))
    readme = course.root / "data" / "README.md"
    if not readme.exists():
        raise AuthoringError(f"{course.shown(readme)} is missing, and a release carries it")
    files = {"data/README.md": readme.read_bytes()}
    lessons = {}
    for lesson in map(course.read, course.sources()):
        path = course.learner_path(lesson.name)
        files[course.shown(path)] = path.read_bytes()
        lessons[lesson.name] = {
            "notebook": course.shown(path),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "source_hash": source_hash(lesson),
            "exercises": [asdict(exercise) for exercise in lesson.exercises],
        }
    manifest = {"course_utils": __version__, "lessons": lessons}
    files["MANIFEST.json"] = (json.dumps(manifest, indent=1) + "\n").encode()
    out.mkdir(parents=True, exist_ok=True)
    bundle = out / f"course_lessons-{__version__}.zip"
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    return bundle
