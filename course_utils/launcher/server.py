"""The server: a small process that starts ranks, watches over them and outlives neither its kernel nor its use.

It is a fresh interpreter that only imports: no tensor operation, no CUDA call, no thread, no process group. Forking it
is therefore safe whatever the kernel has done before, and a forked rank has torch in memory already. Where forking is
not safe (macOS, a module that started a thread or opened a GPU) or not wanted (COURSE_LAUNCHER=subprocess), the same
server starts each rank as a fresh interpreter instead.

It lives in a session of its own, since Jupyter sends an interrupt to the kernel's whole process group. Three things end
it: the kernel closes the base socket, the kernel is no longer its parent, or nothing was launched for IDLE_SECONDS.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import psutil

from . import protocol
from .processes import (
    adopt_orphans,
    children_of_this_process,
    descendants,
    die_with_parent,
    is_running,
    python_command,
    signal_each,
    signal_group,
    why_forking_is_unsafe,
)
from .rank import be_a_rank

IDLE_SECONDS = 15 * 60


@dataclass
class ServedRun:
    """One run as its server sees it: the leash, the living ranks and, once it is being ended, since when."""

    leash: socket.socket
    seconds_to_end: float = 0.0  # between SIGTERM and SIGKILL
    alive: dict[int, int] = field(default_factory=dict)  # pid -> rank
    interpreters: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ending_since: float | None = None
    victims: list[psutil.Process] = field(default_factory=list)  # what ranks had started when the end began


class Server:
    """Starts ranks on request and ends them when their run's leash is let go."""

    def __init__(self, base: socket.socket, kernel: int, folder: str, preload: list[str], fork: bool) -> None:
        self._base = base
        self._folder = folder
        self._kernel = kernel
        self._runs: list[ServedRun] = []
        self._used = time.monotonic()
        with self._mindful_of_the_kernel():
            why = _import_all(preload) if fork else None
        self._fork = fork and why is None
        adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._child_ended, waker = socket.socketpair()
        self._child_ended.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(base, selectors.EVENT_READ, self._on_base)
        self._selector.register(self._child_ended, selectors.EVENT_READ, lambda sock: sock.recv(4096))
        gc.collect()
        gc.freeze()  # forked ranks then share these pages instead of copying them at their first collection
        base.sendall(protocol.frame_json(protocol.READY, {"fork": self._fork, "why": why}))

    def serve(self) -> NoReturn:
        """Run until the kernel is gone or nothing has been asked for a long time."""
        while True:
            ending = any(run.ending_since is not None for run in self._runs)
            events = self._selector.select(0.01 if ending else 0.25 if self._runs else 0.5)
            for key, _ in events:
                key.data(key.fileobj)
            if self._fork and not events and not self._runs:
                self._import_more()
            self._reap()
            for run in list(self._runs):
                self._end_if_due(run)
            if os.getppid() != self._kernel:  # a process forked from the kernel may still hold its sockets open
                self._leave(kernel_gone=True)
            if self._runs:
                self._used = time.monotonic()
            elif time.monotonic() - self._used > IDLE_SECONDS:
                self._leave(kernel_gone=False)

    @contextlib.contextmanager
    def _mindful_of_the_kernel(self) -> Iterator[None]:
        """Notice the kernel's end also during an import, which takes seconds."""

        def look(*_: Any) -> None:
            if os.getppid() != self._kernel:
                self._leave(kernel_gone=True)

        before = signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    def _import_more(self) -> None:
        """While nobody waits: what DDP's constructor would import in every rank anew, which takes over a second."""
        if "torch" in sys.modules and "torch._dynamo" not in sys.modules:
            with self._mindful_of_the_kernel(), contextlib.suppress(ImportError):
                importlib.import_module("torch._dynamo")
            self._fork = why_forking_is_unsafe() is None
            gc.collect()
            gc.freeze()

    def _on_base(self, base: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(base, 1, 1)
        except OSError:
            data, descriptors = b"", []
        if not data or data == protocol.GOODBYE:
            self._leave(kernel_gone=not data)
        run = ServedRun(socket.socket(fileno=descriptors[0]))
        self._runs.append(run)
        try:
            self._start(run)
        except ConnectionError:  # interrupted while asking
            self._begin_to_end(run)
        except (OSError, ValueError) as error:
            _tell(run, protocol.REFUSED, {"why": f"{type(error).__name__}: {error}"})
            self._begin_to_end(run)
        else:
            self._selector.register(run.leash, selectors.EVENT_READ, self._on_leash)

    def _start(self, run: ServedRun) -> None:
        header = protocol.receive_exactly(run.leash, protocol.HEADER.size)
        request = json.loads(protocol.receive_exactly(run.leash, protocol.HEADER.unpack(header)[1]))
        run.seconds_to_end = request["seconds_to_end"]
        descriptors = protocol.receive_descriptors(run.leash, 2 * request["nprocs"])
        try:
            for rank in range(request["nprocs"]):
                control, output = descriptors[2 * rank : 2 * rank + 2]
                if self._fork and not request["fresh"]:
                    pid = self._fork_rank(control, output)
                else:
                    interpreter = _exec_rank(control, output, request["environment"])
                    run.interpreters.append(interpreter)
                    pid = interpreter.pid
                run.alive[pid] = rank
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork_rank(self, control: int, output: int) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:  # from here on this is the rank; whatever happens, it must never return into the server's loop
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            die_with_parent(server)
            edges = [2, *sorted((control, output)), os.sysconf("SC_OPEN_MAX")]
            for low, high in itertools.pairwise(edges):
                os.closerange(low + 1, high)
            be_a_rank(control, output)
        finally:
            os._exit(70)

    def _on_leash(self, leash: socket.socket) -> None:
        run = next(run for run in self._runs if run.leash is leash)
        try:
            let_go = not leash.recv(1)
        except OSError:
            let_go = True
        if let_go:
            self._selector.unregister(leash)
            self._begin_to_end(run)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for run in self._runs:
                if pid in run.alive:
                    rank = run.alive.pop(pid)
                    signal_group(pid, signal.SIGKILL)  # what it started goes with it
                    _tell(run, protocol.EXITED, {"rank": rank, "code": os.waitstatus_to_exitcode(status)})
                for interpreter in run.interpreters:
                    if interpreter.pid == pid:
                        interpreter.returncode = os.waitstatus_to_exitcode(status)  # reaped here, not by subprocess

    def _begin_to_end(self, run: ServedRun) -> None:
        """Ask everything that belongs to the run to go; _end_if_due insists later."""
        if run.ending_since is None:
            run.ending_since = time.monotonic()
            run.victims = descendants(run.alive)
            for pid in run.alive:
                signal_group(pid, signal.SIGTERM)
            signal_each(run.victims, signal.SIGTERM)

    def _end_if_due(self, run: ServedRun) -> None:
        if run.ending_since is None:
            if run.alive:
                return
            self._begin_to_end(run)  # all ranks have left on their own
        assert run.ending_since is not None
        strays = self._strays(run)
        if not run.alive:
            signal_each(strays, signal.SIGKILL)
        if run.alive or strays or any(is_running(process) for process in run.victims):
            if time.monotonic() - run.ending_since >= run.seconds_to_end:
                self._kill(run)
            return
        self._runs.remove(run)
        if run.leash in [key.fileobj for key in self._selector.get_map().values()]:
            self._selector.unregister(run.leash)
        run.leash.close()  # tells the kernel that nothing of the run is left

    def _strays(self, ending: ServedRun | None = None) -> list[psutil.Process]:
        """Orphans that this server adopted. While another run lives they might be its own, so they wait for its end."""
        if ending and any(run.alive for run in self._runs if run is not ending):
            return []
        ranks = {pid for run in self._runs for pid in run.alive}
        strays = []
        for pid in children_of_this_process() - ranks:
            try:
                strays.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue
        return strays

    def _kill(self, run: ServedRun) -> None:
        run.victims += descendants(run.alive)
        for pid in run.alive:
            signal_group(pid, signal.SIGKILL)
        signal_each(run.victims, signal.SIGKILL)

    def _leave(self, kernel_gone: bool) -> NoReturn:
        for run in self._runs:
            self._kill(run)
        deadline = time.monotonic() + 1.0
        while children_of_this_process() and time.monotonic() < deadline:
            self._reap()
            signal_each(self._strays(), signal.SIGKILL)
            time.sleep(0.005)
        if kernel_gone:  # one that lives keeps its runs' logs, and removes them itself
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def _import_all(modules: list[str]) -> str | None:
    """Import what ranks will want in memory; return why this process must not be forked after that, or None."""
    for name in modules:
        importlib.import_module(name)
    return why_forking_is_unsafe()


def _exec_rank(control: int, output: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    start = python_command("from course_utils.launcher.rank import main; main()", sys.path)
    command = [*start, str(control), str(output), str(os.getpid())]
    return subprocess.Popen(
        command,
        pass_fds=(control, output),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


def _tell(run: ServedRun, kind: bytes, content: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the kernel may have let go
        run.leash.sendall(protocol.frame_json(kind, content))


def main() -> NoReturn:
    """Entry point: argv holds base socket, kernel's pid, folder, "fork" or "fresh", and what to preload."""
    base, kernel, folder = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    try:
        server = Server(base, kernel, folder, preload=sys.argv[5:], fork=sys.argv[4] == "fork")
    except Exception as error:
        with contextlib.suppress(OSError):
            base.sendall(protocol.frame_json(protocol.REFUSED, {"why": f"{type(error).__name__}: {error}"}))
        if os.getppid() != kernel:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
    server.serve()
