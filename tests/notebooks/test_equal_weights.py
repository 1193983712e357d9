"""The same network, data, first weights and batches, trained as each lesson teaches it, end with the same weights.

What is called here stands in the lessons: their solved editions' functions, taken from the notebooks.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import nbformat
import numpy as np
import pytest
import torch

from course_utils import launch
from course_utils.datasets import digits

SOLUTIONS = Path(__file__).resolve().parents[2] / "notebooks" / "solutions"
STEPS, BATCH, RATE, WORLD = 20, 60, 0.25, 2  # 0.25: Keras keeps a rate in float32, where 0.1 is another number
SHAPES = ((64, 32), (32,), (32, 10), (10,))
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}  # of the largest weight

pytestmark = pytest.mark.usefixtures("tensorflow_is_there")


@cache
def taught(lesson: str) -> dict[str, Any]:
    """The imports, functions and classes of a lesson's solved edition."""
    (path,) = SOLUTIONS.glob(f"{lesson}_*.ipynb")
    names: dict[str, Any] = {"__name__": f"lesson_{lesson}"}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code" and not cell.source.startswith("%%"):
            kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
            for statement in ast.parse(cell.source).body:
                with contextlib.suppress(NameError):  # one whose defaults are values of the lesson's
                    if isinstance(statement, kinds):
                        exec(compile(ast.Module([statement], []), path.name, "exec"), names)
    return names


def first_weights(dtype: str) -> list[Any]:
    draw = np.random.default_rng(0)
    return [draw.normal(scale=0.2, size=shape).astype(dtype) for shape in SHAPES]


def batches(dtype: str, rank: int | None = None) -> list[tuple[Any, Any]]:
    """The batches of one process, or this rank's equal share of each."""
    data = digits("train")
    order = np.random.default_rng(1).permutation(len(data))[: STEPS * BATCH].reshape(STEPS, BATCH)
    mine = order if rank is None else np.split(order, WORLD, axis=1)[rank]
    return [(data.images[indices].astype(dtype), data.labels[indices]) for indices in mine]


def torch_model(dtype: str) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    model.to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), first_weights(dtype), strict=True):
            parameter.copy_(torch.from_numpy(array.T))  # torch keeps a matrix the other way round
    return model


def torch_batches(dtype: str, rank: int | None = None) -> list[tuple[Any, Any]]:
    return [(torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in batches(dtype, rank)]


def weights_of(model: Any) -> list[Any]:
    return [parameter.detach().numpy().T for parameter in model.parameters()]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def plain_loop(model: Any, dtype: str, rank: int | None = None) -> None:
    optimizer = sgd(model)
    for images, labels in torch_batches(dtype, rank):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def by_hand(train_replicas: Callable[..., None], dtype: str) -> Any:
    model = torch_model(dtype)
    rank = torch.distributed.get_rank()
    train_replicas(model, sgd(model), torch_batches(dtype, rank), lambda: None)
    return weights_of(model)


def in_ddp(dtype: str) -> Any:
    model = torch_model(dtype)
    plain_loop(torch.nn.parallel.DistributedDataParallel(model), dtype, torch.distributed.get_rank())
    return weights_of(model)


def in_keras(lesson: dict[str, Any], mirrored: bool, dtype: str) -> Any:
    import keras
    import tensorflow as tf

    if mirrored:
        strategy = tf.distribute.MirroredStrategy(lesson["two_devices"]())
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(32, "tanh", dtype=dtype), keras.layers.Dense(10, dtype=dtype)]
        model = keras.Sequential([keras.Input((64,), dtype=dtype), *layers])
        model.set_weights(first_weights(dtype))
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    for parts in zip(*(batches(dtype, rank) for rank in range(WORLD)), strict=True):
        lesson["distributed_step"](strategy, model, optimizer, lesson["spread"](strategy, parts), BATCH)
    return model.get_weights()


@pytest.fixture
def results(request: pytest.FixtureRequest) -> Iterator[Callable[[str], dict[str, list[Any]]]]:
    """The last weights of every rank, by the way they were trained."""

    def train(dtype: str) -> dict[str, list[Any]]:
        wanted = {name: taught("08")[name] for name in ("two_devices", "distributed_step", "spread")}
        in_tensorflow = {"framework": "tensorflow"}
        return {
            "by hand": launch(by_hand, taught("03")["train_replicas"], dtype).results,
            "DDP": launch(in_ddp, dtype).results,
            "MirroredStrategy": launch(in_keras, wanted, True, dtype, nprocs=1, **in_tensorflow).results,
            "MultiWorkerMirroredStrategy": launch(in_keras, wanted, False, dtype, **in_tensorflow).results,
        }

    cloudpickle.register_pickle_by_value(request.module)
    yield train
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_by_hand_ddp_and_both_strategies_end_with_the_weights_of_one_process(dtype, results):
    alone = torch_model(dtype)
    plain_loop(alone, dtype)
    moved = max(np.abs(one - first).max() for one, first in zip(weights_of(alone), first_weights(dtype), strict=True))
    assert moved > 0.1  # or equality would mean nothing
    for way, ranks in results(dtype).items():
        for rank, weights in enumerate(ranks):
            for got, right in zip(weights, weights_of(alone), strict=True):
                off = np.abs(got - right).max() / np.abs(right).max()
                assert str(got.dtype) == dtype
                assert off < TOLERANCE[dtype], f"{way}, rank {rank}: off by {off:.1e}"
