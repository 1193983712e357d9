"""Every exception of the course, one tree.

CourseError
├── LaunchError                 something went wrong around the ranks of a launch
│   ├── BadRequest              the call itself cannot be carried out; nothing was started   (also a ValueError)
│   │   └── FrameworkMissing    this Python does not have the framework that was asked for
│   ├── NotSendable             fn refers to something that cannot travel; nothing was started     (also a TypeError)
│   ├── WorkerFailed            a rank raised, died, or returned what cannot be sent back
│   └── WorkerTimeout           no rank made progress for `timeout` seconds                  (also a TimeoutError)
└── AnswerNeeded                a cell needs the answer of an exercise that has none yet
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class CourseError(Exception):
    """Base of every error that course_utils raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, which says where in the learner's code, without our own frames."""
        return [f"{type(self).__name__}: {self}"]


class LaunchError(CourseError):
    """Something went wrong around the ranks of a launch."""


class BadRequest(LaunchError, ValueError):
    """The call cannot be carried out as it stands; the message says what to change. Nothing was started."""


class FrameworkMissing(BadRequest):
    """This Python does not have the framework; the message says how to get it. Nothing was started."""


class NotSendable(LaunchError, TypeError):
    """The function refers to something that cannot travel to another process. Nothing was started.

    `variable` is the name the learner wrote (with the path to the part, such as `config['lock']`), `type_name` its
    type.
    """

    def __init__(self, variable: str, type_name: str, why: str) -> None:
        self.variable = variable
        self.type_name = type_name
        super().__init__(f"{variable} is {_article(type_name)}, and {why}")


@dataclass(frozen=True)
class RankState:
    """Where one rank was when a run was stopped.

    `state` is "starting", "running", "waiting", "returned" or "died"; `collective` what it waits in (such as
    "all_reduce" or "recv from rank 0"); `where` and `code` the line of the learner's code; `stack` its whole Python
    stack.
    """

    rank: int
    state: str
    collective: str | None = None
    where: str | None = None
    code: str | None = None
    stack: str = ""

    def __str__(self) -> str:
        what = {
            "starting": "is still starting",
            "running": "is running",
            "waiting": f"waits in {self.collective}",
            "returned": "returned",
            "died": "died",
        }[self.state]
        place = f", {self.where}" if self.where else ""
        code = f": {self.code}" if self.code else ""
        return f"rank {self.rank}: {what}{place}{code}"


class WorkerFailed(LaunchError):
    """A rank failed; this names the first *original* failure and folds what followed from it.

    `rank` is the root cause. `kind` says how it failed: "exception" (see `exception_type`, `exception_message`,
    `traceback`), "exit" (`exitcode`), "signal" (`signal`) or "result" (what it returned cannot be sent back).
    `consequences` holds (rank, one line) for failures of other ranks; `logs` what each rank printed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        kind: str,
        exception_type: str | None = None,
        exception_message: str = "",
        traceback: str = "",
        exitcode: int | None = None,
        signal: int | None = None,
        consequences: Sequence[tuple[int, str]] = (),
        logs: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.exception_type = exception_type
        self.exception_message = exception_message
        self.traceback = traceback
        self.exitcode = exitcode
        self.signal = signal
        self.consequences = list(consequences)
        self.logs = list(logs)


class WorkerTimeout(LaunchError, TimeoutError):
    """No rank made progress for `seconds`; `states` says where each one stood."""

    def __init__(
        self, message: str, *, seconds: float, states: Sequence[RankState] = (), logs: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.states = list(states)
        self.logs = list(logs)


class AnswerNeeded(CourseError):
    """A cell needs the answer of an exercise that has none yet."""

    def __init__(self, exercise: str) -> None:
        self.exercise = exercise
        super().__init__(
            f"this cell needs your answer to the exercise '{exercise}': write it, run its cell, then come back"
        )


def _article(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"
