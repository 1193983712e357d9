"""The random faults of faults.py in the ranks of Horovod and TensorFlow, which wait for each other in compiled code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from tests.launcher.faults import soak


def horovod() -> Callable[[], None]:
    import horovod.torch as hvd
    import torch

    return lambda: hvd.allreduce(torch.ones(100))


def tensorflow() -> Callable[[], None]:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    @tf.function
    def step() -> object:
        def replica() -> object:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.fill([3], float(index)))

        return strategy.run(replica)

    return step


@pytest.mark.usefixtures("horovod_is_there")
def test_every_fault_of_a_horovod_rank_ends_in_its_verdict(count: Callable[[int, int], int]) -> None:
    soak("horovod", horovod, rounds=count(30, 150), seconds=25)


@pytest.mark.usefixtures("tensorflow_is_there")
def test_every_fault_of_a_tensorflow_worker_ends_in_its_verdict(count: Callable[[int, int], int]) -> None:
    soak("tensorflow", tensorflow, rounds=count(20, 100), seconds=25, patience=8)
