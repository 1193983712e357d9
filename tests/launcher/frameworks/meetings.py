"""What all ranks of a framework have to call for any of them to go on, made in the rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any


def horovod() -> Callable[[], Any]:
    """An all-reduce over Horovod's ranks."""
    import horovod.torch as hvd
    import torch

    return lambda: hvd.allreduce(torch.ones(100))


def tensorflow() -> Callable[[], Any]:
    """A sum over TensorFlow's workers, which bring three times 1, 2, ... each."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    @tf.function
    def step() -> Any:
        def replica() -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.fill([3], float(index + 1)))

        return strategy.run(replica)

    return step
