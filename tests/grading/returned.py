"""Notebooks as they come back from learners, made for tests, and the rows that a folder of them gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from course_utils.exercises.registry import exercises_of
from course_utils.grading import batch
from course_utils.grading.batch import Row

SEED = 3

PROCESS_IDS = '# @exercise process_ids points=1 minutes=2 kind=predict\nguess = {}\npredict("process_ids", guess)'
INTRODUCE = "# @exercise introduce points=1 minutes=3\n{}\n\nintroduce = check('introduce', introduce)"
BRING_HOME = "# @exercise bring_home points=2 minutes=5 kind=debug\n{}\n\nbring_home = check('bring_home', bring_home)"
SHIFT = "# @exercise shift points=4 minutes=10 kind=debug\n{}\n\nshift = check('shift', shift)"
AVERAGE = "# @exercise average_by_hand points=5 minutes=15\n{}"
ESSAY = "<!-- @exercise one_size_hangs points=2 minutes=5 kind=explain -->\n{}"

IMPORTS = "import os\nimport torch\nimport torch.distributed as dist\nfrom course_utils import check, launch, predict"
RIGHT_INTRODUCE = 'def introduce():\n    return f"rank {dist.get_rank()} of {dist.get_world_size()}"'
WRONG_INTRODUCE = 'def introduce():\n    return "rank 0 of 1"'
OPEN_INTRODUCE = 'def introduce():\n    """Say who you are."""\n    raise NotImplementedError("your turn")'
RIGHT_BRING_HOME = """\
def bring_home(model, inputs, targets):
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return model.state_dict()"""
OPEN_BRING_HOME = 'def bring_home(model, inputs, targets):\n    raise NotImplementedError("your turn")'

UNTOUCHED = (
    "# 00 Start here",
    IMPORTS,
    PROCESS_IDS.format("None"),
    INTRODUCE.format(OPEN_INTRODUCE),
    "WORLD = 4\n\n\ndef give_greeting():\n    return 'hello'",
    BRING_HOME.format(OPEN_BRING_HOME),
    *(
        f"# @exercise {exercise.name} points=1 minutes=1\n# your answer here"
        for exercise in exercises_of("00")
        if exercise.name not in ("process_ids", "introduce", "bring_home") and exercise.kind != "explain"
    ),
    *(
        f"<!-- @exercise {exercise.name} points=1 minutes=1 kind=explain -->\n*Your answer:*"
        for exercise in exercises_of("00")
        if exercise.kind == "explain"
    ),
)


def cell(text: str, **more: Any) -> dict[str, Any]:
    """A cell; one that begins as a heading or a comment of HTML is markdown."""
    if text.startswith(("# 0", "<!--", "Prose")):
        return {"cell_type": "markdown", "metadata": {}, "source": text, **more}
    return {
        "cell_type": "code",
        "metadata": {},
        "source": text.splitlines(keepends=True),
        "outputs": [],
        "execution_count": None,
        **more,
    }


def notebook(*texts: str, minor: int = 5) -> dict[str, Any]:
    """A notebook of cells with these texts."""
    cells = [cell(text, **({"id": f"cell-{place}"} if minor >= 5 else {})) for place, text in enumerate(texts)]
    return {"nbformat": 4, "nbformat_minor": minor, "metadata": {}, "cells": cells}


def hand_in(path: Path, *texts: str) -> Path:
    """Write a notebook of cells with these texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook(*texts)), encoding="utf-8")
    return path


def handed_out(folder: Path) -> Path:
    """Write the learner edition that these notebooks come from; return its folder."""
    hand_in(folder / "00_start_here.ipynb", *UNTOUCHED)
    return folder


def rows_of(folder: Path, release: Path, seed: int = SEED) -> list[Row]:
    """Grade a folder."""
    return [row for report in batch.grade(batch.collect(folder), release, seed) for row in report.rows]


def by_exercise(rows: list[Row]) -> dict[str, Row]:
    """The rows of one notebook by exercise."""
    assert len({row.file for row in rows}) == 1
    return {row.exercise: row for row in rows}
