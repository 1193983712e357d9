"""Inside a rank while an answer is judged: try case after case, within a time limit, and bring back plain data."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..launcher.failures import frames_of

MARK = "\x02"  # begins what tells the judge something through the log, in a line of its own
CASE = f"{MARK}case "  # which case a rank has begun
OVERTIME = f"{MARK}overtime "  # after how many seconds a rank has given up, and on which frames
TIME_UP = 124  # as `timeout` exits
_NAMED = 3  # so many different requests are named; a loop may have begun thousands
_FRAMES = 20  # so many, the innermost, are told


class _Judged:
    """What is noted about the answer that is judged in this rank: requests without a wait, and work of the course's."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[Any, str]] = {}  # held: a message under way must not go with its request
        self._kept: list[Any] = []
        self._own_calls: list[tuple[str, int]] = []

    def watch_requests(self) -> None:
        """See to it that every request of isend and irecv is held, and known until somebody waits for it."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_initialized():
            return
        dist = torch.distributed
        group = type(dist.distributed_c10d._get_default_group())
        group.send = self._begun(group.send, lambda arguments: f"isend to rank {arguments[1]}")
        group.recv = self._begun(group.recv, lambda arguments: f"irecv from rank {arguments[1]}")
        group.recv_anysource = self._begun(group.recv_anysource, lambda _: "irecv from any rank")
        for kind in (dist.Work, *dist.Work.__subclasses__()):
            if "wait" in vars(kind):
                kind.wait = self._waited(kind.wait)

    def note_own_call(self, name: str, size: int) -> None:
        """Note that the course's own version of an exercise has moved a tensor of `size` bytes."""
        self._own_calls.append((name, size))

    def take_notes(self) -> tuple[list[str], list[tuple[str, int]]]:
        """Return what nobody has waited for, and the calls of the course's own versions; begin anew."""
        unwaited = sorted({words for _, words in self._requests.values()})
        if len(unwaited) > _NAMED:
            unwaited[_NAMED:] = [f"and {len(unwaited) - _NAMED} more"]
        self._kept += [work for work, _ in self._requests.values()]
        self._requests.clear()
        own_calls, self._own_calls = self._own_calls, []
        return unwaited, own_calls

    def _begun(self, operation: Callable[..., Any], words: Callable[[tuple[Any, ...]], str]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def begin(group: Any, *arguments: Any, **more: Any) -> Any:
            work = operation(group, *arguments, **more)
            self._requests[id(work)] = (work, words(arguments))
            return work

        return begin

    def _waited(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def waiting(work: Any, *arguments: Any, **more: Any) -> Any:
            self._requests.pop(id(work), None)
            return wait(work, *arguments, **more)

        return waiting


judged: _Judged | None = None  # in a rank in which an answer is judged


def perform(
    answer: Callable[..., Any], scenario: Callable[..., Any], batch: list[list[tuple[Any, ...]]], limit: float
) -> list[Any]:
    """Run the scenario on each of this rank's cases; return in their order (result, unwaited requests, own calls)."""
    global judged
    judged = _Judged()
    judged.watch_requests()
    results = []
    with within(limit):
        for index, inputs in enumerate(batch[int(os.environ["RANK"])]):
            if index:
                _wait_for_the_others()  # a message left over from one case must not be taken for one of the next
            print(f"{CASE}{index}", flush=True)
            judged.take_notes()
            results.append((scenario(answer, *inputs), *judged.take_notes()))
    return results


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """End this rank, with a word to the judge, when what follows takes longer than that."""
    watch = threading.Timer(seconds, _give_up, args=(seconds, threading.main_thread().ident))
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def plain(value: Any) -> Any:
    """Return what an answer returned as plain data: ("tensor", dtype, array), ("value", it) or ("other", type, repr).

    Numbers, texts, None, and lists, tuples and dicts of those are values; a tensor is torch's or TensorFlow's.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        kept = value.detach().cpu()
        array = kept.to(torch.float32).numpy() if kept.dtype == torch.bfloat16 else kept.numpy()
        return ("tensor", str(kept.dtype).removeprefix("torch."), array.copy())
    array = _array_of_tensorflow(value)
    if array is not None and array.dtype.kind in "biufc":  # no strings, no bfloat16
        return ("tensor", str(array.dtype), array)
    if _is_plain(value):
        return ("value", value)
    return ("other", type(value).__name__, repr(value)[:200])


def _array_of_tensorflow(value: Any) -> Any:
    """The numbers of a tensor or a variable of TensorFlow that has some, as an array; else None."""
    tensorflow: Any = sys.modules.get("tensorflow")
    kinds = (tensorflow.Tensor, tensorflow.Variable) if hasattr(tensorflow, "Variable") else ()
    if not isinstance(value, kinds) or not hasattr(value, "numpy"):
        return None
    import numpy as np

    return np.array(value.numpy())


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(_is_plain(part) for part in value)
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(part) for pair in value.items() for part in pair)
    return value is None or type(value) in (bool, int, float, str, bytes)


def _wait_for_the_others() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.barrier()


def _give_up(seconds: float, main_thread: int) -> None:
    frames = frames_of(sys._current_frames().get(main_thread))
    print()  # whatever the answer has printed, what follows begins a line
    print(f"{OVERTIME}{seconds:g} {json.dumps(frames[-_FRAMES:])}", flush=True)
    os._exit(TIME_UP)
