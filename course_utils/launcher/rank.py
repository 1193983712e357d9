"""Inside a rank: take the task, become the process that the learner's function expects, run it, report, wait, leave."""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import importlib
import io
import json
import os
import pickle
import queue
import random
import select
import signal
import socket
import sys
import threading
import time
import types
from typing import Any, NoReturn

import cloudpickle

from . import failures, frameworks, plain, protocol
from .frameworks.inside import Inside, itself
from .processes import die_with_parent
from .sending import unpack

WATCH_SECONDS = 0.2


def main() -> NoReturn:
    """Entry point of a rank that is a fresh interpreter: argv holds the two descriptors and the server's pid."""
    control, output, server = (int(argument) for argument in sys.argv[1:4])
    die_with_parent(server)
    be_a_rank(control, output)


def be_a_rank(control: int, output: int) -> NoReturn:
    """Live as a rank on these two descriptors: the control socket and the pipe that takes what it prints."""
    _redirect(output)
    channel = protocol.Channel(socket.socket(fileno=control))
    messages: list[tuple[bytes, bytes]] | None = []
    while not messages:
        messages = channel.receive()
        if messages is None:
            os._exit(72)
    rank = Rank(channel, json.loads(messages[0][1]), messages[1:])
    rank.serve()
    rank.leave()


class Rank:
    """One rank and its watcher thread, which answers the kernel while the main thread works."""

    def __init__(self, channel: protocol.Channel, task: dict[str, Any], early: list[tuple[bytes, bytes]]) -> None:
        self._channel = channel
        self._task = task
        self._calls: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None: everyone may leave
        self._begun = False
        self._call_held: Any = None
        self._state = types.SimpleNamespace()
        self._main_thread = threading.main_thread().ident or 0
        # before the learner's folder, which may hold a torch.py, is on the path
        self._inside = frameworks.inside_of(task["framework"])(task)
        os.environ.clear()
        os.environ.update(task["environment"])
        if task["folder"] is not None:
            os.chdir(task["folder"])
        sys.path[:] = task["python_path"]
        sys.argv[:] = [""]
        _refuse_the_keyboard()
        self._own_modules = OwnModules()
        stack_file = open(task["stack_file"], "w")  # noqa: SIM115 - open as long as this process lives
        faulthandler.enable(stack_file, all_threads=False)
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
        channel.send_json(protocol.HELLO, {"pid": os.getpid()})
        for kind, payload in early:
            self._on_message(kind, payload)
        threading.Thread(target=self._answer, daemon=True, name="course_utils-watcher").start()

    def serve(self) -> None:
        """Carry out one call after the other, until all ranks have reported: a peer may still talk to this one."""
        while (call := self._calls.get()) is not None:
            self._work(call)

    def leave(self) -> NoReturn:
        """Do what was registered for the end, and go."""
        try:
            atexit._run_exitfuncs()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)

    def _work(self, call: dict[str, Any]) -> None:
        """Run the learner's function and report its value, or what went wrong."""
        try:
            value, seconds = self._call(call)
        except BaseException as error:  # SystemExit too: the rank must report, whatever the function did
            self._channel.send_json(protocol.ERROR, failures.describe(error))
            return
        try:
            carried = plain.encode(value) if self._task["judged"] else _pickle_result(value, self._inside)
        except Exception as error:
            self._channel.send_json(protocol.ERROR, failures.describe_unsendable_result(value, error))
            return
        self._channel.send(protocol.VALUE, carried)
        done = {"seconds": seconds, "events": self._inside.events(), "type": type(value).__name__}
        self._channel.send_json(protocol.DONE, done)

    def _call(self, call: dict[str, Any]) -> tuple[Any, float]:
        first = not self._begun
        if first:
            self._inside.install()
            self._limit_threads(self._task["threads"])
        self._inside.next_call(call["epoch"])
        if first or not self._task["state"]:
            _reseed()
        self._own_modules.forget_those_edited()
        with open(call["payload"], "rb") as file:
            self._call_held = fn, args, kwargs = unpack(file)  # until the next call: a message may need it
        if first:
            self._channel.send_json(protocol.BEGUN, self._inside.begin())
            self._begun = True
        if self._task["state"]:
            args = (self._state, *args)
        start = time.perf_counter()
        try:
            value = fn(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - start
            self._own_modules.look()
        return value, seconds

    def _answer(self) -> None:
        """Watcher thread: report progress, answer questions, and end this rank when the kernel is gone."""
        seen = 0
        while True:
            try:
                readable, _, _ = select.select([self._channel], [], [], WATCH_SECONDS)
                messages = self._channel.receive() if readable else []
            except (OSError, ValueError):  # the learner's code has closed every file of this process
                messages = None
            if messages is None:
                os.killpg(os.getpgid(0), signal.SIGKILL)
            for kind, payload in messages or []:
                self._on_message(kind, payload)
            progress = self._inside.progress()
            if progress != seen:
                seen = progress
                self._channel.send(protocol.PROGRESS)

    def _on_message(self, kind: bytes, payload: bytes) -> None:
        if kind == protocol.STACK_WANTED:
            self._channel.send_json(protocol.STACK, self._where())
        elif kind == protocol.CALL:
            self._calls.put(json.loads(payload))
        elif kind == protocol.RELEASE:
            self._calls.put(None)

    def _where(self) -> dict[str, Any]:
        frame = sys._current_frames().get(self._main_thread)
        waiting = self._inside.waits_in(self._main_thread)
        return {"frames": failures.frames_of(frame), "waiting": waiting}

    def _limit_threads(self, threads: int) -> None:
        """Give this rank its share of the cores: libraries fix their thread count at import, so they are told again."""
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            threads_of = os.environ.setdefault(variable, str(threads))
            if variable == "OMP_NUM_THREADS" and threads_of.isdigit():
                threads = int(threads_of)
        self._inside.limit_threads(threads)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
        if "numpy" in sys.modules:
            import threadpoolctl

            threadpoolctl.threadpool_limits(threads, user_api="blas")


class OwnModules:
    """The learner's own modules in this process: a file that was edited since it was imported is imported anew."""

    def __init__(self) -> None:
        self._others = set(sys.modules)
        self._times: dict[str, float | None] = {}

    def look(self) -> None:
        """Remember what has been imported, and the age of its file."""
        for name in sys.modules.keys() - self._others - self._times.keys():
            module = sys.modules[name]
            file = getattr(module, "__file__", None)
            if file and not failures.is_library(file):
                self._times[name] = _modified(module)
            else:
                self._others.add(name)

    def forget_those_edited(self) -> None:
        """Drop what was imported from a file that has changed."""
        for name, time_then in list(self._times.items()):
            if _modified(sys.modules.get(name)) != time_then:
                sys.modules.pop(name, None)
                del self._times[name]


def _modified(module: Any) -> float | None:
    try:
        return os.stat(module.__file__).st_mtime
    except (AttributeError, TypeError, OSError):
        return None


def _redirect(output: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in {nothing, output} - {0, 1, 2}:
        os.close(descriptor)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(descriptor, "w", closefd=False)
        # write through: what was printed must not be lost when the rank dies
        stream = io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)


class _NoKeyboard(io.TextIOBase):
    """Standard input of a rank: reading from it says why that cannot work."""

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "the function asked for keyboard input, and a rank has no keyboard: pass the value to launch "
            "as an argument, and debug with print or by calling the function in the notebook"
        )

    read = readline = readlines = __next__ = refuse


def _refuse_the_keyboard() -> None:
    keyboard = _NoKeyboard()
    sys.stdin = keyboard
    builtins.input = keyboard.refuse
    setattr(builtins, "display", _display)  # noqa: B010 - notebooks have it, so cells use it
    sys.breakpointhook = keyboard.refuse


def _display(*values: Any, **_: Any) -> None:
    """What `display` shows in a rank: the text form of each value."""
    for value in values:
        print(repr(value))


def _reseed() -> None:
    """Draw fresh seeds from the system: ranks forked from one server would otherwise draw identical numbers."""
    random.seed(os.urandom(32))
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(list(os.urandom(32)))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int.from_bytes(os.urandom(7), "big"))


class _ResultPickler(cloudpickle.Pickler):
    """Sends what the kernel can read without a GPU or a framework of its own: CUDA tensors as CPU tensors."""

    def __init__(self, buffer: io.BytesIO, inside: Inside) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._inside = inside

    def reducer_override(self, obj: Any) -> Any:
        plain_form = self._inside.as_plain(obj)
        if plain_form is not obj:
            return itself, (plain_form,)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.is_cuda:
            moved = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, obj.requires_grad)
            return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _pickle_result(value: Any, inside: Inside) -> bytes:
    buffer = io.BytesIO()
    _ResultPickler(buffer, inside).dump(value)
    return buffer.getvalue()
