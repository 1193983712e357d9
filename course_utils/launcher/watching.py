"""What a rank does on the wire, seen from inside it: where it waits, whether it makes progress, what it sent.

torch.distributed's Python functions end in methods of ProcessGroup and in Work.wait. Those are wrapped here, so that
every collective and every message leaves a mark, whoever starts the process group. DDP's reducer calls the group from
C++ and does not pass through them: its progress shows in the group's sequence number, and a traced run (`trace=True`),
or one over an emulated link, gives it a process group written in Python, through which it has to go.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .links import Port

TRACED_BACKEND = "traced"
_CALLBACKS_TAKE = 5.0  # seconds at most until the callback of a future that is done has run

# ProcessGroup's method -> (the name learners know, which argument holds this rank's own data, which one the peer)
_METHODS: dict[str, tuple[str, int, int | None]] = {
    "send": ("send", 0, 1),
    "recv": ("recv", 0, 1),
    "recv_anysource": ("recv", 0, None),
    "allreduce": ("all_reduce", 0, None),
    "allreduce_coalesced": ("all_reduce_coalesced", 0, None),
    "broadcast": ("broadcast", 0, None),
    "reduce": ("reduce", 0, None),
    "allgather": ("all_gather", 1, None),
    "allgather_coalesced": ("all_gather_coalesced", 1, None),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", 1, None),
    "all_gather_single_coalesced": ("all_gather_into_tensor", 1, None),
    "_allgather_base": ("all_gather_into_tensor", 1, None),
    "all_gather_single": ("all_gather_into_tensor", 1, None),
    "gather": ("gather", 1, None),
    "scatter": ("scatter", 1, None),
    "reduce_scatter": ("reduce_scatter", 1, None),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1, None),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1, None),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", 1, None),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", 1, None),
    "alltoall": ("all_to_all", 1, None),
    "alltoall_base": ("all_to_all_single", 1, None),
    "all_to_all_single": ("all_to_all_single", 1, None),
    "barrier": ("barrier", 0, None),
    "monitored_barrier": ("monitored_barrier", 0, None),
}


@dataclass(frozen=True)
class _Operation:
    """Something started on the wire: what is recorded of it, and what tells until when a link holds it back."""

    event: dict[str, Any]
    may_end_at: Callable[[], float] | None


class Watch:
    """Everything seen on the wire by one rank; one a process, installed once."""

    def __init__(self, trace: bool, port: Port | None = None) -> None:
        self._port = port
        self._epoch = 0.0
        self._trace = trace
        self._events: list[dict[str, Any]] = []
        self._works: weakref.WeakKeyDictionary[Any, _Operation] = weakref.WeakKeyDictionary()
        self._waiting: dict[int, list[str]] = {}  # thread -> what it is in, innermost last
        self._unnoted: dict[int, Any] = {}  # where only C++ waits: event -> the future that tells its end
        self._steps = 0
        self._finishing = threading.Lock()

    def install(self) -> None:
        """Wrap ProcessGroup's operations and Work.wait in this process."""
        for method in _METHODS:
            if hasattr(dist.ProcessGroup, method):  # names differ between torch versions
                setattr(dist.ProcessGroup, method, self.watched(method, getattr(dist.ProcessGroup, method)))
        dist.Work.wait = self.watched_wait(dist.Work.wait)
        if self._trace or self._port:
            dist.Backend.register_backend(TRACED_BACKEND, self._traced_group, devices=["cpu"])

    def next_call(self, epoch: float) -> None:
        """Begin to record anew; the times of events count from `epoch`."""
        self._epoch = epoch
        self._events = []

    def progress(self) -> int:
        """Return a number that changes whenever this rank starts or finishes anything on the wire."""
        steps = self._steps
        for group in list(dist.distributed_c10d._world.pg_map):
            try:
                steps += group._get_sequence_number_for_group()
            except RuntimeError:  # a backend that keeps no sequence number
                continue
        return steps

    def waits_in(self, thread: int) -> str | None:
        """Return what `thread` is blocked in, such as "all_reduce" or "recv from rank 0", or None."""
        inside = self._waiting.get(thread)
        return inside[-1] if inside else None

    def events(self) -> list[dict[str, Any]]:
        """Return what was recorded under trace=True, in the order it was started."""
        deadline = time.monotonic() + _CALLBACKS_TAKE
        for event, future in list(self._unnoted.items()):  # DDP goes on when it is done, its callback may be late
            while future.done() and event in self._unnoted and time.monotonic() < deadline:
                time.sleep(0.001)
        return self._events

    def watched_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return Work.wait, or a subclass's, so that it tells where this rank waits and when that ends."""

        def watched(work: Any, *args: Any, **kwargs: Any) -> Any:
            operation = self._works.get(work)
            if operation is None or operation.event["finished"] is not None:
                return wait(work, *args, **kwargs)
            with self._within(operation.event):
                finished = wait(work, *args, **kwargs)
                self._finish(operation, work)
            return finished

        return watched

    def watched(self, method: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        """Return an operation of ProcessGroup, or of a subclass, so that it leaves its mark."""
        name, own, peer_at = _METHODS[method]

        def watched(group: Any, *args: Any, **kwargs: Any) -> Any:
            event = {
                "op": name,
                "peer": None if peer_at is None else _global_rank(group, args[peer_at]),
                "bytes": _bytes_of(args[own]) if len(args) > own else 0,
                "tag": args[-1] if name in ("send", "recv") and isinstance(args[-1], int) else None,
                "group": _name_of(group),
                "start": time.monotonic() - self._epoch,
                "end": None,
                "started": self._step(),
                "finished": None,
            }
            if self._trace:
                self._events.append(event)
            may_end_at = self._port.started(event, _global_ranks(group)) if self._port else None
            started = _Operation(event, may_end_at)
            with self._within(event):
                work = operation(group, *args, **kwargs)
                if not isinstance(work, dist.Work):
                    self._finish(started, None)
            if isinstance(work, dist.Work):
                self._works[work] = started
                if self._trace and name not in ("send", "recv", "barrier"):
                    self._note_the_end(event, work)
            return work

        return watched

    def _note_the_end(self, event: dict[str, Any], work: Any) -> None:
        """Record when a collective is done also where only C++ waits for it, as DDP's reducer does."""

        def done(_: Any) -> None:
            with self._finishing:
                if event["end"] is None:
                    event["end"] = time.monotonic() - self._epoch
            self._unnoted.pop(id(event), None)

        with contextlib.suppress(RuntimeError):  # gloo has no future for reduce_scatter
            self._unnoted[id(event)] = future = work.get_future()
            future.add_done_callback(done)

    def _finish(self, operation: _Operation, work: Any) -> None:
        event = operation.event
        if event["op"] == "recv" and event["peer"] is None:
            event["peer"] = work._source_rank()
        if operation.may_end_at is not None:
            time.sleep(max(0.0, operation.may_end_at() - time.monotonic()))
        with self._finishing:  # over a link two threads wait for a collective; it ends for the first one
            if event["finished"] is None:
                event["end"] = time.monotonic() - self._epoch
                event["finished"] = self._step()

    def _step(self) -> int:
        self._steps += 1
        return self._steps

    @contextlib.contextmanager
    def _within(self, event: dict[str, Any]) -> Iterator[None]:
        label = event["op"]
        if label in ("send", "recv"):
            direction = "to" if label == "send" else "from"
            label += f" {direction} {'any rank' if event['peer'] is None else 'rank ' + str(event['peer'])}"
        inside = self._waiting.setdefault(threading.get_ident(), [])
        inside.append(label)
        try:
            yield
        finally:
            inside.pop()

    def _traced_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        """A process group in Python around gloo: C++ callers such as DDP's reducer pass through it and are seen."""
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        gloo._set_sequence_number_for_group()
        group = TracedGroup(rank, size)
        group.inner = dist.ProcessGroup(store, rank, size)
        group.held_back = HeldBack() if self._port else None
        for either in (group, group.inner):  # C++ asks the outer group, too, for its backend's name and options
            either._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            either._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group


class HeldBack:
    """Finishes the collectives of one group when the emulated link lets them, one after the other, for those who do not
    call `wait` in Python: DDP's reducer waits for the future of the work.
    """

    def __init__(self) -> None:
        self._pending: queue.SimpleQueue[DelayedWork] = queue.SimpleQueue()
        threading.Thread(target=self._finish_each, daemon=True, name="course_utils-held-back").start()

    def until_due(self, work: dist.Work) -> DelayedWork:
        """Return a work that is done when `work` is, and not before the link allows it."""
        delayed = DelayedWork(work)
        self._pending.put(delayed)
        return delayed

    def _finish_each(self) -> None:
        while True:
            self._pending.get().finish()


class DelayedWork(dist.Work):
    """A collective over an emulated link. `work` is the real one, whose `wait` is watched and takes the link's time."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work
        self._done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def finish(self) -> None:
        """Wait for the real work and the link, then tell all who wait."""
        try:
            self._work.wait()
            self._done.set_result(self.result())
        except Exception as error:
            self._done.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()  # watched: a report of a hang says what this thread waits in
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._done.done())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._done

    def result(self) -> list[torch.Tensor]:
        try:
            value: list[torch.Tensor] = self._work.get_future().value()
        except RuntimeError:  # gloo has no future for reduce_scatter; its result lies in the caller's tensors
            return []
        return value


class TracedGroup(dist.ProcessGroup):
    """Passes every operation on to `inner`, whose methods are watched."""

    inner: dist.ProcessGroup
    held_back: HeldBack | None = None  # over an emulated link: what finishes collectives late

    def getBackendName(self) -> str:
        return "gloo"


def _passed_on(method: str) -> Callable[..., Any]:
    is_message = _METHODS[method][0] in ("send", "recv")

    def operation(self: TracedGroup, *args: Any, **kwargs: Any) -> Any:
        work = getattr(self.inner, method)(*args, **kwargs)
        if self.held_back is None or is_message or not isinstance(work, dist.Work):
            return work
        return self.held_back.until_due(work)

    return operation


for _method in _METHODS:
    if hasattr(dist.ProcessGroup, _method):
        setattr(TracedGroup, _method, _passed_on(_method))


def _bytes_of(data: Any) -> int:
    if isinstance(data, torch.Tensor):
        return data.numel() * data.element_size()
    if isinstance(data, list | tuple):
        return sum(_bytes_of(part) for part in data)
    return 0


def _global_rank(group: Any, rank: int) -> int:
    ranks = dist.distributed_c10d._world.pg_group_ranks.get(group, {})
    return next((whole for whole, part in ranks.items() if part == rank), rank)


def _global_ranks(group: Any) -> list[int]:
    return sorted(dist.distributed_c10d._world.pg_group_ranks.get(group, range(group.size())))


def _name_of(group: Any) -> str:
    try:
        return str(group.group_name)
    except RuntimeError:  # not named yet
        return ""
