"""The ranks of one simulated run: one has the turn at a time, and hands it on when it has to wait for a message.

A rank is a thread, so that its function needs no change. Exactly one of them runs, and which one comes next depends on
nothing but what the ranks did before. A message is moved when both its sides are there, straight from the sender's
tensor into the receiver's; with buffered sends it is copied first, and its sender goes on.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from ..errors import RankState
from ..launcher import failures
from .record import JOINED, LEFT, POSTED, SENT, UNMATCHED, Collective, Record
from .steps import as_plain

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_STACK_BYTES = 2**20
_VAIN_LOOKS = 1_000  # this often each rank may look at requests in vain, all others waiting, before that is a deadlock
_FAREWELL_SECONDS = 2.0
_LOOK_SECONDS = 0.5

here = threading.local()  # .rank: the simulated rank that the calling thread is


class Stopped(SystemExit):
    """The run is over for a rank that has not returned.

    It is a SystemExit, so that `except Exception` lets it pass and a thread ends on it without a word.
    """


class Rank:
    """One simulated rank: its thread, its turn, and where it stands."""

    def __init__(self, world: World, number: int, random: torch.Tensor) -> None:
        self.world = world
        self.number = number
        self.random = random  # the state of torch's generator while another rank has the turn
        self.turn = threading.Lock()
        self.turn.acquire()
        self.thread: threading.Thread | None = None
        self.state = "starting"
        self.waiting: Request | None = None
        self.result: Any = None
        self.failure: BaseException | None = None
        self.collectives = 0
        self.seen: list[tuple[int, Any]] = []  # (the latest round received from, the watched variable's value)


class Request:
    """What isend, irecv and collectives with async_op=True return: a rank waits for it, or looks whether it is done."""

    __slots__ = ("done", "error", "rank", "waited", "waiter")

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.done = False
        self.waited = False
        self.waiter: Rank | None = None
        self.error: Exception | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Wait until it is done. `timeout` changes nothing: that nobody will come is seen at once."""
        if self.rank.world.watch:
            self.rank.world.look(self.rank)
        self.complete()
        return True

    def complete(self) -> None:
        """Wait until it is done, and let its rank go on from there."""
        if not self.done:
            self.rank.world.park(self.rank, self)
        if self.error is not None:
            raise self.error
        if not self.waited:
            self.waited = True
            self.finish()

    def is_completed(self) -> bool:
        """Say whether it is done; if it is not, other ranks get their turn first."""
        world = self.rank.world
        if world.watch:
            world.look(self.rank)
        if not self.done:
            world.let_others(self.rank, self)
        return self.done

    def finish(self) -> None:
        """Note that its rank goes on from here."""
        raise NotImplementedError

    def label(self) -> str:
        """What its rank waits in."""
        raise NotImplementedError

    def awaited(self) -> list[int]:
        """The ranks that it waits for."""
        raise NotImplementedError


class Sending(Request):
    """A message on its way out."""

    __slots__ = ("number", "peer", "tensor")

    def __init__(self, rank: Rank, tensor: torch.Tensor, peer: int, number: int) -> None:
        super().__init__(rank)
        self.tensor = tensor
        self.peer = peer
        self.number = number

    def finish(self) -> None:
        self.rank.world.record.actions[self.rank.number].append(self.number * 8 + SENT)

    def label(self) -> str:
        return f"send to rank {self.peer}"

    def awaited(self) -> list[int]:
        return [self.peer]


class Receiving(Request):
    """A message that is expected, from one rank or (`peer` None) from any.

    The tensor is filled when its rank waits, not before: whoever reads it earlier reads what was there.
    """

    __slots__ = ("arrived", "number", "peer", "place", "tensor", "waits")

    def __init__(self, rank: Rank, tensor: torch.Tensor, peer: int | None, place: int, waits: bool) -> None:
        super().__init__(rank)
        self.tensor = tensor
        self.peer = peer
        self.place = place  # where among its rank's actions it was posted
        self.waits = waits  # its rank does nothing else until the message is there
        self.number = UNMATCHED
        self.arrived: torch.Tensor | None = None

    def arrive(self, sent: torch.Tensor, source: int) -> None:
        """Take what the sender has; it may change its tensor from now on."""
        into = self.tensor
        if sent.dtype is not into.dtype or sent.numel() > into.numel():
            self.error = ValueError(
                f"rank {source} sent {sent.numel()} elements of {sent.dtype}, and rank {self.rank.number} receives "
                f"into a tensor of {into.numel()} elements of {into.dtype}"
            )
        elif self.waits or self.waiter is not None:
            self._fill(sent)
        else:
            self.arrived = sent.clone()

    def finish(self) -> None:
        if self.arrived is not None:
            self._fill(self.arrived)
            self.arrived = None
        self.rank.world.record.take(self.number, self.tensor.nbytes)

    def _fill(self, sent: torch.Tensor) -> None:
        into = self.tensor.detach() if self.tensor.requires_grad else self.tensor
        if sent.shape == into.shape:
            into.copy_(sent)
        else:
            into.view(-1)[: sent.numel()].copy_(sent.view(-1))

    def label(self) -> str:
        return "recv from any rank" if self.peer is None else f"recv from rank {self.peer}"

    def awaited(self) -> list[int]:
        everyone = range(self.rank.world.nprocs)
        return [rank for rank in everyone if rank != self.rank.number] if self.peer is None else [self.peer]

    def _source_rank(self) -> int:
        return self.rank.world.record.sources[self.number]


class Joining(Request):
    """One rank's part in a collective."""

    __slots__ = ("meeting",)

    def __init__(self, rank: Rank, meeting: Meeting) -> None:
        super().__init__(rank)
        self.meeting = meeting

    def finish(self) -> None:
        self.rank.world.record.actions[self.rank.number].append(self.meeting.number * 8 + LEFT)

    def label(self) -> str:
        return self.meeting.op

    def awaited(self) -> list[int]:
        return [rank for rank in range(self.rank.world.nprocs) if rank not in self.meeting.brought]


class Meeting:
    """A collective that ranks join one by one; `settle` does it once all are there."""

    def __init__(self, op: str, number: int) -> None:
        self.op = op
        self.number = number
        self.brought: dict[int, Any] = {}
        self.requests: list[Joining] = []


class World:
    """Runs one function in `nprocs` simulated ranks. `outcome` is None, "done", "failed" or "deadlock"."""

    def __init__(self, nprocs: int, buffered: bool, watch: str) -> None:
        self.nprocs = nprocs
        self.watch = watch
        self.record = Record(nprocs)
        self.outcome: str | None = None
        self.stopping = False
        self.failed: Rank | None = None
        seed = int(torch.randint(2**62, ()))
        self.ranks = [
            Rank(self, number, torch.Generator().manual_seed(seed + number).get_state()) for number in range(nprocs)
        ]
        self._buffered = buffered
        self._ready = deque(self.ranks)
        self._unfinished = nprocs
        self._vain_looks = 0
        self._turns = 0
        self._over = threading.Event()
        self._sends: dict[tuple[int, int, int], deque[Sending]] = defaultdict(deque)  # by (from, to, tag)
        self._receives: dict[tuple[int | None, int, int], deque[Receiving]] = defaultdict(deque)
        self._from_anyone = False  # whether a receive from any rank was ever left waiting
        self._meetings: dict[tuple[int, str], Meeting] = {}  # by (how many came before, name)
        self._generator = torch.default_generator

    # ---- from outside

    def run(self, calls: Sequence[Callable[[], Any]], timeout: float) -> bool:
        """Run `calls[r]` as rank r until all have returned, one has failed or all hang; False if none had progress."""
        size_before = threading.stack_size(_STACK_BYTES)
        try:
            for rank, call in zip(self.ranks, calls, strict=True):
                name = f"course_utils-simulated-{rank.number}"
                rank.thread = threading.Thread(target=self._live, args=(rank, call), daemon=True, name=name)
                rank.thread.start()
        finally:
            threading.stack_size(size_before)
        self._ready.popleft().turn.release()
        seen, since = self._progress(), time.monotonic()
        while not self._over.wait(min(_LOOK_SECONDS, timeout)):
            if seen != self._progress():
                seen, since = self._progress(), time.monotonic()
            elif time.monotonic() - since >= timeout:
                return False
        return True

    def stop(self) -> None:
        """End every rank that has not returned: those that wait at once, one that computes at its next line."""
        self.stopping = True
        alive = [rank for rank in self.ranks if rank.thread is not None and rank.thread.is_alive()]
        for rank in alive:
            if rank.waiting is None and rank.state == "running":
                assert rank.thread is not None
                ident = ctypes.c_ulong(rank.thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Stopped))
            if rank.turn.locked():
                rank.turn.release()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for rank in alive:
            assert rank.thread is not None
            rank.thread.join(max(0.0, deadline - time.monotonic()))

    def states(self) -> list[RankState]:
        """Say where each rank stands."""
        stacks = sys._current_frames()
        return [self._state_of(rank, stacks) for rank in self.ranks]

    def never_received(self) -> list[Sending]:
        """The messages that nobody took, in the order in which they were sent."""
        return sorted((one for waiting in self._sends.values() for one in waiting), key=lambda one: one.number)

    # ---- from inside a rank

    def send(self, rank: Rank, tensor: torch.Tensor, peer: int, tag: int) -> Sending:
        """Start a message."""
        record, source = self.record, rank.number
        number = record.start(source, peer, tensor.numel(), tensor.nbytes, tag)
        request = Sending(rank, tensor, peer, number)
        receiver = self._receiver_of(source, peer, tag)
        if receiver is not None:
            self._move(request, receiver)
            return request
        if self._buffered:
            request.tensor = tensor.detach().clone()
            request.done = True
        self._sends[source, peer, tag].append(request)
        return request

    def receive(self, rank: Rank, tensor: torch.Tensor, peer: int | None, tag: int, waits: bool) -> Receiving:
        """Expect a message; with `waits`, the rank does nothing else until it is there."""
        actions = self.record.actions[rank.number]
        request = Receiving(rank, tensor, peer, len(actions), waits)
        actions.append(UNMATCHED)
        waiting = self._sends.get((peer, rank.number, tag)) if peer is not None else self._from_any(rank.number, tag)
        if waiting:
            self._move(waiting.popleft(), request)
        else:
            self._receives[peer, rank.number, tag].append(request)
            self._from_anyone = self._from_anyone or peer is None
        return request

    def join(self, rank: Rank, op: str, brought: Any, size: int, settle: Callable[[dict[int, Any]], None]) -> Joining:
        """Join the rank's next collective; the last one to come lets `settle` do it for all."""
        key = rank.collectives, op
        rank.collectives += 1
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(op, len(self.record.collectives))
            self.record.collectives.append(Collective(op, {}))
        request = Joining(rank, meeting)
        meeting.brought[rank.number] = brought
        meeting.requests.append(request)
        self.record.collectives[meeting.number].bytes[rank.number] = size
        self.record.actions[rank.number].append(meeting.number * 8 + JOINED)
        if len(meeting.brought) == self.nprocs:
            settle(meeting.brought)
            for one in meeting.requests:
                self._finish(one)
            del self._meetings[key]
        return request

    def park(self, rank: Rank, request: Request) -> None:
        """Give the turn away until the request is done."""
        request.waiter = rank
        rank.waiting = request
        self._hand_on(rank)
        rank.waiting = None

    def let_others(self, rank: Rank, request: Request) -> None:
        """Give the turn away once; if nothing happens in many such turns, nothing will."""
        self._vain_looks += 1
        rank.waiting = request
        if self._vain_looks <= _VAIN_LOOKS * self.nprocs:
            self._ready.append(rank)
        else:
            self._ready.clear()
        self._hand_on(rank)
        rank.waiting = None

    def look(self, rank: Rank) -> None:
        """Keep the watched variable's value as it is now in the learner's code."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not self._knows(frame):
            frame = frame.f_back
        if frame is not None:
            rank.seen.append((self.record.clocks[rank.number], as_plain(frame.f_locals[self.watch])))

    # ---- the turn

    def _live(self, rank: Rank, call: Callable[[], Any]) -> None:
        rank.turn.acquire()
        if self.stopping:
            return
        here.rank = rank
        rank.state = "running"
        self._generator.set_state(rank.random)
        try:
            if self.watch:
                sys.setprofile(lambda frame, event, _: self._look_at_last(rank, frame, event))
            rank.result = call()
        except BaseException as error:  # SystemExit too: whatever ends a rank early is told
            if not self.stopping:
                rank.failure = error
                self.failed = rank
                self._end("failed")
            return
        finally:
            rank.state = "returned" if rank.failure is None else "died"
        self._unfinished -= 1
        self._vain_looks = 0
        if self._ready:
            self._ready.popleft().turn.release()
        else:
            self._end("deadlock" if self._unfinished else "done")

    def _hand_on(self, rank: Rank) -> None:
        if self._ready:
            self._turns += 1
            following = self._ready.popleft()
            if following is rank:
                return
            rank.random = self._generator.get_state()
            following.turn.release()
        else:
            self._end("deadlock")
        rank.turn.acquire()
        if self.stopping:
            raise Stopped
        self._generator.set_state(rank.random)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self._over.set()

    def _progress(self) -> tuple[int, int]:
        return self._turns, len(self.record.rounds)

    def _state_of(self, rank: Rank, stacks: dict[int, FrameType]) -> RankState:
        assert rank.thread is not None
        frames = failures.frames_of(stacks.get(rank.thread.ident or 0)) if rank.state == "running" else ()
        return failures.state_of(rank.number, rank.state, frames, rank.waiting.label() if rank.waiting else None)

    # ---- messages

    def _receiver_of(self, source: int, peer: int, tag: int) -> Receiving | None:
        """Take the receive that this message belongs to: the first posted of those from its sender or from anyone."""
        named = self._receives.get((source, peer, tag))
        anyone = self._receives.get((None, peer, tag)) if self._from_anyone else None
        if named and (not anyone or named[0].place < anyone[0].place):
            return named.popleft()
        return anyone.popleft() if anyone else None

    def _from_any(self, receiver: int, tag: int) -> deque[Sending] | None:
        waiting = [self._sends.get((source, receiver, tag)) for source in range(self.nprocs)]
        return min((one for one in waiting if one), key=lambda one: one[0].number, default=None)

    def _move(self, sending: Sending, receiving: Receiving) -> None:
        receiving.number = number = sending.number
        self.record.actions[receiving.rank.number][receiving.place] = number * 8 + POSTED
        sent = sending.tensor.detach() if sending.tensor.requires_grad else sending.tensor
        receiving.arrive(sent, sending.rank.number)
        self.record.keep(number, sent)
        self._finish(sending)
        self._finish(receiving)

    def _finish(self, request: Request) -> None:
        self._vain_looks = 0
        request.done = True
        if request.waiter is not None:
            self._ready.append(request.waiter)
            request.waiter = None

    # ---- the watched variable

    def _knows(self, frame: FrameType) -> bool:
        return self._names(frame.f_code) and self.watch in frame.f_locals

    def _names(self, code: CodeType) -> bool:
        named = self.watch in code.co_varnames or self.watch in code.co_cellvars
        return named and not code.co_filename.startswith(_PACKAGE)

    def _look_at_last(self, rank: Rank, frame: FrameType, event: str) -> None:
        if event == "return" and not self.stopping and self._knows(frame):
            rank.seen.append((self.record.clocks[rank.number], as_plain(frame.f_locals[self.watch])))
