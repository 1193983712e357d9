"""The DDP benchmark's verdicts: which times meet the targets, and that it runs the lesson's own wrapper."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks.bench_ddp import (
    EMULATED,
    FLAT,
    LOOPBACK,
    OWN,
    STEPS,
    TORCH,
    gain,
    in_turns,
    lesson_ddp,
    make_model,
    missed,
    ratio_with_interval,
    table,
)


def turns(own: float, flat: float, spread: float = 0.0) -> dict[str, list[float]]:
    rng = random.Random(1)

    def noise() -> list[float]:  # that of a turn is shared by its steps
        return [one for _ in range(10) for one in [rng.uniform(-spread, spread)] * STEPS]

    shared = noise()
    return {
        OWN: [own + one for one in shared],
        FLAT: [flat + one for one in shared],
        TORCH: [1.0 + one for one in noise()],
    }


def test_good_times_miss_nothing() -> None:
    assert missed({LOOPBACK: turns(1.1, 1.1), EMULATED: turns(1.1, 1.4)}) == []


def test_each_target_can_be_missed() -> None:
    (slow,) = missed({LOOPBACK: turns(1.2, 1.2), EMULATED: turns(1.1, 1.4)})
    assert slow.startswith("loopback: own DDP may take 1.20 times")
    (little,) = missed({LOOPBACK: turns(1.1, 1.1), EMULATED: turns(1.1, 1.3)})
    assert "overlap gains 15%" in little


def test_a_ratio_that_is_only_probably_small_enough_misses() -> None:
    noisy = turns(1.14, 1.6, spread=0.6)
    ratio, low, high = ratio_with_interval(noisy, OWN, TORCH)
    assert low < ratio < 1.15 < high
    assert len(missed({LOOPBACK: noisy})) == 1


def test_without_noise_the_interval_is_a_point_and_repeats() -> None:
    assert ratio_with_interval(turns(1.1, 1.5), OWN, TORCH) == pytest.approx((1.1, 1.1, 1.1))
    noisy = turns(1.1, 1.5, spread=0.2)
    assert ratio_with_interval(noisy, OWN, TORCH) == ratio_with_interval(noisy, OWN, TORCH)


def test_steps_that_share_their_turn_s_noise_are_not_taken_for_independent() -> None:
    """The same times: an interval is wider where whole turns were slow than where single steps were."""
    slow = [2.0] * STEPS * 3 + [1.0] * STEPS * 7
    single = [slow[place * 7 % len(slow)] for place in range(len(slow))]
    widths = []
    for own in (slow, single):
        _, low, high = ratio_with_interval({OWN: own, TORCH: [1.0] * len(own)}, OWN, TORCH)
        widths.append(high - low)
    assert widths[0] > widths[1]


def test_the_gain_is_a_share_of_the_flat_step() -> None:
    assert gain(turns(0.75, 1.0)) == pytest.approx(0.25)
    assert "overlap gains 25% over one flat all-reduce, at least 20%" in table(EMULATED, turns(0.75, 1.0))


def test_the_model_has_ten_million_parameters() -> None:
    assert sum(one.numel() for one in make_model(1024, 10).parameters()) >= 10_000_000


def test_every_contender_takes_its_turns_with_the_same_gradients() -> None:
    seconds = in_turns(lesson_ddp(), 16, 3, 4, 1_000, 2, nprocs=3)
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys((OWN, FLAT, TORCH), 2 * STEPS)


def test_other_gradients_are_no_time() -> None:
    with pytest.raises(Exception, match="not those of torch's DDP"):
        in_turns(Idle, 16, 3, 4, 1_000, 1)


def test_gradients_that_are_wrong_on_another_rank_only_are_no_time() -> None:
    with pytest.raises(ValueError, match="not those of torch's DDP"):
        in_turns(WrongAtTheEnd, 16, 3, 4, 1_000, 1)


class Idle:
    """Sends nothing."""

    def __init__(self, model, bucket_bytes):
        self.model, self.parameters, self.zero_grad = model, model.parameters, model.zero_grad

    def __call__(self, inputs):
        return self.model(inputs)

    def synchronize(self):
        pass


class WrongAtTheEnd(torch.nn.parallel.DistributedDataParallel):
    """Right on rank 0, and elsewhere in all but the last element of the last gradient."""

    def __init__(self, model, bucket_bytes):
        super().__init__(model)

    def synchronize(self):
        if dist.get_rank() > 0:
            list(self.parameters())[-1].grad[-1] += 1
