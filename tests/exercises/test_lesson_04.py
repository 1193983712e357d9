"""The checks of lesson 04 accept wrappers that are right and start early, and say what is wrong with others."""

from __future__ import annotations

import pytest

from course_utils.exercises import judging, registry
from course_utils.exercises.own import OwnVersion
from tests.exercises import answers_04
from tests.exercises.judged import each_right, each_wrong, families_of, rejection, text_of, verdict_on

FAMILIES = families_of("04")
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
    judged = {exercise.name for exercise in registry.exercises_of("04") if exercise.cases}
    assert set(FAMILIES) == judged
    assert all(len(family.right) >= 3 for family in FAMILIES.values())


def test_P6_a_no_sync_around_backward_only_is_rejected():
    assert "DDP decides in *forward*" in rejected("accumulate", "accumulate_with_the_forward_outside", seed=1)


def test_P6_a_no_sync_that_sends_is_rejected_though_its_values_are_right():
    rejected("own_ddp", "DDPWithANoSyncThatSyncs", seed=2)


def test_P7_unused_parameters_stay_without_a_gradient():
    rejected("own_ddp", "DDPWithZerosForNone", seed=3)
    rejected("unflatten", "unflatten_to_zeros", seed=3)


def test_P7_frozen_parameters_start_equal_and_are_not_sent():
    rejected("own_ddp", "DDPThatBroadcastsWhatIsTrained")
    rejected("make_buckets", "buckets_with_frozen_parameters", seed=4)


def test_P7_a_parameter_that_one_rank_alone_does_not_use_neither_hangs_nor_is_missed(monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 3.0)
    rejected("own_ddp", "DDPThatWaitsForWhatIsMissing")
    rejected("own_ddp", "DDPInTheOrderOfArrival")
    rejected("unflatten", "unflatten_where_something_is")


def test_P7_tied_parameters_are_among_the_cases():
    from course_utils.exercises import lesson_04

    kinds = [training.kind for training in _trainings(lesson_04)]
    assert any(kind.tied and kind.frozen and kind.unused and kind.spare for kind in kinds)


def _trainings(lesson_04):
    import random

    for trial in lesson_04._trainings(random.Random(0), False):
        yield from (case.inputs[0][0] for case in trial.cases)


def test_P16_clipping_before_the_synchronisation_has_finished_is_rejected():
    assert "clip when it is there" in " ".join(rejected("clipped_step", "clip_before_synchronize", seed=5).split())


def test_overlap_must_start_before_backward_is_through():
    assert "half-way" in rejected("own_ddp", "DDPAfterBackward", seed=6)
    rejected("own_ddp", "DDPInOneBucket", seed=7)


def test_many_messages_are_rejected():
    rejected("own_ddp", "DDPPerParameter", seed=8)


@pytest.mark.parametrize("exercise", FAMILIES)
def test_the_graders_fresh_cases_accept_a_right_answer(exercise):
    for answer, seed in zip(FAMILIES[exercise].right[:2], (2026, 11), strict=True):
        verdict = verdict_on(exercise, answer, seed)
        assert verdict.state == "passed", text_of(verdict)
        assert exercise == "make_buckets" or {1, 2, 3, 4} <= set(verdict.sizes)


@pytest.mark.parametrize("exercise", BORROWED)
def test_what_the_lesson_goes_on_with_has_the_right_values_and_is_no_answer(exercise):
    own = OwnVersion(exercise)
    parameters = registry.all_exercises()[exercise].parameters
    one, two = (lambda a: own(a)), (lambda a, b: own(a, b))  # the number of arguments is looked at first
    verdict = verdict_on(exercise, one if len(parameters) == 1 else two, seed=12)
    assert verdict.finding is not None, text_of(verdict)
    assert verdict.finding.received == f"a call of the course's {exercise}"  # its values were right
    assert verdict_on(exercise, own).state == "not attempted"


def test_an_untouched_cell_is_not_attempted():
    def untouched(model, *_):
        raise NotImplementedError("your turn")

    class Untouched:
        def __init__(self, model, bucket_bytes):
            raise NotImplementedError("your turn")

    for exercise in FAMILIES:
        assert verdict_on(exercise, untouched).state == "not attempted"
    assert verdict_on("own_ddp", Untouched).state == "not attempted"


def test_an_answer_may_be_built_on_the_courses_versions_of_the_parts():
    flatten, unflatten, make_buckets = map(OwnVersion, ("flatten", "unflatten", "make_buckets"))

    class Built(answers_04.DDPAsInTheLesson):
        def make(self, bucket_bytes):
            return make_buckets(self.module.parameters(), bucket_bytes)

        def flat_of(self, bucket):
            return flatten(bucket)

        def put_back(self, bucket, flat):
            unflatten(bucket, flat)

    verdict = verdict_on("own_ddp", Built)
    assert verdict.state == "passed", text_of(verdict)


def test_judging_leaves_the_notebooks_generators_and_its_grad_mode_alone():
    import torch

    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        for exercise in ("own_ddp", "accumulate", "clipped_step"):
            verdict = verdict_on(exercise, FAMILIES[exercise].right[0])
            assert verdict.state == "passed", text_of(verdict)
        rejected("own_ddp", "DDPThatSums")
    assert torch.equal(torch.rand(3), wanted)
