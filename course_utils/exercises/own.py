"""The course's own versions of exercises: what a lesson goes on with while the learner has no right answer.

They are built on torch.distributed, and whatever uses them may still be judged: what they move is then not the answer's
traffic, but noted under the name of the exercise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from . import inside
from .registry import all_exercises
from .standins import StandIn

_at_work: ContextVar[str] = ContextVar("the exercise whose own version is running", default="version")


class OwnVersion:
    """The course's version of an exercise; ranks get it by name."""

    def __init__(self, exercise: str) -> None:
        self.exercise = exercise
        functools.update_wrapper(self, self._made())
        self.__name__ = exercise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _at_work.set(self.exercise)
        try:
            return self._made()(*args, **kwargs)
        finally:
            _at_work.reset(before)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnVersion, (self.exercise,)

    def _made(self) -> Callable[..., Any]:
        make = all_exercises()[self.exercise].own
        assert make is not None
        return make()


def answered(function: Any) -> bool:
    """Whether what `check` returned is the learner's own function, and neither the course's version nor a stand-in.

    For cells that measure: a time or a count of a stand-in would go under the name of what it stands for.

    Example: `rings = {"ring": ring_all_reduce} if answered(ring_all_reduce) else {}`.
    """
    return not isinstance(function, OwnVersion | StandIn)


def all_reduce(tensor: Any) -> None:
    """Put the sum over all ranks into a contiguous tensor. In one call of an own version, at most one call of this."""
    import torch.distributed as dist

    if inside.judged is None:
        dist.all_reduce(tensor)
        return
    group = dist.distributed_c10d._get_default_group()
    if hasattr(group, "of_every_rank"):  # the judge's transport: the judge notes it, and carries it
        first, *others = group.of_every_rank(_at_work.get(), tensor)
        for other in others:
            first += other  # in the order of the ranks, so that all get the same bits
        tensor.copy_(first)
    else:
        inside.judged.note_own_call(_at_work.get(), tensor.numel() * tensor.element_size())
        # the backend itself, so that a trace does not take it for a call of the answer
        group._get_backend(tensor.device).allreduce([tensor], dist.AllreduceOptions()).wait()


def gather(value: Any) -> list[Any]:
    """Return every rank's value, by rank; for versions that may use torch's collectives (a lesson after 02)."""
    import torch.distributed as dist

    note()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def note() -> None:
    """See to it that an answer which calls this own version is known to do so, where answers are judged."""
    if inside.judged is not None:
        inside.judged.note_own_call(_at_work.get(), 0)
