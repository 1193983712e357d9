"""Lesson 08, TensorFlow strategies: its exercises, and the cases that judge them in TensorFlow's own workers.

A scenario never makes a collective of its own after an answer has run: an answer that goes wrong on one rank alone must
not keep the others waiting. What is expected is computed here, by the judge, without TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from . import own
from .inside import plain
from .judging import Case, Finding, Trial
from .models import generator, nearly
from .registry import Exercise
from .telling import counted, first_numbers, shown

_TOLERANCE = {"float64": 1e-9}  # of the largest number; Keras adds a tiny number to a norm here and there
_numbers = partial(first_numbers, most=4)


def _close(got: Any, wanted: Any) -> bool:
    return bool(got.shape == wanted.shape) and nearly(got, wanted, _TOLERANCE)


@functools.cache
def _strategy(mirrored: bool) -> Any:
    """This rank's strategy, made once: two replicas in one process, or one replica in each worker; on the CPU."""
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    if not mirrored:
        return tf.distribute.MultiWorkerMirroredStrategy()
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _spread(strategy: Any, parts: Sequence[Any]) -> Any:
    """What each replica holds, from one array for each replica of the job."""
    import tensorflow as tf

    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )


def _where(mirrored: bool, replicas: int) -> str:
    if mirrored:
        return f"MirroredStrategy, {counted(replicas, 'replica')} in one process"
    return f"MultiWorkerMirroredStrategy, {counted(replicas, 'worker')}"


def _trial(mirrored: bool, world: int, scenario: Callable[..., Any], cases: Sequence[Case]) -> Trial:
    return Trial(1 if mirrored else world, scenario, cases, framework="tensorflow")


# ---- tf_config(workers, index)


def _configure(answer: Callable[..., Any]) -> dict[str, Any]:
    """What was written for each worker; a cluster is started with it only where all of it is right."""
    import tensorflow as tf

    config = json.loads(os.environ["TF_CONFIG"])
    workers, index = config["cluster"]["worker"], config["task"]["index"]
    written = [plain(answer(list(workers), other)) for other in range(len(workers))]
    told = {"workers": workers, "written": written}
    if all(_wrong_config(one, workers, other) is None for other, one in enumerate(written)):
        os.environ["TF_CONFIG"] = written[index][1]
        told["replicas"] = int(_strategy(mirrored=False).num_replicas_in_sync)
        told["cluster"] = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().as_dict()["worker"]
    return told


def _wrong_config(written: Any, workers: list[str], index: int) -> tuple[str, str] | None:
    """(what there is, a sentence that helps), or None where TensorFlow can read it."""
    if written[0] != "value" or not isinstance(written[1], str):
        return shown(written), "An environment variable holds text: json.dumps makes JSON of a dict."
    text = written[1]
    try:
        config = json.loads(text)
    except ValueError:
        return text, "That is no JSON: it takes double quotes, as json.dumps writes them and str() does not."
    cluster = config.get("cluster") if isinstance(config, dict) else None
    task = config.get("task") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        return text, 'It has two parts, "cluster" and "task".'
    if set(cluster) != {"worker"}:
        return text, 'The cluster has one kind of task here, "worker", and says so in the singular.'
    if cluster["worker"] != workers:
        why = "The list of addresses is the same on every worker, in the same order: the index is a place in it."
        return text, why
    if task.get("type") != "worker":
        return text, 'The type of the task is "worker", as it is called in the cluster.'
    if task.get("index") != index or isinstance(task["index"], bool):
        return text, "The index is this worker's number, counted from 0, as a number and not as text."
    return None


def _configs(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    for world in (1, 2, 3, 4) if thorough else (1, 3):
        given = f"{world} address{'es' * (world > 1)}"
        case = Case(given, [()] * world, partial(_judge_config, given))
        yield _trial(False, world, _configure, [case])


def _judge_config(given: str, results: list[Any]) -> Finding | None:
    for rank, told in enumerate(results):
        for index, written in enumerate(told["written"]):
            wrong = _wrong_config(written, told["workers"], index)
            if wrong:
                right = {"cluster": {"worker": told["workers"]}, "task": {"type": "worker", "index": index}}
                return Finding(f"{given}, index={index}", json.dumps(right), wrong[0], rank, wrong[1])
        if told["replicas"] != len(results) or told["cluster"] != told["workers"]:
            received = f"{told['replicas']} replicas at {told['cluster']}"
            return Finding(given, f"{len(results)} replicas at {told['workers']}", received, rank)
    return None


# ---- global_batch_loss(losses, penalty, global_batch, replicas)


def _lose(
    answer: Callable[..., Any], mirrored: bool, parts: list[Any], targets: list[Any], weights: Any, decay: float
) -> list[tuple[Any, Any]]:
    """The loss and its gradient of each replica here."""
    import tensorflow as tf

    strategy = _strategy(mirrored)
    with strategy.scope():
        variable = tf.Variable(weights)
    count, replicas = sum(map(len, parts)), strategy.num_replicas_in_sync

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.square(tf.linalg.matvec(x, variable) - y)
            penalty = decay * tf.reduce_sum(tf.square(variable))
            value = answer(losses, penalty, count, replicas)
        told.append((plain(value), plain(tape.gradient(value, variable) if isinstance(value, tf.Tensor) else None)))

    told: list[tuple[Any, Any]] = []
    strategy.run(replica, args=(_spread(strategy, parts), _spread(strategy, targets)))
    return told


def _losses(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given: list[tuple[bool, list[tuple[tuple[int, ...], float]]]]
    given = [(True, [((3, 3), 0.0), ((4, 1), 0.0), ((2, 2), 0.1)]), (False, [((2, 4, 0), 0.1)])]
    if thorough:
        given = []
        for mirrored, world in ((True, 2), (False, 2), (False, 3)):
            some = tuple(rng.randint(1, 6) for _ in range(world))
            uneven = (rng.randint(3, 6), *(rng.randint(0, 2) for _ in range(world - 1)))
            given.append((mirrored, [(some, 0.0), (uneven, 0.0), (uneven, rng.choice([0.05, 0.2]))]))
    for mirrored, some_cases in given:
        world = len(some_cases[0][0])
        cases = [_loss_case(mirrored, counts, decay, generator(rng)) for counts, decay in some_cases]
        yield _trial(mirrored, world, _lose, cases)


def _loss_case(mirrored: bool, counts: tuple[int, ...], decay: float, draw: Any) -> Case:
    parts = [draw.normal(size=(count, 3)) for count in counts]
    targets = [draw.normal(size=count) for count in counts]
    weights = draw.normal(size=3)
    given = f"{_where(mirrored, len(counts))} with {', '.join(map(str, counts))} samples"
    given += f", a penalty of {decay:g} times the squared weights" if decay else ", no penalty"
    inputs = [(mirrored, parts, targets, weights, decay)] * (1 if mirrored else len(counts))
    return Case(given, inputs, lambda results: _judge_loss(given, parts, targets, weights, decay, results))


def _judge_loss(
    given: str, parts: list[Any], targets: list[Any], weights: Any, decay: float, results: list[Any]
) -> Finding | None:
    import numpy as np

    replicas = [(rank, told) for rank, local in enumerate(results) for told in local]
    for rank, (value, _) in replicas:
        if value[0] != "tensor" or value[2].shape != ():
            return Finding(given, "one number, a tensor without dimensions", shown(value), rank, "Add the losses up.")
    errors = [part @ weights - target for part, target in zip(parts, targets, strict=True)]
    squares = [error**2 for error in errors]
    count, world = sum(map(len, parts)), len(parts)
    penalty = decay * float(np.sum(weights**2))
    own_means = [float(one.mean()) if len(one) else 0.0 for one in squares]
    total = sum(float(one.sum()) for one in squares)
    right = total / count + penalty
    text = f"replicas' losses that add up to {right:.6f}"
    values = [float(value[2]) for _, (value, _) in replicas]
    got = sum(values)
    if not _near(got, right):
        why = "The sum over replicas is to be the mean over the global batch, plus the penalty once."
        if np.isnan(got):
            why = "A replica without samples has no mean of its own: that is 0 / 0. Its sum is 0."
        elif decay and _near(got, total / count + world * penalty):
            why = "Every replica has the same weights, so every one adds the penalty: in the sum it counts that often."
        elif _near(got, sum(own_means) + penalty * world) or _near(got, sum(own_means) + penalty):
            why = "A replica's mean is over its own samples. The means are then added up: divide by the global batch."
        elif _near(got, sum(own_means) / world + penalty):
            why = "That is the mean of the replicas' means, in which a sample on a small replica counts for more."
        elif _near(got, total + penalty) or _near(got, total + world * penalty):
            why = "That is the sum over all samples: it grows with the batch, and the step with it."
        elif _near(got, right / world):
            why = "Divided once too often: the replicas' losses are added up, not averaged."
        return Finding(given, text, f"{got:.6f}, from {_numbers(np.array(values))}", None, why)
    slope = sum(2 * part.T @ error for part, error in zip(parts, errors, strict=True)) / count + 2 * decay * weights
    gradients = [gradient for _, (_, gradient) in replicas]
    for rank, gradient in zip((rank for rank, _ in replicas), gradients, strict=True):
        if gradient[0] != "tensor":
            why = "The value is right, but no gradient flows back from it: stay with TensorFlow's operations."
            return Finding(given, "a loss that can be differentiated", "a gradient of None", rank, why)
    summed = sum(gradient[2] for gradient in gradients)
    if not _close(summed, slope):
        why = "The value is right, its gradient is not: is part of it held constant?"
        return Finding(given, f"gradients that add up to {_numbers(slope)}", _numbers(summed), None, why)
    return None


def _near(got: float, wanted: float) -> bool:
    return abs(got - wanted) <= 1e-9 * max(1.0, abs(wanted))


# ---- a small classifier in Keras, and the same one replayed by the judge

_INPUTS, _HIDDEN, _CLASSES = 4, 5, 3
_RATE, _MOMENTUM = 0.25, 0.875  # Keras takes them through float32, where 0.2 and 0.9 would be other numbers
_ADAM = {"beta_1": 0.875, "beta_2": 1 - 2**-10, "epsilon": 2**-10}
Weights = list[Any]  # a matrix and a bias of the first layer, then of the second
Batch = tuple[Any, Any]  # inputs and labels


def _weights(draw: Any) -> Weights:
    return [
        draw.normal(scale=0.7, size=shape) for shape in ((_INPUTS, _HIDDEN), _HIDDEN, (_HIDDEN, _CLASSES), _CLASSES)
    ]


def _batches(draw: Any, counts: Sequence[int], steps: int) -> list[list[Batch]]:
    """For each step the batch of each replica."""
    return [
        [(draw.normal(size=(count, _INPUTS)), draw.integers(_CLASSES, size=count)) for count in counts]
        for _ in range(steps)
    ]


def _in_keras(strategy: Any, weights: Weights, adam: bool) -> tuple[Any, Any]:
    """A model with these weights, and its optimizer, made in the strategy's scope."""
    import keras

    with strategy.scope():
        layers = [keras.layers.Dense(_HIDDEN, "tanh", dtype="float64"), keras.layers.Dense(_CLASSES, dtype="float64")]
        model = keras.Sequential([keras.Input((_INPUTS,), dtype="float64"), *layers])
        model.set_weights(weights)
        if adam:
            optimizer = keras.optimizers.Adam(_RATE, **_ADAM)
        else:
            optimizer = keras.optimizers.SGD(_RATE, momentum=_MOMENTUM)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def _copies(model: Any) -> list[Weights]:
    """The weights of each replica here."""
    values = [getattr(variable.value, "values", (variable.value,)) for variable in model.trainable_variables]
    return [[one.numpy() for one in of_replica] for of_replica in zip(*values, strict=True)]


def _number_of(value: Any) -> Any:
    """What was returned as plain data; a number of numpy's is a number."""
    import numpy as np

    return plain(value.item() if isinstance(value, np.generic) else value)


Gradient = Callable[[list[Any], int], list[Any]]  # what is applied, from each replica's sum over samples and the count


def _replayed(weights: Weights, steps: Sequence[Sequence[Batch]], gradient: Gradient, adam: bool) -> list[Weights]:
    """The weights after each step, as one process makes them."""
    import torch

    parameters = [torch.tensor(array, requires_grad=True) for array in weights]
    optimizer = torch.optim.SGD(parameters, lr=_RATE, momentum=_MOMENTUM)
    step = _adam_as_in_keras(parameters) if adam else optimizer.step
    after = []
    for batches in steps:
        sums = [_summed_gradients(parameters, batch) for batch in batches]
        applied = gradient(sums, sum(len(labels) for _, labels in batches))
        for parameter, one in zip(parameters, applied, strict=True):
            parameter.grad = one
        step()
        after.append([parameter.detach().numpy().copy() for parameter in parameters])
    return after


def _adam_as_in_keras(parameters: list[Any]) -> Callable[[], None]:
    """A step of Adam that adds epsilon to the root of the moment as it is; torch's corrects the moment first."""
    import torch

    moments = [(torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in parameters]
    first_decay, second_decay, epsilon = _ADAM.values()
    steps = itertools.count(1)

    def step() -> None:
        number = next(steps)
        rate = _RATE * (1 - second_decay**number) ** 0.5 / (1 - first_decay**number)
        with torch.no_grad():
            for parameter, (first, second) in zip(parameters, moments, strict=True):
                first += (parameter.grad - first) * (1 - first_decay)
                second += (parameter.grad**2 - second) * (1 - second_decay)
                parameter -= rate * first / (second.sqrt() + epsilon)

    return step


def _summed_gradients(parameters: list[Any], batch: Batch) -> list[Any]:
    import torch

    if not len(batch[1]):
        return [torch.zeros_like(parameter) for parameter in parameters]
    return list(torch.autograd.grad(_summed_loss(parameters, batch), parameters))


def _summed_loss(parameters: list[Any], batch: Batch) -> Any:
    import torch

    inputs, labels = (torch.from_numpy(array) for array in batch)
    first, first_bias, second, second_bias = parameters
    logits = torch.tanh(inputs @ first + first_bias) @ second + second_bias
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def _added(sums: list[Any]) -> list[Any]:
    return [sum(parts) for parts in zip(*sums, strict=True)]


def _same(got: Weights, wanted: Weights) -> bool:
    return all(_close(one, other) for one, other in zip(got, wanted, strict=True))


# ---- distributed_step(strategy, model, optimizer, batch, global_batch)


def _step(
    answer: Callable[..., Any], mirrored: bool, weights: Weights, steps: list[list[Batch]], adam: bool
) -> dict[str, Any]:
    strategy = _strategy(mirrored)
    model, optimizer = _in_keras(strategy, weights, adam)
    losses, states = [], []
    for batches in steps:
        batch = tuple(_spread(strategy, parts) for parts in zip(*batches, strict=True))
        count = sum(len(labels) for _, labels in batches)
        losses.append(_number_of(answer(strategy, model, optimizer, batch, count)))
        states.append(_copies(model))
    return {"losses": losses, "states": states}


_STEPS = 5


def _steps(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given: list[tuple[bool, tuple[int, ...], bool]]
    given = [(True, (4, 2), False), (True, (4, 1), True), (False, (2, 3), False), (False, (1, 4, 2), True)]
    if thorough:
        given = []
        for mirrored, world in ((True, 2), (False, 2), (False, 3)):
            counts = [(rng.randint(4, 6), *(rng.randint(1, 3) for _ in range(world - 1))), (rng.randint(2, 5),) * world]
            given += [(mirrored, some, adam) for some, adam in zip(counts, rng.sample([False, True], 2), strict=True)]
    for (mirrored, world), some in itertools.groupby(given, key=lambda one: (one[0], len(one[1]))):
        cases = [_step_case(mirrored, counts, adam, generator(rng)) for _, counts, adam in some]
        yield _trial(mirrored, world, _step, cases)


def _optimizer_named(adam: bool) -> str:
    return "Adam" if adam else "SGD with momentum"


def _step_case(mirrored: bool, counts: tuple[int, ...], adam: bool, draw: Any) -> Case:
    weights, steps = _weights(draw), _batches(draw, counts, _STEPS)
    given = f"{_where(mirrored, len(counts))} with {', '.join(map(str, counts))} samples a step"
    given += f", {counted(_STEPS, 'step')} of {_optimizer_named(adam)}"
    inputs = [(mirrored, weights, steps, adam)] * (1 if mirrored else len(counts))
    return Case(given, inputs, lambda results: _judge_steps(given, weights, steps, adam, results))


def _divided(number: float) -> Gradient:
    """The sum of all samples' gradients, divided by so many times their count."""
    return lambda sums, count: [one / (count * number) for one in _added(sums)]


def _judge_steps(
    given: str, weights: Weights, steps: list[list[Batch]], adam: bool, results: list[Any]
) -> Finding | None:
    import torch

    replicas = len(steps[0])
    wanted = _replayed(weights, steps, _divided(1), adam)
    before = [weights, *wanted]
    for step, right in enumerate(wanted):
        for rank, told in enumerate(results):
            wrong = next((copy for copy in told["states"][step] if not _same(copy, right)), None)
            if wrong is None:
                continue
            why = _why_stepped(weights, steps, adam, step, results, wrong)
            text = f"the first weights after step {step + 1} as one process has them: {_numbers(right[0])}"
            return Finding(given, text, _numbers(wrong[0]), rank, why)
        count = sum(len(labels) for _, labels in steps[step])
        parameters = [torch.tensor(array) for array in before[step]]
        right_loss = sum(float(_summed_loss(parameters, batch)) for batch in steps[step] if len(batch[1])) / count
        for rank, told in enumerate(results):
            number = _loss_number(told["losses"][step])
            if number is None or not _near(number, right_loss):
                why = "Return the mean loss over the global batch, the same on every worker, from before the update."
                if told["losses"][step][1] == "PerReplica":
                    why = "strategy.run returns a value for each replica: strategy.reduce makes one of them."
                elif number is not None and _near(number * replicas, right_loss):
                    why = "The replicas' losses are parts of one sum: ReduceOp.SUM adds them, and nothing more."
                received = shown(told["losses"][step])
                return Finding(given, f"a loss of {right_loss:.6f} from step {step + 1}", received, rank, why)
    return None


def _loss_number(value: Any) -> float | None:
    if value[0] == "tensor" and value[2].shape == ():
        return float(value[2])
    return float(value[1]) if value[0] == "value" and type(value[1]) in (int, float) else None


def _why_stepped(
    weights: Weights, steps: list[list[Batch]], adam: bool, step: int, results: list[Any], wrong: Weights
) -> str:
    """What could have led to these weights."""
    sizes = [[len(labels) for _, labels in batches] for batches in steps]
    replicas = len(sizes[0])

    def of_means(sums: list[Any], count: int) -> list[Any]:
        return _added([[one / max(1, size) for one in part] for part, size in zip(sums, sizes[0], strict=True)])

    known: list[tuple[Gradient, str]] = [
        (of_means, "Each replica took the mean over its own samples, and apply_gradients added those means up."),
        (
            lambda sums, count: [one / replicas for one in of_means(sums, count)],
            "That is the mean of the replicas' means, in which a sample on a small replica counts for more.",
        ),
        (
            _divided(1 / replicas),
            "Keras's apply_gradients sums gradients over replicas itself: here they are summed twice.",
        ),
        (
            _divided(replicas),
            "Divided once too often: gradients that are divided by the global batch are summed, not averaged.",
        ),
        (
            lambda sums, count: _added(sums),
            "That is the gradient of the sum of the losses: divide by the global batch.",
        ),
    ]
    if step == 0 and _same(wrong, weights):
        return "Nothing has moved: is optimizer.apply_gradients called, with gradients that are there?"
    for replica in range(replicas):
        if _same(wrong, _replayed(weights, steps, partial(_of_one, replica, sizes[0]), adam)[step]):
            return (
                "That is what this replica gives alone: nothing was synchronised. Keras sums gradients only inside "
                "strategy.run, where each replica calls apply_gradients."
            )
    for gradient, why in known:
        if _same(wrong, _replayed(weights, steps, gradient, adam)[step]):
            return why
    if len({_key(copy) for told in results for copy in told["states"][step]}) > 1:
        return "The replicas have different weights: they have not applied the same gradient."
    return "Inside strategy.run: losses, their sum divided by the global batch, its gradients, apply_gradients."


def _of_one(replica: int, sizes: list[int], sums: list[Any], count: int) -> list[Any]:
    """The gradient that one replica makes of its own samples, as if there were no others."""
    return [one / max(1, sizes[replica]) for one in sums[replica]]


def _key(copy: Weights) -> bytes:
    return b"".join(one.tobytes() for one in copy)


# ---- shard_dataset(dataset, context, global_batch)

_EPOCHS = 2


def _shard(answer: Callable[..., Any], mirrored: bool, count: int, global_batch: int) -> dict[str, Any]:
    """The batches that this worker's pipeline gives, epoch after epoch; of an endless one some."""
    import tensorflow as tf

    made: list[Any] = []

    def pipeline(context: Any) -> Any:
        made.append(answer(tf.data.Dataset.range(count), context, global_batch))
        return made[0] if isinstance(made[0], tf.data.Dataset) else tf.data.Dataset.range(count)

    _strategy(mirrored).distribute_datasets_from_function(pipeline)
    if not isinstance(made[0], tf.data.Dataset):
        return {"other": plain(made[0])}
    epochs = []
    for _ in range(_EPOCHS):
        batches = [plain(batch) for batch in itertools.islice(made[0], 2 * count + 2)]
        epochs.append([batch[2].tolist() if batch[0] == "tensor" else None for batch in batches])
    return {"epochs": epochs}


def _shards(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given = [(True, 2, 21, 8), (False, 2, 25, 6), (False, 3, 34, 9)]
    if thorough:
        given = [
            (mirrored, world, world * rng.randint(10, 16) + rng.randrange(1, world), world * rng.randint(2, 4))
            for mirrored, world in ((True, 2), (False, 2), (False, 3))
        ]
    for mirrored, world, count, size in given:
        text = f"{_where(mirrored, world)}, {counted(count, 'sample')}, global_batch={size}"
        inputs = [(mirrored, count, size)] * (1 if mirrored else world)
        case = Case(text, inputs, partial(_judge_shards, text, count, size // world))
        yield _trial(mirrored, world, _shard, [case])


def _judge_shards(given: str, count: int, size: int, results: list[Any]) -> Finding | None:
    for rank, told in enumerate(results):
        if "other" in told:
            return Finding(given, "a tf.data.Dataset", shown(told["other"]), rank)
        for batches in told["epochs"]:
            if any(not isinstance(batch, list) for batch in batches):
                return Finding(given, "batches of samples", "single samples", rank, "The last step is batch(...).")
            sizes = [len(batch) for batch in batches]
            if sum(sizes) > 2 * count:
                return Finding(
                    given, "an epoch that ends", "one without end", rank, "An epoch is one pass: no repeat()."
                )
            if any(one != size for one in sizes[:-1]) or max(sizes, default=0) > size:
                why = (
                    "A pipeline gives each of its replicas a batch in turn: context.get_per_replica_batch_size says of "
                    "how many samples."
                )
                return Finding(given, f"batches of {size}, the last may be smaller", f"{sizes}", rank, why)
    for epoch in range(_EPOCHS):
        taken = [[number for batch in told["epochs"][epoch] for number in batch] for told in results]
        every = sorted(itertools.chain(*taken))
        twice = len(every) - len(set(every))
        missing = count - len(set(every))
        if twice or missing:
            why = "Each pipeline takes a share of its own: dataset.shard(number of pipelines, this pipeline's number)."
            if twice and missing:
                why = (
                    "Where the whole is shuffled before it is shared out, each worker takes its share of an order of "
                    "its own: share out first."
                )
            elif missing:
                why = "Nothing may be left out, in the last batch neither."
            received = f"{counted(twice, 'sample')} more than once, {missing} never"
            return Finding(f"{given}, epoch {epoch + 1}", "each sample once over all workers", received, None, why)
        shares = [len(one) for one in taken]
        if max(shares) - min(shares) > 1:
            why = "The slowest worker sets the pace: share out evenly."
            return Finding(given, "shares that differ by one sample at most", f"{shares} samples", None, why)
    for rank, told in enumerate(results):
        first, second = ([number for batch in epoch for number in batch] for epoch in told["epochs"])
        if first == second or first == sorted(first):
            why = "shuffle over the whole share, of which a fresh order comes in each epoch unless one says otherwise."
            received = f"{first[:6]} ..., then {second[:6]} ..."
            return Finding(given, "another order in each epoch", received, rank, why)
    return None


# ---- clipped_update(strategy, model, optimizer, batch, global_batch, max_norm)


def _clip(
    answer: Callable[..., Any], mirrored: bool, weights: Weights, steps: list[list[Batch]], max_norm: float
) -> list[list[Weights]]:
    strategy = _strategy(mirrored)
    model, optimizer = _in_keras(strategy, weights, adam=False)
    states = []
    for batches in steps:
        batch = tuple(_spread(strategy, parts) for parts in zip(*batches, strict=True))
        answer(strategy, model, optimizer, batch, sum(len(labels) for _, labels in batches), max_norm)
        states.append(_copies(model))
    return states


def _clips(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given: list[tuple[bool, tuple[int, ...], float]]
    given = [(True, (3, 3), 100.0), (True, (4, 2), 0.1), (False, (2, 3), 0.1)]
    if thorough:
        given = []
        for mirrored, world in ((True, 2), (False, 2), (False, 3)):
            counts = tuple(rng.randint(2, 5) for _ in range(world))
            given += [(mirrored, counts, max_norm) for max_norm in (100.0, rng.choice([0.05, 0.1]))]
    for (mirrored, world), some in itertools.groupby(given, key=lambda one: (one[0], len(one[1]))):
        cases = [_clip_case(mirrored, counts, max_norm, generator(rng)) for _, counts, max_norm in some]
        yield _trial(mirrored, world, _clip, cases)


def _clip_case(mirrored: bool, counts: tuple[int, ...], max_norm: float, draw: Any) -> Case:
    weights, steps = _weights(draw), _batches(draw, counts, 3)
    given = f"{_where(mirrored, len(counts))} with {', '.join(map(str, counts))} samples a step, max_norm={max_norm:g}"
    inputs = [(mirrored, weights, steps, max_norm)] * (1 if mirrored else len(counts))
    return Case(given, inputs, lambda results: _judge_clips(given, weights, steps, max_norm, results))


def _limited(gradients: list[Any], most: float) -> list[Any]:
    norm = sum(float((one * one).sum()) for one in gradients) ** 0.5
    return [one * min(1.0, most / norm) for one in gradients]


def _judge_clips(
    given: str, weights: Weights, steps: list[list[Batch]], most: float, results: list[Any]
) -> Finding | None:
    replicas = len(steps[0])
    mean = _divided(1)

    def right(sums: list[Any], count: int) -> list[Any]:
        return _limited(mean(sums, count), most)

    def before_the_sum(sums: list[Any], count: int) -> list[Any]:
        return _added([_limited([one / count for one in part], most) for part in sums])

    known: list[tuple[Gradient, str]] = [
        (
            before_the_sum,
            "Each replica's own gradient was limited, and the limited ones added up: sum first, then clip.",
        ),
        (
            lambda sums, count: [one * replicas for one in right(sums, count)],
            "The norm is limited, and then apply_gradients sums over replicas once more: so many times too far.",
        ),
        (
            lambda sums, count: [one * replicas for one in mean(sums, count)],
            "Nothing is clipped, and gradients are summed twice.",
        ),
        (mean, "Nothing is clipped."),
    ]
    wanted = _replayed(weights, steps, right, adam=False)
    for step, state in enumerate(wanted):
        for rank, told in enumerate(results):
            wrong = next((copy for copy in told[step] if not _same(copy, state)), None)
            if wrong is None:
                continue
            why = "Sum the gradients over all replicas, limit the norm of the sum, and see what apply_gradients adds."
            for gradient, words in known:
                if _same(wrong, _replayed(weights, steps, gradient, adam=False)[step]):
                    why = words
                    break
            before = (wanted[step - 1] if step else weights)[0]
            text = f"in step {step + 1} the first weights move by {_numbers(state[0] - before)}"
            return Finding(given, text, f"by {_numbers(wrong[0] - before)}", rank, why)
    return None


# ---- what the lesson goes on with while there is no right answer


def _own_global_batch_loss(losses: Any, penalty: Any, global_batch: int, replicas: int) -> Any:
    import tensorflow as tf

    own.note()
    average = tf.nn.compute_average_loss(losses, global_batch_size=global_batch)
    return average + tf.nn.scale_regularization_loss(penalty)


EXERCISES = (
    Exercise(
        name="sum_of_means",
        title="how much too large a sum of means is",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="global_batch_loss",
        title="a replica's part of the loss",
        kind="implement",
        points=4,
        parameters=("losses", "penalty", "global_batch", "replicas"),
        cases=_losses,
        own=lambda: _own_global_batch_loss,
        own_name="tf.nn.compute_average_loss",
        hints=(
            "Write down what the sum over the replicas is to be. Which part of that sum can this replica know?",
            "Every sample of the global batch counts with 1 / global_batch, wherever it lies. The penalty is on every "
            "replica, and is to count once.",
            "The sum of the losses divided by one number, plus the penalty divided by another.",
        ),
    ),
    Exercise(
        name="tf_config",
        title="a worker's TF_CONFIG",
        kind="implement",
        points=3,
        parameters=("workers", "index"),
        cases=_configs,
        hints=(
            "The worker whose TF_CONFIG was read aloud: which part of it is the same on all workers, and which is not?",
            'A dict with two entries: "cluster" maps each kind of task to its addresses, "task" says who this is.',
            'json.dumps of {"cluster": {"worker": workers}, "task": {...}}, the task with a type and an index.',
        ),
    ),
    Exercise(
        name="distributed_step",
        title="one training step on all replicas",
        kind="implement",
        points=5,
        parameters=("strategy", "model", "optimizer", "batch", "global_batch"),
        cases=_steps,
        hints=(
            "Two functions: one that a replica runs on its own part of the batch, and around it the call that runs it "
            "on all replicas. Which of the two calls apply_gradients?",
            "In the replica's function: losses of the samples under a tape, their sum divided by global_batch, the "
            "gradients, apply_gradients, and the loss as its result.",
            "strategy.run(replica_step, args=batch) gives a loss for each replica. They are parts of one sum: "
            "strategy.reduce(tf.distribute.ReduceOp.SUM, ..., axis=None).",
        ),
    ),
    Exercise(
        name="lines_read",
        title="what sharding by data costs",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="shard_dataset",
        title="a pipeline for each worker",
        kind="implement",
        points=4,
        parameters=("dataset", "context", "global_batch"),
        cases=_shards,
        hints=(
            "Three things happen to the dataset: it is shared out, shuffled, and put into batches. In which order?",
            "context knows num_input_pipelines and input_pipeline_id, and how large a replica's batch is.",
            "shard, then shuffle with a buffer that holds the whole share, then "
            "batch(context.get_per_replica_batch_size(global_batch)).",
        ),
    ),
    Exercise(
        name="clipped_update",
        title="clipped before the sum, or after it",
        kind="debug",
        points=4,
        parameters=("strategy", "model", "optimizer", "batch", "global_batch", "max_norm"),
        cases=_clips,
        hints=(
            "What is limited here: the gradient of the global batch, or a replica's part of it?",
            "tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients) gives every replica "
            "the sum. What does apply_gradients then do with it?",
            "All-reduce, clip, and divide by strategy.num_replicas_in_sync, so that the sum in apply_gradients gives "
            "the clipped gradient once.",
        ),
    ),
    Exercise(
        name="four_gpus",
        title="from one GPU to four",
        kind="explain",
        points=3,
    ),
)
