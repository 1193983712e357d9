"""Judging one answer: run it in fresh ranks on the exercise's cases, compare, and put the outcome into words.

The same cases serve a learner (a few, fixed) and a grader (many, drawn from a recorded seed). Inputs and expected
values stay here, in the judge's process; what comes back from ranks is plain data.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import AnswerNeeded, BadRequest, NotSendable, RankState, WorkerFailed, WorkerTimeout
from ..launcher import launch
from . import inside
from .registry import Exercise
from .standins import StandIn

PATIENCE = 6.0  # seconds without any progress before an answer counts as stuck
SECOND_PATIENCE = 3.0  # times as long, where a rank was still at work: on a busy machine it may only have been slow
LIMIT = 30.0  # seconds that one trial may take in all: an answer that prints for ever does make progress
OWN = "__course_own__"


@dataclass(frozen=True)
class Finding:
    """What is wrong: the input, what was expected, what came, on which rank, and a sentence that helps."""

    given: str
    expected: str
    received: str
    rank: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Case:
    """One input of an exercise.

    `given` says it in words; `inputs` holds, for each rank, what the scenario is called with after the answer;
    `judge` gets the scenario's results by rank and returns a Finding, or None when they are right.
    """

    given: str
    inputs: Sequence[tuple[Any, ...]]
    judge: Callable[[list[Any]], Finding | None]


@dataclass(frozen=True)
class Trial:
    """Cases that one launch tries in turn, all in the same world size.

    `scenario(answer, *inputs)` runs in each rank. With `group`, ranks have a process group, and with `traffic` what
    they sent in all is judged too. With `store`, each case has a fresh TCPStore of the judge's, and its port comes
    first in inputs.
    """

    nprocs: int
    scenario: Callable[..., Any]
    cases: Sequence[Case]
    group: bool = False
    store: bool = False
    traffic: Callable[[Any], Finding | None] | None = None


Cases = Callable[[random.Random, bool], Iterable[Trial]]
Runner = Callable[[Any, Trial, list[list[tuple[Any, ...]]]], Any]  # (answer, trial, inputs by rank) -> Run


@dataclass(frozen=True)
class Verdict:
    """The outcome for one answer.

    `state` is "not attempted", "passed", "failed" or "stopped"; `reason` one sentence; `finding` what was wrong, or
    `given` the input and `states` where each rank stood when it was stopped; `traceback` and `printed` the answer's
    own; `tried` how many cases ran to their end, in world sizes `sizes`.
    """

    exercise: Exercise
    state: str
    reason: str = ""
    finding: Finding | None = None
    given: str = ""
    states: tuple[RankState, ...] = ()
    traceback: str = ""
    printed: str = ""
    tried: int = 0
    sizes: tuple[int, ...] = ()


def judge(exercise: Exercise, answer: Any, seed: int | None = None, runner: Runner | None = None) -> Verdict:
    """Judge an answer: on the learner's fixed cases, or with a `seed` on the grader's, which are the same for a seed.

    `runner` runs a trial in another way than `launch` does; what the answer is, is then between the two of them.
    Raises KeyboardInterrupt as itself; everything that an answer can do wrong ends in a Verdict.
    """
    refused = _look_at(exercise, answer) if runner is None else None
    if refused:
        return refused
    assert exercise.cases is not None
    tried = 0
    sizes: list[int] = []
    for trial in exercise.cases(random.Random(0 if seed is None else seed), seed is not None):
        verdict = _try(exercise, answer, trial, runner or _Launcher(PATIENCE))
        if verdict.state != "passed":
            return replace(verdict, tried=tried, sizes=tuple(sizes))
        tried += len(trial.cases)
        sizes.append(trial.nprocs)
    return Verdict(exercise, "passed", tried=tried, sizes=tuple(sizes))


def _look_at(exercise: Exercise, answer: Any) -> Verdict | None:
    """What can be said about an answer without running it."""
    if isinstance(answer, StandIn) or getattr(answer, OWN, None):
        return Verdict(exercise, "not attempted", "Run the cell that defines your version first, then this check.")
    call = f"{exercise.name}({', '.join(exercise.parameters)})"
    if not callable(answer):
        finding = Finding(
            given=f"check({exercise.name!r}, ...)",
            expected=f"the function itself: check({exercise.name!r}, {exercise.name})",
            received=_short(answer),
            why=(
                "Give the function's name without parentheses: with them, the function runs first and check gets "
                "its result."
            ),
        )
        return Verdict(exercise, "failed", finding=finding)
    try:
        signature = inspect.signature(answer)
    except (TypeError, ValueError):
        return None  # something built in: the first case will tell
    try:
        signature.bind(*exercise.parameters)
    except TypeError:
        name = getattr(answer, "__name__", "your function")
        finding = Finding(
            given=f"the call {call}",
            expected=f"a function that takes ({', '.join(exercise.parameters)})",
            received=f"one that takes {signature}",
            why=f"The lesson calls {name} with exactly these arguments.",
        )
        return Verdict(exercise, "failed", finding=finding)
    return None


def _try(exercise: Exercise, answer: Any, trial: Trial, runner: Runner) -> Verdict:
    """Run one trial; the verdict is "passed", or says what is wrong."""
    hosts, batch = _prepare(trial)
    try:
        run = runner(answer, trial, batch)
    except AnswerNeeded as error:
        return Verdict(exercise, "not attempted", f"It uses {error.exercise!r}, which has no right answer yet.")
    except (NotSendable, BadRequest) as error:
        return Verdict(exercise, "stopped", f"It could not be sent to the ranks: {error}")
    except WorkerTimeout as error:
        if isinstance(runner, _Launcher) and runner.may_have_been_hasty(error):
            return _try(exercise, answer, trial, _Launcher(SECOND_PATIENCE * PATIENCE))
        return _stuck(exercise, trial, error)
    except WorkerFailed as error:
        return _crashed(exercise, trial, error)
    finally:
        del hosts
    printed = _printed(run.logs)
    for index, case in enumerate(trial.cases):
        finding = case.judge([results[index] for results in run.results])
        if finding:
            return Verdict(exercise, "failed", finding=finding, printed=printed)
    finding = trial.traffic(run.trace) if trial.traffic else None
    if finding:
        return Verdict(exercise, "failed", finding=finding, printed=printed)
    return Verdict(exercise, "passed")


def _prepare(trial: Trial) -> tuple[list[Any], list[list[tuple[Any, ...]]]]:
    """The stores that the judge hosts, and for each rank the inputs of its cases."""
    if not trial.store:
        return [], [[case.inputs[rank] for case in trial.cases] for rank in range(trial.nprocs)]
    import torch.distributed as dist

    hosts = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in trial.cases]
    batch = [
        [(host.port, *case.inputs[rank]) for host, case in zip(hosts, trial.cases, strict=True)]
        for rank in range(trial.nprocs)
    ]
    return hosts, batch


@dataclass(frozen=True)
class _Launcher:
    """Runs trials through `launch`, without showing what the ranks print: a verdict shows it where it helps."""

    patience: float

    def __call__(self, answer: Any, trial: Trial, batch: list[list[tuple[Any, ...]]]) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return launch(
                inside.perform,
                answer,
                trial.scenario,
                batch,
                LIMIT,
                nprocs=trial.nprocs,
                backend="gloo",
                timeout=self.patience,
                init=trial.group,
                trace=trial.traffic is not None,
            )

    def may_have_been_hasty(self, error: WorkerTimeout) -> bool:
        """Whether a rank was at work when time was up, and the longer patience has not been tried."""
        at_work = any(state.state in ("starting", "running") for state in error.states)
        return at_work and self.patience <= PATIENCE


def _stuck(exercise: Exercise, trial: Trial, error: WorkerTimeout) -> Verdict:
    case = trial.cases[min((_reached(log) for log in error.logs), default=0)]
    # a rank outside the answer's own lines has finished it and waits for the others
    states = tuple(
        state if state.where or state.state not in ("waiting", "running") else RankState(state.rank, "returned")
        for state in error.states
    )
    deadlock = any(state.state == "waiting" for state in states)
    what = "A deadlock: no rank" if deadlock else "An endless wait: no rank"
    return Verdict(
        exercise,
        "stopped",
        f"{what} made progress for {error.seconds:g} seconds.",
        given=case.given,
        states=states,
        printed=_printed(error.logs),
    )


def _crashed(exercise: Exercise, trial: Trial, error: WorkerFailed) -> Verdict:
    if error.exception_type == "NotImplementedError" and "raise NotImplementedError" in error.traceback:
        return Verdict(exercise, "not attempted")
    if error.exception_type == "AnswerNeeded":
        return Verdict(
            exercise, "not attempted", f"{error.exception_message[:1].upper()}{error.exception_message[1:]}."
        )
    case = trial.cases[_reached(error.logs[error.rank])]
    printed = _printed(error.logs)
    if error.exitcode == inside.TIME_UP:
        reason = f"It was still running after {LIMIT:g} seconds."
        return Verdict(exercise, "stopped", reason, given=case.given, printed=printed)
    if error.kind != "exception" or error.exception_type == "SystemExit":
        reason = f"{str(error).splitlines()[0]}."
        return Verdict(exercise, "stopped", f"{reason[:1].upper()}{reason[1:]}", given=case.given, printed=printed)
    finding = Finding(
        given=case.given,
        expected="a result",
        received=f"{error.exception_type}: {error.exception_message}",
        rank=error.rank,
        why=_why_raised(error),
    )
    return Verdict(exercise, "failed", finding=finding, traceback=error.traceback, printed=printed)


def _why_raised(error: WorkerFailed) -> str:
    """A sentence on exceptions whose own message does not say what to do."""
    helps = (
        (
            "has to be contiguous|must be contiguous",
            "send and recv move one solid block of memory: .contiguous() makes one.",
        ),
        (
            "should not be the same as the rank of the current process|Pair is not connected",
            "A rank cannot send to itself: with one rank there is nobody to talk to.",
        ),
        (
            "nvalid destination rank|nvalid source rank|out of range for group",
            "There is no such rank: think of the two ends.",
        ),
        ("a leaf Variable that requires grad", "Work on tensor.detach() or on a clone: autograd watches the original."),
        (
            "is not defined",
            "Ranks get what the function refers to in this notebook: run the cell that defines that name.",
        ),
    )
    for pattern, sentence in helps:
        if re.search(pattern, error.exception_message):
            return sentence
    return ""


def _reached(log: str) -> int:
    """The case that a rank had begun, from the marks among what it printed."""
    marks = re.findall(rf"^{inside.MARK}(\d+)$", log, re.MULTILINE)
    return int(marks[-1]) if marks else 0


def _printed(logs: Sequence[str]) -> str:
    """What the answer printed, by rank, without the judge's marks and torch's own log lines."""
    lines = []
    for rank, log in enumerate(logs):
        kept = (line for line in log.splitlines() if line.strip() and not re.match(rf"{inside.MARK}|\[[IWE]\d+ ", line))
        lines += [f"[rank {rank}] {line}" for line in kept]
    return "\n".join(lines)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<a {type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]} ..."
