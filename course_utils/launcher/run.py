"""One launch from call to result: ask for ranks, listen to all of them at once, judge how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

from ..errors import LaunchError, RankState
from . import failures, plain, protocol
from .client import forget, server_for
from .links import Link
from .output import Console, Lane, Logs
from .relay import Relay
from .requests import OPTIONS, Request, refuse_ambiguous, understand
from .sending import pack
from .tracing import Trace, trace_of

START_SECONDS = 60.0  # to get all ranks to the learner's function, on a busy machine
LEAVE_SECONDS = 2.0  # for what ranks registered with atexit
STACK_SECONDS = 1.0
SETTLE_SECONDS = 0.3  # after a failure, for an earlier one whose report is still under way
CONSEQUENCE_SECONDS = 2.0  # after a lost connection, for the failure that must be behind it
_KILLED = "the process that starts and watches ranks was killed, and the ranks with it"
# Variables that an interpreter or a library reads once, at its start: a forked rank would not see them.
_READ_AT_START = ("PYTHON", "LD_", "DYLD_", "MALLOC_", "TORCH_LOGS", "TORCH_CPP_LOG_LEVEL", "OPENBLAS_", "KMP_", "MKL_")


Parameters = ParamSpec("Parameters")


@dataclass(frozen=True, repr=False)
class Run:
    """What came of a launch.

    `results` holds the value of every rank, `logs` all that each printed, `seconds` how long each spent in the
    function. `backend` is what was used ("gloo", "nccl", or None where no process group was set up), `notes` what was
    degraded, in words, `trace` the messages of each rank if the run was traced.
    """

    results: list[Any]
    logs: Logs
    backend: str | None
    notes: list[str]
    seconds: list[float]
    trace: Trace | None = None

    def __repr__(self) -> str:
        ranks = f"{len(self.results)} rank{'s' * (len(self.results) != 1)}"
        over = f" over {self.backend}" if self.backend else ""
        return f"<Run of {ranks}{over}: see .results, .logs, .seconds, .notes{', .trace' if self.trace else ''}>"


def _knowing_what_was_given(body: Callable[Parameters, Run]) -> Callable[Parameters, Run]:
    @functools.wraps(body)
    def launch(*args: Parameters.args, **given: Parameters.kwargs) -> Run:
        refuse_ambiguous(args[0] if args else None, OPTIONS & given.keys())
        return body(*args, **given)

    return launch


@_knowing_what_was_given
def launch(
    fn: Callable[..., Any],
    *args: Any,
    nprocs: int = 2,
    framework: str = "torch",
    backend: str | None = None,
    timeout: float = 120.0,
    init: bool = True,
    roles: Any = None,
    link: Link | None = None,
    trace: bool = False,
    preload: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> Run:
    """Run `fn(*args, **kwargs)` in `nprocs` new processes, one a rank, and return what each of them returned.

    The function and everything in the notebook that it refers to travel by value. What ranks print appears here, each
    line with its rank.

    Args:
        fn: the function that every rank calls.
        nprocs: the number of ranks, 1 to 64.
        framework: "torch" (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set and the process group is
        up
            before `fn`, unless init=False) or "python" (the variables alone).
        backend: "gloo", "nccl", "cpu:gloo,cuda:nccl", or None for NCCL where every rank has a GPU, else gloo.
        timeout: seconds without progress (no output, no message, no collective on any rank) before the run is ended.
        trace: count messages, bytes and rounds; see `Run.trace`.
        preload: further installed modules to hold in memory between launches.
        env: further environment variables for the ranks.
        link: a Link that slows messages down as such a network would; the run's notes say that its times are emulated.
        roles: comes in a later release.

    Raises:
        BadRequest, NotSendable: before anything is started.
        WorkerFailed: a rank raised or died; names the first original failure, with its traceback.
        WorkerTimeout: no progress; says where each rank stands.

    Example:
        >>> launch(lambda: int(os.environ["RANK"]) ** 2, nprocs=3, framework="python").results
        [0, 1, 4]
    """
    request = understand(
        fn,
        args,
        kwargs,
        nprocs=nprocs,
        framework=framework,
        backend=backend,
        timeout=timeout,
        init=init,
        roles=roles,
        link=link,
        trace=trace,
        preload=preload,
        env=env,
    )
    return _Launch(request).carry_out()


def launch_judged(
    fn: Callable[..., Any],
    *args: Any,
    nprocs: int,
    timeout: float,
    init: bool = True,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Like `launch`, for answers that count: this process takes nothing from the ranks on trust.

    Results come back as plain data (see `plain`), never pickled. Messages pass through this process, which counts them:
    `Run.trace` holds what really went from rank to rank. Ranks have send, recv, isend, irecv and barrier; other
    collectives refuse. Nothing is shown.

    Raises what `launch` raises.
    """
    request = understand(
        fn,
        args,
        {},
        nprocs=nprocs,
        framework="torch",
        backend="gloo",
        timeout=timeout,
        init=init,
        roles=None,
        link=None,
        trace=False,
        preload=(),
        env=env,
    )
    return _Launch(dataclasses.replace(request, judged=True)).carry_out()


class _ServerGone(LaunchError):
    """The server has ended, idle or killed."""


@dataclass
class _RankLink:
    """What the kernel holds of one rank: its control socket, its output, and what it has reported."""

    rank: int
    control: socket.socket
    output: int
    lane: Lane
    stack_file: Path
    unsent: bytearray = field(default_factory=bytearray)
    unframer: protocol.Unframer = field(default_factory=protocol.Unframer)
    state: str = "starting"
    pid: int | None = None
    where: dict[str, Any] | None = None
    value: bytes = b""
    report: dict[str, Any] = field(default_factory=dict)


class _Launch:
    """One run while it goes on. Everything happens in the calling thread, so that an interrupt ends up there."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._notes: list[str] = []
        self._backend: str | None = None
        self._failures: list[failures.Failure] = []
        self._settled_at = 0.0
        self._server_gone = False
        self._last_progress = time.monotonic()

    def carry_out(self) -> Run:
        """Start the ranks, listen until all have reported, and return or raise. Nothing of the run is left then."""
        payload = pack(self._request.fn, self._request.args, self._request.kwargs)
        try:
            return self._attempt(payload)
        except _ServerGone:
            forget(self._server)
            if any(link.pid for link in self._ranks):
                raise
        return _Launch(self._request)._attempt(payload)  # it had ended before the ranks began: nothing has happened yet

    def _attempt(self, payload: bytes) -> Run:
        request = self._request
        self._server = server = server_for(request.framework, request.preload)
        fresh_because = server.why_fresh()
        self._folder = Path(server.run_folder())
        self._logs = Logs(str(self._folder), request.nprocs)
        self._folder.joinpath("payload").write_bytes(payload)
        self._console = Console(request.nprocs, silent=request.judged)
        for note in request.plan.notes if request.framework == "torch" else ():
            self._note(note)
        early = sorted(name for name in request.environment if name.startswith(_READ_AT_START))
        if fresh_because:
            self._note(f"ranks are started afresh, which is slow: {fresh_because}")
        elif early:
            self._note(f"ranks are started afresh, which is slow: {early[0]} is read when an interpreter starts")
        if request.link:
            self._note(f"times on the wire are emulated: {request.link}")
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(str(self._folder / "relay"), request.nprocs, self._selector) if request.judged else None
        self._ranks: list[_RankLink] = []
        self._leash: socket.socket | None = None
        with _reserved_port() as port:
            try:
                self._start(server, port, fresh=bool(early))
                self._listen()
                self._release()
            finally:
                self._clean_up()
        return self._result()

    # ---- the way there

    def _start(self, server: Any, port: int, fresh: bool) -> None:
        request = self._request
        environment = {**os.environ, **request.environment}
        theirs: list[socket.socket | int] = []
        try:
            for rank in range(request.nprocs):
                control, their_control = socket.socketpair()
                output, their_output = os.pipe()
                theirs += [their_control, their_output]
                lane = Lane(rank, self._folder / f"rank-{rank}.log")
                link = _RankLink(rank, control, output, lane, self._folder / f"stack-{rank}.txt")
                self._ranks.append(link)
                control.setblocking(False)
                os.set_blocking(output, False)
                self._selector.register(output, selectors.EVENT_READ, functools.partial(self._on_output, link))
                self._selector.register(control, selectors.EVENT_READ, functools.partial(self._on_control, link))
                self._send(link, protocol.frame_json(protocol.TASK, self._task(link, port, environment)))
            numbers = [end if isinstance(end, int) else end.fileno() for end in theirs]
            asked = {"nprocs": request.nprocs, "fresh": fresh, "environment": environment}
            try:
                self._leash = server.ask(asked, numbers)
            except OSError:
                raise _ServerGone(_KILLED) from None
        finally:
            for end in theirs:
                os.close(end) if isinstance(end, int) else end.close()
        self._leash_unframer = protocol.Unframer()
        self._selector.register(self._leash, selectors.EVENT_READ, self._on_leash)

    def _task(self, link: _RankLink, port: int, environment: dict[str, str]) -> dict[str, Any]:
        request = self._request
        rank, nprocs = str(link.rank), str(request.nprocs)
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": nprocs,
            "LOCAL_WORLD_SIZE": nprocs,
            "MASTER_ADDR": "127.0.0.1",  # never a host name: it may not resolve
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": _loopback(),
        }
        return {
            "rank": link.rank,
            "nprocs": request.nprocs,
            "framework": request.framework,
            "init": request.init,
            "trace": request.trace,
            "backend": request.plan.backend,
            "threads": request.plan.threads,
            "group_timeout": max(
                30 * 60, request.timeout + 60
            ),  # this launch's own timeout tells more, and comes first
            "environment": {**environment, **variables, **request.environment},
            "folder": _working_directory(),
            "python_path": sys.path,
            "link": dataclasses.asdict(request.link) if request.link else None,
            "run_folder": str(self._folder),
            "judged": request.judged,
            "payload": str(self._folder / "payload"),
            "stack_file": str(link.stack_file),
            "epoch": time.monotonic(),
        }

    # ---- listening

    def _listen(self) -> None:
        """Return when every rank has returned; raise when one has failed or none makes progress."""
        self._last_progress = time.monotonic()
        while any(link.state != "returned" for link in self._ranks):
            now = time.monotonic()
            if self._failures and (now >= self._settled_at or self._nobody_is_left()):
                raise self._as_error()
            if self._server_gone:
                raise _ServerGone(_KILLED)
            starting = any(link.state == "starting" for link in self._ranks)
            patience = max(self._request.timeout, START_SECONDS) if starting else self._request.timeout
            until = self._last_progress + patience - now
            if until <= 0:
                raise self._as_timeout(patience)
            self._wait(min(until, self._settled_at - now) if self._failures else until)

    def _wait(self, seconds: float) -> None:
        for key, ready in self._selector.select(max(0.0, seconds)):
            key.data(ready)

    def _on_output(self, link: _RankLink, ready: int) -> None:
        try:
            data = os.read(link.output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(link.output)
            return
        self._last_progress = time.monotonic()
        self._console.show(link.rank, link.lane.feed(data))

    def _on_control(self, link: _RankLink, ready: int) -> None:
        if ready & selectors.EVENT_WRITE:
            self._flush(link)
        if ready & selectors.EVENT_READ:
            self._receive(link)

    def _receive(self, link: _RankLink) -> None:
        while True:
            try:
                data = link.control.recv(1 << 20)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                if link.control in self._selector.get_map():
                    self._selector.unregister(link.control)
                return
            for kind, payload in link.unframer.feed(data):
                self._on_message(link, kind, payload)

    def _on_message(self, link: _RankLink, kind: bytes, payload: bytes) -> None:
        self._last_progress = time.monotonic()
        if kind == protocol.HELLO:
            link.pid = json.loads(payload)["pid"]
        elif kind == protocol.BEGUN:
            link.state = "running"
            begun = json.loads(payload)
            self._backend = begun["backend"]
            for note in begun["notes"]:
                self._note(note)
        elif kind == protocol.STACK:
            link.where = json.loads(payload)
        elif kind == protocol.VALUE:
            link.value = payload
        elif kind == protocol.DONE:
            link.report = json.loads(payload)
            link.state = "returned"
        elif kind == protocol.ERROR:
            told = json.loads(payload)
            link.state = "failed"
            chain = tuple(told["chain"])
            self._failed(failures.Failure(link.rank, told["kind"], told["time"], told["type"], told["message"], chain))

    def _on_leash(self, ready: int) -> None:
        assert self._leash is not None
        data = _receive_or_nothing(self._leash)
        if not data:
            self._server_gone = True
            self._selector.unregister(self._leash)
            return
        for kind, payload in self._leash_unframer.feed(data):
            told = json.loads(payload)
            if kind == protocol.REFUSED:
                raise LaunchError(f"the ranks could not be started: {told['why']}")
            link = self._ranks[told["rank"]]
            self._receive(link)  # what it said before it went counts first
            if link.state in ("starting", "running"):
                link.state = "died"
                code = told["code"]
                how = "exit" if code >= 0 else "signal"
                frames = tuple(failures.frames_in(link.stack_file))
                self._failed(failures.Failure(link.rank, how, time.monotonic(), code=abs(code), frames=frames))

    def _failed(self, failure: failures.Failure) -> None:
        known_original = any(not known.may_be_consequence for known in self._failures)
        if not self._failures or (not failure.may_be_consequence and not known_original):
            wait = CONSEQUENCE_SECONDS if failure.may_be_consequence else SETTLE_SECONDS
            self._settled_at = time.monotonic() + wait
        self._failures.append(failure)

    def _nobody_is_left(self) -> bool:
        return all(link.state in ("returned", "failed", "died") for link in self._ranks)

    # ---- speaking

    def _send(self, link: _RankLink, message: bytes) -> None:
        link.unsent += message
        self._flush(link)

    def _flush(self, link: _RankLink) -> None:
        try:
            while link.unsent:
                sent = link.control.send(link.unsent)
                del link.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the rank is gone; the server will tell how
            link.unsent.clear()
        if link.control in self._selector.get_map():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
            self._selector.modify(link.control, wanted, self._selector.get_key(link.control).data)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            self._console.note(text)

    # ---- the end

    def _as_error(self) -> Exception:
        return failures.worker_failed(self._failures, self._request.nprocs, self._logs)

    def _as_timeout(self, patience: float) -> Exception:
        asked = [link for link in self._ranks if link.state in ("starting", "running")]
        for link in asked:
            self._send(link, protocol.frame(protocol.STACK_WANTED))
        self._wait_until(lambda: all(link.where for link in asked), STACK_SECONDS)
        stuck = [link for link in asked if link.where is None and link.pid is not None]
        for link in stuck:  # compiled code holds the interpreter: only a signal handler in C gets through
            try:
                os.kill(link.pid or 0, signal.SIGUSR1)
            except ProcessLookupError:
                continue
        self._wait_until(lambda: all(link.stack_file.stat().st_size for link in stuck), STACK_SECONDS / 2)
        states = []
        for link in self._ranks:
            where = link.where or {"frames": failures.frames_in(link.stack_file), "waiting": None}
            live = link.state in ("starting", "running")
            state = "died" if link.state == "failed" else link.state
            states.append(
                failures.state_of(link.rank, state, where["frames"], where["waiting"])
                if live
                else RankState(link.rank, state)
            )
        return failures.worker_timeout(patience, states, self._logs)

    def _wait_until(self, reached: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not reached() and time.monotonic() < deadline and not self._server_gone:
            self._wait(min(0.05, max(0.0, deadline - time.monotonic())))

    def _release(self) -> None:
        """Let the ranks go: all have reported, so none can break off another one's conversation."""
        for link in self._ranks:
            self._send(link, protocol.frame(protocol.RELEASE))
        self._wait_until(lambda: self._server_gone, LEAVE_SECONDS)

    def _clean_up(self) -> None:
        """End what is left and wait until it is gone; the server goes on with it if an interrupt ends the wait."""
        try:
            if self._leash is not None and not self._server_gone:
                self._leash.shutdown(socket.SHUT_WR)
                self._wait_until(lambda: self._server_gone, 3 * LEAVE_SECONDS)
            for link in self._ranks:
                self._drain(link)
            self._console.close()
        finally:
            self._selector.close()
            if self._relay is not None:
                self._relay.close()
            if self._leash is not None:
                self._leash.close()
            for link in self._ranks:
                link.control.close()
                os.close(link.output)
                link.lane.close()

    def _drain(self, link: _RankLink) -> None:
        while link.output in self._selector.get_map():
            before = time.monotonic()
            self._on_output(link, selectors.EVENT_READ)
            if self._last_progress < before:  # nothing more to read
                break
        self._console.show(link.rank, link.lane.close())

    def _result(self) -> Run:
        return Run(
            results=[self._value_of(link) for link in self._ranks],
            logs=self._logs,
            backend=self._backend,
            notes=self._notes,
            seconds=[link.report["seconds"] for link in self._ranks],
            trace=self._trace(),
        )

    def _value_of(self, link: _RankLink) -> Any:
        try:
            return plain.decode(link.value) if self._request.judged else pickle.loads(link.value)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            failure = failures.Failure(link.rank, "result", time.monotonic(), link.report["type"], text)
            raise failures.worker_failed([failure], self._request.nprocs, self._logs) from None

    def _trace(self) -> Trace | None:
        if self._relay is not None:
            return trace_of(self._relay.recorded)
        return trace_of([link.report["events"] for link in self._ranks]) if self._request.trace else None


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port that stays ours: bound here without listening, so that rank 0 alone can share it (SO_REUSEADDR)."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _receive_or_nothing(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


def _loopback() -> str:
    return "lo" if sys.platform.startswith("linux") else "lo0"


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody deleted it
        return None
