"""What travels to a rank: the function, its arguments, and everything in the notebook that they refer to, by value.

Looks before it pickles. A pickler stops at some things that cannot travel and carries others along without complaint
(an open file, a CUDA tensor), and it names neither the variable nor the way to it.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import functools
import io
import linecache
import mmap
import multiprocessing.process
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import cloudpickle

from ..errors import CourseError, NotSendable

_CREATE_IN_RANK = "create it inside the function, so that each rank has its own"

# What cannot travel, and what to do instead.
_UNSENDABLE: tuple[tuple[Any, str], ...] = (
    ((type(threading.Lock()), type(threading.RLock())), f"a lock guards threads of one process; {_CREATE_IN_RANK}"),
    (
        (
            threading.Condition,
            threading.Event,
            threading.Semaphore,
            threading.Barrier,
            threading.Thread,
            threading.local,
        ),
        f"it belongs to the threads of one process; {_CREATE_IN_RANK}",
    ),
    (
        (types.GeneratorType, types.AsyncGeneratorType),
        "its place in its code cannot be sent; send a list, or the function",
    ),
    ((types.CoroutineType,), "its place in its code cannot be sent; call asyncio.run inside the function"),
    ((types.FrameType, types.TracebackType), "it describes one process's stack"),
    ((socket.socket,), f"a connection belongs to the process that opened it; {_CREATE_IN_RANK}"),
    ((subprocess.Popen, multiprocessing.process.BaseProcess), "a child belongs to the process that started it"),
    ((concurrent.futures.Executor, asyncio.AbstractEventLoop), f"it holds threads of one process; {_CREATE_IN_RANK}"),
    ((mmap.mmap,), f"a memory map belongs to the process that made it; {_CREATE_IN_RANK}"),
)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, range, type(Ellipsis), types.ModuleType)
_MAX_OBJECTS = 200_000


def pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call by value, and before it the text of the cells that its functions come from, by file name.

    Raises NotSendable, naming the variable, for anything that cannot live in another process.
    """
    _Look().everything(fn, args, kwargs)
    try:
        call, files = _dumps((fn, args, kwargs))
        return pickle.dumps({file: lines for file in files if (lines := _text_of_cell(file))}) + call
    except CourseError:
        raise
    except Exception as error:
        raise _name_the_culprit(fn, args, kwargs, error) from None


def unpack(file: BinaryIO) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Read what `pack` made, in a rank; what asks for the source of a function, as AutoGraph does, finds its cell."""
    for name, lines in pickle.load(file).items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = pickle.load(file)
    return call


def _text_of_cell(file: str) -> list[str]:
    """The lines of a file that exists in this process alone."""
    return [] if os.path.exists(file) else linecache.getlines(file)


class _Refused(Exception):
    """The pickler met something that it would carry, but that cannot live in another process."""

    def __init__(self, type_name: str, why: str) -> None:
        super().__init__(why)
        self.type_name = type_name


class _Pickler(cloudpickle.Pickler):
    """Keeps the file name of code, which cloudpickle blanks: tracebacks and hang reports name the cell by it."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self.files: set[str] = set()
        self.dispatch_table = collections.ChainMap(
            {types.CodeType: self._reduce_code}, cloudpickle.Pickler.dispatch_table
        )
        super().__init__(buffer)

    def _reduce_code(self, code: types.CodeType) -> tuple[Any, ...]:
        self.files.add(code.co_filename)
        build, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
        return build, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)

    def reducer_override(self, obj: Any) -> Any:
        why = _why_not(obj)
        if why:  # inside something that the look does not see through
            raise _Refused(type(obj).__name__, why)
        if isinstance(obj, functools._lru_cache_wrapper) and not _by_reference(obj):
            return _cached_again, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _cached_again(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _dumps(value: Any) -> tuple[bytes, set[str]]:
    """The pickled value, and the files that its code comes from."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.files


class _Look:
    """Walks all that a call refers to and would carry along."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # keeps what it has seen alive, so that an id stays one object's

    def everything(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._look(fn, _name_of(fn))
        for value, name in _arguments(args, kwargs):
            self._look(value, name)

    def _look(self, value: Any, name: str) -> None:
        pending = [(value, name)]
        while pending:
            value, name = pending.pop()
            if isinstance(value, _ATOMS) or id(value) in self._seen or len(self._seen) > _MAX_OBJECTS:
                continue
            self._seen[id(value)] = value
            refuse = getattr(type(value), "__refuse_launch__", None)
            if refuse is not None:
                refuse(value)
            why = _why_not(value)
            if why:
                raise NotSendable(name, type(value).__name__, why)
            pending += _parts(value, name)


def _parts(value: Any, name: str) -> Iterator[tuple[Any, str]]:
    """What pickling `value` would carry along, each with the way to it as a learner would write it."""
    if not isinstance(value, type) and not _by_reference(type(value)):
        yield type(value), type(value).__name__
    if isinstance(value, types.FunctionType):
        if not _by_reference(value):
            yield from _referred_to(value)
    elif isinstance(value, types.MethodType):
        yield value.__self__, f"{name}'s self"
        yield value.__func__, name
    elif isinstance(value, functools.partial):
        yield value.func, _name_of(value.func)
        yield from _arguments(value.args, value.keywords)
    elif isinstance(value, functools._lru_cache_wrapper):
        if not _by_reference(value):
            yield value.__wrapped__, name
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__, name
    elif isinstance(value, property):
        yield from ((part, name) for part in (value.fget, value.fset, value.fdel) if part)
    elif isinstance(value, type):
        if not _by_reference(value):
            for key, member in vars(value).items():
                if key not in ("__dict__", "__weakref__", "__doc__", "__module__"):
                    yield member, f"{value.__name__}.{key}"
            yield from ((base, base.__name__) for base in value.__bases__)
    elif isinstance(value, dict):
        for key, member in value.items():
            yield member, f"{name}[{key!r}]"
            yield key, f"a key of {name}"
    elif isinstance(value, list | tuple | collections.deque):
        for index, member in enumerate(value):
            yield member, f"{name}[{index}]"
    elif isinstance(value, set | frozenset):
        yield from ((member, f"an element of {name}") for member in value)
    elif isinstance(value, types.SimpleNamespace) or not _pickles_in_its_own_way(value):
        for key, member in _state_of(value).items():
            yield member, f"{name}.{key}"
        for owner in type(value).__mro__:
            slots = owner.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                    yield getattr(value, slot), f"{name}.{slot}"


def _pickles_in_its_own_way(value: Any) -> bool:
    """Whether its type decides what travels (a logger goes by its name, say): then only the pickler knows."""
    kind: Any = type(value)
    return kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__


def _state_of(value: Any) -> dict[str, Any]:
    """The attributes that pickle would take along."""
    own_way = getattr(type(value), "__getstate__", None)
    if own_way is not None and own_way is not getattr(object, "__getstate__", None):
        try:
            state = value.__getstate__()
        except Exception:  # the pickler will meet it again and tell
            return {}
        return state if isinstance(state, dict) else {}
    return getattr(value, "__dict__", {})


def _referred_to(function: types.FunctionType) -> Iterator[tuple[Any, str]]:
    """Closure, globals, defaults and attributes of a function, under the names it uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield cell.cell_contents, name
        except ValueError:  # not filled yet
            continue
    for name in sorted(_global_names(function.__code__)):
        if name in function.__globals__:
            yield function.__globals__[name], name
    for default in function.__defaults__ or ():
        yield default, f"a default of {function.__name__}"
    for name, default in (function.__kwdefaults__ or {}).items():
        yield default, f"the default of {name} in {function.__name__}"
    for name, value in vars(function).items():
        yield value, f"{function.__name__}.{name}"


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _by_reference(value: Any) -> bool:
    """Whether pickle finds this function or class by its module and name, so that nothing of it travels."""
    module = getattr(value, "__module__", None)
    if module in (None, "__main__") or module in cloudpickle.list_registry_pickle_by_value():
        return False
    found: Any = sys.modules.get(module)
    for part in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is value


def _why_not(value: Any) -> str | None:
    for types_, why in _UNSENDABLE:
        if isinstance(value, types_):
            return why
    if _is_open_file(value):
        return "an open file belongs to the process that opened it; send its path and open it inside the function"
    in_torch = _why_not_in_torch(value) if "torch" in sys.modules else None
    return in_torch or (_why_not_in_tensorflow(value) if "tensorflow" in sys.modules else None)


def _is_open_file(value: Any) -> bool:
    if isinstance(value, io.BytesIO | io.StringIO):
        return False
    return isinstance(value, io.IOBase | tempfile._TemporaryFileWrapper)


def _why_not_in_torch(value: Any) -> str | None:
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor) and getattr(value, "is_cuda", False):
        return "it lives on a GPU of this process; send its .cpu() and move it to the rank's device inside the function"
    distributed = sys.modules.get("torch.distributed")
    if (
        distributed is not None
        and distributed.is_available()
        and isinstance(value, distributed.ProcessGroup | distributed.Work | distributed.Store)
    ):
        return "it connects this process with others; launch gives each rank its own process group"
    if isinstance(value, torch.cuda.Stream | torch.cuda.Event):
        return f"it belongs to a GPU of this process; {_CREATE_IN_RANK}"
    return None


def _why_not_in_tensorflow(value: Any) -> str | None:
    tf: Any = sys.modules["tensorflow"]
    distribute, data = getattr(tf, "distribute", None), getattr(tf, "data", None)  # absent while it is being imported
    if distribute is not None and isinstance(value, (distribute.Strategy, distribute.coordinator.ClusterCoordinator)):
        return f"it belongs to the devices of this process; {_CREATE_IN_RANK}"
    if data is not None and isinstance(value, data.Dataset | data.Iterator):
        return f"it belongs to the graph of this process; {_CREATE_IN_RANK}, or send the arrays that it is made of"
    return None


def _name_the_culprit(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> NotSendable:
    """Find, by pickling smaller and smaller parts, which variable the pickler stopped at."""
    value, name = (fn, args, kwargs), "the call"
    parts: list[tuple[Any, str]] = [(fn, _name_of(fn)), *_arguments(args, kwargs)]
    seen: set[int] = set()
    while True:
        for part, part_name in parts:
            if id(part) in seen:
                continue
            seen.add(id(part))
            try:
                _dumps(part)
            except Exception as smaller:
                value, name, error = part, part_name, smaller
                parts = list(_parts(part, part_name))
                break
        else:
            if isinstance(error, _Refused):
                return NotSendable(name, error.type_name, str(error))
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            return NotSendable(name, type(value).__name__, f"it cannot be sent to another process ({reason})")


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    for index, value in enumerate(args):
        yield value, f"argument {index + 1}"
    for name, value in kwargs.items():
        yield value, f"argument {name}"


def _name_of(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__
