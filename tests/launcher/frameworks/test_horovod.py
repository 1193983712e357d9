"""Horovod's ranks: met before the function begins, over torch and over TensorFlow, and what a failure says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from course_utils import Ranks, launch
from course_utils.errors import BadRequest, WorkerFailed, WorkerTimeout

from .ends import WAYS, end, names

pytestmark = pytest.mark.usefixtures("horovod_is_there")


def in_horovod(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return launch(fn, *args, framework="horovod", **options)


def summed() -> Any:
    import horovod.torch as hvd
    import torch

    return hvd.allreduce(torch.full((3,), float(hvd.rank() + 1)), op=hvd.Sum).tolist()


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_ranks_have_met_before_the_function_begins(nprocs: int) -> None:
    run = in_horovod(summed, nprocs=nprocs)
    assert run.results == [[float(sum(range(nprocs + 1)))] * 3] * nprocs
    assert run.backend == "gloo"


def test_torch_and_tensorflow_can_be_used_in_one_function(tensorflow_is_there: None) -> None:
    def both() -> Any:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        return summed(), hvd.allreduce(tf.fill([2], float(hvd.rank())), op=hvd.Sum)

    results = in_horovod(both).results
    assert [(ours, theirs.tolist()) for ours, theirs in results] == [([3.0] * 3, [1.0] * 2)] * 2


@pytest.mark.parametrize("way", WAYS)
def test_L2_the_error_names_the_rank_that_failed(way: str, count: Callable[[int, int], int]) -> None:
    def worker(way: str) -> None:
        import horovod.torch as hvd

        summed()
        if hvd.rank() == 1:
            end(way)
        summed()

    for _ in range(count(4, 50)):
        with pytest.raises(WorkerFailed) as caught:
            in_horovod(worker, way)
        names(caught.value, 1, way)


def test_L17_a_rank_that_skips_an_allreduce_shows_in_the_table_of_the_timeout() -> None:
    def worker() -> None:
        import horovod.torch as hvd

        if hvd.rank() == 0:
            summed()

    with pytest.raises(WorkerTimeout) as caught:
        in_horovod(worker, timeout=4)
    first, second = caught.value.states
    assert (first.state, first.collective) == ("waiting", "allreduce")
    assert second.state == "returned"


def test_ranks_that_stay_are_initialised_once() -> None:
    with Ranks(2, framework="horovod") as ranks:
        assert [ranks.run(summed).results for _ in range(3)] == [[[3.0] * 3] * 2] * 3


def test_what_compiled_code_hides_is_not_offered() -> None:
    with pytest.raises(BadRequest, match="Horovod moves its tensors in compiled code"):
        in_horovod(summed, trace=True)
