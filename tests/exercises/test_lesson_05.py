"""The checks of lesson 05 accept right code around DDP, and say what is wrong where no error is raised."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from course_utils import hardware, launch
from course_utils.exercises import judging, registry
from course_utils.exercises.own import OwnVersion
from tests.exercises.judged import each_right, each_wrong, families_of, rejection, text_of, verdict_on

FAMILIES = families_of("05")
RIGHT, WRONG = each_right(FAMILIES), each_wrong(FAMILIES)
BORROWED = [name for name in FAMILIES if registry.all_exercises()[name].own]


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
    judged = {exercise.name for exercise in registry.exercises_of("05") if exercise.cases}
    assert set(FAMILIES) == judged
    assert all(len(family.right) >= 3 for family in FAMILIES.values())


def test_P4_a_shorter_rank_that_leaves_is_told_where_the_others_wait(monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 3.0)
    assert "2 ranks with 2, 4 batches" in rejected("train_uneven", "uneven_without_join")


def test_P4_dropping_and_padding_are_not_training_on_every_batch_once():
    rejected("train_uneven", "uneven_that_drops", seed=1)
    rejected("train_uneven", "uneven_that_pads", seed=2)


def test_P8_a_step_around_the_wrapper_is_rejected():
    assert "ddp.module goes around it" in rejected("train_step", "step_around_the_wrapper")
    rejected("train_step", "step_around_the_wrapper", seed=3)


def test_P9_statistics_per_rank_and_means_of_variances_are_rejected():
    rejected("sync_batch_norm", "norm_per_rank", seed=4)
    rejected("sync_batch_norm", "norm_by_the_mean_of_means", seed=5)
    rejected("sync_batch_norm", "norm_by_the_mean_of_variances", seed=6)


def test_P9_statistics_without_their_gradient_are_rejected():
    rejected("sync_batch_norm", "norm_with_statistics_without_gradient", seed=7)
    rejected("sync_batch_norm", "norm_with_a_plain_all_reduce", seed=8)


def test_P10_an_evaluation_on_rank_0_alone_hangs_and_is_told_where(monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 3.0)
    assert "ddp(x)" in rejected("evaluate", "evaluate_on_rank_0_alone")
    rejected("evaluate", "evaluate_on_rank_0_and_broadcast")
    rejected("evaluate", "evaluate_and_tell_rank_0_alone")


def test_P11_a_mean_of_the_ranks_accuracies_is_rejected():
    assert "on a small shard for more" in rejected("evaluate", "evaluate_by_the_mean_of_accuracies")


def test_P11_padding_and_dropping_in_evaluation_are_rejected():
    for name in ("evaluate_with_padded_shards", "evaluate_with_a_sampler_that_drops"):
        rejected("evaluate", name, seed=9)
    rejected("evaluate", "evaluate_with_a_loader_that_drops")


def test_P18_an_overflow_on_one_rank_must_skip_the_step_on_all():
    assert "unscale after it" in rejected("scaled_step", "scaled_and_unscaled_first")
    rejected("scaled_step", "scaled_and_unscaled_first", seed=10)


def test_P18_the_scale_stays_equal_on_all_ranks():
    assert "scales differ" in rejected("scaled_step", "scaled_and_skipped_after_the_mean")


@pytest.mark.parametrize("exercise", FAMILIES)
def test_the_graders_fresh_cases_accept_a_right_answer(exercise):
    for answer, seed in zip(FAMILIES[exercise].right[:2], (2026, 11), strict=True):
        verdict = verdict_on(exercise, answer, seed)
        assert verdict.state == "passed", text_of(verdict)
        assert {1, 2, 3, 4} <= set(verdict.sizes)


@pytest.mark.parametrize("exercise", BORROWED)
def test_what_the_lesson_goes_on_with_has_the_right_values_and_is_no_answer(exercise):
    own = OwnVersion(exercise)
    verdict = verdict_on(exercise, lambda a, b, c, d: own(a, b, c, d), seed=12)
    assert verdict.finding is not None, text_of(verdict)
    assert verdict.finding.received == f"a call of the course's {exercise}"  # its values were right
    assert verdict_on(exercise, own).state == "not attempted"


def test_what_the_lesson_evaluates_with_takes_fewer_samples_than_ranks():
    def one_sample():
        import torch

        from course_utils.exercises import lesson_05

        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
        return lesson_05._own_evaluate(ddp, torch.zeros(1, 4), torch.zeros(1, dtype=torch.long), 2)

    assert len(set(launch(one_sample, nprocs=3).results)) == 1


def test_an_untouched_cell_is_not_attempted():
    def untouched(*_):
        raise NotImplementedError("your turn")

    for exercise in FAMILIES:
        assert verdict_on(exercise, untouched).state == "not attempted"


def test_judging_leaves_the_notebooks_generators_and_its_grad_mode_alone():
    import torch

    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        for exercise, family in FAMILIES.items():
            verdict = verdict_on(exercise, family.right[0])
            assert verdict.state == "passed", text_of(verdict)
    assert torch.equal(torch.rand(3), wanted)


# ---- which device a rank takes


@pytest.fixture
def chooser(root: Path):
    """The lesson's own functions device_of and backend_for."""
    import torch

    source = (root / "notebooks" / "source" / "05_pytorch_ddp.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    names = ("device_of", "backend_for")
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    space = {"torch": torch, "hardware": hardware}
    exec(compile(tree, "05_pytorch_ddp.py", "exec"), space)
    return tuple(space[name] for name in names)


@pytest.mark.parametrize(
    ("gpus", "ranks", "devices", "backend"),
    [
        (0, 2, ["cpu", "cpu"], "gloo"),
        (1, 2, ["cpu", "cpu"], "gloo"),  # NCCL refuses two ranks on one GPU
        (2, 2, ["cuda:0", "cuda:1"], "cpu:gloo,cuda:nccl"),
        (2, 4, ["cpu"] * 4, "gloo"),
        (4, 2, ["cuda:0", "cuda:1"], "cpu:gloo,cuda:nccl"),
    ],
)
def test_each_rank_takes_a_gpu_of_its_own_where_there_are_enough(gpus, ranks, devices, backend, chooser, monkeypatch):
    monkeypatch.setenv("COURSE_FAKE_GPUS", str(gpus))
    device_of, backend_for = chooser
    assert [str(device_of(rank, ranks)) for rank in range(ranks)] == devices
    assert backend_for(ranks) == backend
