"""Lesson 05, PyTorch DDP: its exercises, and the cases that judge what is left to the code around the wrapper."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from . import own
from .inside import plain
from .judging import Case, Finding, Trial
from .models import Arrays, filled, generator, nearly
from .registry import Exercise
from .telling import counted, first_numbers, shown

_TOLERANCE = {"float32": 2e-5, "float64": 1e-10}  # of the largest number
_numbers = partial(first_numbers, most=4)


def _close(got: Any, wanted: Any) -> bool:
    return nearly(got, wanted, _TOLERANCE)


# ---- a small network, with or without buffers

_INPUTS, _CLASSES = 4, 3


def _network(arrays: Arrays, normed: bool = False) -> Any:
    """Linear, tanh, with `normed` a batch norm (whose buffers DDP sends before a forward), linear; in float64."""
    import torch

    def make() -> Any:
        layers = [torch.nn.Linear(_INPUTS, 5), torch.nn.Tanh(), torch.nn.Linear(5, _CLASSES)]
        return torch.nn.Sequential(*layers, *([torch.nn.BatchNorm1d(_CLASSES)] if normed else []))

    return filled(make, "float64", arrays)


def _drawn(draw: Any) -> dict[str, Any]:
    shapes = {"0.weight": (5, _INPUTS), "0.bias": (5,), "2.weight": (_CLASSES, 5), "2.bias": (_CLASSES,)}
    statistics = {"3.running_mean": draw.normal(size=_CLASSES), "3.running_var": draw.uniform(0.5, 2, size=_CLASSES)}
    return {name: draw.normal(scale=0.7, size=shape) for name, shape in shapes.items()} | statistics


def _wrapped(model: Any) -> Any:
    import torch

    return torch.nn.parallel.DistributedDataParallel(model)


def _told(model: Any) -> dict[str, Any]:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def _tensors(batch: Sequence[Any]) -> tuple[Any, ...]:
    import torch

    return tuple(torch.from_numpy(array.copy()) for array in batch)


# ---- evaluate(ddp, images, labels, batch_size)


def _evaluate(
    answer: Callable[..., Any], arrays: Arrays, images: Any, labels: Any, size: int, training: bool
) -> dict[str, Any]:
    """What was returned, and what went through the model: the first number of a sample is its own."""
    model = _network(arrays, normed=True)
    ddp = _wrapped(model).train(training)
    seen: list[tuple[list[int], bool]] = []

    def note(_: Any, inputs: tuple[Any, ...]) -> None:
        seen.append((inputs[0][:, 0].mul(1000).round().int().tolist(), model.training))

    model.register_forward_pre_hook(note)
    value = plain(answer(ddp, *_tensors((images, labels)), size))
    return {"value": value, "seen": seen, "mode": model.training}


def _evaluations(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given = {2: [(7, 2), (1, 3)], 3: [(11, 2), (1, 2)]}
    if thorough:
        given = {
            world: [(world * rng.randint(2, 6) + rng.randrange(world), rng.randint(1, 4)), (rng.randint(1, world), 3)]
            for world in (1, 2, 3, 4)
        }
    for world, some in given.items():
        cases = [
            _evaluation_case(world, count, size, number % 2 == 0, generator(rng))
            for number, (count, size) in enumerate(some)
        ]
        yield Trial(world, _evaluate, cases, group=True, collectives=True)


def _evaluation_case(world: int, count: int, size: int, training: bool, draw: Any) -> Case:
    import numpy as np
    import torch

    arrays = _drawn(draw)
    images = draw.normal(size=(count, _INPUTS))
    images[:, 0] = np.arange(1, count + 1) / 1000  # by which a sample is known again
    with torch.no_grad():
        predicted = _network(arrays, normed=True).eval()(torch.from_numpy(images)).argmax(dim=1).numpy()
    correct = _telling(world, count, draw)
    labels = np.where(correct, predicted, (predicted + 1) % _CLASSES)
    given = f"{counted(world, 'rank')}, {counted(count, 'sample')}, batch_size={size}"
    inputs = [(arrays, images, labels, size, training)] * world
    return Case(given, inputs, lambda results: _judge_evaluated(given, world, correct, size, training, results))


def _telling(world: int, count: int, draw: Any) -> Any:
    """Which samples are to be right: drawn until wrong ways of counting give another accuracy, where they can."""
    import numpy as np

    for _ in range(200):
        correct = draw.random(count) < 0.6
        others = [_mean_of_means(correct, world), _padded(correct, world)]
        if count < world or world == 1 or count % world == 0:
            return correct
        if all(abs(other - correct.mean()) > 1e-6 for other in others):
            return correct
    return np.arange(count) == 0


def _mean_of_means(correct: Any, world: int) -> float:
    parts = [correct[rank::world] for rank in range(world)]
    return float(sum(part.mean() for part in parts if len(part)) / world)


def _padded(correct: Any, world: int) -> float:
    """The accuracy with the samples that DistributedSampler repeats."""
    import numpy as np

    return float(np.resize(correct, -(-len(correct) // world) * world).mean())


def _judge_evaluated(
    given: str, world: int, correct: Any, size: int, training: bool, results: list[Any]
) -> Finding | None:
    right = float(correct.mean())
    text = f"{right:.6f}, {int(correct.sum())} of {len(correct)}"
    taken = [number for told in results for batch, _ in told["seen"] for number in batch]
    for rank, told in enumerate(results):
        if any(mode for _, mode in told["seen"]):
            why = "In training mode batch norm uses the statistics of the batch, and changes its buffers: eval() first."
            return Finding(given, "a model in evaluation mode", "one in training mode", rank, why)
        largest = max((len(batch) for batch, _ in told["seen"]), default=0)
        if largest > size:
            why = "A test set can be too large for one forward."
            return Finding(given, f"batches of at most {size}", f"a batch of {largest}", rank, why)
    everywhere = [told["value"] for told in results]
    missing = sorted(set(range(1, len(correct) + 1)) - set(taken))
    twice = sorted({number for number in taken if taken.count(number) > 1})
    for rank, value in enumerate(everywhere):
        number = _number(value)
        if number is None:
            why = "A Python float, on every rank: total.item() makes one of a tensor."
            if value == ("value", None):
                why = "Nothing came back on this rank. Every rank returns the accuracy: all-reduce the counts."
            return Finding(given, text, shown(value), rank, why)
        if abs(number - right) < 1e-6:
            continue
        why = "Add up over all ranks how many were right and how many there were; divide once, at the end."
        if twice:
            why = (
                f"{counted(len(twice), 'sample')} went through a model more than once: DistributedSampler pads, so "
                f"that all ranks have equally many. {why}"
            )
        elif missing:
            why = f"{counted(len(missing), 'sample')} never went through a model: is something dropped? {why}"
        elif world > 1 and len({_number(one) for one in everywhere}) > 1:
            why = f"Ranks return different numbers: their own accuracies. {why}"
        elif world > 1:
            why = f"A mean of the ranks' accuracies counts a sample on a small shard for more. {why}"
        return Finding(given, text, f"{number:.6f}", rank, why)
    if twice:
        why = "The number is right, but the work is not shared out: each sample goes through a model on one rank."
        received = f"{counted(len(twice), 'sample')} more than once"
        return Finding(given, "each sample once", received, None, why)
    if missing:
        why = "The number is right by chance: some samples never went through a model."
        return Finding(given, "each sample once", f"{counted(len(missing), 'sample')} never", None, why)
    if world > 1 and len(correct) >= world and any(not any(batch for batch, _ in told["seen"]) for told in results):
        idle = next(rank for rank, told in enumerate(results) if not any(batch for batch, _ in told["seen"]))
        why = "The number is right, but one rank does the work of others: shard the samples."
        return Finding(given, "a share of the samples on each rank", "none", idle, why)
    for rank, told in enumerate(results):
        if told["mode"] != training:
            mode = "training" if training else "evaluation"
            why = "Whoever goes on training after an evaluation should not have to know that there was one."
            return Finding(given, f"the model back in {mode} mode", "the other mode", rank, why)
    return None


def _number(value: Any) -> float | None:
    """The number that an answer returned, or None; a tensor of one number is none."""
    return float(value[1]) if value[0] == "value" and type(value[1]) in (int, float) else None


# ---- steps of training, replayed by one process

_RATE, _MOMENTUM = 0.1, 0.9


def _sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)


def _adam(model: Any) -> Any:
    import torch

    return torch.optim.Adam(model.parameters(), lr=_RATE, eps=1e-3)


def _mse(model: Any, batch: Sequence[Any]) -> Any:
    import torch

    inputs, targets = _tensors(batch)
    return torch.nn.functional.mse_loss(model(inputs), targets)


def _replayed(
    arrays: Arrays, steps: Sequence[Sequence[Any]], divisors: Sequence[int], made: Callable[[Any], Any] = _sgd
) -> dict[str, Any]:
    """The parameters after steps whose gradient is the sum over the step's batches, divided."""
    import torch

    model = _network(arrays)
    optimizer = made(model)
    with torch.enable_grad():
        for batches, divisor in zip(steps, divisors, strict=True):
            optimizer.zero_grad()
            for batch in batches:
                (_mse(model, batch) / divisor).backward()
            optimizer.step()
    return _told(model)


def _same(got: Arrays, wanted: Arrays) -> bool:
    return all(_close(got[name], wanted[name]) for name in got)


def _batch(draw: Any, count: int) -> tuple[Any, Any]:
    return draw.normal(size=(count, _INPUTS)), draw.normal(size=(count, _CLASSES))


# ---- train_uneven(ddp, optimizer, batches)


def _train_uneven(answer: Callable[..., Any], arrays: Arrays, batches: list[Any]) -> dict[str, Any]:
    model = _network(arrays)
    answer(_wrapped(model), _sgd(model), [_tensors(batch) for batch in batches])
    return _told(model)


def _unevens(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given: dict[int, list[tuple[int, ...]]] = {2: [(3, 3), (2, 4)], 3: [(3, 1, 2)]}
    if thorough:
        given = {1: [(2,)]}
        for world in (2, 3, 4):
            counts = [rng.randint(1, 5) for _ in range(world)]
            while len(set(counts)) == 1:
                counts = [rng.randint(1, 5) for _ in range(world)]
            given[world] = [(2,) * world, tuple(counts)]
    for world, some in given.items():
        cases = [_uneven_case(world, counts, generator(rng)) for counts in some]
        yield Trial(world, _train_uneven, cases, group=True, collectives=True)


def _uneven_case(world: int, counts: Sequence[int], draw: Any) -> Case:
    arrays = _drawn(draw)
    batches = [[_batch(draw, 3) for _ in range(count)] for count in counts]
    given = f"{counted(world, 'rank')} with {', '.join(map(str, counts))} batches"
    inputs = [(arrays, mine) for mine in batches]
    return Case(given, inputs, lambda results: _judge_uneven(given, arrays, batches, results))


def _steps_of(batches: Sequence[Sequence[Any]], length: int, repeat: bool = False) -> list[list[Any]]:
    return [
        [mine[min(step, len(mine) - 1)] for mine in batches if repeat or step < len(mine)] for step in range(length)
    ]


def _judge_uneven(given: str, arrays: Arrays, batches: list[list[Any]], results: list[Any]) -> Finding | None:
    import numpy as np

    world, counts = len(batches), [len(mine) for mine in batches]
    steps = _steps_of(batches, max(counts))
    rights = [
        _replayed(arrays, steps, [world] * len(steps)),
        _replayed(arrays, steps, [len(step) for step in steps]),
    ]
    name = "0.weight"
    text = f"{name} as one process has it: {_numbers(rights[0][name])}"
    for rank, told in enumerate(results):
        if any(not np.array_equal(told[key], results[-1][key]) for key in told):
            why = "Replicas must be equal in the end: a rank that has no batch any more needs the later steps too."
            if any(_same(told, _replayed(arrays, _steps_of([mine], len(mine)), [1] * len(mine))) for mine in batches):
                why = "Each rank has trained alone: the forward goes through the wrapper."
            received = f"{name} {_numbers(told[name])} here, {_numbers(results[-1][name])} on rank {world - 1}"
            return Finding(given, "equal parameters on all ranks", received, rank, why)
    for rank, told in enumerate(results):
        if any(_same(told, right) for right in rights):
            continue
        why = "One step a batch; the gradient is the sum over the ranks that have a batch, divided."
        shortest = _steps_of(batches, min(counts))
        repeated = _steps_of(batches, max(counts), repeat=True)
        if _same(told, _replayed(arrays, shortest, [world] * len(shortest))):
            given_steps = counted(len(shortest), "step")
            why = f"That is what {given_steps} give: the batches beyond the shortest list are left out."
        elif _same(told, _replayed(arrays, repeated, [world] * len(repeated))):
            why = "A rank that has run out has used its last batch again: a batch counts once."
        elif _same(told, arrays):
            why = "Nothing has moved: is optimizer.step() called?"
        return Finding(given, text, _numbers(told[name]), rank, why)
    return None


# ---- sync_batch_norm(x, eps)


def _normalise(answer: Callable[..., Any], x: Any, weights: Any, eps: float) -> dict[str, Any]:
    import torch

    given = torch.from_numpy(x.copy()).requires_grad_()
    with torch.enable_grad():
        out = answer(given, eps)
        if not isinstance(out, torch.Tensor) or out.shape != given.shape:
            return {"out": plain(out), "gradient": None}
        if not out.requires_grad:
            return {"out": plain(out), "gradient": None}
        (out * torch.from_numpy(weights)).sum().backward()
    return {"out": plain(out), "gradient": None if given.grad is None else given.grad.numpy().copy()}


def _normalisations(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given: dict[int, list[tuple[int, ...]]] = {2: [(2, 5), (4, 4)], 3: [(1, 4, 2)]}
    if thorough:
        given = {world: [tuple(rng.randint(1, 7) for _ in range(world)) for _ in range(2)] for world in (1, 2, 3, 4)}
        given = {world: [*some, (*range(2, world + 2),)] for world, some in given.items()}
    for world, some in given.items():
        cases = [_norm_case(world, counts, rng.randint(2, 4), generator(rng)) for counts in some]
        yield Trial(world, _normalise, cases, group=True, collectives=True)


def _norm_case(world: int, counts: Sequence[int], channels: int, draw: Any) -> Case:
    eps = 1e-3
    shards = [draw.normal(loc=rank, scale=1 + rank, size=(count, channels)) for rank, count in enumerate(counts)]
    weights = [draw.normal(size=shard.shape) for shard in shards]
    given = f"{counted(world, 'rank')} with {', '.join(map(str, counts))} samples of {channels} channels, eps={eps}"
    inputs = [(shard, weight, eps) for shard, weight in zip(shards, weights, strict=True)]
    return Case(given, inputs, lambda results: _judge_normed(given, shards, weights, eps, results))


def _whole_norm(shards: Sequence[Any], weights: Sequence[Any], eps: float, kind: str = "right") -> list[Any]:
    """(output, gradient) by rank of one process; or of what is often made in its place, told by `kind`."""
    import torch

    tensors = [torch.from_numpy(shard.copy()).requires_grad_() for shard in shards]
    with torch.enable_grad():
        every = torch.cat(tensors)
        means = [one.mean(dim=0) for one in tensors]
        variances = [one.var(dim=0, unbiased=False) for one in tensors]
        mean, variance = every.mean(dim=0), every.var(dim=0, unbiased=False)
        if kind == "mean of means":
            mean, variance = torch.stack(means).mean(dim=0), torch.stack(variances).mean(dim=0)
        elif kind in ("unweighted mean", "unweighted"):
            mean = torch.stack(means).mean(dim=0)
            squares = [(one - mean).pow(2) for one in tensors]
            variance = torch.cat(squares).mean(dim=0)
            if kind == "unweighted":
                variance = torch.stack([one.mean(dim=0) for one in squares]).mean(dim=0)
        elif kind == "within":
            shares = [len(one) / len(every) for one in tensors]
            variance = torch.stack([share * one for share, one in zip(shares, variances, strict=True)]).sum(dim=0)
        elif kind == "unbiased":
            variance = every.var(dim=0, unbiased=True)
        elif kind == "constant":
            mean, variance = mean.detach(), variance.detach()
        outs = [(one - mean) / (variance + eps).sqrt() for one in tensors]
        if kind == "eps outside":
            outs = [(one - mean) / (variance.sqrt() + eps) for one in tensors]
        if kind == "per rank":
            outs = [(a - b) / (c + eps).sqrt() for a, b, c in zip(tensors, means, variances, strict=True)]
        if outs[0].requires_grad:
            total = sum((out * torch.from_numpy(w)).sum() for out, w in zip(outs, weights, strict=True))
            torch.autograd.backward(total)
    return [(out.detach().numpy(), one.grad.numpy()) for out, one in zip(outs, tensors, strict=True)]


_UNWEIGHTED = (
    "A mean of the ranks' means counts a sample of a short shard for more than one of a long shard. Add up sums and "
    "counts over all ranks, then divide once."
)
_STATISTICS = {
    "per rank": "Those are the statistics of this rank's own shard. Sum up over all ranks: values, squares, counts.",
    "within": (
        "The mean is right, the variance is not: a mean of the ranks' variances misses the distance between their "
        "means. Take the squares of the distances from the mean over *all* ranks."
    ),
    "mean of means": (
        "That is the mean of the ranks' means and variances. Shards have different lengths, and a variance over all "
        "also has a part from the distance between the means: add up sums and counts over all ranks, then divide."
    ),
    "unweighted mean": _UNWEIGHTED,
    "unweighted": _UNWEIGHTED,
    "eps outside": "The root is taken of variance + eps, together.",
    "unbiased": "Batch norm divides the squares by n, not by n - 1.",
}


def _judge_normed(given: str, shards: list[Any], weights: list[Any], eps: float, results: list[Any]) -> Finding | None:
    wanted = _whole_norm(shards, weights, eps)
    for rank, (told, (out, _)) in enumerate(zip(results, wanted, strict=True)):
        value = told["out"]
        text = f"this rank's rows of the normalised batch: {_numbers(out)}"
        if value[0] != "tensor":
            why = "Nothing came back: is there a return?" if value == ("value", None) else ""
            return Finding(given, text, shown(value), rank, why)
        if value[2].shape != out.shape:
            why = "A rank returns its own shard, as long as it came."
            return Finding(given, text, f"a tensor of shape {tuple(value[2].shape)}", rank, why)
        if str(value[2].dtype) != "float64" or not _close(value[2], out):
            why = "Subtract the mean over all ranks; divide by the square root of variance + eps."
            for kind, words in _STATISTICS.items():
                other = _whole_norm(shards, weights, eps, kind)[rank][0]
                if str(value[2].dtype) == "float64" and _close(value[2], other):
                    why = words
                    break
            return Finding(given, text, _numbers(value[2]), rank, why)
    constant = _whole_norm(shards, weights, eps, "constant")
    for rank, (told, (_, gradient)) in enumerate(zip(results, wanted, strict=True)):
        text = f"the gradient of x: {_numbers(gradient)}"
        got = told["gradient"]
        if got is None:
            why = "The values are right, but nothing leads back to x: is something detached, or under no_grad?"
            return Finding(given, text, "no gradient", rank, why)
        if not _close(got, gradient):
            why = (
                "The values are right, the gradient is not. dist.all_reduce knows nothing of autograd: in backward the "
                "gradients at all ranks have to be summed too, which SumOverRanks.apply does."
            )
            if _close(got, constant[rank][1]):
                why = (
                    "The values are right; in the gradient the statistics count as constants. They depend on x, on all "
                    "ranks: let them be part of the graph, with SumOverRanks.apply."
                )
            return Finding(given, text, _numbers(got), rank, why)
    return None


# ---- train_step(ddp, optimizer, inputs, targets)


def _step(answer: Callable[..., Any], arrays: Arrays, batches: list[Any], adam: bool) -> dict[str, Any]:
    model = _network(arrays)
    ddp, optimizer = _wrapped(model), (_adam if adam else _sgd)(model)
    losses = [plain(answer(ddp, optimizer, *_tensors(batch))) for batch in batches]
    return {"losses": losses, "state": _told(model)}


_STEPS = 3


def _steps(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    for world in (1, 2, 3, 4) if thorough else (2, 3):
        cases = []
        for adam in (False, True) if thorough else (world == 3,):
            draw = generator(rng)
            batches = [[_batch(draw, 4) for _ in range(_STEPS)] for _ in range(world)]
            cases.append(_step_case(world, _drawn(draw), batches, adam))
        yield Trial(world, _step, cases, group=True, collectives=True)


def _step_case(world: int, arrays: Arrays, batches: list[Any], adam: bool) -> Case:
    given = f"{counted(world, 'rank')}, {counted(_STEPS, 'step')} of {'Adam' if adam else 'SGD with momentum'}"
    inputs = [(arrays, mine, adam) for mine in batches]
    return Case(given, inputs, lambda results: _judge_steps(given, arrays, batches, adam, results))


def _judge_steps(given: str, arrays: Arrays, batches: list[Any], adam: bool, results: list[Any]) -> Finding | None:
    world, name = len(batches), "0.weight"
    steps, made = _steps_of(batches, _STEPS), _adam if adam else _sgd
    right = _replayed(arrays, steps, [world] * _STEPS, made)
    for rank, told in enumerate(results):
        if not _same(told["state"], right):
            why = (
                "In this order: clear the gradients, forward through the wrapper, backward, step. (It is the gradients "
                "that are averaged: a mean of parameters after the step is something else for most optimizers.)"
            )
            alone = _replayed(arrays, _steps_of([batches[rank]], _STEPS), [1] * _STEPS, made)
            if world > 1 and _same(told["state"], alone):
                why = (
                    "That is what this rank gives alone: nothing was synchronised. DDP prepares the synchronisation in "
                    "its own forward; a call of ddp.module goes around it."
                )
            elif _same(told["state"], _replayed(arrays, steps, [1] * _STEPS, made)):
                why = "Those are steps with the sum of the gradients; the mean is wanted."
            elif _same(told["state"], arrays):
                why = "Nothing has moved: is optimizer.step() called, with gradients that are there?"
            text = f"{name} as one process has it: {_numbers(right[name])}"
            return Finding(given, text, _numbers(told["state"][name]), rank, why)
    for rank, told in enumerate(results):
        first = float(_mse(_network(arrays), batches[rank][0]).detach())
        number = _number(told["losses"][0])
        if number is None or abs(number - first) > 1e-9 * max(1.0, abs(first)):
            why = "The loss of this rank's own batch, not averaged, before the step, as a Python float: loss.item()."
            return Finding(given, f"{first:.6f} from the first step", shown(told["losses"][0]), rank, why)
    return None


# ---- scaled_step(optimizer, scaler, loss, synchronize, max_norm)

_SCALE, _INTERVAL = 1024.0, 2


def _half_loss(model: Any, batch: Sequence[Any], factor: float) -> Any:
    """A loss whose gradient goes through float16 on its way back, where more than 65,504 overflows."""
    inputs, targets = _tensors(batch)
    return (model(inputs).half().double() - targets).pow(2).mean() * factor


def _scaled(
    answer: Callable[..., Any], arrays: Arrays, batches: list[Any], factors: list[float], max_norm: float
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    model = _network(arrays)
    optimizer = _sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=_INTERVAL)

    def synchronize() -> None:
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    scales, states = [], []
    for batch, factor in zip(batches, factors, strict=True):
        answer(optimizer, scaler, _half_loss(model, batch, factor), synchronize, max_norm)
        scales.append(float(scaler.get_scale()))
        states.append(_told(model))
    return {"scales": scales, "states": states}


def _replayed_scaled(
    arrays: Arrays, batches: list[Any], factors: list[list[float]], max_norm: float, how: str = "right"
) -> tuple[list[float], list[dict[str, Any]]]:
    """(scales, parameters) after each step, as one process makes them; `how` names a mistake to make."""
    import torch

    model = _network(arrays)
    optimizer, scale, good = _sgd(model), _SCALE, 0
    scales, states = [], []
    for step in range(len(factors[0])):
        gradients = []
        for mine, own_factors in zip(batches, factors, strict=True):
            with torch.enable_grad():
                loss = _half_loss(model, mine[step], own_factors[step]) * scale
                gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        means = [torch.stack(parts).mean(dim=0) for parts in zip(*gradients, strict=True)]
        if all(bool(mean.isfinite().all()) for mean in means):
            for parameter, mean in zip(model.parameters(), means, strict=True):
                parameter.grad = mean if how == "scaled" else mean / scale
            if how != "unclipped":
                torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm)
            if how == "scaled":
                for parameter in model.parameters():
                    parameter.grad = parameter.grad / scale
            optimizer.step()
            good += 1
            if good == _INTERVAL:
                scale, good = scale * 2, 0
        else:
            scale, good = scale / 2, 0
        scales.append(scale)
        states.append(_told(model))
    return scales, states


def _overflows(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given: dict[int, list[list[list[float]]]] = {
        2: [[[1, 1, 1], [1, 1, 1]], [[1, 1, 1, 1], [1, 1e4, 1, 1]]],
        3: [[[1e4, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]],
    }
    if thorough:
        given = {}
        for world in (1, 2, 3, 4):
            factors = [[1.0] * 5 for _ in range(world)]
            factors[rng.randrange(world)][rng.randrange(4)] = 1e4
            given[world] = [[[1.0] * 3 for _ in range(world)], factors]
    for world, some in given.items():
        cases = [_scaled_case(world, factors, rng.choice([0.05, 0.1]), generator(rng)) for factors in some]
        yield Trial(world, _scaled, cases, group=True, collectives=True)


def _scaled_case(world: int, factors: list[list[float]], max_norm: float, draw: Any) -> Case:
    arrays = _drawn(draw)
    count = len(factors[0])
    batches = [[_batch(draw, 4) for _ in range(count)] for _ in range(world)]
    where = [(rank, step + 1) for rank, mine in enumerate(factors) for step, factor in enumerate(mine) if factor > 1]
    given = f"{counted(world, 'rank')}, {counted(count, 'step')}, max_norm={max_norm}"
    given += "".join(f", an overflow on rank {rank} in step {step}" for rank, step in where)
    inputs = [(arrays, mine, own_factors, max_norm) for mine, own_factors in zip(batches, factors, strict=True)]
    return Case(given, inputs, lambda results: _judge_scaled(given, arrays, batches, factors, max_norm, results))


def _judge_scaled(
    given: str, arrays: Arrays, batches: list[Any], factors: list[list[float]], max_norm: float, results: list[Any]
) -> Finding | None:
    import numpy as np

    scales, states = _replayed_scaled(arrays, batches, factors, max_norm)
    name = "0.weight"
    for step, (scale, state) in enumerate(zip(scales, states, strict=True)):
        overflow = any(mine[step] > 1 for mine in factors)
        for rank, told in enumerate(results):
            if any(not np.isfinite(values).all() for values in told["states"][step].values()):
                why = (
                    "This rank has stepped with an infinite mean. unscale_ notes whether a gradient is infinite, and "
                    "scaler.step goes by that note (optimizer.step() does not). Before synchronize() a rank sees its "
                    "own gradients alone: unscale after it."
                )
                return Finding(given, f"step {step + 1} skipped on all ranks", "parameters that are NaN", rank, why)
        for rank, told in enumerate(results):
            if told["scales"][step] != scale:
                why = "scaler.update() ends every step, on every rank: it lowers the scale after an overflow."
                if len({one["scales"][step] for one in results}) > 1:
                    why = (
                        "The ranks' scales differ, so they have decided differently whether there was an overflow: "
                        "synchronise first, then unscale, so that all of them look at the same gradients."
                    )
                received = f"a scale of {told['scales'][step]:g}"
                return Finding(given, f"a scale of {scale:g} after step {step + 1}", received, rank, why)
        for rank, told in enumerate(results):
            got = told["states"][step]
            if all(nearly(got[key], state[key], {"float64": 1e-6}) for key in state):  # clipping adds 1e-6 to a norm
                continue
            why = "In this order: clear, scale and backward, synchronize, unscale, clip, step, update."
            if overflow:
                why = "A gradient of some rank is infinite in this step, so no rank moves."
            elif _same(got, states[step - 1] if step else {k: arrays[k] for k in state}):
                why = "Nothing has moved: scaler.step(optimizer) makes the step."
            elif _same(got, _replayed_scaled(arrays, batches, factors, max_norm, "scaled")[1][step]):
                why = "The norm that is limited is that of the gradients without the scale: unscale, then clip."
            elif _same(got, _replayed_scaled(arrays, batches, factors, max_norm, "unclipped")[1][step]):
                why = "That is a step with gradients that are not clipped."
            elif not all(_same(got, one["states"][step]) for one in results):
                why = "The ranks have moved differently: clip and step come after synchronize()."
            before = (states[step - 1] if step else arrays)[name]
            text = f"{name} as in one process: in step {step + 1} it moves by {_numbers(state[name] - before)}"
            return Finding(given, text, f"by {_numbers(got[name] - before)}", rank, why)
    return None


# ---- what the lesson goes on with while there is no right answer


def _own_evaluate(ddp: Any, images: Any, labels: Any, batch_size: int) -> float:
    """Return the accuracy from counts that every rank gathers."""
    import torch
    import torch.distributed as dist

    rank, world, model = dist.get_rank(), dist.get_world_size(), ddp.module
    mode = model.training
    model.eval()
    right = 0
    with torch.no_grad():
        for part in torch.arange(len(labels), device=labels.device)[rank::world].split(batch_size):
            if len(part):
                right += int((model(images[part]).argmax(dim=1) == labels[part]).sum())
    model.train(mode)
    return float(sum(own.gather(right)) / len(labels))


EXERCISES = (
    Exercise(
        name="evaluate",
        title="accuracy over all ranks, each sample once",
        kind="implement",
        points=4,
        parameters=("ddp", "images", "labels", "batch_size"),
        cases=_evaluations,
        own=lambda: _own_evaluate,
        own_name="dist.all_gather_object",
        hints=(
            "Each rank takes a shard of its own, images[rank::world], and counts. Which two numbers have to be added "
            "up over the ranks?",
            "A forward through a wrapped model with buffers can be collective, and a rank may have no sample at all: "
            "use ddp.module.",
            "Put the number of right ones and the number of all into one tensor, dist.all_reduce it, and divide. "
            "Remember model.training, call model.eval(), and in the end model.train(what_it_was).",
        ),
    ),
    Exercise(
        name="train_uneven",
        title="training where ranks have different numbers of batches",
        kind="implement",
        points=4,
        parameters=("ddp", "optimizer", "batches"),
        cases=_unevens,
        hints=(
            "Write the plain loop first; it is right where all have equally many batches.",
            "A rank that has left the loop must go on answering the all-reduces of the others.",
            "The whole loop stands inside `with ddp.join():`.",
        ),
    ),
    Exercise(
        name="sync_batch_norm",
        title="batch norm with the statistics of all ranks, gradients included",
        kind="implement",
        points=5,
        parameters=("x", "eps"),
        cases=_normalisations,
        hints=(
            "First the mean: the sum of x over all ranks, divided by the number of samples on all ranks. Both numbers "
            "need a sum over ranks.",
            "Then the variance: x minus that mean, squared, summed over samples and ranks, divided by the same number.",
            "SumOverRanks.apply(tensor) is such a sum, and gradients flow through it. The count is a tensor too: "
            "torch.tensor([float(len(x))], dtype=x.dtype).",
        ),
    ),
    Exercise(
        name="fp16_kilobytes",
        title="kilobytes of a step with the fp16 hook",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="powersgd_times",
        title="how many times fewer bytes PowerSGD brings",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="train_step",
        title="a step that goes around the wrapper",
        kind="debug",
        points=3,
        parameters=("ddp", "optimizer", "inputs", "targets"),
        cases=_steps,
        hints=(
            "What does DDP see of a step in which only ddp.module is used?",
            "DDP's own forward prepares the synchronisation of the backward that follows.",
            "The forward is ddp(inputs). There is no need for `model` at all.",
        ),
    ),
    Exercise(
        name="scaled_step",
        title="an overflow on one rank is an overflow on all",
        kind="debug",
        points=4,
        parameters=("optimizer", "scaler", "loss", "synchronize", "max_norm"),
        cases=_overflows,
        hints=(
            "unscale_ looks for infinite gradients. Whose gradients does it see, before synchronize() and after it?",
            "If all ranks look at the same gradients, they decide alike.",
            "scale and backward, synchronize, unscale_, clip, step, update.",
        ),
    ),
    Exercise(
        name="two_accuracies",
        title="two accuracies of one checkpoint",
        kind="explain",
        points=3,
    ),
)
