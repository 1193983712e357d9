"""Lesson 03, data parallel by hand: its exercises, and the cases that hold replicas to what one process computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import own
from .inside import plain
from .judging import Case, Finding, Trial
from .models import Arrays, filled, generator, nearly
from .registry import Exercise
from .telling import counted, first_numbers

# ---- models that make trouble: tied, frozen, unused parameters, and buffers


@dataclass(frozen=True)
class _Kind:
    """A small network of a dtype, with what real ones have and small ones lack."""

    dtype: str = "float32"
    tied: bool = False
    frozen: bool = False
    unused: bool = False

    def __str__(self) -> str:
        traits = {
            "tied weights": self.tied,
            "a frozen layer": self.frozen,
            "a layer that the forward never uses": self.unused,
        }
        having = [trait for trait, has in traits.items() if has]
        return f"a {self.dtype} model" + (f" with {' and '.join(having)}" if having else "")


def _model(kind: _Kind, arrays: Arrays) -> Any:
    """Build the network and fill it, without touching the generators."""
    import torch

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(6, 6)
            self.second = torch.nn.Linear(6, 6)
            self.last = torch.nn.Linear(6, 4)
            if kind.unused:
                self.spare = torch.nn.Linear(6, 3)
            if kind.tied:
                self.second.weight = self.first.weight
            if kind.frozen:
                self.second.bias.requires_grad_(False)
                self.last.weight.requires_grad_(False)
            self.register_buffer("scale", torch.ones(6))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, inputs: Any) -> Any:
            hidden = torch.tanh(self.first(inputs * self.scale))
            return self.last(torch.tanh(self.second(hidden)))

    return filled(Network, kind.dtype, arrays)


def _drawn(kind: _Kind, draw: Any) -> dict[str, Any]:
    """Fresh values for all parameters and buffers."""
    import numpy as np

    arrays: dict[str, Any] = {}
    for name, rows in (("first", 6), ("second", 6), ("last", 4), *((("spare", 3),) if kind.unused else ())):
        if not (kind.tied and name == "second"):
            arrays[f"{name}.weight"] = draw.normal(scale=0.5, size=(rows, 6)).astype(kind.dtype)
        arrays[f"{name}.bias"] = draw.normal(scale=0.2, size=rows).astype(kind.dtype)
    arrays["scale"] = draw.uniform(0.5, 1.5, size=6).astype(kind.dtype)
    arrays["seen"] = np.array(draw.integers(1, 2**40), dtype=np.int64)
    return arrays


def _told(model: Any) -> dict[str, Any]:
    """Every parameter (tied ones once) and buffer, as plain data."""
    return {name: plain(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _sorted_batch(kind: _Kind, counts: Sequence[int], draw: Any) -> list[tuple[Any, Any]]:
    """A batch for each rank, cut from one that is sorted by label: the ranks' gradients then differ a lot."""
    import numpy as np

    total = sum(counts)
    labels = np.sort(draw.integers(0, 4, size=total))
    inputs = (draw.normal(size=(total, 6)) + labels[:, None]).astype(kind.dtype)
    cuts = np.cumsum(counts)[:-1]
    return list(zip(np.split(inputs, cuts), np.split(labels, cuts), strict=True))


# ---- broadcast_parameters(model)


def _broadcast(answer: Callable[..., Any], kind: _Kind, arrays: Arrays) -> dict[str, Any]:
    model = _model(kind, arrays)
    before = {name: (id(one), one.requires_grad) for name, one in model.named_parameters()}
    answer(model)
    after = {name: (id(one), one.requires_grad) for name, one in model.named_parameters()}
    return {"state": _told(model), "kept": before == after}


def _broadcasts(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    tame, wild = _Kind(), _Kind("float64", tied=True, frozen=True)
    worlds = {2: [tame, wild], 4: [_Kind(frozen=True)]}
    if thorough:
        worlds = {world: [tame, wild, _random_kind(rng)] for world in (1, 2, 3, 4, rng.choice([5, 6]))}
    for world, kinds in worlds.items():
        yield Trial(
            world, _broadcast, [_broadcast_case(world, kind, rng) for kind in kinds], group=True, collectives=True
        )


def _random_kind(rng: random.Random) -> _Kind:
    return _Kind(rng.choice(["float32", "float64"]), *(rng.random() < 0.5 for _ in range(3)))


def _broadcast_case(world: int, kind: _Kind, rng: random.Random) -> Case:
    draw = generator(rng)
    starts = [_drawn(kind, draw) for _ in range(world)]
    given = f"{counted(world, 'rank')}, {kind}, each rank with values of its own"
    inputs = [(kind, start) for start in starts]
    return Case(given, inputs, lambda results: _judge_broadcast(given, kind, starts, results))


def _judge_broadcast(given: str, kind: _Kind, starts: list[Any], results: list[Any]) -> Finding | None:
    import numpy as np

    for rank, told in enumerate(results):
        for name, wanted in starts[0].items():
            value = told["state"].get(name)
            got = value[2] if value and value[0] == "tensor" else None
            if got is not None and got.dtype == wanted.dtype and np.array_equal(got, wanted):
                continue
            text = f"{name} as on rank 0: {_numbers(wanted)}"
            if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
                why = "Only values change: names, shapes and dtypes stay what they are."
                received = "nothing of that name" if got is None else f"{got.dtype} of shape {got.shape}"
                return Finding(given, text, received, rank, why)
            return Finding(given, text, _numbers(got), rank, _why_not_broadcast(name, kind, got, starts, rank))
    for rank, told in enumerate(results):
        if not told["kept"]:
            why = (
                "An optimizer holds the parameters themselves. Write into them (copy_, or a broadcast of the tensor) "
                "in place of putting new ones there, and leave requires_grad as it was."
            )
            return Finding(given, "the same Parameter objects, with other values", "other objects", rank, why)
    return None


def _why_not_broadcast(name: str, kind: _Kind, got: Any, starts: list[Any], rank: int) -> str:
    import numpy as np

    if rank == 0:
        if np.allclose(got, np.mean([start[name] for start in starts], axis=0)):
            return "That is the mean over all ranks. A broadcast copies rank 0's values."
        return "Rank 0 is the source: what it has must stay."
    if not np.array_equal(got, starts[rank][name]):
        return "That is neither rank 0's value nor this rank's own."
    if name in ("scale", "seen"):
        return "It is still this rank's own. Buffers belong to the model too: model.buffers()."
    if kind.frozen and name in ("second.bias", "last.weight"):
        return "It is still this rank's own. A frozen parameter is not trained, but the forward uses it."
    return "It is still this rank's own: replicas that start apart stay apart."


# ---- shard(length, rank, world, epoch, seed) -> indices


def _shards(answer: Callable[..., Any], length: int, world: int, epochs: int, seed: int) -> dict[str, Any]:
    """What the answer gives for each epoch and rank, and once more; whether the global generators were left alone."""
    import numpy as np
    import torch

    def indices(rank: int, epoch: int, seed: int) -> Any:
        value = answer(length, rank, world, epoch, seed)
        try:
            return ("value", [int(index) for index in value])
        except (TypeError, ValueError):
            return plain(value)

    def generators() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = generators()
    first = [[indices(rank, epoch, seed) for rank in range(world)] for epoch in range(epochs)]
    kept = generators() == before
    again = [[indices(rank, epoch, seed) for rank in range(world)] for epoch in range(epochs)]
    other = [indices(rank, 0, seed + 1000) for rank in range(world)]
    return {"first": first, "same": first == again, "other": other, "kept": kept}


def _shardings(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given = [(12, 3), (50, 4), (23, 2), (2, 4), (7, 1)]
    if thorough:
        given = [(rng.randint(40, 300), world) for world in (1, 2, 3, 4, rng.randint(5, 16))]
        given += [(0, 2), (rng.randint(1, 3), 5), (120, 4)]
    cases = [_shard_case(length, world, 3, rng.randrange(1000)) for length, world in given]
    yield Trial(2, _shards, cases)  # two processes, so that what depends on the process shows


def _shard_case(length: int, world: int, epochs: int, seed: int) -> Case:
    given = f"{counted(length, 'sample')}, {counted(world, 'rank')}, seed {seed}"
    inputs = [(length, world, epochs, seed)] * 2
    return Case(given, inputs, lambda results: _judge_shards(given, length, world, results))


def _judge_shards(given: str, length: int, world: int, results: list[Any]) -> Finding | None:
    told = results[0]
    for epoch, shards in enumerate(told["first"]):
        finding = _not_a_partition(f"{given}, epoch {epoch}", length, world, shards)
        if finding:
            return finding
    orders = [[shard for _, shard in shards] for shards in told["first"]]
    if not told["same"] or results[1]["first"] != told["first"]:
        why = (
            "Every rank calls it for itself: what is drawn may depend on seed and epoch alone. A generator of its own, "
            "torch.Generator().manual_seed(seed + epoch), gives the same permutation everywhere."
        )
        return Finding(given, "the same indices from each call with the same arguments", "other indices", None, why)
    if not told["kept"]:
        why = (
            "manual_seed without a generator of its own reseeds the whole process: dropout would then be the same on "
            "all ranks. Use torch.Generator, random.Random or numpy's default_rng."
        )
        return Finding(given, "torch's, numpy's and random's own generators left alone", "one of them moved", None, why)
    if length < 12 * world:
        return None  # few samples can fall in the same order by chance
    if orders[0] == orders[1] or orders[1] == orders[2]:
        why = "The epoch must reach the generator, as with DistributedSampler.set_epoch: seed + epoch will do."
        return Finding(given, "another order in each epoch", "epochs 0 and 1 in the same order", None, why)
    if all(shard == sorted(shard) for shard in orders[0]):
        why = "Draw a permutation of all samples (torch.randperm), then take this rank's part of it."
        return Finding(given, "the samples in a random order", "an ascending order", 0, why)
    if world > 1 and [set(shard) for shard in orders[0]] == [set(shard) for shard in orders[1]]:
        why = (
            "Each rank has the same samples in every epoch, only in another order. Permute first, all samples, and "
            "divide afterwards."
        )
        return Finding(given, "samples that change ranks between epochs", "the same samples on each rank", None, why)
    if orders[0] == [shard for _, shard in told["other"]]:
        why = "In epoch 0 the seed has no effect."
        return Finding(given, "another order for another seed", "the same order", None, why)
    return None


def _not_a_partition(given: str, length: int, world: int, shards: list[Any]) -> Finding | None:
    for rank, (kind, *rest) in enumerate(shards):
        if kind != "value" or not isinstance(rest[0], list):
            why = "Nothing came back: is there a return?" if (kind, rest[0]) == ("value", None) else ""
            return Finding(given, "indices: a list, or a tensor of one dimension", str(rest[-1])[:200], rank, why)
    counts = [0] * length
    for rank, (_, shard) in enumerate(shards):
        for index in shard:
            if not 0 <= index < length:
                return Finding(given, f"indices from 0 to {length - 1}", f"the index {index}", rank)
            counts[index] += 1
    sizes = [len(shard) for _, shard in shards]
    missed, doubled = counts.count(0), sum(count > 1 for count in counts)
    if missed or doubled:
        why = (
            "All ranks must cut the same permutation: one that each draws for itself leaves samples out and takes "
            "others twice."
            if missed and doubled
            else "Samples that do not divide evenly are dropped: give some ranks one more."
            if missed
            else "Do not pad: in this lesson shards may differ by one sample."
        )
        received = f"{missed} on none, {doubled} more than once"
        return Finding(given, f"each of the {length} samples on exactly one rank", received, None, why)
    if max(sizes) - min(sizes) > 1:
        why = "order[rank::world], or tensor_split: the shards differ by one sample at most."
        return Finding(given, "shards as equal as can be", f"sizes {sizes}", None, why)
    return None


# ---- reduce_gradients(model, count)


def _reduce(
    answer: Callable[..., Any], kind: _Kind, arrays: Arrays, inputs: Any, labels: Any, backward: bool
) -> dict[str, Any]:
    import torch

    model = _model(kind, arrays)
    if backward:
        _mean_loss(model, inputs, labels).backward()
        if not len(labels):  # torch gives zeros here; a loss that is scaled by its own mean gives these
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))
    answer(model, len(labels))
    gradients = {name: None if one.grad is None else plain(one.grad) for name, one in model.named_parameters()}
    kept = all(
        torch.equal(one.detach(), torch.from_numpy(arrays[name].copy())) for name, one in model.named_parameters()
    )
    return {"gradients": gradients, "kept": kept}


def _mean_loss(model: Any, inputs: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(torch.from_numpy(inputs.copy())), torch.from_numpy(labels.copy()))


def _reductions(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    wild = _Kind("float64", tied=True, frozen=True, unused=True)
    worlds: dict[int, list[tuple[_Kind, list[int], bool]]] = {
        2: [(_Kind(), [4, 4], False), (_Kind(), [1, 7], False), (_Kind(unused=True), [5, 3], False)],
        3: [(_Kind("float64"), [2, 0, 9], False), (_Kind("float64"), [0, 3, 5], True)],
        4: [(wild, [3, 12, 0, 1], False)],
    }
    if thorough:
        worlds = {}
        for world in (1, 2, 3, 4, rng.choice([5, 6])):
            uneven = [rng.randint(1, 20) for _ in range(world)]
            empty = [0 if rank == rng.randrange(world) else count for rank, count in enumerate(uneven)]
            empty[rng.randrange(world)] = rng.randint(2, 9)
            spare = rng.randrange(world)
            hollow = [count if rank != spare or world == 1 else 0 for rank, count in enumerate(uneven)]
            worlds[world] = [
                (_Kind(), [6] * world, False),
                (_Kind(), uneven, False),
                (_random_kind(rng), empty, False),
                (_random_kind(rng), hollow, True),
                (wild, hollow, False),
            ]
    for world, given in worlds.items():
        cases = [_reduce_case(world, *one, rng) for one in given]
        yield Trial(world, _reduce, cases, group=True, collectives=True)


def _reduce_case(world: int, kind: _Kind, counts: list[int], through: bool, rng: random.Random) -> Case:
    """`through`: a rank with an empty batch has gradients all the same, of NaN, as a mean over nothing is."""
    draw = generator(rng)
    start, batches = _drawn(kind, draw), _sorted_batch(kind, counts, draw)
    given = f"{counted(world, 'rank')} with {_listed(counts)} samples, {kind}"
    if 0 in counts:
        given += (
            ", NaN gradients on the rank without samples" if through else ", no gradients on the rank without samples"
        )
    alone = [_gradients(kind, start, [batch]) for batch in batches]
    wanted = _gradients(kind, start, batches)
    inputs = [(kind, start, *batch, through or len(batch[1]) > 0) for batch in batches]
    return Case(given, inputs, lambda results: _judge_gradients(given, kind, counts, alone, wanted, results))


def _gradients(kind: _Kind, start: Arrays, batches: list[tuple[Any, Any]]) -> dict[str, Any]:
    """What one process computes on the union of the batches; None for parameters that get no gradient."""
    import numpy as np
    import torch

    inputs, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    model = _model(kind, start)
    if len(labels):
        with torch.enable_grad():  # the notebook may have turned them off
            _mean_loss(model, inputs, labels).backward()
    return {name: None if one.grad is None else one.grad.numpy() for name, one in model.named_parameters()}


def _judge_gradients(
    given: str, kind: _Kind, counts: list[int], alone: list[Any], wanted: dict[str, Any], results: list[Any]
) -> Finding | None:
    import numpy as np

    for rank, told in enumerate(results):
        for name, right in wanted.items():
            value = told["gradients"][name]
            if right is None:
                if value is not None:
                    why = (
                        "No rank had a gradient for it. Left at None the optimizer skips it; with zeros in its place, "
                        "weight decay and momentum would move it, which one process would not do."
                    )
                    return Finding(given, f"None as the gradient of {name}", _numbers(value[2]), rank, why)
                continue
            text = f"the gradient of {name}: {_numbers(right)}"
            if value is None:
                why = "This rank had no samples, but its replica takes the same step as all the others."
                return Finding(given, text, "None", rank, why if not counts[rank] else "")
            got = value[2]
            if got.shape != right.shape or got.dtype != right.dtype:
                return Finding(given, text, f"{value[1]} of shape {got.shape}", rank, "Keep shape and dtype.")
            if not _close(got, right):
                return Finding(given, text, _numbers(got), rank, _why_not_the_mean(name, got, rank, counts, alone))
    for rank, told in enumerate(results):
        if not told["kept"]:
            why = "Only gradients change here; the step is the optimizer's."
            return Finding(given, "the parameters as they were", "other parameters", rank, why)
        for name, value in told["gradients"].items():
            if value is not None and not np.array_equal(value[2], results[0]["gradients"][name][2]):
                why = "All ranks must hold the same bits: replicas that differ in the last bit drift apart."
                return Finding(given, f"the gradient of {name} as on rank 0", "another last bit", rank, why)
    return None


def _why_not_the_mean(name: str, got: Any, rank: int, counts: list[int], alone: list[Any]) -> str:
    import numpy as np

    world = len(counts)
    if not np.isfinite(got).all():
        return (
            "A mean over no samples may be NaN (0/0), and NaN times zero is NaN. Whatever its gradients hold, a rank "
            "without samples has to bring zeros."
        )
    own_gradient = alone[rank][name]
    if own_gradient is not None and _close(got, own_gradient):
        return "That is this rank's own gradient: nothing has come from the others."
    for weights, why in _wrong_weights(counts):
        guess = sum(weight * one[name] for weight, one in zip(weights, alone, strict=True) if one[name] is not None)
        if world > 1 and _close(got, np.asarray(guess)):
            return why
    right = sum(
        count / sum(counts) * one[name]
        for count, one in zip(counts, alone, strict=True)
        if count and one[name] is not None
    )
    off = float(np.abs(got - right).max(initial=0.0)) / max(1e-30, float(np.abs(right).max(initial=0.0)))
    if got.dtype == np.float64 and off < 1e-5:
        return (
            f"The two differ by {off:.0e} of the largest number: right, but rounded to float32 on the way. "
            "torch.tensor(float(count)) is float32, and so is whatever is divided by it: total.item() gives a number "
            "that takes the gradient's own type."
        )
    return "Each rank's gradient counts by its share of the samples: count / total."


def _wrong_weights(counts: Sequence[int]) -> list[tuple[list[float], str]]:
    """By which weights of the ranks' own means a gradient goes wrong, and what is then to be said."""
    world, total = len(counts), sum(counts)
    filled = sum(count > 0 for count in counts)
    share = [count / total for count in counts]
    return [
        (
            [1.0] * world,
            "The gradients are summed. The gradient of a mean loss is a mean; with the sum, every step is so many "
            "times too long.",
        ),
        (
            [1 / world] * world,
            "That is the mean of the ranks' means. A rank with few samples then counts as much as one with many: "
            "weight by the number of samples.",
        ),
        (
            [1 / filled] * world,
            "That is the mean of the means of the ranks that have samples. Weight by the number of samples.",
        ),
        ([1 / world**2] * world, "Divided twice by the number of ranks."),
        ([part / world for part in share], "Divided twice: by the samples, and by the ranks once more."),
        (
            [float(count) for count in counts],
            "That is the sum over all samples: divide it by the number of samples of all ranks.",
        ),
        (
            [count / world for count in counts],
            "Weighted by the samples, then divided by the number of ranks: divide by the number of samples of all "
            "ranks.",
        ),
    ]


# ---- train_replicas(model, optimizer, batches, after_step)


@dataclass(frozen=True)
class _Training:
    """Steps of SGD on ranks whose replicas start apart: `counts[step][rank]` samples."""

    kind: _Kind
    counts: tuple[tuple[int, ...], ...]
    momentum: float = 0.0
    decay: float = 0.0
    rate: float = 0.2

    @property
    def world(self) -> int:
        return len(self.counts[0])

    def __str__(self) -> str:
        text = f"{counted(self.world, 'rank')}, each with a seed of its own, {self.kind}, SGD"
        text += f" with momentum {self.momentum:g}" if self.momentum else ""
        text += f" with weight decay {self.decay:g}" if self.decay else ""
        return text + f", batches of {_listed(self.counts[0])} samples"

    def optimizer(self, model: Any) -> Any:
        import torch

        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=self.momentum, weight_decay=self.decay)


def _train(answer: Callable[..., Any], training: _Training, arrays: Arrays, batches: list[Any]) -> list[Any]:
    """The state of the model after each step."""
    import torch

    model = _model(training.kind, arrays)
    optimizer = training.optimizer(model)
    tensors = [(torch.from_numpy(inputs.copy()), torch.from_numpy(labels.copy())) for inputs, labels in batches]
    seen: list[Any] = []
    answer(model, optimizer, tensors, lambda: seen.append(_told(model)))
    return [*seen, _told(model)]


def _trainings(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    equal, uneven, hollow = ((4, 4),) * 5, ((2, 9), (7, 1), (3, 3), (1, 8), (5, 4)), ((3, 0, 6), (0, 4, 2)) * 3
    wild = _Kind("float64", tied=True, frozen=True, unused=True)
    worlds = {
        2: [_Training(_Kind("float64"), equal), _Training(_Kind(), uneven)],
        3: [_Training(_Kind("float64", frozen=True), hollow[:5])],
        4: [_Training(wild, ((1, 6, 0, 3), (2, 2, 2, 2), (5, 0, 0, 1), (1, 2, 3, 4), (0, 0, 7, 0)), 0.9, 0.05)],
    }
    if thorough:
        worlds = {}
        for world in (1, 2, 3, 4, rng.choice([5, 6])):
            full = tuple(tuple(rng.randint(1, 9) for _ in range(world)) for _ in range(5))
            gaps = tuple(tuple(0 if rank != step % world and rng.random() < 0.4 else count
                               for rank, count in enumerate(counts)) for step, counts in enumerate(full))  # fmt: skip
            worlds[world] = [
                _Training(_Kind("float64"), ((4,) * world,) * 5),
                _Training(_random_kind(rng), full, rng.choice([0.0, 0.9])),
                _Training(wild, gaps, 0.9, 0.05),
            ]
    for world, trainings in worlds.items():
        yield Trial(world, _train, [_train_case(training, rng) for training in trainings], group=True, collectives=True)


def _train_case(training: _Training, rng: random.Random) -> Case:
    draw = generator(rng)
    starts = [_drawn(training.kind, draw) for _ in range(training.world)]
    by_step = [_sorted_batch(training.kind, counts, draw) for counts in training.counts]
    inputs = [(training, starts[rank], [batches[rank] for batches in by_step]) for rank in range(training.world)]
    return Case(str(training), inputs, lambda results: _judge_training(training, starts, by_step, results))


def _replayed(
    training: _Training,
    starts: list[Any],
    by_step: list[Any],
    weigh: Callable[[Sequence[int]], Sequence[float]],
    together: bool = True,
    fresh: bool = True,
) -> list[list[dict[str, Any]]]:
    """What ranks would hold after each step, by step and rank, if gradients were weighed in a certain way.

    `together`: replicas start from rank 0's values; `fresh`: gradients are cleared before each step.
    """
    import torch

    models = [_model(training.kind, starts[0] if together else start) for start in starts]
    optimizers = [training.optimizer(model) for model in models]
    states = []
    with torch.enable_grad():  # the notebook may have turned them off
        for batches in by_step:
            for model, (inputs, labels) in zip(models, batches, strict=True):
                if fresh:
                    model.zero_grad()
                if len(labels):
                    _mean_loss(model, inputs, labels).backward()
            weights = weigh([len(labels) for _, labels in batches])
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                parts = [(weight, one.grad) for weight, one in zip(weights, parameters, strict=True)
                         if one.grad is not None]  # fmt: skip
                if parts:
                    mean = sum((weight * grad for weight, grad in parts), torch.zeros_like(parameters[0]))
                    for one in parameters:
                        one.grad = mean.detach().clone()
            for optimizer in optimizers:
                optimizer.step()
            states.append([{name: one.detach().numpy().copy() for name, one in model.named_parameters()}
                           for model in models])  # fmt: skip
    return states


def _in_one_process(training: _Training, start: Arrays, by_step: list[Any]) -> list[dict[str, Any]]:
    """The parameters after each step of one process on the union of the ranks' batches: the yardstick."""
    import numpy as np
    import torch

    model = _model(training.kind, start)
    optimizer = training.optimizer(model)
    states = []
    with torch.enable_grad():  # the notebook may have turned them off
        for batches in by_step:
            inputs, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
            optimizer.zero_grad()
            _mean_loss(model, inputs, labels).backward()
            optimizer.step()
            states.append({name: one.detach().numpy().copy() for name, one in model.named_parameters()})
    return states


def _judge_training(training: _Training, starts: list[Any], by_step: list[Any], results: list[Any]) -> Finding | None:
    import numpy as np

    given = str(training)
    wanted = _in_one_process(training, starts[0], by_step)
    for rank, told in enumerate(results):
        if len(told) != len(wanted) + 1:
            why = "Call after_step() once in every step, on every rank, also where this rank's batch is empty."
            return Finding(given, f"{len(wanted)} calls of after_step", f"{len(told) - 1}", rank, why)
    for step, right in enumerate(wanted):
        for rank, told in enumerate(results):
            for name, values in right.items():
                got = told[step][name][2]
                if got.shape == values.shape and _close(got, values):
                    continue
                where = f"{name} after step {step + 1} as one process has it: {_numbers(values)}"
                why = _why_not_one_process(training, starts, by_step, step, rank, told[step], right)
                return Finding(given, where, _numbers(got), rank, why)
            for name in ("scale", "seen"):
                if not np.array_equal(told[step][name][2], starts[0][name]):
                    why = "Buffers belong to the model too: broadcast them with the parameters."
                    return Finding(given, f"the buffer {name} as on rank 0", "this rank's own", rank, why)
    for rank, told in enumerate(results):
        for step, state in enumerate(told):
            for name, value in state.items():
                if not np.array_equal(value[2], results[0][step][name][2]):
                    why = "Nearly equal is not enough: what differs in the last bit drifts apart."
                    expected = f"{name} after step {min(step + 1, len(wanted))} with the same bits as on rank 0"
                    return Finding(given, expected, "other bits", rank, why)
        if any(not _close(told[-1][name][2], values) for name, values in wanted[-1].items()):
            return Finding(given, "the model as after the last step", "changed after it", rank)
    return None


def _why_not_one_process(
    training: _Training,
    starts: list[Any],
    by_step: list[Any],
    step: int,
    rank: int,
    state: Mapping[str, Any],
    right: Mapping[str, Any],
) -> str:
    """Replay what learners get wrong, and say which of it gives these parameters."""
    import numpy as np

    def fits(values: Mapping[str, Any]) -> bool:
        return all(_close(state[name][2], one) for name, one in values.items())

    def shares(counts: Sequence[int]) -> list[float]:
        return [count / sum(counts) for count in counts]

    if any(not np.isfinite(value[2]).all() for value in state.values()):
        return (
            "NaN: the mean over an empty batch is 0/0. A rank without samples must bring zeros, and no loss of its own."
        )
    if all(np.array_equal(state[name][2], starts[rank][name]) for name in right):
        return (
            "These are the values that it started with: nothing was trained. Is optimizer.step() called, before "
            "after_step()?"
        )
    if all(np.array_equal(state[name][2], starts[0][name]) for name in right):
        return "These are rank 0's first values: after_step() comes when the step has been made."
    replays: list[tuple[Any, dict[str, bool], str]] = [
        (
            shares,
            {"together": False},
            "The gradients are right, but the replicas started apart and stay apart: broadcast.",
        ),
        (shares, {"fresh": False}, "Gradients of earlier steps are still in it: optimizer.zero_grad() in each step."),
        (
            lambda counts: [1.0 * (other == rank) for other in range(training.world)],
            {},
            "This replica was trained on its own shard alone: nothing has come from the others.",
        ),
    ]
    for place, (_, why) in enumerate(_wrong_weights(training.counts[0])):
        for together in (True, False):
            more = "" if together else " And the replicas started apart: broadcast."
            weigh = lambda counts, place=place: _wrong_weights(counts)[place][0]  # noqa: E731
            replays.append((weigh, {"together": together}, why + more))
    for weigh, how, why in replays:
        if fits(_replayed(training, starts, by_step[: step + 1], weigh, **how)[step][rank]):
            return why
    if step:
        return "The steps before it were right. What is left over from one step to the next?"
    return "One process takes the mean over all samples of all ranks, from rank 0's first values."


# ---- start_replica(make_model, seed) -> model


def _start(answer: Callable[..., Any], seed: int, width: int) -> dict[str, Any]:
    import torch

    def make_model() -> Any:
        layers = [torch.nn.Linear(width, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)]
        return torch.nn.Sequential(*layers)

    def begun(seed: int) -> tuple[Any, Any]:
        model = answer(make_model, seed)
        if not isinstance(model, torch.nn.Module):
            return plain(model), None
        drawn = torch.nn.functional.dropout(torch.ones(64))
        return _told(model), plain(drawn)

    return {"first": begun(seed), "again": begun(seed), "other": begun(seed + 1000)}


def _starts(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    for world in (2, 3, 4, 1) if thorough else (2, 4):
        cases = [_start_case(world, rng.randrange(1000), rng.randint(3, 9)) for _ in range(2)]
        yield Trial(world, _start, cases, group=True, collectives=True)


def _start_case(world: int, seed: int, width: int) -> Case:
    given = f"{counted(world, 'rank')}, seed {seed}, a model with dropout"
    return Case(given, [(seed, width)] * world, lambda results: _judge_starts(given, results))


def _judge_starts(given: str, results: list[Any]) -> Finding | None:
    for rank, told in enumerate(results):
        for state, drawn in told.values():
            if drawn is None:
                return Finding(given, "a model", str(state[-1])[:200], rank, "Return what make_model() gave.")
    weights = [_bits(told["first"][0]) for told in results]
    masks = [_bits({"": told["first"][1]}) for told in results]
    for rank, told in enumerate(results):
        if weights[rank] != weights[0]:
            why = "The model was made with a seed of this rank's own. Same weights first; different numbers afterwards."
            return Finding(given, "the same weights as on rank 0", "other weights", rank, why)
        for other in range(rank):
            if masks[rank] == masks[other]:
                why = (
                    "Both drop the same units. Dropout on the union of the shards would draw for each sample anew: let "
                    "each rank's generator go its own way once the model is made."
                )
                return Finding(given, f"another dropout mask than on rank {other}", "the same mask", rank, why)
        again = told["again"]
        if _bits(again[0]) != weights[rank] or _bits({"": again[1]}) != masks[rank]:
            why = "What each rank draws must follow from seed and rank, so that the run can be repeated."
            return Finding(given, "the same weights and masks from a second call", "others", rank, why)
    if _bits(results[0]["other"][0]) == weights[0]:
        return Finding(given, "other weights for another seed", "the same", 0, "The seed is not used.")
    for rank, told in enumerate(results):
        if _bits({"": told["other"][1]}) == masks[rank]:
            why = "What is drawn after the model was made must follow from the seed too, not from the rank alone."
            return Finding(given, "another dropout mask for another seed", "the same mask", rank, why)
    return None


def _bits(state: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    return [(name, value[2].tobytes()) for name, value in state.items()]


# ---- numbers and words

_TOLERANCE = {"float32": 1e-5, "float64": 1e-10}  # of the largest number, as the lesson says


def _close(got: Any, wanted: Any) -> bool:
    return nearly(got, wanted, _TOLERANCE)


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


_numbers = partial(first_numbers, most=4)


# ---- what the lesson goes on with while there is no right answer: all is gathered everywhere, which does not scale


def _own_broadcast(model: Any) -> None:
    """Give every rank the state of rank 0's model."""
    model.load_state_dict(own.gather(model.state_dict())[0])


def _own_shard(length: int, rank: int, world: int, epoch: int, seed: int) -> list[int]:
    """Return every so-many-th index of the order that DistributedSampler has for a single rank."""
    from torch.utils.data import DistributedSampler

    own.note()
    sampler: Any = DistributedSampler(range(length), num_replicas=1, rank=0, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)[rank::world]


def _own_reduce(model: Any, count: int) -> None:
    """Put into each gradient what the samples of all ranks give."""
    import torch

    parameters = list(model.parameters())
    everyone = own.gather((count, [one.grad for one in parameters]))
    total = sum(samples for samples, _ in everyone)
    for place, one in enumerate(parameters):
        parts = [gradients[place] * (samples / total) for samples, gradients in everyone
                 if samples and gradients[place] is not None]  # fmt: skip
        one.grad = torch.stack(parts).sum(dim=0) if parts else None


def _own_training(model: Any, optimizer: Any, batches: Any, after_step: Callable[[], object]) -> None:
    """Train every replica on the batches of all ranks."""
    import torch

    state, theirs = zip(*own.gather((model.state_dict(), list(batches))), strict=True)
    model.load_state_dict(state[0])
    for parts in zip(*theirs, strict=True):
        inputs, labels = (torch.cat(one) for one in zip(*parts, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        after_step()


EXERCISES = (
    Exercise(
        name="drift_ratio",
        title="how far apart two replicas are after training, by how far they were at the start",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="broadcast_parameters",
        title="the same start on every rank",
        kind="implement",
        points=3,
        parameters=("model",),
        cases=_broadcasts,
        own=lambda: _own_broadcast,
        own_name="dist.all_gather_object",
        hints=(
            "Which tensors does a forward depend on? Those that are trained, those that are frozen, and those that are "
            "no parameters at all.",
            "dist.broadcast(tensor, src=0) writes rank 0's values into the tensor, in place, on every other rank. All "
            "ranks must call it for the same tensors in the same order.",
            "Autograd watches parameters: hand over parameter.data, or work under torch.no_grad(). Buffers are in "
            "model.buffers().",
            "for tensor in model.state_dict().values(): dist.broadcast(tensor, src=0) reaches all of them, since "
            "state_dict gives the tensors themselves.",
        ),
    ),
    Exercise(
        name="samples_missed",
        title="percent of the samples that nobody sees when 4 ranks shuffle each for itself",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="shard",
        title="every sample once, in another order each epoch",
        kind="implement",
        points=4,
        parameters=("length", "rank", "world", "epoch", "seed"),
        cases=_shardings,
        own=lambda: _own_shard,
        own_name="DistributedSampler",
        hints=(
            "All ranks draw the same permutation of all samples; each takes its own part of it.",
            "generator = torch.Generator().manual_seed(...) is a source of numbers apart from torch's global one. What "
            "must its seed depend on, and on what must it not?",
            "torch.randperm(length, generator=generator) is the permutation; order[rank::world] takes every world-th "
            "entry, beginning with number rank.",
            "The seed of the generator: seed + epoch. No rank in it, or samples are doubled and missed.",
        ),
    ),
    Exercise(
        name="sum_learning_rate",
        title="the learning rate that makes summed gradients of 4 ranks step like the mean does at 0.8",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="reduce_gradients",
        title="the gradient of all samples, on every rank",
        kind="implement",
        points=5,
        parameters=("model", "count"),
        cases=_reductions,
        own=lambda: _own_reduce,
        own_name="dist.all_gather_object",
        hints=(
            "The mean over all samples is the sum over ranks of (count / total) times the rank's own mean. So one "
            "number has to be summed first: total.",
            "A collective is called by all ranks or by none. A rank that has nothing to bring brings zeros, and a rank "
            "must never decide by what it alone knows whether to call.",
            "Whether *any* rank has a gradient for a parameter is a question for an all-reduce too: each brings a 1 or "
            "a 0.",
            "For each parameter: there = torch.tensor(float(count > 0 and parameter.grad is not None)); "
            "dist.all_reduce(there). If it is 0, the gradient is None; else all-reduce parameter.grad * (count / "
            "total.item()), or torch.zeros_like(parameter) on a rank that has none. (total.item(): a number; a float32 "
            "tensor would round the weight.)",
        ),
    ),
    Exercise(
        name="train_replicas",
        title="replicas that train like one process",
        kind="implement",
        points=5,
        parameters=("model", "optimizer", "batches", "after_step"),
        cases=_trainings,
        own=lambda: _own_training,
        own_name="dist.all_gather_object",
        hints=(
            "Five things, in this order: broadcast once; then for each batch clear the gradients, run backward, "
            "reduce, step.",
            "A rank with an empty batch has no loss: no forward, no backward. But it must not skip the rest, since the "
            "others wait for it in reduce_gradients, and its replica has to move with theirs.",
            "if len(labels): F.cross_entropy(model(inputs), labels).backward(). Then, on every rank: "
            "reduce_gradients(model, len(labels)); optimizer.step(); after_step().",
        ),
    ),
    Exercise(
        name="start_replica",
        title="equal weights, different dropout",
        kind="debug",
        points=3,
        parameters=("make_model", "seed"),
        cases=_starts,
        hints=(
            "A generator's numbers follow from its seed. What should be equal on all ranks, and what should not?",
            "Weights are drawn while make_model() runs, dropout masks later. A generator can be seeded between the "
            "two.",
            "torch.manual_seed(seed), then make_model(), then torch.manual_seed with something in which the rank "
            "occurs.",
        ),
    ),
    Exercise(
        name="bits_and_biases",
        title="two differences, and which of them to worry about",
        kind="explain",
        points=3,
    ),
)
