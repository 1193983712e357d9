"""What a rank does for its framework besides running the function. The base serves ranks that have none."""

from __future__ import annotations

from typing import Any


class Inside:
    """One rank's framework, from the moment its process is a rank. `task` is what the kernel sent."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task

    def install(self) -> None:
        """Look over the framework's shoulder; called before anything of the learner's is unpickled."""

    def limit_threads(self, threads: int) -> None:
        """Keep the framework to this rank's share of the cores."""

    def begin(self) -> dict[str, Any]:
        """Meet the other ranks; return the backend that is used, and notes on what was degraded."""
        return {"backend": None, "notes": []}

    def next_call(self, epoch: float) -> None:
        """Forget what the last call sent; times count from `epoch` (time.monotonic)."""

    def progress(self) -> int:
        """Return a number that changes whenever this rank starts or finishes a collective or a message."""
        return 0

    def waits_in(self, thread: int) -> str | None:
        """Return what `thread` is blocked in, in learners' words, or None."""
        return None

    def events(self) -> list[dict[str, Any]]:
        """Return what was recorded under trace=True since the call began."""
        return []

    def as_plain(self, value: Any) -> Any:
        """Return what travels to the kernel instead of a value of the framework's, or `value` itself."""
        return value


def itself(value: Any) -> Any:
    """What the kernel makes of a plain form: no more than it is."""
    return value
