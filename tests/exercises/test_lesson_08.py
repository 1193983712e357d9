"""The checks of lesson 08 accept right code around TensorFlow's strategies, and say what is wrong in the rest."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from course_utils.exercises import judging, registry
from course_utils.exercises.own import OwnVersion
from tests.conftest import REQUIRE_ALL
from tests.exercises.judged import each_right, each_wrong, families_of, rejection, text_of, verdict_on

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if not REQUIRE_ALL:
    pytest.importorskip("tensorflow", reason="needs tensorflow, which is not installed (make test installs it)")

FAMILIES = families_of("08")
RIGHT, WRONG = each_right(FAMILIES), each_wrong(FAMILIES)


def rejected(exercise: str, name: str, seed: int | None = None) -> str:
    return " ".join(rejection(FAMILIES[exercise], name, seed).split())


@pytest.mark.parametrize(("exercise", "answer"), RIGHT, ids=lambda value: getattr(value, "__name__", value))
def test_a_right_answer_passes_however_it_is_written(exercise, answer):
    verdict = verdict_on(exercise, answer)
    assert verdict.state == "passed", text_of(verdict)


@pytest.mark.parametrize(("exercise", "name"), WRONG)
def test_a_wrong_answer_is_rejected_in_words_that_help(exercise, name, monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 3.0)
    rejected(exercise, name)


def test_each_check_has_three_differently_written_right_answers():
    judged = {exercise.name for exercise in registry.exercises_of("08") if exercise.cases}
    assert set(FAMILIES) == judged
    assert all(len(family.right) >= 3 for family in FAMILIES.values())


@pytest.mark.parametrize("name", ["loss_by_the_mean", "loss_by_the_mean_of_means", "loss_divided_twice"])
def test_P14_a_loss_that_is_not_divided_by_the_global_batch_alone_is_rejected_by_a_grader_too(name):
    rejected("global_batch_loss", name, seed=1)


@pytest.mark.parametrize("name", ["step_with_means", "step_with_the_mean_of_means", "step_that_sums_twice"])
def test_P14_steps_with_another_gradient_than_one_process_are_rejected_by_a_grader_too(name):
    rejected("distributed_step", name, seed=2)


def test_P3_a_mean_of_means_passes_only_where_replicas_have_equally_many_samples():
    assert "4, 1 samples" in rejected("global_batch_loss", "loss_by_the_mean_of_means")


def test_P16_clipping_before_the_sum_is_rejected_by_a_grader_too():
    rejected("clipped_update", "clip_before_the_sum", seed=3)


def test_P5_a_share_of_an_order_of_its_own_is_rejected_by_a_grader_too():
    rejected("shard_dataset", "shard_after_the_shuffle", seed=4)


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_right_answers_pass_a_graders_cases(family, seed):
    verdict = verdict_on(family.exercise, family.right[seed % 3], seed)
    assert verdict.state == "passed", text_of(verdict)


def test_the_frameworks_own_loss_passes_where_it_stands_in():
    """OwnVersion itself is no attempt; what it calls is right."""
    version = OwnVersion("global_batch_loss")
    verdict = verdict_on("global_batch_loss", lambda *given: version(*given))
    assert verdict.state == "failed"
    assert "a call of the course's global_batch_loss" in text_of(verdict)


def test_the_package_holds_no_solution():
    source = Path(registry.__file__).with_name("lesson_08.py").read_text()
    called = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert not called & {"apply_gradients", "shard", "clip_by_global_norm", "get_per_replica_batch_size", "all_reduce"}
