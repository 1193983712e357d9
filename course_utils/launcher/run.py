"""`launch`: one call in new ranks, from what the learner writes to what came of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from .links import Link
from .output import Logs, reprint
from .requests import OPTIONS, Request, judged, refuse_ambiguous, understand
from .sending import pack
from .session import Outcome, ServerGone, Session
from .tracing import Trace

Parameters = ParamSpec("Parameters")


@dataclass(frozen=True, repr=False)
class Run:
    """What came of a launch.

    `results` holds the value of every rank, `logs` all that each printed, `seconds` how long each spent in the
    function. `backend` is what was used ("gloo", "nccl", or None where no process group was set up), `notes` what was
    degraded, in words, `trace` the messages of each rank if the run was traced. With roles, `by_role` holds the values
    of each role's ranks; where the chief's return ended the run, ranks that had not returned have None.
    """

    results: list[Any]
    logs: Logs
    backend: str | None
    notes: list[str]
    seconds: list[float | None]
    trace: Trace | None = None
    by_role: dict[str, list[Any]] = field(default_factory=dict)

    def show(self, rank: int | None = None) -> None:
        """Print all that one rank printed, or that every rank did, one rank after the other.

        Raises IndexError for a rank that the run did not have.
        """
        count = len(self.logs)
        if rank is not None and rank not in range(count):
            raise IndexError(f"there is no rank {rank}: the run had ranks 0 to {count - 1}")
        for which in range(count) if rank is None else (rank,):
            reprint(which, self.logs[which])

    def __repr__(self) -> str:
        ranks = f"{len(self.results)} rank{'s' * (len(self.results) != 1)}"
        over = f" over {self.backend}" if self.backend else ""
        return f"<Run of {ranks}{over}: see .results, .logs, .seconds, .notes{', .trace' if self.trace else ''}>"


def run_of(request: Request, outcome: Outcome) -> Run:
    """A Run from what a session's call left."""
    by_role: dict[str, list[Any]] = {}
    if request.has_roles:
        for task, value in zip(request.tasks, outcome.values, strict=True):
            by_role.setdefault(task.role, []).append(value)
    return Run(
        results=outcome.values,
        logs=outcome.logs,
        backend=outcome.backend,
        notes=outcome.notes,
        seconds=outcome.seconds,
        trace=outcome.trace,
        by_role=by_role,
    )


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
    roles: Mapping[str, int] | None = None,
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
        nprocs: the number of ranks, 1 to 64; with `roles`, what they add up to.
        framework: "torch" (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set and the process group is
            up before `fn`, unless init=False), "tensorflow" (TF_CONFIG is set), "horovod" (`hvd.init()` has been
            called, for horovod.torch and for horovod.tensorflow, whichever the function imports, unless init=False)
            or "python" (the variables alone).
        backend: "gloo", "nccl", "cpu:gloo,cuda:nccl", or None for NCCL where every rank has a GPU, else gloo.
        timeout: seconds without progress (no output, no message, no collective on any rank) before the run is ended.
        init: whether the ranks have met (process group, `hvd.init()`) before `fn` begins.
        roles: TensorFlow's tasks, such as {"chief": 1, "worker": 2, "ps": 1}: ranks are numbered in the order chief,
            worker, ps. With a "ps" the chief's return ends the run, since servers never return.
        link: a Link that slows messages down as such a network would; the run's notes say that its times are emulated.
        trace: count messages, bytes and rounds; see `Run.trace`.
        preload: further installed modules to hold in memory between launches.
        env: further environment variables for the ranks.

    Raises:
        BadRequest, NotSendable: before anything is started.
        WorkerFailed: a rank raised or died; names the first original failure, with its traceback.
        WorkerTimeout: no progress; says where each rank stands.

    Example:
        >>> launch(lambda: int(os.environ["RANK"]) ** 2, nprocs=3, framework="python").results
        [0, 1, 4]
    """
    request = understand(
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
        call=(fn, args, kwargs),
    )
    return _carry_out(request, fn, args, kwargs)


def launch_judged(
    fn: Callable[..., Any],
    *args: Any,
    nprocs: int,
    timeout: float,
    framework: str = "torch",
    init: bool = True,
    env: Mapping[str, str] | None = None,
    relayed: bool = True,
) -> Run:
    """Like `launch`, for answers that count: results come back as plain data (see `plain`), never pickled, and nothing
    is shown.

    With `relayed`, messages pass through this process, which counts them: `Run.trace` holds what really went from rank
    to rank. Ranks have send, recv, isend, irecv and barrier; other collectives refuse. Without it, for answers that may
    use every collective, ranks have gloo, and `Run.trace` is what they noted themselves. Ranks of another framework
    than torch move their tensors themselves, unseen: there is no trace, and `relayed` has to be False.

    Raises what `launch` raises.
    """
    options = understand(
        nprocs=nprocs,
        framework=framework,
        backend="gloo" if framework == "torch" else None,
        timeout=timeout,
        init=init,
        env=env,
        call=(fn, args, {}),
    )
    request = judged(options, relayed)
    return _carry_out(request, fn, args, {})


def _carry_out(request: Request, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    payload = pack(fn, args, kwargs)
    try:
        return run_of(request, Session(request).call(payload, last=True))
    except ServerGone as gone:
        if gone.begun:
            raise
    # it had ended before the ranks began: nothing has happened yet
    return run_of(request, Session(request).call(payload, last=True))
