"""An emulated link between ranks: messages take the time that a slower network would need.

Loopback is so fast that overlap, buckets and compression look pointless on one machine. A link holds each message back
until it would have arrived. What is computed is real and what is sent is real; only the waiting is emulated.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import BadRequest

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Link:
    """A link of `latency` seconds a message and `bandwidth` bytes a second, the same for each pair of ranks.

    Every rank has one port out: its messages leave one after the other. A message of S bytes that is sent at time t
    arrives at max(t, port free) + S / bandwidth + latency (Hockney's model, 1994). A collective is charged what a
    ring (or, for broadcast, reduce and barrier, a binomial tree) of such messages would take from the moment the last
    rank has joined.

    Raises BadRequest for a negative latency or a bandwidth that is not positive.

    Example:
        >>> Link(latency=1e-3, bandwidth=1e9).seconds(1_000_000)
        0.002
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise BadRequest(f"Link({name}={value!r}): it takes a number")
        if not 0 <= self.latency < math.inf:
            raise BadRequest(f"Link(latency={self.latency!r}): it takes seconds, zero or more")
        if not 0 < self.bandwidth <= math.inf:
            raise BadRequest(f"Link(bandwidth={self.bandwidth!r}): it takes bytes per second, more than zero")

    def seconds(self, size: int) -> float:
        """Return how long one message of `size` bytes takes."""
        return self.latency + size / self.bandwidth

    def seconds_of(self, collective: str, size: int, ranks: int) -> float:
        """Return how long a collective takes to which each of `ranks` brings `size` bytes."""
        if ranks == 1:
            return 0.0
        steps, part = {
            "all_reduce": (2 * (ranks - 1), size / ranks),
            "all_reduce_coalesced": (2 * (ranks - 1), size / ranks),
            "reduce_scatter": (ranks - 1, size / ranks),
            "reduce_scatter_tensor": (ranks - 1, size / ranks),
            "all_to_all": (ranks - 1, size / ranks),
            "all_to_all_single": (ranks - 1, size / ranks),
            "broadcast": (math.ceil(math.log2(ranks)), size),
            "reduce": (math.ceil(math.log2(ranks)), size),
            "barrier": (2 * math.ceil(math.log2(ranks)), 0),
            "monitored_barrier": (2 * math.ceil(math.log2(ranks)), 0),
        }.get(collective, (ranks - 1, size))
        return steps * (self.latency + part / self.bandwidth)

    def __str__(self) -> str:
        return f"latency {self.latency:g} s, bandwidth {self.bandwidth:g} bytes/s"


@dataclass
class _Collective:
    seconds: float
    end: float | None = None


class Port:
    """One rank's end of the emulated link.

    Ranks tell each other when a message left through datagrams beside the real messages, so that the receiver knows
    until when to hold it back.
    """

    def __init__(self, link: Link, rank: int, folder: str) -> None:
        self._link = link
        self._rank = rank
        self._folder = folder
        self._free_at = 0.0
        self._collectives: dict[str, list[_Collective]] = defaultdict(list)  # by group, in order
        self._told: dict[tuple[Any, ...], list[float]] = defaultdict(list)  # what others said, in their order
        self._taken: dict[tuple[Any, ...], int] = defaultdict(int)
        self._news = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address(rank))
        threading.Thread(target=self._listen, daemon=True, name="course_utils-link").start()

    def started(self, event: dict[str, Any], ranks: list[int]) -> Callable[[], float]:
        """Take note of an operation that starts now; return what tells, once it is done, when it may end."""
        now = time.monotonic()
        if event["op"] == "send":
            left = self._leave(now, event["bytes"])
            self._tell(event["peer"], ["message", self._rank, event["tag"], event["group"]], left + self._link.latency)
            return lambda: left
        if event["op"] == "recv":
            return self._arrival(event)
        return self._collective(event, max(now, self._free_at), ranks)

    def _leave(self, now: float, size: int) -> float:
        self._free_at = max(now, self._free_at) + size / self._link.bandwidth
        return self._free_at

    def _arrival(self, event: dict[str, Any]) -> Callable[[], float]:
        def key() -> tuple[Any, ...]:
            return "message", event["peer"], event["tag"], event["group"]

        turn = self._turn(key()) if event["peer"] is not None else None  # from any rank: known when it is there
        return lambda: self._heard(key(), self._turn(key()) if turn is None else turn)

    def _collective(self, event: dict[str, Any], joined: float, ranks: list[int]) -> Callable[[], float]:
        group = event["group"]
        so_far = self._collectives[group]
        so_far.append(_Collective(self._link.seconds_of(event["op"], event["bytes"], len(ranks))))
        mine = len(so_far) - 1
        for rank in ranks:
            self._tell(rank, ["joined", self._rank, group], joined)

        def end() -> float:
            free = 0.0
            for turn, one in enumerate(so_far[: mine + 1]):  # a group's collectives go one after the other
                if one.end is None:
                    one.end = max(free, *(self._heard(("joined", rank, group), turn) for rank in ranks)) + one.seconds
                free = one.end
            self._free_at = max(self._free_at, free)
            return free

        return end

    def _turn(self, key: tuple[Any, ...]) -> int:
        self._taken[key] += 1
        return self._taken[key] - 1

    def _tell(self, rank: int, key: list[Any], moment: float) -> None:
        self._socket.sendto(json.dumps([key, moment]).encode(), self._address(rank))

    def _heard(self, key: tuple[Any, ...], turn: int) -> float:
        with self._news:
            if not self._news.wait_for(lambda: len(self._told[key]) > turn, _PATIENCE_SECONDS):
                raise RuntimeError(f"the emulated link lost a message ({key})")
            return self._told[key][turn]

    def _listen(self) -> None:
        while True:
            key, moment = json.loads(self._socket.recv(4096))
            with self._news:
                self._told[tuple(key)].append(moment)
                self._news.notify_all()

    def _address(self, rank: int) -> str:
        return f"{self._folder}/link-{rank}"
