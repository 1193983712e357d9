"""Judging one answer: run it in fresh ranks on the exercise's cases, compare, and put the outcome into words.

The same cases serve a learner (a few, fixed) and a grader (many, drawn from a recorded seed). Inputs and expected
values stay here, in the judge's process; what comes back from ranks is plain data.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import random
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import AnswerNeeded, BadRequest, FrameworkMissing, NotSendable, RankState, WorkerFailed, WorkerTimeout
from ..launcher import launch
from ..launcher.failures import state_of
from . import inside
from .own import OwnVersion
from .registry import Exercise, all_exercises
from .standins import StandIn
from .traffic import by_case, own_calls, with_own_calls

PATIENCE = 6.0  # seconds without any progress before an answer counts as stuck
SECOND_PATIENCE = 3.0  # times as long, where a rank was still at work: on a busy machine it may only have been slow
_LOG_LINE = r"\[[IWE]\d+ |[IWE]\d{4} |(WARNING|ERROR):(absl|tensorflow):"  # torch's, abseil's, TensorFlow's
_LONGER = "preamble.length"  # gloo's words when it ends a process for a message that is too long
_MESSAGE = 400  # characters of an exception's message; TensorFlow's can take a page
LIMIT = 30.0  # seconds that one trial may take in all: an answer that prints for ever does make progress


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
    `judge` gets the scenario's results by rank and returns a Finding, or None when they are right. `traffic` judges
    what the case sent, a Trace, in the same way. `overtime` helps whoever took longer than the scenario allows.
    """

    given: str
    inputs: Sequence[tuple[Any, ...]]
    judge: Callable[[list[Any]], Finding | None]
    traffic: Callable[[Any], Finding | None] | None = None
    overtime: str = ""


@dataclass(frozen=True)
class Trial:
    """Cases that one launch tries in turn, all in the same world size.

    `scenario(answer, *inputs)` runs in each rank, which belongs to `framework` as with `launch`. With `group`, ranks
    have met (a process group, `hvd.init()`). With `store`, each case has a fresh TCPStore of the judge's, and its port
    comes first in inputs. With `collectives`, the answer may call torch's all_reduce and the like (a lesson after 02):
    a grader then gives it gloo, traced, where it otherwise carries the messages itself and collectives do not exist.
    What ranks of other frameworks send is never seen, so a Case of theirs has no `traffic`.
    """

    nprocs: int
    scenario: Callable[..., Any]
    cases: Sequence[Case]
    group: bool = False
    store: bool = False
    collectives: bool = False
    framework: str = "torch"

    @property
    def traced(self) -> bool:
        """Whether traffic is judged."""
        return any(case.traffic for case in self.cases)


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


def judge(
    exercise: Exercise,
    answer: Any,
    seed: int | None = None,
    runner: Runner | None = None,
    may_use: Collection[str] | None = None,
) -> Verdict:
    """Judge an answer: on the learner's fixed cases, or with a `seed` on the grader's, which are the same for a seed.

    `runner` runs a trial in another way than `launch` does; what the answer is, is then between the two of them.
    `may_use` names the exercises whose own version of the course's it has been given; None for any.
    Raises KeyboardInterrupt as itself, and FrameworkMissing where the exercise's framework is not installed; everything
    that an answer can do wrong ends in a Verdict.
    """
    refused = _look_at(exercise, answer) if runner is None else None
    if refused:
        return refused
    assert exercise.cases is not None
    tried = 0
    sizes: list[int] = []
    for trial in exercise.cases(random.Random(0 if seed is None else seed), seed is not None):
        verdict = _try(exercise, answer, trial, runner or _Launcher(PATIENCE), may_use)
        if verdict.state != "passed":
            return replace(verdict, tried=tried, sizes=tuple(sizes))
        tried += len(trial.cases)
        sizes.append(trial.nprocs)
    return Verdict(exercise, "passed", tried=tried, sizes=tuple(sizes))


def _look_at(exercise: Exercise, answer: Any) -> Verdict | None:
    """What can be said about an answer without running it."""
    if isinstance(answer, StandIn | OwnVersion):
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


def _try(exercise: Exercise, answer: Any, trial: Trial, runner: Runner, may_use: Collection[str] | None) -> Verdict:
    """Run one trial; the verdict is "passed", or says what is wrong."""
    hosts, batch = _prepare(trial)
    try:
        run = runner(answer, trial, batch)
    except AnswerNeeded as error:
        return Verdict(exercise, "not attempted", f"It uses {error.exercise!r}, which has no right answer yet.")
    except FrameworkMissing:
        raise
    except (NotSendable, BadRequest) as error:
        return Verdict(exercise, "stopped", f"It could not be sent to the ranks: {error}")
    except WorkerTimeout as error:
        if isinstance(runner, _Launcher) and runner.may_have_been_hasty(error):
            return _try(exercise, answer, trial, _Launcher(SECOND_PATIENCE * PATIENCE), may_use)
        return _stuck(exercise, trial, error)
    except WorkerFailed as error:
        return _crashed(exercise, trial, error)
    finally:
        del hosts
    finding = _first_finding(exercise, trial, run, may_use)
    if finding:
        return Verdict(exercise, "failed", finding=finding, printed=_printed(run.logs))
    return Verdict(exercise, "passed")


def _first_finding(exercise: Exercise, trial: Trial, run: Any, may_use: Collection[str] | None) -> Finding | None:
    """What is wrong with the first case that is not right: its values, its requests, or its traffic."""
    parts = by_case(run.trace, len(trial.cases)) if trial.traced else [run.trace] * len(trial.cases)
    for index, case in enumerate(trial.cases):
        values, unwaited, noted = zip(*(results[index] for results in run.results), strict=True)
        finding = _with_requests(case, case.judge(list(values)), unwaited)
        if finding:
            return finding
        if isinstance(parts, int):
            why = "A receive waits for its message: no barrier is needed, and none is counted in this exercise."
            return Finding(case.given, "messages alone", "a call of barrier", parts, why)
        used = [*own_calls(parts[index] or ()), *((rank, name) for rank, own in enumerate(noted) for name, _ in own)]
        finding = _borrowed(exercise, case, used, may_use)
        if finding is None and case.traffic:
            finding = case.traffic(with_own_calls(parts[index], noted))
        if finding:
            return finding
    return None


def _with_requests(case: Case, finding: Finding | None, unwaited: Sequence[Sequence[str]]) -> Finding | None:
    """A finding on requests that nobody waited for; where the value is wrong too, they are named as a likely cause.

    Whether such a message arrives in time is a matter of luck: the words that help are the same either way.
    """
    rank = next((rank for rank, words in enumerate(unwaited) if words), None)
    if rank is None:
        return finding
    left = f"{', '.join(unwaited[rank])}: nobody waited for it"
    why = (
        "isend and irecv return at once, with a request; only when its wait() has returned, the message is through and "
        "the tensor yours again. A request that nobody keeps can even take its message with it, and the receiver waits "
        "for ever."
    )
    if finding:
        return replace(finding, why=f"{finding.why} On rank {rank}, {left}, which may be the cause. {why}".strip())
    return Finding(case.given, "every request waited for", left, rank, why)


def _borrowed(
    exercise: Exercise, case: Case, used: Iterable[tuple[int, str]], may_use: Collection[str] | None
) -> Finding | None:
    """A finding on own versions of the course's, by (rank, exercise), that are not this answer's to use."""
    theirs = all_exercises() if may_use is None else may_use
    for rank, name in used:
        if name == exercise.name or name not in theirs:
            why = "Here the framework did the work: the course's version is there for lessons to go on with."
            return Finding(case.given, "work of the answer's own", f"a call of the course's {name}", rank, why)
    return None


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
                framework=trial.framework,
                backend="gloo" if trial.framework == "torch" else None,
                timeout=self.patience,
                init=trial.group,
                trace=trial.traced,
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
    if all(state.state == "returned" for state in states):
        reason = f"The function had returned on every rank, but within {error.seconds:g} seconds "
        if any(state.collective == "barrier" for state in error.states):
            reason += (
                "they could not all meet again: a collective that only some of them have called (such as barrier), "
                "or a message that was left half-way, stands between them."
            )
        else:
            reason += "the case did not come to its end."
    else:
        what = "A deadlock" if any(state.state == "waiting" for state in states) else "An endless wait"
        reason = f"{what}: no rank made progress for {error.seconds:g} seconds."
    return Verdict(exercise, "stopped", reason, given=case.given, states=states, printed=_printed(error.logs))


def _crashed(exercise: Exercise, trial: Trial, error: WorkerFailed) -> Verdict:
    if error.exception_type == "NotImplementedError" and "raise NotImplementedError" in error.traceback:
        return Verdict(exercise, "not attempted")
    if error.exception_type == "AnswerNeeded":
        return Verdict(
            exercise, "not attempted", f"{error.exception_message[:1].upper()}{error.exception_message[1:]}."
        )
    case = trial.cases[_reached(error.logs[error.rank])]
    printed = _printed(error.logs)
    overtime = _overtime(error.logs)
    if error.exitcode == inside.TIME_UP and error.rank in overtime:
        seconds, _ = overtime[error.rank]
        reason = f"It was still running after {seconds} seconds. {case.overtime}".strip()
        states = tuple(state for _, state in overtime.values())
        return Verdict(exercise, "stopped", reason, given=case.given, states=states, printed=printed)
    if error.kind != "exception" or error.exception_type == "SystemExit":
        reason = f"{str(error).splitlines()[0]}."
        if any(_LONGER in log for log in error.logs):
            reason += " A message was longer than the tensor that was made ready for it: do sender and receiver agree? "
            reason += "Collectives are matched by their order: do all ranks start the same ones, one after the other?"
        return Verdict(exercise, "stopped", f"{reason[:1].upper()}{reason[1:]}", given=case.given, printed=printed)
    finding = Finding(
        given=case.given,
        expected="a result",
        received=_cut(f"{error.exception_type}: {error.exception_message}", _MESSAGE),
        rank=error.rank,
        why=_why_raised(error),
    )
    return Verdict(exercise, "failed", finding=finding, traceback=error.traceback, printed=printed)


def _overtime(logs: Sequence[str]) -> dict[int, tuple[str, RankState]]:
    """The ranks that have given up: after how many seconds, and where they were."""
    found = {}
    for rank, log in enumerate(logs):
        for seconds, told in re.findall(rf"^{inside.OVERTIME}([\d.]+) (.*)$", log, re.MULTILINE):
            with contextlib.suppress(ValueError, TypeError):  # an answer can print such a line too
                frames = [[str(file), int(line), str(function)] for file, line, function in json.loads(told)]
                found[rank] = (seconds, state_of(rank, "running", frames))
    return found


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
        (
            "has no attribute 'merge_call'",
            "Keras applies gradients inside strategy.run, where each replica calls apply_gradients.",
        ),
        (
            "Shape mismatch in the collective",
            "Collectives are matched by their order: do all workers call the same ones, one after the other?",
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
    if error.exception_type == "IndexError" and ".chunk(" in error.traceback:
        return "`chunk(n)` may give fewer than n parts; `tensor_split(n)` gives n, some of them empty."
    return ""


def _reached(log: str) -> int:
    """The case that a rank had begun, from the marks among what it printed."""
    marks = re.findall(rf"{inside.CASE}(\d+)$", log, re.MULTILINE)
    return int(marks[-1]) if marks else 0


def _printed(logs: Sequence[str]) -> str:
    """What the answer printed, by rank, without the judge's marks and the frameworks' own log lines."""
    lines = []
    for rank, log in enumerate(logs):
        own = (line.partition(inside.MARK)[0] for line in log.splitlines() if not re.match(_LOG_LINE, line))
        lines += [f"[rank {rank}] {line}" for line in own if line.strip()]
    return "\n".join(lines)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<a {type(value).__name__} whose repr raises {type(error).__name__}>"
    return _cut(text, 200)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]} ..."
