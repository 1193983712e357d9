"""The learner's vocabulary: there at once, light to import, and not replaced by anything that is imported later."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import course_utils

PACKAGE = Path(course_utils.__file__).parent
# Who may import whom: everything that is not below one of these names is refused.
MAY_IMPORT = {
    "errors": set(),
    "machine": {"errors"},
    "launcher": {"errors", "machine"},
    "exercises": {"errors", "machine", "launcher"},
    "datasets": {"errors", "machine"},
    "following": set(),
    "showing": set(),
    "horovod_build": {"errors", "machine", "following", "showing"},
    "tensorflow_setup": {"errors", "following", "showing"},
    "graphs": {"errors", "machine", "datasets"},
    "simulate": {"errors", "launcher"},
    "visuals": {"errors", "machine", "launcher", "simulate"},
    "grading": {"errors", "machine", "launcher", "exercises"},
    "authoring": {"errors", "machine", "launcher", "exercises"},
}


# What only ranks import, and the framework that it needs.
NEEDS = {f"course_utils.launcher.frameworks.in_{name}": name for name in ("tensorflow", "horovod")}


def modules() -> list[str]:
    found = pkgutil.walk_packages([str(PACKAGE)], "course_utils.")
    return [module.name for module in found if not module.name.endswith("__main__")]


def test_every_public_name_is_still_what_it_was_when_all_submodules_are_imported() -> None:
    there = [name for name in modules() if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
    source = (
        "import importlib, course_utils\n"
        "before = {name: getattr(course_utils, name) for name in course_utils.__all__}\n"
        f"for module in {[name for name in there if 'authoring.first_cell' not in name]!r}:\n"
        "    importlib.import_module(module)\n"
        "changed = [name for name in before if getattr(course_utils, name) is not before[name]]\n"
        "assert not changed, changed\n"
        "assert all(callable(value) for value in before.values()), before\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", sorted({name.rpartition(".")[0] for name in modules()}))
def test_no_submodule_shares_a_name_with_a_public_function_of_its_package(package: str) -> None:
    public = set(importlib.import_module(package).__dict__.get("__all__", ()))
    folder = Path(importlib.import_module(package).__file__ or "").parent
    assert not public & {path.stem for path in folder.iterdir()}


def test_every_name_of_the_vocabulary_can_be_found_and_nothing_else() -> None:
    for name in course_utils.__all__:
        assert name in dir(course_utils)
        assert getattr(course_utils, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        course_utils.lunch  # noqa: B018


def test_importing_the_package_imports_next_to_nothing() -> None:
    source = (
        "import sys; before = set(sys.modules); import course_utils\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert "course_utils" in done.stdout
    heavy = {"torch", "tensorflow", "numpy", "IPython", "sklearn", "matplotlib", "psutil", "cloudpickle"}
    assert not heavy & set(done.stdout.split())


def test_imports_go_one_way() -> None:
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] == "__init__":
            continue
        for imported in imported_concerns(path, parts):
            if imported != parts[0]:
                assert imported in MAY_IMPORT[parts[0]], f"{path.relative_to(PACKAGE)} imports {imported}"


def imported_concerns(path: Path, parts: tuple[str, ...]) -> set[str]:
    """The concerns (first level of the package) that a module imports."""
    package = ["course_utils", *parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{start}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            steps = name.split(".")
            if steps[0] == "course_utils" and len(steps) > 1 and steps[1] in MAY_IMPORT:
                found.add(steps[1])
    return found


def test_the_one_way_test_sees_an_import_that_goes_the_other_way(tmp_path: Path) -> None:
    module = tmp_path / "server.py"
    module.write_text(
        "from ..exercises import check\nfrom course_utils.grading.marks import x\nimport course_utils.visuals\n"
    )
    assert imported_concerns(module, ("launcher", "server")) == {"exercises", "grading", "visuals"}


def imported_at_once(path: Path) -> set[str]:
    """The modules of the package that a module imports when it is imported itself, not inside functions."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    package = list(parts[:-1])
    known = set(modules())
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name for alias in node.names if (name := f"{start}.{alias.name}") in known} or {start} & known
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
    return found


def test_no_module_imports_itself_in_a_circle() -> None:
    arrows = {name: imported_at_once(file_of(name)) for name in modules()}
    assert arrows["course_utils.launcher.session"] >= {"course_utils.errors", "course_utils.launcher.client"}
    while leaves := {name for name, imported in arrows.items() if not imported & arrows.keys()}:
        arrows = {name: imported for name, imported in arrows.items() if name not in leaves}
    assert not arrows


def file_of(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
