"""Costs on paper, and the two constants of a link from measured times."""

from __future__ import annotations

import math
import random

import pytest

from course_utils import Link
from course_utils.errors import BadRequest
from course_utils.simulate import fit_alpha_beta, halving_doubling_cost, naive_cost, ring_cost, tree_cost

SIZES = [10**power for power in range(2, 9)]


def test_the_costs_of_eight_ranks_are_those_of_the_papers() -> None:
    link = Link(latency=1e-3, bandwidth=1e6)
    seconds = {cost(8, 8000).algorithm: cost(8, 8000).seconds(link) for cost in (naive_cost, tree_cost, ring_cost)}
    assert seconds == pytest.approx({"naive": 14 * 0.009, "tree": 6 * 0.009, "ring": 14 * 0.002})
    assert halving_doubling_cost(8, 8000).seconds(link) == pytest.approx(6 * 0.001 + 2 * 7 / 8 * 0.008)
    assert halving_doubling_cost(6, 8000).seconds(link) == pytest.approx(6 * 0.001 + (2 * 3 / 4 + 2) * 0.008)


@pytest.mark.parametrize("cost", [naive_cost, tree_cost, ring_cost, halving_doubling_cost])
def test_one_rank_needs_nothing(cost: object) -> None:
    one = cost(1, 100)  # type: ignore[operator]
    assert (one.messages, one.bytes, one.rounds, one.sent) == (0, 0, 0, 0)


def test_costs_refuse_what_is_no_number_of_ranks_or_bytes() -> None:
    for nprocs, size in ((0, 1), (2.0, 1), (True, 1), (2, -1), (2, math.inf)):
        with pytest.raises(BadRequest):
            ring_cost(nprocs, size)  # type: ignore[arg-type]


def test_exact_times_give_back_their_constants() -> None:
    fit = fit_alpha_beta(SIZES, [2e-5 + size / 3e9 for size in SIZES])
    assert fit.latency == pytest.approx(2e-5, rel=1e-6)
    assert fit.bandwidth == pytest.approx(3e9, rel=1e-6)
    assert fit.relative_error < 1e-9
    assert fit.link == Link(latency=fit.latency, bandwidth=fit.bandwidth)


def test_noisy_times_give_nearly_their_constants_and_the_size_of_the_noise() -> None:
    rng = random.Random(1)
    sizes = SIZES * 20
    fit = fit_alpha_beta(sizes, [(5e-5 + size / 1e9) * rng.choice((0.9, 1.1)) for size in sizes])
    assert fit.latency == pytest.approx(5e-5, rel=0.05)
    assert fit.bandwidth == pytest.approx(1e9, rel=0.05)
    assert fit.relative_error == pytest.approx(0.1, rel=0.1)


def test_one_slow_large_message_does_not_drown_the_latency() -> None:
    times = [1e-4 + size / 1e9 for size in SIZES]
    times[-1] *= 1.5
    assert fit_alpha_beta(SIZES, times).latency == pytest.approx(1e-4, rel=0.05)


def test_no_constant_becomes_negative() -> None:
    through_zero = fit_alpha_beta([1e6, 2e6, 4e6], [0.9e-3, 2e-3, 4.2e-3])
    assert through_zero.latency == 0.0
    assert through_zero.bandwidth == pytest.approx(1e9, rel=0.05)
    flat = fit_alpha_beta([1, 2, 4], [1.2e-3, 1.0e-3, 0.9e-3])
    assert flat.bandwidth == math.inf
    assert 0.9e-3 < flat.latency < 1.2e-3
    assert flat.relative_error > 0.05
    assert flat.link.seconds(10**9) == flat.latency


def test_the_line_that_goes_through_zero_is_the_best_such_line() -> None:
    sizes, seconds = [1e6, 2e6, 4e6], [0.9e-3, 2e-3, 4.2e-3]
    fit = fit_alpha_beta(sizes, seconds)

    def error(bandwidth: float) -> float:
        return sum((size / bandwidth / one - 1) ** 2 for size, one in zip(sizes, seconds, strict=True))

    assert error(fit.bandwidth) < min(error(fit.bandwidth * 1.001), error(fit.bandwidth / 1.001))


@pytest.mark.parametrize(
    ("sizes", "seconds", "words"),
    [
        ([1, 2], [1.0], "as many of each"),
        ([5, 5], [1.0, 1.0], "two different sizes"),
        ([], [], "two different sizes"),
        ([1, 2], [1.0, 0.0], "above zero"),
        ([-1, 2], [1.0, 1.0], "zero or more"),
        ([1, math.nan], [1.0, 1.0], "zero or more"),
    ],
)
def test_measurements_that_make_no_line_are_refused(sizes: list[float], seconds: list[float], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        fit_alpha_beta(sizes, seconds)


def test_a_fit_is_told_with_its_error() -> None:
    assert str(fit_alpha_beta([0, 1e6], [1e-3, 2e-3])) == "latency 0.001 s, bandwidth 1e+09 bytes/s, off by 0.0%"
