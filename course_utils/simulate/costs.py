"""What an all-reduce costs on paper, and the two constants of a real link, fitted to measured times.

A message of S bytes takes alpha + S * beta seconds (Hockney 1994, "The communication challenge for MPP: Intel Paragon
and Meiko CS-2", Parallel Computing 20): alpha is the link's latency, 1 / beta its bandwidth. A rank sends one message
and receives one at the same time, no more. The counts follow Thakur, Rabenseifner and Gropp (2005), "Optimization of
collective communication operations in MPICH", Int. J. High Performance Computing Applications 19(1), without the time
that adding takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BadRequest
from ..launcher import Link


@dataclass(frozen=True)
class Cost:
    """What an algorithm needs to all-reduce a tensor.

    `messages` and `bytes` are those that have to follow one another through a port, whoever's; the time is
    messages * alpha + bytes * beta. `rounds` is the longest chain of dependent messages, and `sent` the bytes that
    leave the rank that sends most.
    """

    algorithm: str
    messages: int
    bytes: float
    rounds: int
    sent: float

    def seconds(self, link: Link) -> float:
        """Return the time over `link`."""
        return self.messages * link.latency + self.bytes / link.bandwidth


def naive_cost(nprocs: int, size: int) -> Cost:
    """Everybody sends `size` bytes to rank 0, which adds and sends back to everybody: 2(N-1)(alpha + S beta).

    Only two rounds: what rank 0 receives does not depend on one another. It still goes through one port.
    """
    _check(nprocs, size)
    others = nprocs - 1
    return Cost("naive", 2 * others, 2.0 * others * size, 2 * min(others, 1), float(others * size))


def tree_cost(nprocs: int, size: int) -> Cost:
    """Reduce along a binomial tree to rank 0, then broadcast along it: 2 ceil(log2 N) (alpha + S beta).

    Rank 0 has a child per bit of N - 1, and hears them one after the other: ceil(log2 N) of them. The tree's depth, and
    with it the rounds, is floor(log2 N) each way.
    """
    _check(nprocs, size)
    children, depth = math.ceil(math.log2(nprocs)), nprocs.bit_length() - 1
    return Cost("tree", 2 * children, 2.0 * children * size, 2 * depth, float(children * size))


def ring_cost(nprocs: int, size: int) -> Cost:
    """Reduce-scatter, then all-gather, around a ring in chunks of S/N: 2(N-1) alpha + 2 (N-1)/N S beta.

    Patarasuk and Yuan (2009), "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
    Parallel and Distributed Computing 69(2): no algorithm can do with fewer bytes.
    """
    _check(nprocs, size)
    steps = 2 * (nprocs - 1)
    return Cost("ring", steps, steps * size / nprocs, steps, steps * size / nprocs)


def halving_doubling_cost(nprocs: int, size: int) -> Cost:
    """Reduce-scatter by recursive halving, all-gather by doubling: 2 log2 N alpha + 2 (N-1)/N S beta (Rabenseifner).

    Where N is no power of two, the ranks beyond the largest power P below N first hand their whole tensor to a partner
    and get the whole result at the end, as in MPICH: 2 alpha + 2 S beta more, with P in place of N.
    """
    _check(nprocs, size)
    steps = nprocs.bit_length() - 1
    power = 2**steps
    extra = int(power != nprocs)
    moved = 2 * (power - 1) / power * size
    messages = 2 * (steps + extra)
    return Cost("halving-doubling", messages, moved + 2.0 * extra * size, messages, moved + extra * size)


@dataclass(frozen=True)
class Fit:
    """A line through measured times: `latency` in seconds, `bandwidth` in bytes per second.

    The bandwidth is infinite where larger messages did not take longer. `relative_error` is the root of the mean square
    of (fitted - measured) / measured: 0.05 means off by 5 percent.
    """

    latency: float
    bandwidth: float
    relative_error: float

    @property
    def link(self) -> Link:
        """The same two constants as a Link, for `launch`, `run.schedule` and `Cost.seconds`."""
        return Link(latency=self.latency, bandwidth=self.bandwidth)

    def __str__(self) -> str:
        return f"{self.link}, off by {100 * self.relative_error:.1f}%"


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit latency + size / bandwidth to measured messages by least squares on the relative error.

    Squares of plain errors would let the largest message decide everything, though small ones alone show the latency.
    Neither constant becomes negative: a line that would need it goes through zero instead.

    Args:
        sizes: Bytes of each message, at least two different ones.
        seconds: How long each took.

    Raises:
        BadRequest: Too few measurements, or ones that are not positive.

    Example:
        >>> fit_alpha_beta([0, 1e6, 1e8], [1e-3, 2e-3, 0.101]).bandwidth
        1000000000.0
    """
    sizes, seconds = [float(size) for size in sizes], [float(one) for one in seconds]
    if len(sizes) != len(seconds):
        raise BadRequest(f"fit_alpha_beta got {len(sizes)} sizes and {len(seconds)} times; it takes as many of each")
    if len(set(sizes)) < 2:
        raise BadRequest("fit_alpha_beta needs messages of at least two different sizes")
    if not all(0 <= size < math.inf for size in sizes) or not all(0 < one < math.inf for one in seconds):
        raise BadRequest("fit_alpha_beta takes sizes of zero or more and times above zero")
    weights = [one**-2 for one in seconds]
    whole = sum(weights)
    mean_size = sum(w * size for w, size in zip(weights, sizes, strict=True)) / whole
    mean_time = sum(w * one for w, one in zip(weights, seconds, strict=True)) / whole
    spread = sum(w * (size - mean_size) ** 2 for w, size in zip(weights, sizes, strict=True))
    both = zip(weights, sizes, seconds, strict=True)
    beta = sum(w * (size - mean_size) * (one - mean_time) for w, size, one in both) / spread
    alpha = mean_time - beta * mean_size
    if beta < 0:
        alpha, beta = mean_time, 0.0
    elif alpha < 0:
        both = zip(weights, sizes, seconds, strict=True)
        square = sum(w * size**2 for w, size in zip(weights, sizes, strict=True))
        alpha, beta = 0.0, sum(w * size * one for w, size, one in both) / square
    errors = [(alpha + beta * size - one) / one for size, one in zip(sizes, seconds, strict=True)]
    error = math.sqrt(sum(off**2 for off in errors) / len(errors))
    return Fit(alpha, 1 / beta if beta else math.inf, error)


def _check(nprocs: int, size: float) -> None:
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise BadRequest(f"nprocs={nprocs!r}: it takes a whole number of ranks, one or more")
    if not 0 <= size < math.inf:
        raise BadRequest(f"size={size!r}: it takes bytes, zero or more")
