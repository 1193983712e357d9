"""From what ranks report to what a learner reads: exceptions, places in cells, the root cause, the table of a hang.

The rank describes (plain data, no source lines: cells exist only in the kernel), the kernel formats.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import RankState, WorkerFailed, WorkerTimeout
from ..front_end import is_plain

Frame = list[Any]  # [file, line, function]; JSON has no tuples

_PACKAGE = str(Path(__file__).parent.parent)
_RANK = str(Path(__file__).with_name("rank.py"))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_AUTOGRAPH = "__autograph_generated_file"  # what TensorFlow makes of a function; its errors name the learner's lines
_LAST_LINES = 12
DEATH_SECONDS = 1.0  # by so much may an exception that a death caused come before the news of the death

# What a rank says when the other side of its connection is gone: never the first failure if there is another one.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|error)|failed to recv|got 0 bytes"
    r"|remote process exited|communicator was aborted|failed to send|software caused connection abort"
    r"|connectfullmesh failed|peer closed|horovod has been shut down|collective ops is aborted"
    r"|failed to connect to all addresses|heartbeat timeout",
    re.IGNORECASE,
)


# ---- in the rank


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception as plain data, with its causes, for the kernel to format."""
    return {
        "kind": "exception",
        "time": time.monotonic(),
        "type": type(error).__name__,
        "message": _text_of(error),
        "chain": _chain(traceback.TracebackException.from_exception(error, lookup_lines=False, compact=True)),
    }


def describe_unsendable_result(value: Any, error: Exception) -> dict[str, Any]:
    """Return as plain data that a rank's return value cannot be pickled, with the type of the part at fault."""
    kind = type(value).__name__
    return {"kind": "result", "time": time.monotonic(), "type": kind, "message": _text_of(error), "chain": []}


def frames_of(frame: FrameType | None) -> list[Frame]:
    """Return the Python stack that ends in `frame`, outermost first."""
    frames: list[Frame] = []
    while frame is not None:
        frames.append([frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name])
        frame = frame.f_back
    return frames[::-1]


def _text_of(error: BaseException) -> str:
    try:
        return _writable(str(error))
    except Exception as second:
        return f"<its message cannot be shown: {type(second).__name__}>"


def _writable(text: str) -> str:
    """Escape what no terminal or notebook can be sent, such as half a character."""
    return text.encode("utf-8", "backslashreplace").decode()


def _chain(described: traceback.TracebackException) -> list[dict[str, Any]]:
    """The exception and what it came from, oldest first."""
    links: list[dict[str, Any]] = []
    seen: set[int] = set()
    link: traceback.TracebackException | None = described
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        cause = link.__cause__
        context = None if link.__suppress_context__ else link.__context__
        links.append(
            {
                "frames": [[entry.filename, entry.lineno, entry.name] for entry in link.stack],
                "lines": [_writable(line.rstrip("\n")) for line in link.format_exception_only()],
                "because": "cause" if cause else "context" if context else None,
            }
        )
        link = cause or context
    return links[::-1]


# ---- in the kernel


@dataclass(frozen=True)
class Failure:
    """How one rank failed. `time` is on the clock that all processes of a machine share."""

    rank: int
    kind: str  # "exception", "result", "exit" or "signal"
    time: float
    type: str = ""
    message: str = ""
    chain: tuple[dict[str, Any], ...] = ()
    code: int = 0  # exit status or signal number
    frames: tuple[Frame, ...] = ()  # where compiled code crashed

    @property
    def may_be_consequence(self) -> bool:
        """Whether this is what a rank says when another one broke its connection."""
        if self.kind != "exception":
            return False
        said = [self.message, *("\n".join(link["lines"]) for link in self.chain)]
        return any(_CONSEQUENCE.search(text) for text in said)

    def folded(self) -> str:
        """The failure in one line, beside one that it may have followed from."""
        return "lost its connection to another rank" if self.may_be_consequence else self.headline()

    def headline(self) -> str:
        """The failure in one line, without its rank."""
        if self.kind == "exception":
            if self.type == "SystemExit":
                return f"called sys.exit({self.message}) instead of returning"
            return f"{self.type}: {_first_line(self.message)}" if self.message else self.type
        if self.kind == "result":
            return f"returned {_a(self.type)} that cannot be sent back: {_first_line(self.message)}"
        if self.kind == "signal":
            return f"died of {_signal_name(self.code)}{_signal_hint(self.code)}"
        return f"ended with exit code {self.code} before it returned"


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Choose the first original failure: a lost connection is a consequence as long as there is anything else."""
    originals = [failure for failure in failures if not failure.may_be_consequence]
    first = min(originals or failures, key=_when)
    alike = [failure for failure in failures if failure.headline() == first.headline()]
    return min(alike, key=lambda failure: failure.rank)  # which of equal failures came first is chance


def _when(failure: Failure) -> float:
    """When a failure happened: a death is heard of later than it happens, and after what it does to other ranks."""
    return failure.time - (DEATH_SECONDS if failure.kind in ("exit", "signal") else 0.0)


def worker_failed(failures: Sequence[Failure], nprocs: int, logs: Sequence[str]) -> WorkerFailed:
    """Build the error of a failed run: the root cause in full, everything else folded to a line."""
    root = root_cause(failures)
    parts = [f"rank {root.rank} of {nprocs} failed: {root.headline()}"]
    shown = format_chain(root.chain)
    if shown and root.type != "SystemExit":
        parts.append(shown)
    if root.kind == "result":
        parts.append("Return plain data, arrays, tensors or a state_dict: things that pickle can carry.")
    if root.frames:
        parts.append(format_frames(_inside_the_call(root.frames)))
    if root.kind in ("exit", "signal"):
        last = _last_lines(logs[root.rank])
        parts.append(f"Its last lines:\n{last}" if last else "It printed nothing.")
    alike = [failure.rank for failure in failures if failure is not root and failure.headline() == root.headline()]
    if alike:
        parts.append(f"In the same way failed: {_ranks(alike)}.")
    others = [failure for failure in failures if failure is not root and failure.rank not in alike]
    consequences = [(failure.rank, failure.folded()) for failure in sorted(others, key=lambda other: other.rank)]
    if consequences:
        parts.append("After that:\n" + "\n".join(f"  rank {rank}: {text}" for rank, text in consequences))
    return WorkerFailed(
        "\n\n".join(parts),
        rank=root.rank,
        kind=root.kind,
        exception_type=root.type if root.kind == "exception" else None,
        exception_message=root.message,
        traceback=shown,
        exitcode=root.code if root.kind == "exit" else None,
        signal=root.code if root.kind == "signal" else None,
        consequences=consequences,
        logs=logs,
    )


def worker_timeout(seconds: float, states: Sequence[RankState], logs: Sequence[str]) -> WorkerTimeout:
    """Build the error of a run without progress: one table, then each stack."""
    stacks = "".join(f"\n\nStack of rank {state.rank}:\n{state.stack}" for state in states if state.stack)
    message = f"no output, message or collective on any rank for {seconds:g} s\n{table_of(states)}{stacks}"
    return WorkerTimeout(message, seconds=seconds, states=states, logs=logs)


def table_of(states: Sequence[RankState]) -> str:
    """Write where ranks stand as one table of text: rank, state, what it waits in, the line and its code."""
    rows = [("rank", "state", "waits in", "line", "code")]
    for one in states:
        rows.append((str(one.rank), one.state, one.collective or "", one.where or "", one.code or ""))
    filled = [column for column in range(5) if any(row[column] for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in filled}
    return "\n".join("  " + "  ".join(row[at].ljust(widths[at]) for at in filled).rstrip() for row in rows)


def state_of(rank: int, state: str, frames: Sequence[Frame] = (), waiting: str | None = None) -> RankState:
    """Describe where a rank is from its stack: the innermost line of the learner's own code."""
    frames = _inside_the_call(frames)
    own = [frame for frame in frames if not is_library(frame[0])]
    where = code = None
    if own:
        where = place(*own[-1][:2])
        code = _source(*own[-1][:2]) or None
    if state == "running" and waiting:
        state = "waiting"
    return RankState(rank, state, waiting, where, code, format_frames(frames))


def _inside_the_call(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The part of a rank's stack below the launcher's own call of the learner's function."""
    outside = [index for index, frame in enumerate(frames) if frame[0] == _RANK]
    return frames[outside[-1] + 1 :] if outside else frames


def format_chain(chain: Sequence[dict[str, Any]]) -> str:
    """Write an exception with its causes as a traceback of the learner's own code."""
    parts = []
    for link in chain:
        if link["because"] == "cause":
            parts.append("The above was the direct cause of:")
        elif link["because"] == "context":
            parts.append("While handling that:")
        parts.append("\n".join(part for part in (format_frames(link["frames"]), "\n".join(link["lines"])) if part))
    return "\n\n".join(parts)


def format_frames(frames: Sequence[Frame]) -> str:
    """Write a stack from the learner's first line on; runs of library frames become one line."""
    lines: list[str] = []
    folded: list[Frame] = []
    frames = [frame for frame in frames if not frame[0].startswith(_PACKAGE)]
    first = next((index for index, frame in enumerate(frames) if not is_library(frame[0])), 0)

    def unfold() -> None:
        if folded:
            file, line, function = folded[-1]
            more = f"{len(folded)} frames, last " if len(folded) > 1 else ""
            lines.append(f"  ({more}{function}, {place(file, line)})")
            folded.clear()

    previous: list[str] = []
    repeated = 0

    def repeat() -> None:
        nonlocal repeated
        if repeated:
            lines.append(f"  (the same line {repeated} more time{'s' * (repeated > 1)})")
            repeated = 0

    for file, line, function in frames[first:]:
        if is_library(file):
            folded.append([file, line, function])
            continue
        unfold()
        entry = [f"  {place(file, line)}, in {function}"]
        source = _source(file, line)
        if source:
            entry.append(f"    {source}")
        if entry == previous:
            repeated += 1
            continue
        repeat()
        lines += entry
        previous = entry
    repeat()
    unfold()
    return "\n".join(lines)


def place(file: str, line: int) -> str:
    """Name a line as a learner knows it: "cell 5, line 12", or the file's name and line."""
    if file.startswith("<ipython-input-") or "/ipykernel_" in file:
        cell = _cell_number(file)
        return f"{'a cell' if cell is None else f'cell {cell}'}, line {line}"
    if file == "<stdin>":
        return f"the console, line {line}"
    if is_library(file):
        return f"{_INSTALLED.split(file)[-1].removeprefix(_STANDARD_LIBRARY + os.sep)}, line {line}"
    return f"{os.path.basename(file)}, line {line}"


def _cell_number(file: str) -> int | None:
    if is_plain():  # a cell's number depends on who executes the notebook
        return None
    in_its_name = re.match(r"<ipython-input-(\d+)-", file)
    if in_its_name:
        return int(in_its_name[1])
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return None
    known: dict[str, int] | None = getattr(shell.compile, "_filename_map", None)
    if known is not None:
        return known.get(file)
    cells = list(enumerate(shell.history_manager.input_hist_raw))  # IPython 7 keeps no map: it names a cell by its text
    for number, text in reversed(cells):
        whole = (text, text + "\n", text + "\n\n")  # the history drops the newlines that end a cell
        if file in (shell.compile.get_code_name(cell, cell, number) for cell in whole):
            return number
    return None


def is_library(file: str) -> bool:
    """Whether a file is this package's, an installed one's or Python's own, and not the learner's."""
    if file.startswith((_PACKAGE, _STANDARD_LIBRARY)):
        return True
    if file.startswith("<"):  # made by exec: dataclasses, named tuples, torch.fx
        return not file.startswith(("<ipython-input-", "<stdin>"))
    return bool(_INSTALLED.search(file)) or os.path.basename(file).startswith(_AUTOGRAPH)


def _source(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


def frames_in(stack_file: Path) -> list[Frame]:
    """Read the stack that faulthandler wrote to a rank's stack file, outermost frame first."""
    text = stack_file.read_text(errors="replace") if stack_file.exists() else ""
    found = re.findall(r'File "(.+)", line (\d+) in (.+)', text)
    return [[file, int(line), function] for file, line, function in reversed(found)]


def _ranks(numbers: Sequence[int]) -> str:
    names = [str(number) for number in sorted(numbers)]
    return f"rank{'s' * (len(names) > 1)} {', '.join(names[:-1])}{' and ' * (len(names) > 1)}{names[-1]}"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    return lines[0] if len(lines[0]) <= 300 else lines[0][:300] + " ..."


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
    return "\n".join(f"  {line[:300]}" for line in lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _signal_hint(number: int) -> str:
    hints = {
        signal.SIGKILL: " (killed from outside; often because memory ran out)",
        signal.SIGSEGV: " (a crash in compiled code)",
        signal.SIGABRT: " (compiled code gave up; see its last lines)",
    }
    return hints.get(number, "")  # type: ignore[call-overload]


def _a(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"
