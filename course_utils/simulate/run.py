"""The call of a simulation, and what it returns."""

from __future__ import annotations

import copy
import inspect
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, cast

from ..errors import AnswerNeeded, BadRequest, RankState, WorkerFailed, WorkerTimeout
from ..launcher import Link, failures
from ..launcher.tracing import Trace
from .record import RECEIVED, SEND, Messages, Record
from .steps import Steps, states_by_round
from .timing import Schedule, replay

MAX_RANKS = 1_024
SHOWN_STATES = 16
SHOWN_LINES = 500
SENDS = ("rendezvous", "buffered")


class SimulatedRun:
    """What a simulated run did. Like the Run of a launch it has `results`, `logs`, `notes` and `trace`.

    `results` holds one value per rank, `logs` what each rank printed, `notes` what deserves a second look, such as
    messages that nobody received.
    """

    def __init__(
        self,
        results: list[Any],
        logs: list[str],
        notes: list[str],
        record: Record,
        buffered: bool,
        watch: str | None,
        seen: list[list[tuple[int, Any]]],
    ) -> None:
        self.results = results
        self.logs = logs
        self.notes = notes
        self._record = record
        self._buffered = buffered
        self._watch = watch
        self._seen = seen

    @property
    def rounds(self) -> int:
        """The longest chain of messages that had to arrive one after the other, as a traced launch counts it."""
        return max(self._record.rounds, default=0)

    @cached_property
    def messages(self) -> Messages:
        """Every message, by round, then by the rank that sent it."""
        return Messages(self._record)

    @cached_property
    def messages_sent(self) -> list[int]:
        """How many messages each rank sent; collectives are not counted."""
        return [sum(action % 8 == SEND for action in actions) for actions in self._record.actions]

    @cached_property
    def messages_received(self) -> list[int]:
        """How many messages each rank received."""
        return [sum(action % 8 == RECEIVED for action in actions) for actions in self._record.actions]

    @cached_property
    def bytes_sent(self) -> list[int]:
        """How many bytes each rank sent; collectives are not counted."""
        sizes = self._record.sizes
        return [sum(sizes[a // 8] for a in actions if a % 8 == SEND) for actions in self._record.actions]

    @cached_property
    def bytes_received(self) -> list[int]:
        """How many bytes each rank received."""
        sizes, rooms = self._record.sizes, self._record.rooms
        return [
            sum(rooms.get(a // 8, sizes[a // 8]) for a in actions if a % 8 == RECEIVED)
            for actions in self._record.actions
        ]

    @cached_property
    def trace(self) -> Trace:
        """What `launch(..., trace=True)` gives, with equal counts; round k lasts from "second" k - 1 to k."""
        return self._record.trace()

    @cached_property
    def steps(self) -> Steps:
        """The run for a cell to show: `run.steps` all of it, `run.steps[k]` how things stand after round k."""
        states = [states_by_round(seen, self.rounds) for seen in self._seen] if self._watch else None
        return Steps(self.messages, self._record.nprocs, self.rounds, self._watch, states)

    def schedule(self, link: Link) -> Schedule:
        """Return when each message would have travelled over `link`, and when each rank would have been done.

        The model is Hockney's (1994) on single-ported ranks, as in Thakur, Rabenseifner and Gropp (2005): a message of
        S bytes takes latency + S / bandwidth seconds, during which it holds its sender's port out and its receiver's
        port in. Computing takes no time; a collective takes `link.seconds_of` from when the last rank joined.

        Note:
            The emulated link of `launch` has no port in, and lets a sender's next message follow before the first has
            arrived. Both agree wherever a rank sends and receives one message at a time, as in ring, tree and
            halving-doubling; the naive all-reduce comes out slower here.

        Example:
            >>> run_simulated(ring, torch.ones(1000), nprocs=8).schedule(Link(latency=1e-3, bandwidth=1e9)).seconds
            0.014007
        """
        return replay(self._record, self.messages.numbers, self._buffered, link)

    def __repr__(self) -> str:
        sent = len(self._record.rounds)
        return f"<{self._record.nprocs} simulated ranks: {sent} messages in {self.rounds} rounds>"


def run_simulated(
    fn: Callable[..., Any],
    *args: Any,
    nprocs: int = 2,
    send: str = "rendezvous",
    watch: str | None = None,
    timeout: float = 120.0,
    **kwargs: Any,
) -> SimulatedRun:
    """Run `fn(*args, **kwargs)` in `nprocs` simulated ranks inside this process.

    fn is what `launch` takes: inside, torch.distributed's get_rank, get_world_size, send, recv, isend, irecv,
    batch_isend_irecv, all_reduce, broadcast, all_gather and barrier work on the simulated ranks. Each rank gets copies
    of the arguments and a random state of torch's of its own; the notebook's other variables, and the random states of
    Python and NumPy, are shared. RANK and WORLD_SIZE are not set. Ranks take turns in an order that depends on nothing
    but what they do, so that a run can be repeated.

    Args:
        fn: The function that each rank runs.
        nprocs: Number of ranks, 1 to 1,024.
        send: "rendezvous": a send is done when its receiver has the message, so two ranks that both send first wait
            for each other forever. "buffered": the message is copied aside, and the sender goes on, as a network may
            do for short messages.
        watch: Name of a variable of fn (or of what it calls) whose value `run.steps` shows after each round. It is
            copied at each message: meant for a handful of ranks.
        timeout: Seconds without a message or a change of turn after which the run is given up.

    Raises:
        BadRequest: The call cannot be carried out.
        WorkerFailed: A rank raised; the error names it.
        WorkerTimeout: The ranks wait for each other (seen at once), or one computes without end. `.states` says where
            each rank stands.

    Example:
        >>> run = run_simulated(ring_all_reduce, torch.arange(8.0), nprocs=4, watch="chunks")
        >>> run.rounds
        6
    """
    _check(fn, args, kwargs, nprocs, send, watch, timeout)
    import torch

    from .interface import standing_in
    from .world import World

    threads = torch.get_num_threads()
    with standing_in([fn, *args, *kwargs.values()]) as stand_in_for, _printing(nprocs) as logs:
        calls = _calls(_with_stand_in(fn, stand_in_for), args, kwargs, nprocs)
        world = World(nprocs, send == "buffered", watch or "")
        random = torch.get_rng_state()
        torch.set_num_threads(1)  # each rank is a thread, and would otherwise bring helpers of its own
        try:
            in_time = world.run(calls, timeout)
            states = world.states() if not in_time or world.outcome == "deadlock" else []
        finally:
            world.stop()
            torch.set_num_threads(threads)
            torch.set_rng_state(random)
    if world.failed is not None and world.failed.failure is not None:
        raise _failure(world.failed.number, world.failed.failure, nprocs, logs) from None
    if not in_time:
        raise failures.worker_timeout(timeout, states[:SHOWN_STATES], logs)
    if world.outcome == "deadlock":
        awaited = {rank.number: rank.waiting.awaited() for rank in world.ranks if rank.waiting is not None}
        raise _deadlock(states, awaited, logs)
    return SimulatedRun(
        [rank.result for rank in world.ranks],
        logs,
        _notes([(one.rank.number, one.peer, one.tensor.numel()) for one in world.never_received()]),
        world.record,
        send == "buffered",
        watch,
        [rank.seen for rank in world.ranks],
    )


def _check(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], nprocs: Any, send: Any, watch: Any, timeout: Any
) -> None:
    if not callable(fn):
        raise BadRequest(f"run_simulated needs a function to run, and got {fn!r}")
    for given in (fn, *args, *kwargs.values()):
        refuse = getattr(type(given), "__refuse_launch__", None)
        if refuse is not None:
            refuse(given)
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or not 1 <= nprocs <= MAX_RANKS:
        raise BadRequest(f"nprocs={nprocs!r}: it takes a whole number of ranks from 1 to {MAX_RANKS:,}")
    if send not in SENDS:
        raise BadRequest(f"send={send!r}: it takes 'rendezvous' or 'buffered'")
    if watch is not None and (not isinstance(watch, str) or not watch.isidentifier()):
        raise BadRequest(f"watch={watch!r}: it takes the name of a variable, such as watch='chunks'")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise BadRequest(f"timeout={timeout!r}: it takes the seconds to wait without progress, a positive number")
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        options = "run_simulated itself takes nprocs, send, watch and timeout"
        raise BadRequest(
            f"{name}{inspect.signature(fn)} cannot be called with these arguments: {error}; {options}"
        ) from None
    except ValueError:  # a built-in function that does not tell what it takes
        return


def _with_stand_in(fn: Callable[..., Any], stand_in_for: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function itself, with a stand-in where it is torch.distributed's own, such as dist.get_rank."""
    if isinstance(fn, partial):
        return partial(_with_stand_in(fn.func, stand_in_for), *fn.args, **fn.keywords)
    return cast("Callable[..., Any]", stand_in_for(fn))


def _calls(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], nprocs: int
) -> list[Callable[[], Any]]:
    calls: list[Callable[[], Any]] = []
    for _ in range(nprocs):
        try:
            own_args, own_kwargs = copy.deepcopy((args, kwargs))
        except Exception as error:
            raise BadRequest(f"each rank needs a copy of the arguments, and one cannot be copied: {error}") from None
        calls.append(partial(fn, *own_args, **own_kwargs))
    return calls


class _Lanes(io.TextIOBase):
    """Standard output while a simulation runs: what a rank prints gets its rank in front, line by line."""

    def __init__(self, behind: Any, nprocs: int) -> None:
        self.logs = [""] * nprocs
        self._behind = behind
        self._begun = [""] * nprocs  # the line that a rank has not finished
        self._shown = 0

    def write(self, text: str) -> int:
        from .world import here

        rank = getattr(here, "rank", None)
        if rank is None:
            self._behind.write(text)
        else:
            self.logs[rank.number] += text
            *lines, self._begun[rank.number] = (self._begun[rank.number] + text).split("\n")
            for line in lines:
                self._show(rank.number, line)
        return len(text)

    def flush(self) -> None:
        self._behind.flush()

    def finish(self) -> None:
        """Show the lines that were begun, and say what was left out."""
        for number, line in enumerate(self._begun):
            if line:
                self._show(number, line)
        if self._shown > SHOWN_LINES:
            self._behind.write(f"({self._shown - SHOWN_LINES:,} more lines; run.logs holds them all)\n")

    def _show(self, number: int, line: str) -> None:
        self._shown += 1
        if self._shown <= SHOWN_LINES:
            self._behind.write(f"[rank {number}] {line}\n")


@contextmanager
def _printing(nprocs: int) -> Iterator[list[str]]:
    """Put each rank's number before its lines; the list holds all that each printed."""
    behind = sys.stdout
    sys.stdout = lanes = _Lanes(behind, nprocs)
    try:
        yield lanes.logs
    finally:
        sys.stdout = behind
        lanes.finish()


def _failure(number: int, error: BaseException, nprocs: int, logs: Sequence[str]) -> WorkerFailed | AnswerNeeded:
    if isinstance(error, AnswerNeeded):  # what shows "answer needed" in a lesson waits for this one
        return error
    told = failures.describe(error)
    failure = failures.Failure(number, told["kind"], told["time"], told["type"], told["message"], tuple(told["chain"]))
    return failures.worker_failed([failure], nprocs, logs)


def _deadlock(states: list[RankState], awaited: dict[int, list[int]], logs: Sequence[str]) -> WorkerTimeout:
    lines = [f"  {state}" for state in states[:SHOWN_STATES]]
    if len(states) > SHOWN_STATES:
        lines.append(f"  and {len(states) - SHOWN_STATES:,} more ranks")
    message = "\n".join(["deadlock: every rank that has not returned waits for another", *lines, _why(awaited)])
    return WorkerTimeout(message, seconds=0.0, states=states, logs=logs)


def _why(awaited: dict[int, list[int]]) -> str:
    """Follow who waits for whom, from the first rank that waits, to a rank that has returned or around a circle."""
    path = [min(awaited)]
    while path[-1] in awaited and path.count(path[-1]) == 1:
        path.append(awaited[path[-1]][0])
    if path[-1] not in awaited:
        return f"rank {path[-2]} waits for rank {path[-1]}, which has returned"
    circle = path[path.index(path[-1]) :]
    names = [str(rank) for rank in (circle if len(circle) <= 9 else [*circle[:4], "...", *circle[-3:]])]
    return f"they wait in a circle: rank {' -> '.join(names)}"


def _notes(lost: list[tuple[int, int, int]]) -> list[str]:
    if not lost:
        return []
    source, destination, elements = lost[0]
    first = f"{elements:,} element{'s' * (elements != 1)} from rank {source} to rank {destination}"
    if len(lost) == 1:
        return [f"a message was sent and never received: {first}"]
    return [f"{len(lost):,} messages were sent and never received, the first {first}"]
