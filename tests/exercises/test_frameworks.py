"""Answers are judged in ranks of TensorFlow and Horovod as they are in torch's, by learners' checks and by graders."""

from __future__ import annotations

import sys

import cloudpickle
import pytest

from course_utils import check
from course_utils.exercises import inside, judging
from course_utils.exercises.judging import Case, Finding, Trial
from course_utils.exercises.registry import Exercise
from course_utils.grading import marking
from course_utils.grading.finding import Release
from course_utils.grading.reading import Cell
from tests.exercises.judged import text_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def sum_in_tensorflow(answer, number):
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return inside.plain(strategy.run(lambda: answer(tf.constant(number))))


def sum_in_horovod(answer, number):
    import torch

    return inside.plain(answer(torch.tensor(number)))


SCENARIOS = {"tensorflow": sum_in_tensorflow, "horovod": sum_in_horovod}


def sums(framework):
    """An exercise: the sum of 1, 2, ... over all ranks."""

    def cases(rng, thorough):
        for world in (2, 3) if thorough else (2,):
            total = world * (world + 1) / 2

            def judge(results, total=total):
                wrong = [rank for rank, value in enumerate(results) if value[0] != "tensor" or value[2] != total]
                return Finding("a number each", f"{total}", repr(results[wrong[0]]), wrong[0]) if wrong else None

            inputs = [(rank + 1.0,) for rank in range(world)]
            yield Trial(world, SCENARIOS[framework], [Case("a number each", inputs, judge)], True, framework=framework)

    return Exercise("summed", "a sum", "implement", 1, ("number",), cases)


def summed_by_tensorflow(number):
    import tensorflow as tf

    return tf.distribute.get_replica_context().all_reduce("SUM", number)


def summed_by_horovod(number):
    import horovod.torch as hvd

    return hvd.allreduce(number, op=hvd.Sum)


RIGHT = {"tensorflow": summed_by_tensorflow, "horovod": summed_by_horovod}


@pytest.mark.parametrize("framework", RIGHT)
def test_an_answer_is_called_in_ranks_of_its_framework(framework, request):
    request.getfixturevalue(f"{framework}_is_there")
    assert judging.judge(sums(framework), RIGHT[framework]).state == "passed"


@pytest.mark.parametrize("framework", RIGHT)
def test_a_wrong_tensor_and_its_rank_are_told(framework, request):
    request.getfixturevalue(f"{framework}_is_there")
    verdict = judging.judge(sums(framework), lambda number: number)
    assert verdict.state == "failed"
    assert verdict.finding.rank == 0
    assert "array(1." in verdict.finding.received


@pytest.mark.parametrize(("framework", "wait"), [("tensorflow", "all_reduce"), ("horovod", "allreduce")])
def test_G12_a_deadlock_is_told_with_the_line(framework, wait, request, monkeypatch):
    request.getfixturevalue(f"{framework}_is_there")
    monkeypatch.setattr(judging, "PATIENCE", 3.0)
    right = RIGHT[framework]

    def rank_0_alone(number):
        return right(number) if number < 2 else number

    text = text_of(judging.judge(sums(framework), rank_0_alone))
    assert text.startswith("Stopped: summed")
    assert f"rank 0  waits in {wait}, test_frameworks.py" in text
    assert "A deadlock" in text


@pytest.mark.usefixtures("tensorflow_is_there")
def test_what_tensorflow_logs_is_not_taken_for_what_the_answer_printed():
    def noisy(number):
        import tensorflow as tf

        print("mine")
        tf.get_logger().error("TensorFlow's")
        return number

    verdict = judging.judge(sums("tensorflow"), noisy)
    assert verdict.printed.splitlines() == ["[rank 0] mine", "[rank 1] mine"]


@pytest.mark.usefixtures("tensorflow_is_there")
def test_tensors_and_variables_of_tensorflow_are_plain_data():
    import tensorflow as tf

    kind, dtype, array = inside.plain(tf.Variable([1.0, 2.0], dtype=tf.float64))
    assert (kind, dtype, array.tolist()) == ("tensor", "float64", [1.0, 2.0])
    assert inside.plain(tf.constant([1, 2]))[:2] == ("tensor", "int32")
    assert inside.plain(tf.constant("text"))[0] == "other"
    assert inside.plain(tf.constant(1.0, tf.bfloat16))[0] == "other"


GRADED = """\
# @exercise summed points=1 minutes=1
import tensorflow as tf
def summed(number):
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, number) * {factor}
"""


@pytest.mark.usefixtures("tensorflow_is_there")
@pytest.mark.parametrize(("factor", "verdict", "points"), [(1, "passed", 1), (2, "failed", 0)])
def test_a_grader_judges_in_tensorflow_too(factor, verdict, points, monkeypatch):
    monkeypatch.setattr(marking, "exercises_of", lambda lesson: (sums("tensorflow"),))
    (mark,) = marking.marks_of("08", [Cell(1, "code", GRADED.format(factor=factor))], Release({}), seed=1)
    assert (mark.verdict, mark.points) == (verdict, points), mark.reason


def test_without_the_framework_a_check_says_how_to_get_it_and_a_grader_asks_for_a_person(monkeypatch, capsys):
    exercise = sums("tensorflow")
    monkeypatch.setattr("course_utils.launcher.frameworks.Framework.is_installed", property(lambda self: False))
    monkeypatch.setattr("course_utils.exercises.answers.find", lambda name, wanted: exercise)
    check("summed", summed_by_tensorflow)
    said = capsys.readouterr().out
    assert said.startswith("Not attempted yet: summed")
    assert "pip install tensorflow tf-keras" in said
    monkeypatch.setattr(marking, "exercises_of", lambda lesson: (exercise,))
    (mark,) = marking.marks_of("08", [Cell(1, "code", GRADED.format(factor=1))], Release({}), seed=1)
    assert (mark.verdict, mark.points) == ("needs review", None)
    assert "cannot be judged on this machine" in mark.reason
