"""Inside a TensorFlow rank: its threads, its log, and what is seen of its collectives."""

from __future__ import annotations

import functools
import logging
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from typing import Any

from ...front_end import nothing_printed
from . import inside as base

with nothing_printed():
    import tensorflow as tf
    from tensorflow.python.autograph.pyct import loader
    from tensorflow.python.eager import context
    from tensorflow.python.ops import collective_ops

# The functions and the operations of TensorFlow in which a task waits for others, in learners' words.
_FUNCTIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "broadcast_send": "broadcast",
    "broadcast_recv": "broadcast",
    "initialize_communicator": "the start of a group of collectives",
}
_OPERATIONS = {
    "CollectiveReduce": "all_reduce",
    "CollectiveReduceScatter": "reduce_scatter",
    "CollectiveGather": "all_gather",
    "CollectiveAllToAll": "all_to_all",
    "CollectiveBcastSend": "broadcast",
    "CollectiveBcastRecv": "broadcast",
    "HorovodAllreduce": "allreduce",
    "HorovodGroupedAllreduce": "grouped_allreduce",
    "HorovodAllgather": "allgather",
    "HorovodGroupedAllgather": "grouped_allgather",
    "HorovodBroadcast": "broadcast",
    "HorovodBroadcastInplace": "broadcast",
    "HorovodAlltoall": "alltoall",
    "HorovodReducescatter": "reducescatter",
    "HorovodGroupedReducescatter": "grouped_reducescatter",
    "HorovodJoin": "join",
}


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
            words = _FUNCTIONS.get(_without_version(name))
            if words:
                setattr(collective_ops, name, self._watched(words, getattr(collective_ops, name)))

    def limit_threads(self, threads: int) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)

    def progress(self) -> int:
        return self._steps

    def waits_in(self, thread: int) -> str | None:
        inside = self._within.get(thread)
        if inside:
            return _words_for(inside[-1])
        # a strategy runs a replica's steps, and reduces, in threads of its own, while the caller waits for them
        found = (_words_for(labels[-1]) for labels in list(self._within.values()) if labels)
        return next((words for words in found if words), None)

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


def _words_for(label: str) -> str | None:
    """What a thread waits in that is inside `label`: a collective's words, or the name of a function."""
    if not label.startswith("__"):
        return label
    collective = _collective_in(label)
    return f"{collective} of the tf.function {_readable(label)}" if collective else None


def _collective_in(function: str) -> str | None:
    """The first collective operation that a graph function runs, in learners' words, or None."""
    pending, seen = [function], {function}
    while pending:
        try:
            definition = context.context().get_function_def(pending.pop())
        except Exception:  # not a function of this context any more
            continue
        for node in definition.node_def:
            words = _OPERATIONS.get(_without_version(node.op, separator="V"))
            if words:
                return words
            for attribute in node.attr.values():
                if attribute.func.name and attribute.func.name not in seen:
                    seen.add(attribute.func.name)
                    pending.append(attribute.func.name)
    return None


def _without_version(name: str, separator: str = "_v") -> str:
    """`all_reduce` from `all_reduce_v2`, `CollectiveReduce` from `CollectiveReduceV2`."""
    start, found, version = name.rpartition(separator)
    return start if found and version.isdigit() else name


def _readable(function: str) -> str:
    """`train_step` from a name such as `__inference_train_step_42`."""
    words = function.removeprefix("__").split("_")
    return "_".join(words[1:-1] if words[-1].isdigit() else words[1:]) or function
