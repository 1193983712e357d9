"""Inside a TensorFlow rank: its threads, its log, and what is seen of its collectives."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import inside as base


@contextlib.contextmanager
def _nothing_printed() -> Iterator[None]:
    """Keep what compiled code says at its start, such as that there is no GPU, from the cell."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


with _nothing_printed():
    import tensorflow as tf
    from tensorflow.python.autograph.pyct import loader
    from tensorflow.python.eager import context
    from tensorflow.python.ops import collective_ops

_COLLECTIVES = ("all_reduce", "all_gather", "broadcast_send", "broadcast_recv", "all_to_all", "initialize_communicator")


class Inside(base.Inside):
    """A task of a TensorFlow cluster; TF_CONFIG says which."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        self._steps = 0
        self._within: dict[int, list[str]] = {}  # thread -> what it is in, innermost last

    def install(self) -> None:
        tf.get_logger().setLevel(logging.ERROR)
        here = functools.partial(tempfile.NamedTemporaryFile, dir=self.task["folder_of_run"])
        loader.tempfile = types.SimpleNamespace(NamedTemporaryFile=here)  # AutoGraph's files go with the run
        context.Context.call_function = self._watched_function(context.Context.call_function)
        for name in dir(collective_ops):
            for collective in _COLLECTIVES:
                if name in (collective, f"{collective}_v2", f"{collective}_v3"):
                    setattr(collective_ops, name, self._watched(collective, getattr(collective_ops, name)))

    def limit_threads(self, threads: int) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)

    def progress(self) -> int:
        return self._steps

    def waits_in(self, thread: int) -> str | None:
        inside = self._within.get(thread)
        if not inside:
            return None
        label = inside[-1]
        if not label.startswith("__"):
            return label
        collective = _collective_in(label)
        return f"{collective} of the tf.function {_readable(label)}" if collective else None

    def as_plain(self, value: Any) -> Any:
        """Tensors and variables as numpy arrays, so that reading results needs no TensorFlow."""
        if isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, tf.Variable):
            return tuple(self.as_plain(part) for part in value.values)
        keras: Any = sys.modules.get("keras")
        kinds = (tf.Tensor, tf.Variable, *([keras.Variable] if hasattr(keras, "Variable") else []))
        return value.numpy() if isinstance(value, kinds) and hasattr(value, "numpy") else value

    def _watched(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return self._noted(name, operation, *args, **kwargs)

        return watched

    def _watched_function(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(its_context: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            label = name.decode() if isinstance(name, bytes) else str(name)
            return self._noted(label, call, its_context, name, *args, **kwargs)

        return watched

    def _noted(self, label: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inside = self._within.setdefault(threading.get_ident(), [])
        inside.append(label)
        self._steps += 1
        try:
            return operation(*args, **kwargs)
        finally:
            inside.pop()
            self._steps += 1


def _collective_in(function: str) -> str | None:
    """The first collective operation that a graph function runs, in learners' words, or None."""
    pending, seen = [function], {function}
    while pending:
        try:
            definition = context.context().get_function_def(pending.pop())
        except Exception:  # not a function of this context any more
            continue
        for node in definition.node_def:
            if node.op.startswith("Collective"):
                return {"Reduce": "all_reduce", "Gather": "all_gather"}.get(
                    node.op.removeprefix("Collective").removesuffix("V2").removesuffix("V3"), node.op
                )
            for attribute in node.attr.values():
                if attribute.func.name and attribute.func.name not in seen:
                    seen.add(attribute.func.name)
                    pending.append(attribute.func.name)
    return None


def _readable(function: str) -> str:
    """`train_step` from a name such as `__inference_train_step_42`."""
    words = function.removeprefix("__").split("_")
    return "_".join(words[1:-1] if words[-1].isdigit() else words[1:]) or function
