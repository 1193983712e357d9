"""The checks of lesson 02 accept what is right, reject what is wrong, and say what is wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_utils import launch
from course_utils.exercises import judging, registry
from course_utils.exercises.own import OwnVersion
from course_utils.exercises.traffic import by_case
from tests.exercises import answers_02
from tests.exercises.judged import each_right, each_wrong, families_of, rejection, text_of, verdict_on

FAMILIES = families_of("02")
RIGHT, WRONG = each_right(FAMILIES), each_wrong(FAMILIES)
MOVES = [name for name in FAMILIES if name != "bandwidths"]  # judged by traffic too


@pytest.mark.parametrize(("exercise", "answer"), RIGHT, ids=lambda value: getattr(value, "__name__", value))
def test_a_right_answer_passes_in_every_world_size_however_it_is_written(exercise, answer):
    verdict = verdict_on(exercise, answer)
    assert verdict.state == "passed", text_of(verdict)
    assert exercise not in MOVES or {1, 2, 3, 4, 5} <= set(verdict.sizes)


@pytest.mark.parametrize(("exercise", "name"), WRONG)
def test_a_wrong_answer_is_rejected_in_words_that_help(exercise, name, monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 3.0)
    rejection(FAMILIES[exercise], name)


def test_each_check_has_three_differently_written_right_answers():
    judged = {exercise.name for exercise in registry.exercises_of("02") if exercise.cases}
    assert set(FAMILIES) == judged
    assert all(len(family.right) >= 3 for family in FAMILIES.values())


@pytest.mark.parametrize("exercise", FAMILIES)
def test_the_graders_fresh_cases_accept_a_right_answer(exercise):
    verdict = verdict_on(exercise, FAMILIES[exercise].right[0], seed=2026)
    assert verdict.state == "passed", text_of(verdict)
    assert exercise not in MOVES or {1, 2, 3, 4, 5} < set(verdict.sizes)


@pytest.mark.parametrize("name", ["ring_of_whole_tensors", "ring_where_n_divides", "ring_with_chunk", "ring_by_turns"])
def test_the_graders_fresh_cases_reject_a_wrong_ring(name):
    answer, _, _ = FAMILIES["ring_all_reduce"].wrong[name]
    assert verdict_on("ring_all_reduce", answer, seed=7).state == "failed"


@pytest.mark.parametrize("exercise", MOVES)
def test_what_the_lesson_goes_on_with_has_the_right_values_and_is_no_answer(exercise):
    own = registry.find(exercise).own()
    verdict = verdict_on(exercise, own)
    assert verdict.finding.received == "a call of the course's version"  # its values were right
    assert "Here the framework did the work" in text_of(verdict)
    assert verdict_on(exercise, OwnVersion(exercise)).state == "not attempted"


@pytest.mark.parametrize("seed", [None, 4])
def test_an_answer_may_be_built_on_the_courses_version_of_another_exercise(seed):
    first_half, ring = OwnVersion("reduce_scatter_ring"), OwnVersion("ring_all_reduce")

    def ring_with_a_borrowed_half(tensor):
        total = answers_02.copy_of(tensor)
        chunks = list(total.view(-1).tensor_split(dist.get_world_size()))
        first_half(chunks)
        answers_02.gather_half(chunks)
        return total

    def mean_with_a_borrowed_ring(gradients):
        flat = ring(torch.cat([gradient.reshape(-1) for gradient in gradients]) / dist.get_world_size())
        parts = flat.split([gradient.numel() for gradient in gradients])
        return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

    for exercise, answer in (
        ("ring_all_reduce", ring_with_a_borrowed_half),
        ("average_gradients", mean_with_a_borrowed_ring),
    ):
        verdict = verdict_on(exercise, answer, seed)
        assert verdict.state == "passed", text_of(verdict)


def test_what_is_borrowed_counts_as_the_traffic_that_it_stands_for():
    first_half, ring = OwnVersion("reduce_scatter_ring"), OwnVersion("ring_all_reduce")

    def half_a_ring(tensor):
        total = answers_02.copy_of(tensor)
        first_half(list(total.view(-1).tensor_split(dist.get_world_size())))
        return total

    def the_same_half_twice(tensor):
        total = answers_02.copy_of(tensor)
        chunks = list(total.view(-1).tensor_split(dist.get_world_size()))
        first_half([chunk.clone() for chunk in chunks])
        first_half(chunks)
        answers_02.gather_half(chunks)
        return total

    def a_ring_per_gradient(gradients):
        return [ring(gradient / dist.get_world_size()) for gradient in gradients]

    for exercise, answer, words in (
        ("ring_all_reduce", half_a_ring, "elements are wrong"),
        ("ring_all_reduce", the_same_half_twice, "with the course's own versions"),
        ("average_gradients", a_ring_per_gradient, "one ring for all of them"),
    ):
        verdict = verdict_on(exercise, answer)
        assert verdict.state == "failed"
        assert words in text_of(verdict)


def test_an_untouched_cell_is_not_attempted():
    def untouched(tensor):
        raise NotImplementedError("your turn")

    for exercise in ("naive_all_reduce", "ring_all_reduce", "halving_doubling"):
        assert verdict_on(exercise, untouched).state == "not attempted"


def test_the_cut_between_cases_counts_rounds_afresh():
    ring = answers_02.ring_of_two_halves

    def two_cases():
        ring(torch.ones(8))
        dist.barrier()
        ring(torch.ones(8))

    trace = launch(two_cases, nprocs=4, trace=True).trace
    assert trace.rounds == 12
    parts = by_case(trace, 2)
    assert [part.rounds for part in parts] == [6, 6]
    assert [[rank.bytes_sent for rank in part] for part in parts] == [[48] * 4] * 2
    assert by_case(trace, 3) == 0


def test_the_grader_tries_each_world_size_in_one_launch():
    import random

    for exercise in MOVES:
        trials = list(registry.find(exercise).cases(random.Random(1), True))
        sizes = [trial.nprocs for trial in trials]
        assert sizes[:5] == [1, 2, 3, 4, 5]
        assert len(sizes) == 6
        assert sum(len(trial.cases) for trial in trials) > 6
