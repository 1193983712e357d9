"""The checks of lesson 03 hold replicas to one process, accept what is right, and say what is wrong."""

from __future__ import annotations

import pytest

from course_utils.exercises import judging, registry
from course_utils.exercises.own import OwnVersion
from tests.exercises import answers_03
from tests.exercises.judged import each_right, each_wrong, families_of, rejection, text_of, verdict_on

FAMILIES = families_of("03")
RIGHT, WRONG = each_right(FAMILIES), each_wrong(FAMILIES)
BORROWED = [name for name in FAMILIES if registry.all_exercises()[name].own]


def rejected(exercise: str, name: str, seed: int | None = None) -> str:
    return rejection(FAMILIES[exercise], name, seed)


@pytest.mark.parametrize(("exercise", "answer"), RIGHT, ids=lambda value: getattr(value, "__name__", value))
def test_a_right_answer_passes_however_it_is_written(exercise, answer):
    verdict = verdict_on(exercise, answer)
    assert verdict.state == "passed", text_of(verdict)


@pytest.mark.parametrize(("exercise", "name"), WRONG)
def test_a_wrong_answer_is_rejected_in_words_that_help(exercise, name, monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 3.0)
    rejected(exercise, name)


def test_each_check_has_three_differently_written_right_answers():
    judged = {exercise.name for exercise in registry.exercises_of("03") if exercise.cases}
    assert set(FAMILIES) == judged
    assert all(len(family.right) >= 3 for family in FAMILIES.values())


def test_P1_replicas_that_start_apart_are_rejected():
    rejected("broadcast_parameters", "no_broadcast", seed=1)
    assert "stay apart" in rejected("train_replicas", "train_without_a_broadcast")


def test_P2_a_sum_in_place_of_the_mean_is_rejected():
    assert "too long" in " ".join(rejected("reduce_gradients", "reduce_to_the_sum").split())
    rejected("train_replicas", "train_on_sums", seed=2)


def test_P2_a_second_division_is_rejected():
    rejected("reduce_gradients", "reduce_and_divide_by_ranks_twice", seed=3)
    rejected("train_replicas", "train_with_two_divisions")


def test_P2_a_learning_rate_multiplied_by_the_ranks_is_rejected():
    rejected("train_replicas", "train_with_a_scaled_rate", seed=4)


def test_P3_a_mean_of_means_is_rejected():
    assert "weight by the number of samples" in rejected("reduce_gradients", "reduce_to_the_mean_of_means")
    rejected("train_replicas", "train_on_the_mean_of_means", seed=5)


def test_P3_an_empty_shard_brings_zeros_and_neither_nan_nor_a_deadlock(monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 3.0)
    rejected("reduce_gradients", "reduce_nan_times_zero")
    rejected("reduce_gradients", "reduce_that_skips_none")
    rejected("train_replicas", "train_that_skips_empty_batches")


def test_P5_the_same_order_in_each_epoch_is_rejected():
    rejected("shard", "shard_without_the_epoch", seed=6)


def test_P5_an_order_per_rank_is_rejected_with_what_is_doubled_and_missed():
    text = rejected("shard", "shard_with_the_rank_in_the_seed")
    assert "on none" in text
    assert "more than once" in text


def test_P7_tied_frozen_and_unused_parameters_are_among_the_cases():
    rejected("broadcast_parameters", "broadcast_of_what_is_trained")
    rejected("reduce_gradients", "reduce_with_zeros_for_none", seed=8)


def test_P17_equal_seeds_that_make_dropout_equal_are_rejected():
    rejected("start_replica", "start_from_one_seed", seed=9)


def test_P17_different_seeds_that_make_weights_differ_are_rejected():
    rejected("start_replica", "start_from_a_seed_per_rank", seed=10)


@pytest.mark.parametrize("exercise", FAMILIES)
def test_the_graders_fresh_cases_accept_a_right_answer(exercise):
    for answer, seed in zip(FAMILIES[exercise].right[:2], (2026, 11), strict=True):
        verdict = verdict_on(exercise, answer, seed)
        assert verdict.state == "passed", text_of(verdict)
        assert exercise == "shard" or {1, 2, 3, 4} <= set(verdict.sizes)


@pytest.mark.parametrize("exercise", BORROWED)
def test_what_the_lesson_goes_on_with_has_the_right_values_and_is_no_answer(exercise):
    own = OwnVersion(exercise)
    verdict = verdict_on(exercise, lambda *arguments: own(*arguments), seed=12)
    if exercise == "shard":  # the number of arguments is looked at first
        verdict = verdict_on(
            exercise, lambda length, rank, world, epoch, seed: own(length, rank, world, epoch, seed), 12
        )
    assert verdict.finding is not None, text_of(verdict)
    assert verdict.finding.received == f"a call of the course's {exercise}"  # its values were right
    assert verdict_on(exercise, own).state == "not attempted"


def test_an_untouched_cell_is_not_attempted():
    def untouched(model, *_):
        raise NotImplementedError("your turn")

    for exercise in FAMILIES:
        assert verdict_on(exercise, untouched).state == "not attempted"


def test_an_answer_may_be_built_on_the_courses_versions_of_the_parts():
    broadcast, reduce = OwnVersion("broadcast_parameters"), OwnVersion("reduce_gradients")

    def train(model, optimizer, batches, after_step):
        answers_03.train_with(reduce, broadcast)(model, optimizer, batches, after_step)

    verdict = verdict_on("train_replicas", train)
    assert verdict.state == "passed", text_of(verdict)


def test_judging_leaves_the_notebooks_generators_and_its_grad_mode_alone():
    import torch

    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        for exercise in ("reduce_gradients", "train_replicas"):
            verdict = verdict_on(exercise, FAMILIES[exercise].right[0])
            assert verdict.state == "passed", text_of(verdict)
        rejected("train_replicas", "train_on_sums")
    assert torch.equal(torch.rand(3), wanted)
