"""Lesson 04, build your own DDP: its exercises, and the cases that judge values, messages and their moments."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from . import own
from .inside import plain
from .judging import Case, Finding, Trial
from .models import Arrays, filled, generator, nearly
from .registry import Exercise
from .telling import counted, first_numbers

# What the scenarios broadcast to leave a mark in the trace: so many bytes, which no gradient here has.
_BUILT, _MIDDLE, _STEPPED = 3, 5, 7


def _mark(size: int) -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(size, dtype=torch.uint8), 0)


# ---- a model that makes trouble: tied, frozen, unused parameters, and parameters that one rank does not use


@dataclass(frozen=True)
class _Kind:
    """A network of eight layers and a buffer. `spare` is a layer that ranks with an odd number of samples leave out."""

    dtype: str = "float64"
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    spare: bool = False
    marked: bool = False  # broadcasts a mark half-way, in forward and in backward

    def __str__(self) -> str:
        traits = {
            "tied weights": self.tied,
            "a frozen layer": self.frozen,
            "a layer that no rank uses": self.unused,
            "a layer that only some ranks use": self.spare,
        }
        having = [trait for trait, has in traits.items() if has]
        return f"a {self.dtype} model of 8 layers" + (f" with {', '.join(having)}" if having else "")


def _model(kind: _Kind, arrays: Arrays) -> Any:
    """Build the network and fill it, without touching the generators."""
    import torch

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, hidden: Any) -> Any:
            _mark(_MIDDLE)
            return hidden.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            _mark(_MIDDLE)
            return gradient

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(8))
            self.register_buffer("shift", torch.zeros(6))
            if kind.unused:
                self.never = torch.nn.Linear(6, 3)
            if kind.spare:
                self.spare = torch.nn.Linear(6, 6)
            if kind.tied:
                self.layers[5].weight = self.layers[1].weight
            if kind.frozen:
                self.layers[3].requires_grad_(False)

        def forward(self, inputs: Any) -> Any:
            hidden = inputs - self.shift
            for number, layer in enumerate(self.layers):
                if kind.marked and number == 4:
                    hidden = Marked.apply(hidden)
                hidden = hidden + torch.tanh(layer(hidden))
                if kind.spare and number == 5 and len(inputs) % 2 == 0:
                    hidden = hidden + self.spare(hidden)
            return hidden

    return filled(Network, kind.dtype, arrays)


def _drawn(kind: _Kind, draw: Any) -> dict[str, Any]:
    names = [f"layers.{number}" for number in range(8)]
    shapes = dict.fromkeys(names, 6) | {"never": 3, "spare": 6}
    arrays = {
        f"{name}.{part}": draw.normal(scale=0.4, size=(rows, 6) if part == "weight" else rows).astype(kind.dtype)
        for name, rows in shapes.items()
        for part in ("weight", "bias")
    }
    return arrays | {"shift": draw.normal(scale=0.4, size=6).astype(kind.dtype)}


def _loss(model: Any, inputs: Any) -> Any:
    """A loss of which a rank's share of the samples does not matter: it is the rank's own mean."""
    import torch

    return model(torch.from_numpy(inputs.copy())).pow(2).mean()


def _told(model: Any) -> dict[str, Any]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().numpy().copy() for name, tensor in named}


# ---- flatten(parameters) and unflatten(parameters, flat)


def _parameters(shapes: Sequence[tuple[int, ...]], dtype: str, gradients: Sequence[Any]) -> list[Any]:
    """Parameters of these shapes; a gradient of None, or an array. Every second one of two dimensions is transposed."""
    import torch

    made = []
    for shape, gradient in zip(shapes, gradients, strict=True):
        parameter = torch.nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)))
        if gradient is not None:
            value = torch.from_numpy(gradient.copy())
            # a transposed gradient is not contiguous, as those of some layers are
            parameter.grad = value.t().contiguous().t() if value.dim() == 2 else value
        made.append(parameter)
    return made


def _flatten(answer: Callable[..., Any], shapes: Any, dtype: str, gradients: Any) -> dict[str, Any]:
    parameters = _parameters(shapes, dtype, gradients)
    flat = plain(answer(parameters))
    kept = [None if one.grad is None else one.grad.numpy().copy() for one in parameters]
    return {"flat": flat, "kept": kept}


_SHAPES: tuple[tuple[int, ...], ...] = ((3, 2), (4,), (), (2, 3))


def _flats(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given: dict[int, list[tuple[tuple[int, ...], str]]] = {
        2: [((1, 1, 1, 1), "float32"), ((1, 0, 1, 1), "float64"), ((1, 1, 0, 1), "float16")],
        3: [((0, 2, 0, 1), "float32")],
    }
    if thorough:
        dtypes = ["float16", "float32", "float64"]
        given = {
            world: [(tuple(rng.randint(0, 2) for _ in _SHAPES), rng.choice(dtypes)) for _ in range(3)]
            + [((1, 0, 2, 1), "float64")]
            for world in (1, 2, 3, 4)
        }
    for world, some in given.items():
        cases = [_flatten_case(world, has, dtype, generator(rng)) for has, dtype in some]
        yield Trial(world, _flatten, cases, group=True, collectives=True)


def _flatten_case(world: int, has: Sequence[int], dtype: str, draw: Any) -> Case:
    """`has` by parameter: 0 for no gradient, 1 for one, 2 for one that is all zeros."""
    per_rank = [
        [
            draw.normal(scale=there % 2, size=shape).astype(dtype) if there else None
            for shape, there in zip(_SHAPES, has, strict=True)
        ]
        for _ in range(world)
    ]
    given = f"{counted(world, 'rank')}, {len(_SHAPES)} {dtype} parameters of shapes {_shapes()}"
    missing = [str(number) for number, there in enumerate(has) if not there]
    given += f", no gradient in number {' and '.join(missing)}" if missing else ""
    zeros = [str(number) for number, there in enumerate(has) if there == 2]
    given += f", a gradient of zeros in number {' and '.join(zeros)}" if zeros else ""
    inputs = [(_SHAPES, dtype, gradients) for gradients in per_rank]
    return Case(given, inputs, lambda results: _judge_flat(given, world, dtype, per_rank, results))


def _judge_flat(given: str, world: int, dtype: str, per_rank: list[Any], results: list[Any]) -> Finding | None:
    import numpy as np

    for rank, (told, gradients) in enumerate(zip(results, per_rank, strict=True)):
        parts = [
            np.zeros(shape).reshape(-1) if one is None else one.reshape(-1)
            for shape, one in zip(_SHAPES, gradients, strict=True)
        ]
        flags = np.array([float(one is not None) for one in gradients])
        wanted = (np.concatenate([*parts, flags]) / world).astype(dtype)
        text = f"{len(wanted)} numbers of {dtype} in one dimension"
        kind, *rest = told["flat"]
        if kind != "tensor":
            why = "Nothing came back: is there a return?" if told["flat"] == ("value", None) else ""
            return Finding(given, text, str(rest[-1])[:200], rank, why)
        got = rest[1]
        if got.shape != wanted.shape or str(got.dtype) != dtype:
            why = "All gradients, zeros where there is none, and then a flag for each parameter, in the same tensor."
            if got.shape == wanted.shape:
                why = "Flags of another dtype than the gradients' have changed that of all: give them the parameters'."
            return Finding(given, text, f"a tensor of {rest[0]} and shape {tuple(got.shape)}", rank, why)
        if not _close(got, wanted):
            why = "Gradients in the order of the parameters, then 1 or 0 for each; all divided by the world size."
            if _close(got, wanted * world):
                why = "Divide by the world size first: then the sum is a mean, and float16 sums do not overflow."
            elif _close(got[: -len(flags)], wanted[: -len(flags)]):
                why = (
                    "The gradients are right; the flags are not. A flag is 1 where this rank has a gradient, also one "
                    "that is all zeros, and it is divided like the rest."
                )
            return Finding(given, _numbers(wanted), _numbers(got), rank, why)
        for before, after in zip(gradients, told["kept"], strict=True):
            if (before is None) != (after is None) or (before is not None and not np.array_equal(before, after)):
                why = "The flat tensor is a copy: the gradients themselves stay what they were until unflatten."
                return Finding(given, "the gradients as they were", "others", rank, why)
    return None


def _unflatten(answer: Callable[..., Any], shapes: Any, dtype: str, gradients: Any, flat: Any) -> list[Any]:
    import torch

    parameters = _parameters(shapes, dtype, gradients)
    answer(parameters, torch.from_numpy(flat.copy()))
    return [None if one.grad is None else plain(one.grad) for one in parameters]


def _unflats(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given: list[tuple[tuple[float, ...], tuple[int, ...], str]] = [
        ((1, 1, 1, 1), (1, 0, 1, 0), "float32"),
        ((1, 0, 0.25, 1), (1, 0, 0, 0), "float64"),
    ]
    if thorough:
        given = [
            (
                tuple(rng.choice([0, 0.25, 1 / 3, 0.5, 1]) for _ in _SHAPES),
                tuple(rng.randint(0, 1) for _ in _SHAPES),
                rng.choice(["float32", "float64"]),
            )
            for _ in range(5)
        ] + given
    for world in (1, 2, 3, 4) if thorough else (2,):
        cases = [_unflatten_case(world, *one, generator(rng)) for one in given]
        yield Trial(world, _unflatten, cases, group=True, collectives=True)


def _unflatten_case(world: int, flags: Sequence[float], has: Sequence[int], dtype: str, draw: Any) -> Case:
    import numpy as np

    before = [
        draw.normal(size=shape).astype(dtype) if there else None for shape, there in zip(_SHAPES, has, strict=True)
    ]
    # zeros where no rank had a gradient, and once where all had one: only the flag tells
    parts = [
        draw.normal(size=shape) * (flag > 0) * (number < 3)
        for number, (shape, flag) in enumerate(zip(_SHAPES, flags, strict=True))
    ]
    flat = np.concatenate([*(np.reshape(part, -1) for part in parts), np.array(flags)]).astype(dtype)
    given = f"{len(_SHAPES)} {dtype} parameters of shapes {_shapes()}, flags {[round(flag, 2) for flag in flags]}"
    wanted = [np.asarray(part).astype(dtype) if flag else None for part, flag in zip(parts, flags, strict=True)]
    inputs = [(_SHAPES, dtype, before, flat)] * world
    return Case(given, inputs, lambda results: _judge_parts(given, world, wanted, before, results))


def _judge_parts(given: str, world: int, wanted: list[Any], before: list[Any], results: list[Any]) -> Finding | None:
    import numpy as np

    for rank, told in enumerate(results):
        for number, (right, value) in enumerate(zip(wanted, told, strict=True)):
            if right is None:
                if value is not None:
                    why = (
                        "A flag of 0 says that no rank had a gradient. Left at None the optimizer skips the parameter; "
                        "with zeros, weight decay and momentum would move it."
                    )
                    return Finding(given, f"None as the gradient of number {number}", "a tensor", rank, why)
                continue
            text = f"the gradient of number {number}: {_numbers(right)}"
            if value is None:
                why = (
                    "Its flag is not 0, so some rank had a gradient, and all ranks get the mean: also a rank that had "
                    "none, and also if the mean is all zeros."
                )
                return Finding(given, text, "None", rank, why)
            got = value[2]
            if got.shape != right.shape or got.dtype != right.dtype:
                why = "A gradient has the shape and the dtype of its parameter."
                return Finding(given, text, f"{value[1]} of shape {tuple(got.shape)}", rank, why)
            if not np.array_equal(got, right):
                why = "The parts lie in the order of the parameters; each is as long as its parameter."
                if before[number] is not None and np.array_equal(got, before[number]):
                    why = "That is the gradient as it was: nothing has been put in its place."
                elif before[number] is not None and _close(got, before[number] + right):
                    why = "The mean takes the place of the gradient; it is not added to it."
                elif _close(got * world, right):
                    why = (
                        "Divided by the world size a second time: flatten has done it, so the sum is the mean already."
                    )
                return Finding(given, text, _numbers(got), rank, why)
    return None


def _shapes() -> str:
    return ", ".join(map(str, _SHAPES))


# ---- make_buckets(parameters, cap_bytes)


@dataclass(frozen=True)
class _Sized:
    """A parameter by its number of elements, its dtype, and whether it is trained."""

    elements: int
    dtype: str = "float32"
    trained: bool = True

    @property
    def size(self) -> int:
        return self.elements * {"float16": 2, "float32": 4, "float64": 8}[self.dtype]


def _bucketed(answer: Callable[..., Any], sizes: Sequence[_Sized], cap: int) -> Any:
    """The numbers of the parameters in each bucket; None stands for what is no parameter of these."""
    import torch

    made = [
        torch.nn.Parameter(torch.zeros(one.elements, dtype=getattr(torch, one.dtype)), requires_grad=one.trained)
        for one in sizes
    ]
    numbers = {id(parameter): number for number, parameter in enumerate(made)}
    buckets = answer(iter(made), cap)  # as model.parameters() is: an iterator
    try:
        return [[numbers.get(id(parameter)) for parameter in bucket] for bucket in buckets]
    except TypeError:
        return plain(buckets)


def _bucketings(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    half = [_Sized(5, "float16"), _Sized(5, "float16"), _Sized(10), _Sized(10), _Sized(3, "float16"), _Sized(10)]
    given = [
        ([_Sized(10)] * 6, 80),
        ([_Sized(10), _Sized(100), _Sized(3), _Sized(7, trained=False), _Sized(25)], 100),
        (half, 60),
        ([_Sized(5, "float16")] * 7, 30),
        ([_Sized(2), _Sized(7), _Sized(1)], 10**9),
        ([_Sized(2), _Sized(7), _Sized(1)], 1),
    ]
    if thorough:
        for _ in range(8):
            sizes = [
                _Sized(rng.randint(1, 60), rng.choice(["float32", "float32", "float64"]), rng.random() < 0.85)
                for _ in range(rng.randint(3, 12))
            ]
            given.append(([*sizes, _Sized(4)], rng.randint(1, 500)))
        given += [([_Sized(3, trained=False)], 10)]
    yield Trial(1, _bucketed, [_bucket_case(sizes, cap) for sizes, cap in given])


def _bucket_case(sizes: Sequence[_Sized], cap: int) -> Case:
    told = [f"{one.size}{'' if one.trained else ' (frozen)'}" for one in sizes]
    dtypes = sorted({one.dtype for one in sizes})
    given = f"parameters of {', '.join(told)} bytes ({', '.join(dtypes)}), cap_bytes={cap:,}"
    return Case(given, [(list(sizes), cap)], lambda results: _judge_buckets(given, sizes, cap, results[0]))


def _judge_buckets(given: str, sizes: Sequence[_Sized], cap: int, buckets: Any) -> Finding | None:
    if not isinstance(buckets, list):
        why = "Nothing came back: is there a return?" if buckets == ("value", None) else ""
        return Finding(given, "a list of lists of parameters", str(buckets[-1])[:200], None, why)
    shown = f"numbers {buckets}"
    flat = [number for bucket in buckets for number in bucket]
    if None in flat:
        why = "A bucket holds the parameters themselves: their gradients come and go."
        return Finding(given, "the parameters themselves", "other objects", None, why)
    wanted = [number for number, one in enumerate(sizes) if one.trained]
    if sorted(flat) != wanted:
        frozen = [number for number in flat if not sizes[number].trained]
        why = (
            "A frozen parameter (requires_grad is False) never gets a gradient: nothing is to be sent."
            if frozen
            else ""
        )
        return Finding(given, f"each of the numbers {wanted} once", shown, None, why)
    if not all(buckets):
        return Finding(
            given, "buckets with something in them", shown, None, "An empty bucket is a message for nothing."
        )
    for dtype in sorted({one.dtype for one in sizes}):
        order = [number for number in flat if sizes[number].dtype == dtype]
        if order != sorted(order, reverse=True):
            why = (
                "Backward reaches the last layer first. A bucket that is to be full early holds the last parameters: "
                "go through them in reverse."
            )
            return Finding(given, "the last parameter first", shown, None, why)
    for place, bucket in enumerate(buckets):
        if len({sizes[number].dtype for number in bucket}) > 1:
            why = "A bucket becomes one flat tensor, and a tensor has one dtype."
            return Finding(given, "one dtype a bucket", f"{shown}; bucket {place} mixes them", None, why)
        size = sum(sizes[number].size for number in bucket)
        before = size - sizes[bucket[-1]].size
        if before >= cap and len(bucket) > 1:
            why = (
                "A bucket is closed by the parameter with which it reaches cap_bytes; the next one begins a new bucket."
            )
            return Finding(
                given, f"bucket {place} closed at {cap:,} bytes", f"{shown}; it holds {size:,} bytes", None, why
            )
        later = buckets[place + 1 :]
        dtype = sizes[bucket[0]].dtype
        if size < cap and later and sizes[later[0][0]].dtype == dtype:
            why = "It had not reached cap_bytes: many small messages are what buckets are there to avoid. Fill it up."
            return Finding(given, f"bucket {place} of at least {cap:,} bytes", f"{shown}; it holds {size:,}", None, why)
    return None


# ---- own_ddp(model, bucket_bytes)


@dataclass(frozen=True)
class _Training:
    """Five steps on ranks that start apart. `counts[rank]` samples a micro-batch, `micro` of them a step."""

    kind: _Kind
    counts: tuple[int, ...]
    bucket_bytes: int
    optimizer: str = "SGD"
    micro: int = 1
    max_norm: float = 0.0
    messages: int = 0  # that a step may take at most; 0: as many as it likes

    @property
    def world(self) -> int:
        return len(self.counts)

    def __str__(self) -> str:
        text = f"{counted(self.world, 'rank')}, each with a seed of its own, {self.kind}, {self.optimizer}"
        text += f", buckets of {self.bucket_bytes:,} bytes"
        text += f", {self.micro} micro-batches a step, all but the last under no_sync" if self.micro > 1 else ""
        return text + (f", clipped to {self.max_norm:g} after synchronize" if self.max_norm else "")

    def optimizer_of(self, model: Any) -> Any:
        import torch

        if self.optimizer == "Adam":
            return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)


_STEPS = 5
_LATE = 0.08  # seconds that all ranks but the first let pass between forward and backward of a marked model


def _train(answer: Callable[..., Any], training: _Training, arrays: Arrays, batches: list[list[Any]]) -> list[Any]:
    """The parameters after wrapping and after each step, and which have no gradient after the first step."""
    import torch
    import torch.distributed as dist

    late = _LATE if training.kind.marked and dist.get_rank() else 0.0
    model = _model(training.kind, arrays)
    ddp = answer(model, training.bucket_bytes)
    _mark(_BUILT)
    optimizer = training.optimizer_of(model)
    states: list[Any] = [_told(model)]
    without: list[str] = []
    for step, micro_batches in enumerate(batches):
        optimizer.zero_grad()
        for number, inputs in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = _loss(ddp, inputs)
                time.sleep(late)
                loss.backward()
        ddp.synchronize()
        if not step:
            without = [name for name, one in model.named_parameters() if one.grad is None]
        if training.max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
        optimizer.step()
        _mark(_STEPPED)
        states.append(_told(model))
    return [states, without]


def _trainings(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    # 8 layers of 336 bytes in float64: a cap of 700 makes 3 buckets of them, with 16 parameters
    plain_one = _Kind(marked=True)
    wild = _Kind(tied=True, frozen=True, unused=True, spare=True)
    worlds = {
        2: [
            _Training(plain_one, (3, 2), 900, messages=8),
            _Training(_Kind(tied=True, frozen=True, unused=True), (1, 4), 500, "Adam"),
            _Training(_Kind(), (2, 2), 10**6, micro=3, max_norm=0.5, messages=2),
        ],
        3: [_Training(wild, (3, 4, 1), 500), _Training(wild, (3, 1, 2), 10**6, "Adam", micro=2)],
        4: [_Training(_Kind("float32", spare=True), (2, 1, 4, 3), 200)],
    }
    if thorough:
        worlds = {}
        for world in (1, 2, 3, 4):
            odd = tuple(2 * rng.randint(0, 2) + 1 for _ in range(world))
            mixed = (*odd[:-1], 2 * rng.randint(1, 3))
            worlds[world] = [
                _Training(plain_one, odd, rng.choice([700, 900, 1000]), messages=8),
                _Training(_random_kind(rng), mixed, rng.randint(1, 1500), rng.choice(["SGD", "Adam"])),
                _Training(wild, mixed[::-1], rng.choice([1, 300, 700]), micro=rng.randint(2, 3), max_norm=0.3),
                _Training(_Kind(frozen=True), odd, 10**6, "Adam", micro=3, messages=2),
                # with a cap of 1 a bucket holds one parameter, and on some ranks none that was used
                _Training(_Kind(unused=True, spare=True), mixed, 1 if world % 2 == 0 else 10**6, max_norm=0.3),
            ]
    for world, trainings in worlds.items():
        yield Trial(world, _train, [_train_case(training, rng) for training in trainings], group=True, collectives=True)


def _random_kind(rng: random.Random) -> _Kind:
    return _Kind(rng.choice(["float32", "float64"]), *(rng.random() < 0.5 for _ in range(4)))


def _train_case(training: _Training, rng: random.Random) -> Case:
    draw = generator(rng)
    starts = [_drawn(training.kind, draw) for _ in range(training.world)]
    batches = [
        [
            [(draw.normal(size=(count, 6)) * (1 + 2 * rank)).astype(training.kind.dtype) for _ in range(training.micro)]
            for _ in range(_STEPS)
        ]
        for rank, count in enumerate(training.counts)
    ]
    inputs = [(training, starts[rank], batches[rank]) for rank in range(training.world)]
    return Case(
        str(training),
        inputs,
        lambda results: _judge_training(training, starts, batches, results),
        traffic=lambda trace: _judge_traffic(training, trace),
    )


def _replayed(
    training: _Training,
    starts: list[Any],
    batches: list[Any],
    factor: float = 1.0,
    alone: bool = False,
    together: bool = True,
    zeros: bool = False,
    last_only: bool = False,
    early: bool = False,
) -> list[list[dict[str, Any]]]:
    """What ranks would hold after each step, by rank: right as it stands, or with one thing done wrongly.

    `factor` times the mean; `alone`: own gradients only; `together`: from rank 0's start; `zeros` in place of None;
    `last_only`: without what accumulated; `early`: clipped before the mean is taken.
    """
    import torch

    kind = replace(training.kind, marked=False)
    models = [_model(kind, starts[0] if together else start) for start in starts]
    optimizers = [training.optimizer_of(model) for model in models]
    states: list[list[dict[str, Any]]] = [[] for _ in models]
    with torch.enable_grad():
        for step in range(_STEPS):
            for model, mine in zip(models, batches, strict=True):
                model.zero_grad()
                for inputs in mine[step][-1:] if last_only else mine[step]:
                    _loss(model, inputs).backward()
                if early:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                has = [one.grad for one in parameters if one.grad is not None]
                if not has and zeros and parameters[0].requires_grad:
                    has = [torch.zeros_like(parameters[0])]
                if has and not alone:
                    mean = torch.stack(has).sum(dim=0) * (factor / len(models))
                    for one in parameters:
                        one.grad = mean.clone()
            for model, optimizer, seen in zip(models, optimizers, states, strict=True):
                if training.max_norm and not early:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
                optimizer.step()
                seen.append(_told(model))
    return states


def _judge_training(training: _Training, starts: list[Any], batches: list[Any], results: list[Any]) -> Finding | None:
    import numpy as np

    given = str(training)
    for rank, (states, _) in enumerate(results):
        for name, got in states[0].items():
            if not np.array_equal(got, starts[0][name]):
                why = (
                    "A buffer is no parameter, and the model computes with it all the same: give rank 0's to all ranks."
                    if name == "shift"
                    else "Replicas that start apart stay apart: the wrapper gives rank 0's values to all ranks when it "
                    "is made, those of frozen parameters too."
                )
                return Finding(given, f"{name} as on rank 0 once wrapped", _numbers(got), rank, why)
    wanted = _replayed(training, starts, batches)[0]
    idle = [name for name in wanted[0] if name.startswith(("never", "layers.3" if training.kind.frozen else "never"))]
    for rank, (_, without) in enumerate(results):
        for name in idle:
            if name not in without:
                return Finding(given, f"None as the gradient of {name}", "a tensor", rank, _ZEROS)
    for step in range(_STEPS):
        for rank, (states, _) in enumerate(results):
            for name, right in wanted[step].items():
                got = states[step + 1][name]
                if not _close(got, right):
                    text = f"{name} as one process has it after step {step + 1}: {_numbers(right)}"
                    why = _why_not_trained(training, starts, batches, step, rank, name, got)
                    return Finding(given, text, _numbers(got), rank, why)
    for rank, (states, _) in enumerate(results):
        for name, got in states[-1].items():
            if not np.array_equal(got, results[0][0][-1][name]):
                why = "All ranks must hold the same bits: replicas that differ in the last bit drift apart."
                return Finding(given, f"{name} as on rank 0", "another last bit", rank, why)
    return None


_ZEROS = (
    "No rank had a gradient for it. Left at None the optimizer skips it; with zeros in its place, weight decay and "
    "momentum would move it, which one process would not do."
)


def _why_not_trained(
    training: _Training, starts: list[Any], batches: list[Any], step: int, rank: int, name: str, got: Any
) -> str:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"alone": True}, "That is what this rank's own gradient gives: nothing has come from the others."),
        (
            {"factor": float(training.world)},
            "The gradients are summed. Divide by the world size: a mean, whatever the number of ranks.",
        ),
        ({"factor": 1 / training.world}, "Divided twice by the number of ranks."),
        ({"zeros": True}, _ZEROS),
    ]
    if training.micro > 1:
        faults.append(
            (
                {"last_only": True},
                "What accumulated under no_sync has been lost: it belongs to the sum that is averaged in the end.",
            )
        )
    if training.max_norm:
        faults.append(({"early": True}, _EARLY))
    for fault, why in faults:
        if _close(got, _replayed(training, starts, batches, **fault)[rank][step][name]):
            return why
    if name.startswith("spare"):
        return (
            "Some ranks have no gradient for it in this step. They bring zeros, the mean is still over all ranks, and "
            "all ranks get it."
        )
    if training.micro > 1:
        return (
            "Without no_sync the same training was right. Inside it a backward accumulates and does nothing else: it "
            "starts no bucket, and counts no parameter as come."
        )
    if step:
        return "The steps before this one were right: is everything made anew at the end of a step?"
    return "After synchronize, each gradient is the mean over all ranks, the sum divided by the world size."


def _judge_traffic(training: _Training, trace: Any) -> Finding | None:
    """Whether a step takes few messages, and the first of them starts before backward has come half-way."""
    given = str(training)
    for rank, told in enumerate(trace):
        events = sorted(told.events, key=lambda event: event.start)
        pieces = _between_steps(events)
        for step, piece in enumerate(pieces):
            sent = [event for event in piece if not _is_mark(event)]
            if training.messages and len(sent) > training.messages:
                why = (
                    "Under no_sync nothing is sent; the sum of all micro-batches is, once."
                    if training.micro > 1
                    else "A bucket is one message, however many parameters it holds."
                )
                text = f"at most {training.messages} messages in a step"
                return Finding(given, text, f"{len(sent)} in step {step + 1}", rank, why)
            if training.kind.marked:
                marks = [place for place, event in enumerate(piece) if _is_mark(event)]
                begun = piece[marks[0] + 1 : marks[1]] if len(marks) >= 2 else []
                if not begun:
                    why = (
                        "The last four layers had their gradients by then, which fill a bucket. Start its all-reduce "
                        "in the hook (register_post_accumulate_grad_hook) of the parameter that completes it, with "
                        "async_op=True, and wait in synchronize(). (A lambda that is made in a loop sees the loop's "
                        "last value: bind it, as in `lambda p, number=number: ...`.)"
                    )
                    text = "an all-reduce that has begun when backward is half-way"
                    return Finding(given, text, f"none on rank {rank} in step {step + 1}", rank, why)
    return _judge_waiting(given, trace) if training.kind.marked and training.world > 1 else None


def _judge_waiting(given: str, trace: Any) -> Finding | None:
    """Whether rank 0's backward goes on while the others, who are late, have not joined its first all-reduce.

    In one step of five is enough: on a busy machine rank 0 may be late itself.
    """
    first, second = (
        _between_steps(sorted(told.events, key=lambda event: event.start)) for told in (trace[0], trace[1])
    )
    for mine, others in zip(first, second, strict=True):
        half_way = [event.start for event in mine if _is_mark(event)][1]
        joined = next(event.start for event in others if not _is_mark(event))
        if half_way < joined:
            return None
    why = (
        "A hook that waits for its all-reduce holds backward up, and nothing overlaps. Start it with async_op=True, "
        "keep the request, and wait in synchronize()."
    )
    text = "rank 0 half-way through backward before rank 1, which is late, has joined the first all-reduce"
    return Finding(given, text, "backward stood still until rank 1 had joined, in all 5 steps", 0, why)


def _is_mark(event: Any) -> bool:
    return event.op == "broadcast" and event.bytes in (_BUILT, _MIDDLE, _STEPPED)


def _between_steps(events: Sequence[Any]) -> list[list[Any]]:
    """The events of each step: from the mark that follows wrapping, cut at the marks that follow steps."""
    pieces: list[list[Any]] = [[]]
    for event in events:
        if event.op == "broadcast" and event.bytes == _BUILT:
            pieces = [[]]
        elif event.op == "broadcast" and event.bytes == _STEPPED:
            pieces.append([])
        else:
            pieces[-1].append(event)
    return pieces[:_STEPS]


# ---- accumulate(ddp, batches), with torch's DistributedDataParallel


def _accumulate(answer: Callable[..., Any], arrays: Arrays, steps: list[list[Any]]) -> list[Any]:
    """The gradients after each step, and the forwards (with their number of samples) and backwards that led there."""
    import torch

    model = _model(_Kind(), arrays)
    passes: list[Any] = []
    model.register_forward_hook(lambda _, inputs, output: passes.append(len(output)))
    model.register_full_backward_hook(lambda *_: passes.append("backward"))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    found = []
    for batches in steps:
        ddp.zero_grad()
        # a first backward of torch's builds its buckets anew, with messages of its own: leave it out of the count
        answer(ddp, [(torch.from_numpy(x.copy()), torch.from_numpy(y.copy())) for x, y in batches])
        _mark(_STEPPED)
        told = {name: None if one.grad is None else plain(one.grad) for name, one in model.named_parameters()}
        found.append([told, list(passes)])
        passes.clear()
    return found


def _accumulations(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    given = {2: [1, 3], 3: [4]}
    if thorough:
        given = {world: [rng.randint(2, 6), 1, rng.randint(2, 6)] for world in (1, 2, 3, 4)}
    for world, counts in given.items():
        cases = [_accumulate_case(world, count, generator(rng)) for count in counts]
        yield Trial(world, _accumulate, cases, group=True, collectives=True)


def _accumulate_case(world: int, count: int, draw: Any) -> Case:
    given = f"{counted(world, 'rank')}, torch's DDP, {counted(count, 'micro-batch')[: None if count == 1 else -1]}"
    given = given if count == 1 else f"{given}es"
    start = _drawn(_Kind(), draw)
    batches = [
        [[(draw.normal(size=(4, 6)), draw.normal(size=(4, 6))) for _ in range(count)] for _ in range(2)]
        for _ in range(world)
    ]
    inputs = [(start, mine) for mine in batches]
    return Case(
        given,
        inputs,
        lambda results: _judge_accumulated(given, start, batches, results),
        traffic=lambda trace: _judge_syncs(given, trace),
    )


def _judge_accumulated(given: str, start: Arrays, batches: list[Any], results: list[Any]) -> Finding | None:
    import torch

    for step in range(2):
        every = [one for mine in batches for one in mine[step]]
        model = _model(_Kind(), start)
        with torch.enable_grad():
            for x, y in every:
                loss = torch.nn.functional.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y))
                (loss / len(every)).backward()
        for name, one in model.named_parameters():
            right = one.grad.numpy()
            for rank, told in enumerate(results):
                text = f"the gradient of {name}: {_numbers(right)}"
                value = told[step][0][name]
                if value is None:
                    return Finding(given, text, "None", rank, "Is backward called on every batch?")
                if _close(value[2], right):
                    continue
                count = len(batches[0][step])
                why = (
                    "The gradient of the mean over all micro-batches of all ranks: each loss divided by the number of "
                    "micro-batches, and the last backward outside of no_sync."
                )
                if count > 1 and _close(value[2], right * count):
                    why = "The micro-batches are summed: divide each loss by their number."
                return Finding(given, text, _numbers(value[2]), rank, why)
        for rank, told in enumerate(results):
            if told[step][1] != [len(batches[0][0][0][0]), "backward"] * len(batches[0][step]):
                why = (
                    "Micro-batches are there because all of them at once do not fit into memory: forward and backward "
                    "of one, then of the next."
                )
                passes = [f"forward of {one}" if one != "backward" else one for one in told[step][1]]
                text = f"{len(batches[0][step])} times a forward of 4 samples and its backward"
                return Finding(given, text, ", ".join(passes), rank, why)
    return None


def _judge_syncs(given: str, trace: Any) -> Finding | None:
    for rank, told in enumerate(trace):
        events = sorted(told.events, key=lambda event: event.start)
        begun = 0
        for event in events:
            if event.op == "broadcast" and event.bytes == _STEPPED:
                if begun > 1:
                    why = (
                        "The model is small and fits one bucket, so a step needs one all-reduce. DDP decides in "
                        "*forward* whether the backward that follows synchronises: the forward belongs inside "
                        "no_sync too. (An all-reduce of your own is not needed.)"
                    )
                    return Finding(given, "one all-reduce in a step", f"{begun} all-reduces", rank, why)
                begun = 0
            begun += event.op == "all_reduce"
    return None


# ---- clipped_step(ddp, optimizer, loss, max_norm)


def _clip(answer: Callable[..., Any], training: _Training, arrays: Arrays, batches: list[Any]) -> list[Any]:
    model = _model(training.kind, arrays)
    ddp = _Wrapped(model)
    optimizer = training.optimizer_of(model)
    states = [_told(model)]
    for (inputs,) in batches:
        answer(ddp, optimizer, _loss(ddp, inputs), training.max_norm)
        states.append(_told(model))
    return [states, []]


def _clippings(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    norms = {2: [0.05, 1e6], 3: [0.3]}
    if thorough:
        norms = {world: [rng.uniform(0.02, 0.2), rng.uniform(0.2, 0.6), 1e6] for world in (1, 2, 3, 4)}
    for world, some in norms.items():
        cases = []
        for norm in some:
            draw = generator(rng)
            optimizer = "SGD" if norm < 0.2 or norm > 1 else "Adam"
            training = _Training(_Kind(), tuple(range(1, world + 1)), 10**6, optimizer, max_norm=norm)
            start = _drawn(training.kind, draw)
            batches = [
                [[draw.normal(size=(count, 6)) * (1 + 3 * rank)] for _ in range(_STEPS)]
                for rank, count in enumerate(training.counts)
            ]
            cases.append(_clip_case(training, start, batches))
        yield Trial(world, _clip, cases, group=True, collectives=True)


def _clip_case(training: _Training, start: Arrays, batches: list[Any]) -> Case:
    given = f"{counted(training.world, 'rank')}, {training.optimizer}, max_norm {training.max_norm:.3g}"
    inputs = [(training, start, mine) for mine in batches]
    return Case(
        given, inputs, lambda results: _judge_clipped(given, training, [start] * training.world, batches, results)
    )


_EARLY = (
    "That is the mean of gradients which each rank had clipped by its own norm. The norm that counts is that of the "
    "mean: clip when it is there, after synchronize()."
)


def _judge_clipped(
    given: str, training: _Training, starts: list[Any], batches: list[Any], results: list[Any]
) -> Finding | None:
    unclipped = replace(training, max_norm=0.0)
    wanted = _replayed(training, starts, batches)[0]
    for step in range(_STEPS):
        for rank, (states, _) in enumerate(results):
            for name, right in wanted[step].items():
                got = states[step + 1][name]
                if _close(got, right):
                    continue
                why = (
                    "In this order: clear the gradients, backward, synchronize, clip, step. To clip is to scale all "
                    "gradients by one factor, so that their norm taken together is max_norm (clip_grad_norm_)."
                )
                if _close(got, _replayed(training, starts, batches, early=True)[rank][step][name]):
                    why = _EARLY
                elif _close(got, _replayed(unclipped, starts, batches)[rank][step][name]):
                    why = "That is the step of gradients that are not clipped."
                elif _close(got, _replayed(training, starts, batches, alone=True)[rank][step][name]):
                    why = "That is what this rank's own gradient gives: synchronize() makes it the mean of all ranks."
                elif _close(got, states[step][name]):
                    why = "Nothing has moved: is optimizer.step() called?"
                before = wanted[step - 1] if step else starts[0]
                text = f"{name} as in one process: in step {step + 1} it moves by {_numbers(right - before[name])}"
                return Finding(given, text, f"by {_numbers(got - before[name])}", rank, why)
    return None


# ---- numbers and words

_TOLERANCE = {"float16": 2e-3, "float32": 2e-5, "float64": 1e-10}  # of the largest number


def _close(got: Any, wanted: Any) -> bool:
    return nearly(got, wanted, _TOLERANCE)


_numbers = partial(first_numbers, most=4)


# ---- what the lesson goes on with while there is no right answer: right, and without any overlap


def _own_flatten(parameters: Any) -> Any:
    """Return the gradients and flags in one tensor, as torch.nn.utils strings parameters together."""
    import torch
    import torch.distributed as dist

    own.note()
    parameters = list(parameters)
    parts = [torch.zeros_like(one) if one.grad is None else one.grad.contiguous() for one in parameters]
    parts += [torch.full((1,), one.grad is not None, dtype=one.dtype) for one in parameters]
    return torch.nn.utils.parameters_to_vector(parts).detach() / dist.get_world_size()


def _own_unflatten(parameters: Any, flat: Any) -> None:
    """Fill gradients as torch.nn.utils fills parameters."""
    import torch

    own.note()
    parameters = list(parameters)
    parts = [torch.zeros_like(one) for one in parameters]
    flags = [torch.zeros(1, dtype=one.dtype) for one in parameters]
    torch.nn.utils.vector_to_parameters(flat, [*parts, *flags])
    for one, part, flag in zip(parameters, parts, flags, strict=True):
        one.grad = part.clone() if flag.item() else None


def _own_buckets(parameters: Any, cap_bytes: int) -> list[list[Any]]:
    """Return the buckets that DistributedDataParallel makes of them."""
    import torch.distributed as dist

    own.note()
    trained = [one for one in parameters if one.requires_grad][::-1]
    assign: Any = dist._compute_bucket_assignment_by_size
    return [[trained[number] for number in bucket] for bucket in assign(trained, [cap_bytes])[0]] if trained else []


class _Wrapped:
    """A model whose gradients are averaged in `synchronize` and no earlier, by gathering them all everywhere."""

    def __init__(self, model: Any) -> None:
        self.module = model

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        return self.module(*inputs, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def synchronize(self) -> None:
        import torch
        import torch.distributed as dist

        everyone: list[Any] = [None] * dist.get_world_size()
        parameters = list(self.module.parameters())
        dist.all_gather_object(everyone, [one.grad for one in parameters])
        for one, gradients in zip(parameters, zip(*everyone, strict=True), strict=True):
            has = [gradient for gradient in gradients if gradient is not None]
            one.grad = torch.stack(has).sum(dim=0) / len(everyone) if has else None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


def _own_ddp(model: Any, bucket_bytes: int) -> _Wrapped:
    """Return the model, equal on all ranks, in a wrapper without buckets."""
    model.load_state_dict(own.gather(model.state_dict())[0])
    return _Wrapped(model)


EXERCISES = (
    Exercise(
        name="latency_paid",
        title="milliseconds of latency in a step with one all-reduce per parameter",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="flatten",
        title="all gradients of a bucket in one tensor, with a flag for each",
        kind="implement",
        points=2,
        parameters=("parameters",),
        cases=_flats,
        own=lambda: _own_flatten,
        own_name="torch.nn.utils.parameters_to_vector",
        hints=(
            "Collect the parts in a list, in the order of the parameters, and join them with torch.cat.",
            "A gradient may be None: torch.zeros_like(parameter) in its place. reshape(-1) also flattens what is not "
            "contiguous; view(-1) does not.",
            "The flags are one more part: torch.tensor([float(p.grad is not None) for p in parameters], "
            "dtype=parameters[0].dtype). Divide the whole by dist.get_world_size().",
        ),
    ),
    Exercise(
        name="unflatten",
        title="back from one tensor to the gradients",
        kind="implement",
        points=2,
        parameters=("parameters", "flat"),
        cases=_unflats,
        own=lambda: _own_unflatten,
        own_name="torch.nn.utils.vector_to_parameters",
        hints=(
            "flat.split([length, length, ...]) gives the parts; the last one is as long as there are parameters.",
            "A part becomes a gradient with part.view_as(parameter).",
            "Only a flag of exactly 0 says that no rank had a gradient. parameter.grad = part.view_as(parameter) if "
            "flag else None.",
        ),
    ),
    Exercise(
        name="make_buckets",
        title="parameters in buckets, the last first",
        kind="implement",
        points=3,
        parameters=("parameters", "cap_bytes"),
        cases=_bucketings,
        own=lambda: _own_buckets,
        own_name="the function that DistributedDataParallel itself uses",
        hints=(
            "One loop over the trained parameters in reverse; remember how many bytes the current bucket holds.",
            "A parameter takes parameter.numel() * parameter.element_size() bytes. Add it to the bucket first, then "
            "ask whether the bucket has reached cap_bytes: the next parameter then begins a new one.",
            "A new bucket begins when there is none, when the last one has reached the cap, or when the dtype is "
            "another than that of buckets[-1][0].",
        ),
    ),
    Exercise(
        name="own_ddp",
        title="a wrapper that sends buckets while backward goes on",
        kind="implement",
        points=8,
        parameters=("model", "bucket_bytes"),
        cases=_trainings,
        own=lambda: _own_ddp,
        own_name="dist.all_gather_object, without overlap",
        hints=(
            "Begin without overlap: broadcast parameters and buffers in __init__, and in synchronize() flatten, "
            "all-reduce and unflatten bucket after bucket. Only then add the hooks.",
            "For each bucket keep the set of parameters whose gradient has not come yet. A hook takes its parameter "
            "out of the set; a bucket with an empty set can start.",
            "All ranks must start the same buckets in the same order, and a rank may miss a parameter that another "
            "one has. So start bucket k only when buckets 0 to k-1 have started, and let synchronize() start those "
            "that are left.",
            "_start: flat = flatten(bucket); request = dist.all_reduce(flat, async_op=True); keep both. synchronize: "
            "start what is left, then for each (bucket, flat, request): request.wait(), unflatten(bucket, flat); make "
            "the sets anew. no_sync: a flag that the hook looks at.",
        ),
    ),
    Exercise(
        name="hidden_percent",
        title="percent of the communication that is hidden behind backward on the emulated link",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="accumulate",
        title="one all-reduce for several micro-batches",
        kind="debug",
        points=3,
        parameters=("ddp", "batches"),
        cases=_accumulations,
        hints=(
            "Count the all-reduces with trace=True: what is found here makes one in every backward.",
            "torch's DDP looks in forward whether it is to synchronise in the backward that follows.",
            "Both lines, the forward and the backward, belong inside `with ddp.no_sync():`, for all batches but the "
            "last.",
        ),
    ),
    Exercise(
        name="clipped_step",
        title="clip what is averaged, not what is averaged later",
        kind="debug",
        points=3,
        parameters=("ddp", "optimizer", "loss", "max_norm"),
        cases=_clippings,
        hints=(
            "What one process clips is the gradient of the whole batch. When does a rank have that?",
            "Until synchronize() has returned, a gradient is this rank's own.",
            "The line with clip_grad_norm_ moves: it stands between ddp.synchronize() and optimizer.step().",
        ),
    ),
    Exercise(
        name="what_to_hide",
        title="when overlap cannot help",
        kind="explain",
        points=3,
    ),
)
