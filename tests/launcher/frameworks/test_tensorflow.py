"""Tasks of a TensorFlow cluster: TF_CONFIG, roles, what comes back, and what a failure says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from course_utils import launch
from course_utils.errors import BadRequest, WorkerFailed, WorkerTimeout

from . import meetings
from .ends import WAYS, end, names

pytestmark = pytest.mark.usefixtures("tensorflow_is_there")


def in_tensorflow(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return launch(fn, *args, framework="tensorflow", **options)


def test_each_worker_has_its_place_in_TF_CONFIG_and_a_port_of_its_own() -> None:
    def worker() -> Any:
        return json.loads(os.environ["TF_CONFIG"])

    told = in_tensorflow(worker, nprocs=3).results
    assert [config["task"] for config in told] == [{"type": "worker", "index": index} for index in range(3)]
    assert len({json.dumps(config["cluster"]) for config in told}) == 1
    assert len(set(told[0]["cluster"]["worker"])) == 3
    assert all(address.startswith("127.0.0.1:") for address in told[0]["cluster"]["worker"])


def summed() -> Any:
    return meetings.tensorflow()()


def test_workers_reduce_together_and_the_result_is_a_numpy_array_without_noise() -> None:
    run = in_tensorflow(summed)
    assert [(type(value).__module__, value.tolist()) for value in run.results] == [("numpy", [3.0] * 3)] * 2
    assert [log for log in run.logs if log] == []


def test_L7_a_worker_that_returns_early_stays_until_all_report() -> None:
    def worker() -> str:
        import time

        summed()
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            time.sleep(1)
        return "done"

    assert in_tensorflow(worker).results == ["done"] * 2


@pytest.mark.parametrize("way", WAYS)
def test_L2_the_error_names_the_worker_that_failed(way: str, count: Callable[[int, int], int]) -> None:
    def worker(way: str) -> None:
        summed()
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            end(way)
        summed()

    for _ in range(count(2, 20)):
        with pytest.raises(WorkerFailed) as caught:
            in_tensorflow(worker, way)
        names(caught.value, 1, way)


def test_L18_a_TF_CONFIG_of_more_workers_than_there_are_ends_in_a_timeout_that_says_so() -> None:
    def worker() -> None:
        import tensorflow as tf

        config = json.loads(os.environ["TF_CONFIG"])
        config["cluster"]["worker"].append("127.0.0.1:9")
        os.environ["TF_CONFIG"] = json.dumps(config)
        tf.distribute.MultiWorkerMirroredStrategy()

    with pytest.raises(WorkerTimeout) as caught:
        in_tensorflow(worker, timeout=8)
    assert "the start of the other tasks in TF_CONFIG" in str(caught.value)


def test_the_chiefs_return_ends_servers_and_results_come_by_role() -> None:
    def task() -> str:
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if resolver.task_type in ("worker", "ps"):
            tf.distribute.Server(
                resolver.cluster_spec(),
                job_name=resolver.task_type,
                task_index=resolver.task_id,
                protocol="grpc",
            ).join()
        tf.distribute.ParameterServerStrategy(resolver)
        return "the chief's"

    run = in_tensorflow(task, nprocs=4, roles={"chief": 1, "worker": 2, "ps": 1}, timeout=60)
    assert run.by_role == {"chief": ["the chief's"], "worker": [None, None], "ps": [None]}


def test_what_compiled_code_hides_is_not_offered() -> None:
    with pytest.raises(BadRequest, match="TensorFlow moves its tensors in compiled code"):
        in_tensorflow(summed, trace=True)
