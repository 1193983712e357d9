"""A pytest plugin beside nbval: where an output matches, it alters each stored number and has nbval compare again.

So one run of a notebook both judges its outputs and proves that no stored number could be wrong unnoticed. A number
that nbval does not miss fails the cell, unless the sanitize file covers it. The counts go to $ALTERED_NUMBERS_REPORT.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nbval.plugin import IPyNbCell

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_nbval_compares = IPyNbCell.compare_outputs
_counts = {"noticed": 0, "sanitized": []}


def pytest_configure(config: pytest.Config) -> None:
    IPyNbCell.compare_outputs = _compare_and_alter


def pytest_unconfigure(config: pytest.Config) -> None:
    IPyNbCell.compare_outputs = _nbval_compares


def pytest_sessionfinish() -> None:
    Path(os.environ["ALTERED_NUMBERS_REPORT"]).write_text(json.dumps(_counts), encoding="utf-8")


def altered(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each number of `text` with a copy of `text` in which its last digit, and nothing else, is another one."""
    for number in _NUMBER.finditer(text):
        at = number.end() - 1
        yield number, text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]


def stored_texts(outputs: list[Any], skipped: tuple[str, ...] = ()) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (holder, key) of each text that nbval compares, so that holder[key] can be read and altered."""
    for output in outputs:
        if output["output_type"] == "stream":
            yield output, "text"
        elif output["output_type"] == "error":
            yield output, "evalue"
        else:
            for kind in output["data"]:
                if kind not in skipped:
                    assert isinstance(output["data"][kind], str), f"{kind} is not text: teach this plugin to alter it"
                    yield output["data"], kind


def _compare_and_alter(cell: IPyNbCell, test: list[Any], ref: list[Any], skip_compare: Any = None) -> bool:
    if not _nbval_compares(cell, test, ref, skip_compare):
        return False
    # nbval would write out every difference, which takes longer than finding it
    cell.format_output_compare = lambda *_: None
    stored = copy.deepcopy(ref)
    unnoticed = []
    for holder, key in stored_texts(stored, cell.parent.skip_compare):
        text = holder[key]
        for number, holder[key] in altered(text):
            if not _nbval_compares(cell, test, stored, skip_compare):
                _counts["noticed"] += 1
            elif _is_sanitized(number, cell.parent.sanitize_patterns):
                _counts["sanitized"].append(text[max(0, number.start() - 30) : number.end() + 10])
            else:
                unnoticed.append(number[0])
        holder[key] = text
    del cell.format_output_compare
    if unnoticed:
        cell.comparison_traceback = [f"altered, these stored numbers were not missed: {unnoticed}"]
    return not unnoticed


def _is_sanitized(number: re.Match[str], patterns: dict[str, str]) -> bool:
    """Whether a pattern of the sanitize file covers the number where it stands."""
    return any(
        match.start() < number.end() and number.start() < match.end()
        for pattern in patterns
        for match in re.finditer(pattern, number.string)
    )
