"""Inside a Horovod rank: `hvd.init()` for the framework that the function uses, and what is seen of its operations."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import horovod.torch as hvd
from horovod.torch import mpi_ops

from ...front_end import nothing_printed
from . import inside as base

_TENSORFLOW = "horovod.tensorflow"


class Inside(base.Inside):
    """A rank that has met the others over gloo.

    Horovod keeps one library for torch and another for TensorFlow. The first is initialised before the function
    begins; the second as soon as it is imported, at a rendezvous of its own.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        self._steps = 0
        self._threads = 1
        self._in_tensorflow: base.Inside | None = None

    def install(self) -> None:
        library = mpi_ops.mpi_lib
        library.horovod_torch_wait_and_clear = self._counted(library.horovod_torch_wait_and_clear)

    def limit_threads(self, threads: int) -> None:
        self._threads = threads

    def begin(self) -> dict[str, Any]:
        if self.task["init"]:
            hvd.init()
        if _TENSORFLOW in sys.modules:
            self._begin_tensorflow(sys.modules[_TENSORFLOW])
        else:
            sys.meta_path[:0] = [_OnImport("tensorflow", _quietly), _OnImport(_TENSORFLOW, self._import_and_begin)]
        return {"backend": "gloo", "notes": []}

    def progress(self) -> int:
        return self._steps + (self._in_tensorflow.progress() if self._in_tensorflow else 0)

    def waits_in(self, thread: int) -> str | None:
        return self._in_tensorflow.waits_in(thread) if self._in_tensorflow else None

    def as_plain(self, value: Any) -> Any:
        return self._in_tensorflow.as_plain(value) if self._in_tensorflow else value

    def _import_and_begin(self, execute: Callable[[ModuleType], None], bound: ModuleType) -> None:
        execute(bound)
        self._begin_tensorflow(bound)

    def _begin_tensorflow(self, bound: ModuleType) -> None:
        from . import in_tensorflow

        self._in_tensorflow = in_tensorflow.Inside(self.task)
        self._in_tensorflow.install()
        self._in_tensorflow.limit_threads(self._threads)
        library = importlib.import_module(f"{_TENSORFLOW}.mpi_ops").MPI_LIB
        for name in dir(library):
            if name.startswith("horovod_") and callable(getattr(library, name)):
                setattr(library, name, self._counted(getattr(library, name)))
        if self.task["init"]:
            port = os.environ.pop("COURSE_SECOND_RENDEZVOUS_PORT")
            first = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
            os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = port
            bound.init()
            os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = first

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._steps += 1
            try:
                return operation(*args, **kwargs)
            finally:
                self._steps += 1

        return counted


def _quietly(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    with nothing_printed():
        execute(module)


class _OnImport(importlib.abc.MetaPathFinder):
    """Has one module executed by `how(execute, module)` when it is imported."""

    def __init__(self, name: str, how: Callable[[Callable[[ModuleType], None], ModuleType], None]) -> None:
        self._name = name
        self._how = how

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            how = functools.partial(self._how, spec.loader.exec_module)
            spec.loader.exec_module = how  # type: ignore[method-assign]
        return spec
