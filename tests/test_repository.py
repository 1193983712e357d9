"""The repository keeps its promises: one set of versions, a wheel that upgrades nothing, explained targets, layout."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from email.parser import Parser
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "course_utils"
PLATFORMS = ROOT / "tests" / "platforms"
CARRIED = tomllib.loads((PLATFORMS / "carried.toml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAINTAINERS = {"authoring", "grading"}  # nothing in the package imports these


def pins(lines: list[str]) -> dict[str, str]:
    """The versions in `name==version` lines."""
    return {
        canonicalize_name(name): version for line in lines for name, _, version in [line.partition("==")] if version
    }


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return pins([line for line in lines if not line.startswith("#")])


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def imported_by(path: Path) -> Iterator[str]:
    """Every module that a file of the package imports, by its full name, wherever in the file it does."""
    package = ["course_utils", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def package_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


# --- one set of versions ---------------------------------------------------------------------------------------------


def test_every_constraint_is_one_exact_version() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)] == []
    assert constraints()["torch"] == "2.13.0"


def test_the_constraints_name_every_package_that_the_project_asks_for() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = names(PROJECT["dependencies"] + extras["torch"] + extras["lab"] + extras["dev"])
    assert asked - constraints().keys() == set()


def test_what_is_installed_here_is_what_the_constraints_say() -> None:
    if (Path(sys.prefix) / ".dev-ready").exists():
        frozen = subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", "freeze", "--all", "--exclude-editable"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.replace("+cpu", "")
        installed, pinned = pins(frozen.splitlines()), constraints()
        assert {name: version for name, version in installed.items() if pinned.get(name, version) != version} == {}


def test_conda_and_pip_users_get_the_same_versions() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *by_conda, by_pip = environment["dependencies"]
    assert by_conda == ["python=3.11", "pip"]
    named, pinned = pins(by_pip["pip"]), constraints()
    assert named == {name: pinned[name] for name in named}
    extras = PROJECT["optional-dependencies"]
    assert named.keys() == names(PROJECT["dependencies"] + extras["torch"] + extras["lab"])
    assert [line for line in by_pip["pip"] if "==" not in line] == ["--constraint constraints.txt", "--editable ."]


# --- the wheel on Kaggle and Colab -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built as `make release` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "--disable-pip-version-check", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *build, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (path,) = folder.iterdir()
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def required(wheel: zipfile.ZipFile) -> list[Requirement]:
    """What the wheel requires of everyone, extras aside."""
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    lines = Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist")
    requirements = [Requirement(line) for line in lines]
    return [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]


def test_the_wheel_requires_neither_torch_nor_tensorflow(required: list[Requirement]) -> None:
    assert {one.name for one in required} & {"torch", "tensorflow", "tensorflow-cpu", "tf-keras", "keras"} == set()
    assert "numpy" in {one.name for one in required}


@pytest.mark.parametrize("platform", CARRIED)
def test_the_wheel_upgrades_nothing_that_a_platform_carries(required: list[Requirement], platform: str) -> None:
    refused = [str(one) for one in required if not one.specifier.contains(CARRIED[platform][one.name])]
    assert refused == []


@pytest.mark.parametrize("platform", CARRIED)
def test_the_extras_admit_what_a_platform_carries(platform: str) -> None:
    carried = CARRIED[platform]
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for line in extras["torch"] + extras["tensorflow"] + extras["lab"]]
    refused = [str(one) for one in wanted if one.name in carried and not one.specifier.contains(carried[one.name])]
    assert refused == []


def test_the_wheel_holds_the_package_alone(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"course_utils"}
    held = {name for name in wheel.namelist() if name.startswith("course_utils/") and name.endswith(".py")}
    assert held == {path.relative_to(ROOT).as_posix() for path in package_files()}


def test_the_package_imports_nothing_that_the_wheel_does_not_require() -> None:
    distributions = {"IPython": "ipython", "PIL": "pillow", "sklearn": "scikit-learn"}
    used = set()
    for path in package_files():
        if path.relative_to(PACKAGE).parts[0] in MAINTAINERS:
            continue
        tops = {module.partition(".")[0] for module in imported_by(path)}
        used |= {distributions.get(top, top) for top in tops - sys.stdlib_module_names - {"course_utils", ""}}
    optional = {"torch", "tensorflow", "keras", "horovod", "ipykernel"}  # each used only where it is already there
    assert used - optional == names(PROJECT["dependencies"])


def test_the_imitation_environment_carries_what_the_platforms_carry() -> None:
    imitated = pins((PLATFORMS / "requirements.txt").read_text(encoding="utf-8").splitlines())
    for name, version in imitated.items():
        known = {carried[name] for carried in CARRIED.values() if name in carried}
        assert not known or version in known, name
    assert {"ipython", "ipywidgets", "numpy", "psutil", "scikit-learn"} <= imitated.keys()


# --- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "environment.yml",
        ".ci/run",
        ".pre-commit-config.yaml",
        "data/README.md",
        "notebooks/00_start_here.ipynb",
        "course_utils/errors.py",
        "course_utils/machine.py",
        "course_utils/launcher",
        "course_utils/exercises",
        "course_utils/datasets",
        "course_utils/authoring",
    ],
)
def test_each_concern_has_its_home(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_lesson_has_a_source_and_both_editions() -> None:
    sources = {path.stem for path in (ROOT / "notebooks" / "source").glob("*.py")}
    assert sources == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert sources == {path.stem for path in (ROOT / "notebooks" / "solutions").glob("*.ipynb")}
    assert {"00_start_here", "01_ranks_and_rendezvous"} <= sources


def test_the_tests_mirror_the_package() -> None:
    rooms = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    untested = {"__init__", "errors"}  # the vocabulary has its own test; errors holds declarations
    missing = [
        room.name
        for room in rooms
        if room.stem not in untested
        and not (ROOT / "tests" / room.name).is_dir()
        and not (ROOT / "tests" / f"test_{room.stem}.py").is_file()
    ]
    assert missing == []


@pytest.mark.parametrize("path", package_files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_file_says_what_lives_there(path: Path) -> None:
    first = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert first
    assert path.read_text(encoding="utf-8").startswith('"""')


@pytest.mark.parametrize(
    ("room", "may_import"),
    [
        ("errors", set()),
        ("machine", {"errors"}),
        ("front_end", set()),
        ("launcher", {"errors", "front_end", "machine"}),
        ("datasets", {"errors"}),
        ("following", set()),
        ("showing", {"front_end"}),
        ("horovod_build", {"errors", "following", "machine", "showing"}),
        ("tensorflow_setup", {"errors", "following", "front_end", "showing"}),
        ("simulate", {"errors", "front_end", "launcher"}),
        ("visuals", {"errors", "front_end", "launcher", "simulate"}),
        ("exercises", {"datasets", "errors", "front_end", "launcher", "machine"}),
    ],
)
def test_imports_point_one_way(room: str, may_import: set[str]) -> None:
    files = [path for path in package_files() if path.relative_to(PACKAGE).parts[0].removesuffix(".py") == room]
    assert files
    imported = {module for path in files for module in imported_by(path) if module.startswith("course_utils.")}
    vocabulary = {"__version__", "launch", "check", "hint", "predict", "progress", "hardware"}
    assert {module.split(".")[1] for module in imported} - vocabulary <= may_import | {room}


def test_nothing_imports_the_maintainers_rooms() -> None:
    for path in package_files():
        if path.relative_to(PACKAGE).parts[0] not in MAINTAINERS:
            rooms = {module.split(".")[1] for module in imported_by(path) if module.startswith("course_utils.")}
            assert rooms & MAINTAINERS == set(), path


# --- words -----------------------------------------------------------------------------------------------------------


@cache
def texts() -> dict[str, str]:
    """Every text file that git tracks, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {}
    for name in filter(None, listed.stdout.split("\0")):
        try:
            found[name] = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
    assert "README.md" in found
    return found


def places(pattern: str, within: Callable[[str], bool] = bool) -> list[str]:
    return [
        f"{name}: {match[0]}"
        for name, text in texts().items()
        if within(name)
        for match in re.finditer(pattern, text, flags=re.MULTILINE)
    ]


def test_no_file_holds_a_path_of_a_machine() -> None:
    homes = "|".join(map(re.escape, {str(ROOT) + os.sep, str(Path(sys.prefix)) + os.sep}))
    assert places(rf"(?<![\w.])/(?:home|root|Users)/\w+|{homes}") == []


def test_no_port_is_fixed() -> None:
    ours = ("course_utils/", "notebooks/source/", "tests/")
    fixed = r"(?i)\w*port\w*[\"'\])]*\s*(?:=|:|,)\s*f?[\"']?\d{4,5}\b"
    assert places(fixed, lambda name: name.startswith(ours)) == []


def test_the_license_is_mit() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.startswith("MIT License\n")
    assert "the course's contributors" in text
    assert PROJECT["license"] == "MIT"


# --- the Makefile ----------------------------------------------------------------------------------------------------


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.+)$", makefile, flags=re.MULTILINE)
    return set(phony.split())


def test_make_alone_explains_every_target(require_system: Callable[[str], str]) -> None:
    shown = subprocess.run([require_system("make")], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"^  make ([\w-]+) +\w", shown, flags=re.MULTILINE)) == targets()
    assert {"lab", "test", "test-long", "check", "lessons", "bench", "release", "help"} <= targets()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_a_page_names_only_targets_that_exist(page: str) -> None:
    named = set(re.findall(r"`make ([a-z][\w-]*)", (ROOT / page).read_text(encoding="utf-8")))
    assert named
    assert named <= targets()


def test_the_readme_links_to_files_that_exist() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "data/README.md"):
        links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8"))
        assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_readme_calls_ready_exactly_the_lessons_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (?:\[(\d\d)[^]]*\]\(notebooks/(\w+)\.ipynb\)|\d\d [^|]+) \|.*\| (\w+) \|$", readme, re.MULTILINE
    )
    assert len(rows) == 11
    assert {name for _, name, state in rows if state == "ready"} == {
        path.stem for path in (ROOT / "notebooks" / "source").glob("*.py")
    }
    assert {name for _, name, state in rows if state != "ready"} == {""}


def test_ci_is_one_command_that_bash_can_read(require_system: Callable[[str], str]) -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    subprocess.run([require_system("bash"), "-n", str(ROOT / ".ci" / "run")], check=True)
