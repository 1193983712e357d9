"""Inside a rank while an answer is judged: try case after case, within a time limit, and bring back plain data."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

MARK = "\x02case "  # starts the line that tells the judge, through the log, which case a rank has begun
TIME_UP = 124  # as `timeout` exits


def perform(
    answer: Callable[..., Any], scenario: Callable[..., Any], batch: list[list[tuple[Any, ...]]], limit: float
) -> list[Any]:
    """Run the scenario on each of this rank's cases and return the results in order."""
    watch = threading.Timer(limit, _give_up, args=(threading.main_thread().ident,))
    watch.daemon = True
    watch.start()
    results = []
    for index, inputs in enumerate(batch[int(os.environ["RANK"])]):
        if index:
            _wait_for_the_others()  # a message left over from one case must not be taken for one of the next
        print(f"{MARK}{index}", flush=True)
        results.append(scenario(answer, *inputs))
    watch.cancel()
    return results


def plain(value: Any) -> Any:
    """Return what an answer returned as plain data: ("tensor", dtype, array), ("value", it) or ("other", type, repr).

    Numbers, texts, None, and lists, tuples and dicts of those are values.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        kept = value.detach().cpu()
        array = kept.to(torch.float32).numpy() if kept.dtype == torch.bfloat16 else kept.numpy()
        return ("tensor", str(kept.dtype).removeprefix("torch."), array.copy())
    if _is_plain(value):
        return ("value", value)
    return ("other", type(value).__name__, repr(value)[:200])


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


def _give_up(main_thread: int) -> None:
    stack = traceback.format_stack(sys._current_frames()[main_thread])
    print("".join(stack[-4:]), file=sys.stderr, flush=True)
    os._exit(TIME_UP)
