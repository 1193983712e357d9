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
import random
import select
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import cloudpickle

from . import failures, plain, protocol
from .links import Link, Port
from .processes import die_with_parent

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
    rank = Rank(channel, json.loads(messages[0][1]))
    rank.work()
    rank.leave()


class Rank:
    """One rank and its watcher thread, which answers the kernel while the main thread works."""

    def __init__(self, channel: protocol.Channel, task: dict[str, Any]) -> None:
        self._channel = channel
        self._task = task
        self._released = threading.Event()
        self._watch: Any = None
        self._call_held: Any = None
        self._main_thread = threading.main_thread().ident or 0
        if task["framework"] == "torch":  # before the learner's folder, which may hold a torch.py, is on the path
            importlib.import_module(".watching", __package__)
        os.environ.clear()
        os.environ.update(task["environment"])
        if task["folder"] is not None:
            os.chdir(task["folder"])
        sys.path[:] = task["python_path"]
        sys.argv[:] = [""]
        _refuse_the_keyboard()
        stack_file = open(task["stack_file"], "w")  # noqa: SIM115 - open as long as this process lives
        faulthandler.enable(stack_file, all_threads=False)
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
        channel.send_json(protocol.HELLO, {"pid": os.getpid()})
        threading.Thread(target=self._answer, daemon=True, name="course_utils-watcher").start()

    def work(self) -> None:
        """Run the learner's function and report its value, or what went wrong."""
        try:
            value, seconds = self._call()
        except BaseException as error:  # SystemExit too: the rank must report, whatever the function did
            self._channel.send_json(protocol.ERROR, failures.describe(error))
            return
        try:
            carried = plain.encode(value) if self._task["judged"] else _pickle_result(value)
        except Exception as error:
            self._channel.send_json(protocol.ERROR, failures.describe_unsendable_result(value, error))
            return
        self._channel.send(protocol.VALUE, carried)
        events = self._watch.events() if self._watch else []
        self._channel.send_json(protocol.DONE, {"seconds": seconds, "events": events, "type": type(value).__name__})

    def leave(self) -> NoReturn:
        """Stay until all ranks have reported, since a peer may still be talking to this one; then go."""
        self._released.wait()
        try:
            atexit._run_exitfuncs()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)

    def _call(self) -> tuple[Any, float]:
        task = self._task
        begun: dict[str, Any] = {"backend": None, "notes": []}
        if task["framework"] == "torch":
            from .watching import Watch

            port = Port(Link(**task["link"]), task["rank"], task["run_folder"]) if task["link"] else None
            self._watch = Watch(task["epoch"], task["trace"], port)
            self._watch.install()
            if task["judged"]:
                from .relayed import register

                register(self._watch, f"{task['run_folder']}/relay")
        _limit_threads(task["threads"])
        _reseed()
        with open(task["payload"], "rb") as file:
            self._call_held = fn, args, kwargs = pickle.load(file)  # until all have reported: a message may need it
        if task["init"]:
            begun = _join_process_group(task)
        self._channel.send_json(protocol.BEGUN, begun)
        start = time.perf_counter()
        value = fn(*args, **kwargs)
        return value, time.perf_counter() - start

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
            for kind, _ in messages or []:
                if kind == protocol.STACK_WANTED:
                    self._channel.send_json(protocol.STACK, self._where())
                elif kind == protocol.RELEASE:
                    self._released.set()
            progress = self._watch.progress() if self._watch else 0
            if progress != seen:
                seen = progress
                self._channel.send(protocol.PROGRESS)

    def _where(self) -> dict[str, Any]:
        frame = sys._current_frames().get(self._main_thread)
        waiting = self._watch.waits_in(self._main_thread) if self._watch else None
        return {"frames": failures.frames_of(frame), "waiting": waiting}


def _join_process_group(task: dict[str, Any]) -> dict[str, Any]:
    """Initialise torch.distributed from the environment variables, as torchrun's workers do."""
    import torch
    import torch.distributed as dist

    if os.environ.get("TORCH_DISTRIBUTED_DEBUG"):  # torch reads it at import, which is long past in a forked rank
        dist.set_debug_level_from_env()
    backend, notes = task["backend"], []
    if "nccl" in backend and not (dist.is_nccl_available() and torch.cuda.device_count() >= task["nprocs"]):
        count = torch.cuda.device_count()
        notes.append(
            f"gloo instead of NCCL: torch sees {count} usable GPU{'s' * (count != 1)} for {task['nprocs']} ranks"
        )
        backend = "gloo"
    if "nccl" in backend:
        torch.cuda.set_device(task["rank"])
    used = backend
    if task["judged"]:
        from .relayed import BACKEND

        backend = used = BACKEND
    elif task["trace"]:
        from .watching import TRACED_BACKEND

        if "nccl" in backend:
            notes.append("gloo instead of NCCL: a traced run counts messages on the CPU")
        backend, used = TRACED_BACKEND, "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=task["group_timeout"]))
    if backend != used:  # what learners' code asks the group for is what carries its messages
        groups = dist.distributed_c10d._world.pg_map
        groups.update({group: (used, store) for group, (_, store) in groups.items()})
    return {"backend": used, "notes": notes}


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


def _limit_threads(threads: int) -> None:
    """Give this rank its share of the cores: libraries fix their thread count at import, so they are told again."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        threads_of = os.environ.setdefault(variable, str(threads))
        if variable == "OMP_NUM_THREADS" and threads_of.isdigit():
            threads = int(threads_of)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    if "numpy" in sys.modules:
        import threadpoolctl

        threadpoolctl.threadpool_limits(threads, user_api="blas")


def _reseed() -> None:
    """Draw fresh seeds from the system: ranks forked from one server would otherwise draw identical numbers."""
    random.seed(os.urandom(32))
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(list(os.urandom(32)))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int.from_bytes(os.urandom(7), "big"))


class _ResultPickler(cloudpickle.Pickler):
    """Sends CUDA tensors as CPU tensors, so that reading results never starts CUDA in the kernel."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.is_cuda:
            moved = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, obj.requires_grad)
            return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _pickle_result(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ResultPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
