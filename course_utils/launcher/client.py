"""The kernel's side of its servers: start one, find it again, replace one that has ended, ask it for ranks."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from . import protocol
from .frameworks import KNOWN, Framework
from .processes import python_command

# A library that starts threads when it is imported makes its process unsafe to fork, so these are set before that.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
_servers: dict[tuple[Any, ...], ServerHandle] = {}
_homes: dict[int, str] = {}  # a process forked from this one has a folder of its own
_lock = threading.Lock()


class ServerHandle:
    """One server of this process. Every run gets a socket of its own, so that runs of several threads do not mix."""

    def __init__(self, preload: tuple[str, ...], fork: bool, environment: Mapping[str, str]) -> None:
        self._home = _home()
        self._folder = tempfile.mkdtemp(prefix="server-", dir=self._home)
        self._base, theirs = socket.socketpair()
        self._ready: dict[str, Any] | None = None
        self._lock = threading.Lock()
        path = [entry for entry in sys.path if entry]
        start = python_command("from course_utils.launcher.server import main; main()", path)
        command = [*start, str(theirs.fileno()), str(os.getpid()), self._home]
        with theirs, Path(self._folder, "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "fork" if fork else "fresh", *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **environment,
                    **os.environ,
                    **_ONE_THREAD,
                    "TORCHINDUCTOR_CACHE_DIR": f"{self._home}/torchinductor",
                },
                cwd=self._folder,
                start_new_session=True,  # Jupyter's interrupt goes to the kernel's whole process group
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run_folder(self) -> str:
        """Make a folder for one run; it goes with the run's logs, or with the kernel."""
        os.makedirs(self._home, exist_ok=True)  # systems clean their temporary folder
        return tempfile.mkdtemp(prefix="run-", dir=self._home)

    def why_fresh(self) -> str | None:
        """Wait until the server is ready; return why it starts fresh interpreters although it was to fork, or None.

        Raises LaunchError if it could not start.
        """
        with self._lock:  # of two threads that launch first, one reads the answer
            if self._ready is None:
                select.select([self._base], [], [])  # an interrupt while it imports must not tear a message apart
                try:
                    header = protocol.receive_exactly(self._base, protocol.HEADER.size)
                    kind, length = protocol.HEADER.unpack(header)
                    answer = json.loads(protocol.receive_exactly(self._base, length))
                except ConnectionError:
                    raise LaunchError(f"the process that starts ranks ended at once:\n{self._log()}") from None
                if kind != protocol.READY:
                    raise LaunchError(f"the process that starts ranks cannot: {answer['why']}\n{self._log()}")
                self._ready = answer
            return self._ready["why"]

    def ask(self, request: dict[str, Any], descriptors: list[int]) -> socket.socket:
        """Have the server start ranks on these descriptors; return the run's leash. Closing it ends the ranks."""
        leash, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._base, [b"R"], [theirs.fileno()])
            leash.sendall(protocol.frame_json(protocol.RUN, request))
            protocol.send_descriptors(leash, descriptors)
        except BaseException:
            leash.close()
            raise
        return leash

    def close(self) -> None:
        """End the server and whatever it still runs."""
        with contextlib.suppress(OSError):  # it may have ended
            self._base.send(protocol.GOODBYE)
        self._base.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _log(self) -> str:
        path = Path(self._folder, "server.log")
        return path.read_text(errors="replace")[-2000:].strip() if path.exists() else ""


def _home() -> str:
    """The folder of everything that this process's servers and runs keep on disk."""
    folder = _homes.get(os.getpid())
    if folder is None or not os.path.isdir(folder):
        try:
            folder = _homes[os.getpid()] = tempfile.mkdtemp(prefix="course_utils-")
        except OSError as error:
            raise LaunchError(f"a launch needs a temporary folder that can be written to: {error}") from None
    return folder


def server_for(framework: Framework, preload: tuple[str, ...]) -> ServerHandle:
    """Return this process's server with these modules in memory, started or replaced as needed."""
    fork = os.environ.get("COURSE_LAUNCHER") != "subprocess" and sys.platform.startswith("linux")
    modules = (*framework.preload, *preload) if fork else ()
    key = (
        os.getpid(),
        fork,
        framework.name,
        modules,
    )  # a process forked from this one must not use its parent's sockets
    with _lock:
        server = _servers.get(key)
        if server is not None and not server.is_alive:
            del _servers[key]
            server.close()
            server = None
        if server is None:
            server = _servers[key] = ServerHandle(modules, fork, framework.environment)
    return server


def forget(server: ServerHandle) -> None:
    """End a server that does not answer any more; the next launch starts another."""
    with _lock:
        for key in [key for key, known in _servers.items() if known is server]:
            del _servers[key]
    server.close()


def warm(framework: str = "torch") -> None:
    """Start the server in the background, so that the first launch need not wait for its imports."""
    server_for(KNOWN[framework], ())


def server_pid(framework: str = "torch") -> int | None:
    """Return the process id of this process's warm server, or None while there is none."""
    key = (os.getpid(), True, framework, KNOWN[framework].preload)
    server = _servers.get(key)
    return server.pid if server is not None and server.is_alive else None


def shutdown() -> None:
    """End all servers of this process and whatever they still run."""
    with _lock:
        for key in [key for key in _servers if key[0] == os.getpid()]:
            _servers.pop(key).close()


@atexit.register
def _leave_nothing() -> None:
    shutdown()
    if os.getpid() in _homes:
        shutil.rmtree(_homes.pop(os.getpid()), ignore_errors=True)
