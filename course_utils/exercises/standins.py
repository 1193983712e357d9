"""What a lesson goes on with while an exercise has no right answer: a stand-in that asks for it, and a panel."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn

from ..errors import AnswerNeeded, WorkerFailed
from .panels import Panel, show


class StandIn:
    """Takes the place of a missing answer. Calling it, or sending it to ranks, raises AnswerNeeded."""

    def __init__(self, exercise: str) -> None:
        self.exercise = exercise

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise AnswerNeeded(self.exercise)

    def __refuse_launch__(self) -> NoReturn:
        raise AnswerNeeded(self.exercise)

    def __reduce__(self) -> tuple[Any, ...]:
        return StandIn, (self.exercise,)

    def __repr__(self) -> str:
        return f"<your answer to {self.exercise!r} is needed here>"


class answer_needed:
    """Run a block that uses the answer of an exercise; where that is missing, say so and let the notebook go on.

    Catches AnswerNeeded alone (raised here, or in a rank): every other exception passes.

    Example:
        with answer_needed():
            run = launch(meet, store.port, nprocs=4)
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, AnswerNeeded):
            text = str(error)
        elif isinstance(error, WorkerFailed) and error.exception_type == AnswerNeeded.__name__:
            text = error.exception_message
        else:
            return False
        show(Panel("answer needed", "Answer needed", sentences=[f"{text[:1].upper()}{text[1:]}."]))
        return True
