"""Lesson 02, all-reduce from scratch: its exercises, and the cases that judge answers by value and by traffic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..launcher.relay import OWN
from . import own
from .inside import plain
from .judging import Case, Finding, Trial
from .registry import Exercise
from .telling import counted, first_numbers, shown

# ---- what travelled: every exercise that moves tensors is judged by it


@dataclass(frozen=True)
class Budget:
    """What an algorithm needs for `length` elements of `itemsize` bytes on `world` ranks.

    A rank sends at least `least` and at most `most` elements in at most `messages` messages of at most `largest`; the
    longest chain of messages has `rounds` links. `total` bounds the messages of all ranks. With `ring`, each rank sends
    to one other only. `name` is the algorithm in words; `slow` helps whose chain is too long, `heavy` whose messages
    are too many or too large. A call of the course's own version of an exercise counts as what its budget allows.
    """

    name: str
    itemsize: int
    messages: int
    rounds: int
    most: float
    least: float = 0
    total: int | None = None
    largest: int | None = None
    ring: bool = False
    slow: str = ""
    heavy: str = ""


def _over_budget(given: str, budget: Budget, trace: Any) -> Finding | None:
    for rank, told in enumerate(trace):
        for event in told.events:
            if event.op == "barrier":
                why = "A receive waits for its message: no barrier is needed, and none is counted in this exercise."
                return Finding(given, "messages alone", "a call of barrier", rank, why)
            if event.op not in ("send", "recv") and not event.op.startswith(OWN):
                why = "Here the framework did the work. Build it from send and recv (or isend and irecv)."
                return Finding(given, "messages from rank to rank", f"a call of {event.op}", rank, why)
    borrowed = [
        _BUDGETS.get(event.op.removeprefix(OWN), _ring)(len(trace), event.bytes // budget.itemsize, budget.itemsize)
        for event in trace[0].events  # all ranks take part in each
        if event.op.startswith(OWN)
    ]
    return _too_heavy(given, budget, borrowed, trace) or _too_slow(given, budget, borrowed, trace)


def _too_heavy(given: str, budget: Budget, borrowed: list[Budget], trace: Any) -> Finding | None:
    with_borrowed = ", with the course's own versions" if borrowed else ""
    more = sum(one.messages for one in borrowed)
    for rank, told in enumerate(trace):
        least, most = (
            told.bytes_sent / budget.itemsize + sum(getattr(one, bound) for one in borrowed)
            for bound in ("least", "most")
        )
        if most < budget.least or least > budget.most:
            low, high = (f"{math.floor(bound):,}" for bound in (budget.least, budget.most))
            allowed = f"{low} to {high}" if low != high else low
            expected = f"{budget.name}: {allowed if budget.least else f'at most {high}'} elements sent by each rank"
            sent = f"{least:,.0f} elements in {counted(told.messages_sent + more, 'message')}{with_borrowed}"
            return Finding(given, expected, sent, rank, _why_heavy(budget, told, more) if least > budget.most else "")
        sizes = [event.bytes / budget.itemsize for event in told.events if event.op == "send"]
        if budget.largest is not None and max(sizes, default=0) > budget.largest:
            expected = f"messages of at most {budget.largest:,} elements"
            return Finding(given, expected, f"one of {max(sizes):,.0f} elements", rank, budget.heavy)
        if max(told.messages_sent, told.messages_received) + more > budget.messages:
            expected = (
                f"{budget.name}: at most {counted(budget.messages, 'message')} sent, and as many received, by a rank"
            )
            received = f"{told.messages_sent + more} sent, {told.messages_received + more} received{with_borrowed}"
            return Finding(given, expected, received, rank, budget.heavy)
    total = sum(told.messages_sent + more for told in trace)
    if budget.total is not None and total > budget.total:
        expected = f"{budget.name}: {counted(budget.total, 'message')} in all"
        return Finding(given, expected, counted(total, "message"), None, budget.heavy)
    return _off_the_ring(given, trace) if budget.ring else None


def _why_heavy(budget: Budget, told: Any, more: int) -> str:
    """What helps a rank that has sent too many elements."""
    sizes = [event.bytes / budget.itemsize for event in told.events if event.op == "send"]
    if budget.ring and budget.messages and max(sizes, default=0) <= budget.most / budget.messages:
        count = told.messages_sent + more
        enough = counted(budget.messages, "round")
        return f"Each message is one chunk, as it should be, but {count} of them are too many: {enough} will do."
    return budget.heavy


def _off_the_ring(given: str, trace: Any) -> Finding | None:
    for rank, told in enumerate(trace):
        peers = sorted({event.peer for event in told.events if event.op == "send" and event.bytes})
        if len(peers) > 1:
            why = "In a ring a rank sends to one neighbour and receives from the other, in every round."
            return Finding(given, "messages to one neighbour", f"messages to the ranks {peers}", rank, why)
    return None


def _too_slow(given: str, budget: Budget, borrowed: list[Budget], trace: Any) -> Finding | None:
    rounds = trace.rounds + sum(one.rounds for one in borrowed)
    if rounds <= budget.rounds:
        return None
    expected = f"{budget.name}: at most {counted(budget.rounds, 'round')}"
    why = f"The sum is right, but too many messages wait for one another. {budget.slow}".strip()
    return Finding(given, expected, counted(rounds, "round"), None, why)


_IN_TURN = (
    "A rank that receives before it sends makes its neighbour wait, and so on around the ring: begin to send "
    "(isend), then "
    "receive, then wait for the request."
)
_WHOLE_TENSOR = (
    "A ring that passes whole tensors gives the right sum with N/2 times the traffic. Each message carries one "
    "chunk, an N-th "
    "of the tensor."
)


def _star(world: int, length: int, itemsize: int) -> Budget:
    return Budget(
        "everything through one rank",
        itemsize,
        messages=world - 1,
        rounds=2 if world > 1 else 0,
        most=(world - 1) * length,
        total=2 * (world - 1),
        slow="All ranks can send to the collecting rank at once, and it answers all of them at once.",
        heavy="Each of the other ranks sends its tensor to the collecting rank once and gets the sum back once.",
    )


def _tree(world: int, length: int, itemsize: int) -> Budget:
    depth = (world - 1).bit_length()
    return Budget(
        "a tree",
        itemsize,
        messages=depth,
        rounds=2 * depth,
        most=depth * length,
        total=2 * (world - 1),
        slow="In a tree the number of ranks that still hold a partial sum halves in each round.",
        heavy=(
            "In a tree every rank but the root sends one partial sum up, no rank takes more than log2(N) of them, "
            "and the "
            "total goes down the same way."
        ),
    )


def _ring(world: int, length: int, itemsize: int, journeys: int = 2) -> Budget:
    """The bounds of a ring that goes around once (`journeys` 1: one half) or twice (an all-reduce)."""
    steps = journeys * (world - 1)
    return Budget(
        "a ring",
        itemsize,
        messages=steps,
        rounds=steps,
        most=steps * math.ceil(length / world),
        least=steps * (length // world),
        ring=True,
        slow=_IN_TURN,
        heavy=_WHOLE_TENSOR,
    )


def _segmented(world: int, length: int, itemsize: int, segment: int) -> Budget:
    """A ring's bounds, with each chunk in pieces that do not wait for one another."""
    chunk = math.ceil(length / world)
    return Budget(
        "a ring in segments",
        itemsize,
        messages=2 * (world - 1) * max(1, math.ceil(chunk / segment)),
        rounds=2 * (world - 1),
        most=2 * (world - 1) * chunk,
        least=2 * (world - 1) * (length // world),
        largest=segment,
        ring=True,
        slow=(
            "A segment may wait only for the message that brought its own partial sum, not for the segments beside "
            "it: begin to "
            "send all segments of the first chunk, then pass each on as soon as it has arrived."
        ),
        heavy="Each message carries one segment of one chunk; `chunk.split(segment)` cuts a chunk without copying.",
    )


def _halving(world: int, length: int, itemsize: int) -> Budget:
    levels = world.bit_length() - 1
    folded = world != 1 << levels
    share = length * (1 - 2**-levels) + levels  # each round may round a half up
    return Budget(
        "halving and doubling",
        itemsize,
        # Folding the ranks above a power of two takes two rounds, or three when each pair halves the tensor first.
        messages=2 * levels + 3 * folded,
        rounds=2 * levels + 3 * folded,
        most=2 * share + 1.5 * (length + 1) * folded,
        slow="There are log2(N) rounds of halving and as many of doubling, and two more where N is no power of two.",
        heavy=(
            "Each round of halving sends half of what the rank is still responsible for; doubling sends the finished "
            "part, "
            "which doubles each time."
        ),
    )


def _half_ring(world: int, length: int, itemsize: int) -> Budget:
    return _ring(world, length, itemsize, journeys=1)


_BUDGETS: dict[str, Callable[[int, int, int], Budget]] = {  # of what later exercises may be built on
    "naive_all_reduce": _star,
    "tree_all_reduce": _tree,
    "reduce_scatter_ring": _half_ring,
    "all_gather_ring": _half_ring,
    "ring_all_reduce": _ring,
    "halving_doubling": _halving,
}


# ---- tensors and what should become of them


@dataclass(frozen=True)
class _Tensors:
    """One tensor a rank, of one shape and dtype; `transposed` hands them over as views that are not contiguous."""

    world: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    transposed: bool = False
    rough: bool = False  # numbers whose sum depends on the order of addition

    def drawn(self, rng: random.Random) -> list[Any]:
        import numpy as np

        draw = np.random.default_rng(rng.randrange(2**32))
        if self.rough:
            return [draw.normal(size=self.shape).astype(self.dtype) for _ in range(self.world)]
        # exact in float16 too, and so is every sum of them, whatever the order
        return [draw.integers(-60, 60, size=self.shape).astype(self.dtype) for _ in range(self.world)]

    def told(self, arrays: Sequence[Any]) -> str:
        shape = self.shape[::-1] if self.transposed else self.shape
        text = f"{counted(self.world, 'rank')}, "
        text += f"{self.dtype} tensors of shape {shape}" if len(shape) != 1 else f"{shape[0]} numbers of {self.dtype}"
        text += ", a transposed view (not contiguous)" if self.transposed else ""
        if 0 < math.prod(shape) <= 5:
            text += ": " + ", ".join(str(array.tolist()) for array in arrays)
        return text


def _reduce(answer: Callable[..., Any], array: Any, transposed: bool) -> dict[str, Any]:
    import torch

    tensor = torch.from_numpy(array.copy())
    tensor = tensor.t() if transposed else tensor
    before = tensor.clone()
    value = answer(tensor)
    told = {"value": plain(value), "kept": bool(torch.equal(tensor, before))}
    told["own"] = not isinstance(value, torch.Tensor) or not value.numel() or value.data_ptr() != tensor.data_ptr()
    return told


def _all_reduces(
    budget: Callable[[int, int, int], Budget], to_eight: bool = False
) -> Callable[[random.Random, bool], Iterator[Trial]]:
    """Cases for an all-reduce of that budget: a sum on every rank, in a tensor of its own.

    `to_eight`: a learner's answer is tried on 8 ranks as well, where three levels of halving can go wrong.
    """

    def trials(rng: random.Random, thorough: bool) -> Iterator[Trial]:
        more = [(8, [_Tensors(8, (19,))])] if to_eight and not thorough else []
        for world, inputs in (*_inputs(rng, thorough), *more):
            cases = []
            for tensors in inputs:
                arrays = tensors.drawn(rng)
                allowed = budget(world, math.prod(tensors.shape), arrays[0].itemsize)
                cases.append(_all_reduce_case(tensors, arrays, allowed))
            yield Trial(world, _reduce, cases, group=True)

    return trials


def _within(given: str, budget: Budget) -> Callable[[Any], Finding | None]:
    return lambda trace: _over_budget(given, budget, trace)


def _worlds(rng: random.Random) -> list[int]:
    """World sizes of the grader."""
    return [1, 2, 3, 4, 5, rng.choice([6, 7, 8])]


def _inputs(rng: random.Random, thorough: bool) -> Iterator[tuple[int, list[_Tensors]]]:
    if thorough:
        special = {
            3: [_Tensors(3, (0,))],
            4: [_Tensors(4, (rng.randint(2, 9), rng.randint(2, 9)), transposed=True)],
        }
        for world in _worlds(rng):
            kinds = rng.choice(["float32", "int64", "float16", "float64"])
            short = _Tensors(world, (rng.randint(1, 3 * world),), kinds)
            long = _Tensors(world, (world * rng.randint(50, 400) + rng.randrange(world),), rough=True)
            yield world, [short, long, *special.get(world, [])]
        return
    yield 2, [_Tensors(2, (4,)), _Tensors(2, (5,)), _Tensors(2, (1_001,), "int64")]
    yield 1, [_Tensors(1, (3,))]
    yield 3, [_Tensors(3, (7,)), _Tensors(3, (2,)), _Tensors(3, (0,)), _Tensors(3, (2, 3, 2))]
    yield 4, [_Tensors(4, (5,)), _Tensors(4, (5, 3), transposed=True), _Tensors(4, (1_001,), "float16")]
    yield 5, [_Tensors(5, (12,)), _Tensors(5, (1_003,), rough=True)]


def _all_reduce_case(tensors: _Tensors, arrays: list[Any], budget: Budget) -> Case:
    import numpy as np

    given = tensors.told(arrays)
    turned = [array.T if tensors.transposed else array for array in arrays]
    wide = np.float64 if arrays[0].dtype.kind == "f" else arrays[0].dtype
    expected = np.sum(turned, axis=0, dtype=wide)
    inputs = [(array, tensors.transposed) for array in arrays]
    return Case(
        given, inputs, lambda results: _judge_sum(given, turned, expected, results), traffic=_within(given, budget)
    )


def _judge_sum(given: str, arrays: list[Any], expected: Any, results: list[dict[str, Any]]) -> Finding | None:
    world, dtype = len(arrays), str(arrays[0].dtype)
    wanted = f"the sum on every rank: {first_numbers(expected)}"
    for rank, told in enumerate(results):
        value = told["value"]
        finding = _not_a_tensor_like(given, expected.shape, dtype, rank, value)
        if finding:
            return finding
        if not _close(value[2], expected, dtype):
            why = ""
            if _close(value[2] * float(world), expected, dtype):
                why = "That is the mean. An all-reduce returns the sum; who wants a mean divides."
            elif rank and _close(results[0]["value"][2], expected, dtype):
                why = "Rank 0 has the sum, this rank has not: the sum itself must travel back."
            elif world > 1 and _close(value[2], arrays[rank], dtype):
                why = "That is this rank's own tensor."
            else:
                lacking = [r for r in range(world) if world > 1 and _close(value[2] + arrays[r], expected, dtype)]
                why = f"The tensor of rank {lacking[0]} is missing in it." if lacking else ""
                why = why or _where_it_differs(value[2], expected, dtype)
            return Finding(given, wanted, first_numbers(value[2]), rank, why)
    for rank, told in enumerate(results):
        if not told["kept"]:
            why = "A caller may need its tensor again. Work on tensor.clone()."
            return Finding(given, "the tensor that was passed in, unchanged", "changed in place", rank, why)
        if not told["own"]:
            why = "Whoever divides the result in place would change the input: return a clone, on one rank too."
            return Finding(given, "a new tensor", "the tensor that was passed in", rank, why)
    return _not_the_same_bits(given, [told["value"][2] for told in results])


def _not_the_same_bits(given: str, arrays: list[Any]) -> Finding | None:
    import numpy as np

    for rank, array in enumerate(arrays):
        if not np.array_equal(array, arrays[0]):
            why = (
                "Floating point sums depend on the order of addition. Let one rank finish each element and send the "
                "finished "
                "sum to the others: replicas that differ in the last bit drift apart."
            )
            received = f"a difference of {np.abs(array.astype(float) - arrays[0]).max():.1e}"
            return Finding(given, "the same bits as on rank 0", received, rank, why)
    return None


def _not_a_tensor_like(given: str, shape: tuple[int, ...], dtype: str, rank: int, value: Any) -> Finding | None:
    if value[0] != "tensor":
        why = "Nothing came back: is there a return?" if value == ("value", None) else ""
        return Finding(given, "a tensor", shown(value), rank, why)
    if value[2].shape != shape:
        why = "The result has the shape of the input: .view_as(tensor) or .view(tensor.shape) brings it back."
        return Finding(given, f"the shape {shape}", f"the shape {value[2].shape}", rank, why)
    if value[1] != dtype:
        why = "torch.empty makes float32 unless told otherwise: torch.empty_like takes the type from a tensor."
        return Finding(given, f"dtype {dtype}", f"dtype {value[1]}", rank, why)
    return None


def _where_it_differs(array: Any, expected: Any, dtype: str) -> str:
    """A sentence on which elements are wrong, where some are right: it tells which chunk went astray."""
    import numpy as np

    rtol, atol = _TOLERANCE.get(dtype, (0.0, 0.0))
    wrong = ~np.isclose(array.astype(float), expected.astype(float), rtol=rtol, atol=atol).reshape(-1)
    if wrong.all() or wrong.size < 2:
        return ""
    places = np.flatnonzero(wrong)
    return (
        f"{len(places)} of {wrong.size} elements are wrong, the first at place {places[0]}, the last at {places[-1]}."
    )


_TOLERANCE = {"float16": (4e-3, 1e-2), "float32": (1e-5, 1e-5), "float64": (1e-12, 1e-12)}


def _close(array: Any, expected: Any, dtype: str) -> bool:
    import numpy as np

    rtol, atol = _TOLERANCE.get(dtype, (0.0, 0.0))
    return bool(np.allclose(array.astype(float), expected.astype(float), rtol=rtol, atol=atol))


# ---- the halves of the ring, and the ring in segments: they work on chunks, in place


def _on_chunks(answer: Callable[..., Any], array: Any, rest: tuple[Any, ...]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    flat = torch.from_numpy(array.copy())
    chunks = list(flat.tensor_split(dist.get_world_size()))
    answer(chunks, *rest)
    listed = torch.cat(chunks) if all(isinstance(chunk, torch.Tensor) for chunk in chunks) else None
    return {"flat": plain(flat), "listed": plain(listed)}


def _lengths(rng: random.Random, thorough: bool) -> Iterator[tuple[int, list[_Tensors]]]:
    if thorough:
        for world in _worlds(rng):
            lengths = (rng.randint(0, 2 * world), world * rng.randint(30, 300) + rng.randrange(world))
            yield world, [_Tensors(world, (length,), rng.choice(["float32", "int64", "float16"])) for length in lengths]
        return
    yield 2, [_Tensors(2, (4,)), _Tensors(2, (5,)), _Tensors(2, (1_001,), "int64")]
    yield 1, [_Tensors(1, (3,))]
    yield 3, [_Tensors(3, (7,)), _Tensors(3, (2,)), _Tensors(3, (0,))]
    yield 4, [_Tensors(4, (5,)), _Tensors(4, (1_001,), "float16")]
    yield 5, [_Tensors(5, (12,)), _Tensors(5, (1_003,))]


def _reduce_scatters(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    for world, inputs in _lengths(rng, thorough):
        drawn = [(tensors, tensors.drawn(rng)) for tensors in inputs]
        cases = [_reduce_scatter_case(tensors.told(arrays), arrays) for tensors, arrays in drawn]
        yield Trial(world, _on_chunks, cases, group=True)


def _reduce_scatter_case(given: str, arrays: list[Any]) -> Case:
    import numpy as np

    world, dtype = len(arrays), str(arrays[0].dtype)
    sums = np.array_split(np.sum(arrays, axis=0), world)

    def judge(results: list[dict[str, Any]]) -> Finding | None:
        for rank, told in enumerate(results):
            got = np.array_split(told["flat"][2], world)
            if _close(got[rank], sums[rank], dtype):
                continue
            listed = np.array_split(told["listed"][2], world)[rank] if told["listed"][0] == "tensor" else None
            why = ""
            if listed is not None and listed.shape == sums[rank].shape and _close(listed, sums[rank], dtype):
                why = (
                    "The sum stands in the list, not in the tensor of which the chunks are views: change a chunk in "
                    "place "
                    "(chunk += arrived, or chunk.copy_), do not put another tensor into the list."
                )
            else:
                finished = [c for c in range(world) if sums[c].size and _close(got[c], sums[c], dtype)]
                if finished and world > 1:
                    why = f"Chunk {finished[0]} is finished here. Begin the journey so that chunk r ends on rank r."
                elif _close(got[rank], np.array_split(arrays[rank], world)[rank], dtype):
                    why = "That is what this rank brought: nothing was added to it."
            wanted = f"the sum of chunk {rank}, in place: {first_numbers(sums[rank])}"
            return Finding(given, wanted, first_numbers(got[rank]), rank, why)
        return None

    traffic = _within(given, _half_ring(world, arrays[0].size, arrays[0].itemsize))
    return Case(given, [(array, ()) for array in arrays], judge, traffic)


def _all_gathers(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    for world, inputs in _lengths(rng, thorough):
        drawn = [(tensors, tensors.drawn(rng)) for tensors in inputs]
        cases = [_all_gather_case(tensors.told(arrays), arrays) for tensors, arrays in drawn]
        yield Trial(world, _on_chunks, cases, group=True)


def _all_gather_case(given: str, arrays: list[Any]) -> Case:
    import numpy as np

    world = len(arrays)
    pieces = [np.array_split(array, world)[rank] for rank, array in enumerate(arrays)]
    return Case(
        f"{given}; chunk r is finished on rank r alone",
        [(array, ()) for array in arrays],
        lambda results: _judge_chunks(
            given,
            np.concatenate(pieces),
            results,
            "Each rank begins with the chunk that is finished on it, `chunks[rank]`; then it passes on what has come.",
        ),
        _within(given, _half_ring(world, arrays[0].size, arrays[0].itemsize)),
    )


def _judge_chunks(given: str, expected: Any, results: list[dict[str, Any]], help: str) -> Finding | None:
    """Every rank's chunks, in place, must together be `expected`; `help` is for whom something else ends up there."""
    import numpy as np

    world, dtype = len(results), str(expected.dtype)
    wanted = np.array_split(expected, world)
    for rank, told in enumerate(results):
        got = np.array_split(told["flat"][2], world)
        for number in range(world):
            if _close(got[number], wanted[number], dtype):
                continue
            why = help
            if told["listed"][0] == "tensor" and _close(told["listed"][2], expected, dtype):
                why = (
                    "It stands in the list, not in the tensor of which the chunks are views: receive into the chunk "
                    "itself, "
                    "or use chunk.copy_."
                )
            text = f"chunk {number}: {first_numbers(wanted[number])}"
            return Finding(given, text, first_numbers(got[number]), rank, why)
    return _not_the_same_bits(given, [told["flat"][2] for told in results])


def _segmented_rings(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    for world, inputs in _lengths(rng, thorough):
        cases = []
        for tensors in inputs:
            arrays = tensors.drawn(rng)
            segment = rng.choice([1, 2, 3]) if tensors.shape[0] < 20 else rng.choice([50, 64, 100])
            cases.append(_segmented_case(f"{tensors.told(arrays)}; segments of {segment}", arrays, segment))
        yield Trial(world, _on_chunks, cases, group=True)


def _segmented_case(given: str, arrays: list[Any], segment: int) -> Case:
    import numpy as np

    expected = np.sum(arrays, axis=0, dtype=arrays[0].dtype)
    inputs = [(array, (segment,)) for array in arrays]
    traffic = _within(given, _segmented(len(arrays), arrays[0].size, arrays[0].itemsize, segment))
    help = (
        "A segment of chunk r makes two journeys: it collects until it is finished on rank r; then it goes around once "
        "more, unchanged."
    )
    return Case(given, inputs, lambda results: _judge_chunks(given, expected, results, help), traffic)


# ---- average_gradients(gradients) -> their means over all ranks


def _average(answer: Callable[..., Any], arrays: list[Any]) -> dict[str, Any]:
    import torch

    gradients = [torch.from_numpy(array.copy()) for array in arrays]
    before = [gradient.clone() for gradient in gradients]
    value = answer(gradients)
    told: dict[str, Any] = {"type": type(value).__name__, "values": None}
    if isinstance(value, list | tuple):
        told["values"] = [plain(part) for part in value]
    told["kept"] = all(torch.equal(gradient, old) for gradient, old in zip(gradients, before, strict=True))
    return told


_Gradients = tuple[list[tuple[int, ...]], str, float]  # shapes, dtype, and how large the numbers are


def _averages(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    plans: list[tuple[int, list[_Gradients]]]
    layers = [(4, 3), (4,), (2, 4), (2,)]
    if thorough:
        special: dict[int, list[_Gradients]] = {
            2: [([(0,), (3,)], "float64", 1.0)],
            3: [(layers, "float16", 40_000.0)],
        }
        plans = []
        for world in _worlds(rng):
            shapes = [tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(2, 6))]
            plans.append((world, [(shapes, "float32", 1.0), *special.get(world, [])]))
    else:
        plans = [
            (2, [([(3,)], "float32", 1.0), (layers, "float32", 1.0)]),
            (1, [(layers, "float32", 1.0)]),
            (3, [(layers, "float16", 40_000.0), ([(2, 2), (0,), (1,)], "float32", 1.0)]),
            (4, [([(7, 11), (7,), (3, 7), (3,)], "float64", 1.0)]),
            (5, [([(13, 8), (13,), (2, 2, 2)], "float32", 1.0)]),
        ]
    for world, inputs in plans:
        yield Trial(world, _average, [_average_case(rng, world, *drawn) for drawn in inputs], group=True)


def _average_case(rng: random.Random, world: int, shapes: list[tuple[int, ...]], dtype: str, scale: float) -> Case:
    import numpy as np

    draw = np.random.default_rng(rng.randrange(2**32))
    arrays = [[(scale * draw.uniform(0.5, 1.0, size=shape)).astype(dtype) for shape in shapes] for _ in range(world)]
    expected = [np.mean([own[place] for own in arrays], axis=0, dtype=np.float64) for place in range(len(shapes))]
    given = f"{counted(world, 'rank')}, {dtype} gradients of the shapes {', '.join(map(str, shapes))}"
    given += f", numbers up to {scale:,.0f}" if scale > 1 else ""
    length = sum(math.prod(shape) for shape in shapes)
    ring = _ring(world, length, arrays[0][0].itemsize)
    gathered = "All gradients fit into one tensor: one ring for all of them takes as many rounds as a ring for one. "
    budget = replace(ring, heavy=gathered + ring.heavy, slow=gathered)
    return Case(
        given,
        [(own,) for own in arrays],
        lambda results: _judge_averages(given, expected, dtype, results),
        _within(given, budget),
    )


def _judge_averages(given: str, expected: list[Any], dtype: str, results: list[dict[str, Any]]) -> Finding | None:
    import numpy as np

    world = len(results)
    for rank, told in enumerate(results):
        if told["values"] is None or len(told["values"]) != len(expected):
            received = (
                f"an object of type {told['type']}" if told["values"] is None else f"{len(told['values'])} of them"
            )
            why = "Nothing came back: is there a return?" if told["type"] == "NoneType" else ""
            return Finding(given, f"a list of {len(expected)} tensors", received, rank, why)
        for place, (value, wanted) in enumerate(zip(told["values"], expected, strict=True)):
            finding = _not_a_tensor_like(f"{given}; gradient {place}", wanted.shape, dtype, rank, value)
            if finding:
                return finding
            if not _close(value[2], wanted, dtype):
                why = ""
                if not np.isfinite(value[2]).all():
                    why = "float16 ends at 65,504; the sum is larger than that, although the mean is not: divide first."
                elif world > 1 and _close(value[2], wanted * world, dtype):
                    why = "That is the sum: divide by the number of ranks."
                elif world > 1 and _close(value[2] * world, wanted, dtype):
                    why = "Divided twice."
                text = f"the mean of gradient {place}: {first_numbers(wanted)}"
                return Finding(given, text, first_numbers(value[2]), rank, why)
    for rank, told in enumerate(results):
        if not told["kept"]:
            why = "The optimiser, or a look at the gradients, may need them as they were: return new tensors."
            return Finding(given, "the gradients that were passed in, unchanged", "changed in place", rank, why)
    return None


# ---- bandwidths(size, seconds, world) -> (algorithm bandwidth, bus bandwidth)


def _bandwidth(answer: Callable[..., Any], size: int, seconds: float, world: int) -> Any:
    return plain(answer(size, seconds, world))


def _bandwidths(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    inputs = [(8_000_000, 0.004, 2), (8_000_000, 0.004, 4), (1_000, 0.5, 8), (64, 0.001, 1)]
    if thorough:
        inputs = [(rng.randint(1, 10**9), 10 ** rng.uniform(-5, 2), rng.randint(1, 1000)) for _ in range(20)]
    *several, last = [_bandwidth_case(*given) for given in inputs]
    yield Trial(1, _bandwidth, several)
    yield Trial(1, _bandwidth, [last])  # apart: with one rank a wrong factor can raise, and what raises is told first


def _bandwidth_case(size: int, seconds: float, world: int) -> Case:
    given = f"size={size:,} bytes, seconds={seconds:g}, world={world}"
    inputs = [(size, seconds, world)]
    return Case(given, inputs, lambda results: _judge_bandwidths(given, size, seconds, world, results[0]))


def _judge_bandwidths(given: str, size: int, seconds: float, world: int, value: Any) -> Finding | None:
    right = (size / seconds, size / seconds * 2 * (world - 1) / world)
    wanted = f"({right[0]:,.0f}, {right[1]:,.0f}) bytes per second"
    if value[0] != "value" or not isinstance(value[1], list | tuple) or len(value[1]) != 2:
        return Finding(given, wanted, shown(value), None, "Return two numbers: algorithm bandwidth, bus bandwidth.")
    if not all(isinstance(number, int | float) for number in value[1]):
        return Finding(given, wanted, shown(value), None, "Return plain numbers.")
    got = tuple(float(number) for number in value[1])
    if all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-9) for pair in zip(got, right, strict=True)):
        return None
    why = ""
    if math.isclose(got[0], right[0], rel_tol=1e-6):
        why = "The first is right. For the bus, count what each rank must send: 2(N-1)/N of the tensor."
    elif math.isclose(got[0], right[1], rel_tol=1e-6) and math.isclose(got[1], right[0], rel_tol=1e-6):
        why = "The two are in each other's place."
    elif math.isclose(got[0] * 1e9, right[0], rel_tol=1e-6):
        why = "Bytes per second, please: not gigabytes."
    return Finding(given, wanted, f"({got[0]:,.6g}, {got[1]:,.6g})", None, why)


# ---- words


# ---- what the lesson goes on with while there is no right answer


def _own_all_reduce(tensor: Any) -> Any:
    """Return the sum over all ranks."""
    import torch

    total = tensor.clone(memory_format=torch.contiguous_format)
    own.all_reduce(total)
    return total


def _own_on_chunks(chunks: list[Any], segment: int | None = None) -> None:
    """Put the sums over all ranks into all chunks."""
    import torch

    for chunk, total in zip(chunks, _apart(_own_all_reduce(torch.cat(chunks)), chunks), strict=True):
        chunk.copy_(total)


def _own_reduce_scatter(chunks: list[Any]) -> None:
    """Put the sum over all ranks into this rank's chunk, and leave the others as they are."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    chunks[rank].copy_(_apart(_own_all_reduce(torch.cat(chunks)), chunks)[rank])


def _own_all_gather(chunks: list[Any]) -> None:
    """Give rank r's chunk r to every rank: a sum to which each rank adds that chunk alone."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    mine = [chunk if number == rank else torch.zeros_like(chunk) for number, chunk in enumerate(chunks)]
    for chunk, finished in zip(chunks, _apart(_own_all_reduce(torch.cat(mine)), chunks), strict=True):
        chunk.copy_(finished)


def _own_average(gradients: list[Any]) -> list[Any]:
    """Return the means over all ranks, of gradients divided first."""
    import torch
    import torch.distributed as dist

    mean = _own_all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]) / dist.get_world_size())
    return [part.view_as(gradient) for part, gradient in zip(_apart(mean, gradients), gradients, strict=True)]


def _apart(flat: Any, parts: list[Any]) -> list[Any]:
    return list(flat.split([part.numel() for part in parts]))


EXERCISES = (
    Exercise(
        name="naive_megabytes",
        title="megabytes that rank 0 sends in the naive all-reduce of 8 MB on 4 ranks",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="naive_all_reduce",
        title="everything through rank 0",
        kind="implement",
        points=2,
        parameters=("tensor",),
        cases=_all_reduces(_star),
        own=lambda: _own_all_reduce,
        own_name="dist.all_reduce",
        hints=(
            "Two parts: rank 0 receives from each of the others and adds; then it sends the sum to each of them.",
            "total = tensor.clone(memory_format=torch.contiguous_format) is what you add to and what you return. "
            "A second tensor, torch.empty_like(total), is room for what arrives.",
            "On rank 0: for other in range(1, world): dist.recv(arrived, other); total += arrived. "
            "After that loop a second one: dist.send(total, other). On all other ranks: send, then receive into total.",
        ),
    ),
    Exercise(
        name="tree_all_reduce",
        title="up a tree and down again",
        kind="implement",
        points=4,
        parameters=("tensor",),
        cases=_all_reduces(_tree, to_eight=True),
        own=lambda: _own_all_reduce,
        own_name="dist.all_reduce",
        hints=(
            "Let distance be 1, 2, 4, ... In each round, half of the ranks that still hold a partial sum give it away.",
            "In the round of distance d, the ranks that still take part are the multiples of d. An odd multiple "
            "sends to "
            "rank - d and is done going up. An even multiple receives from rank + d, if there is such a rank.",
            "Rank r meets its parent at distance r & -r, its lowest bit. It receives from r + 1, r + 2, r + 4, ... "
            "below that "
            "distance, sends to r - (r & -r), and waits there for the total.",
            "Down: whoever has the total sends it to the ranks that it received from, the farthest first, since that "
            "one has "
            "the most to pass on.",
        ),
    ),
    Exercise(
        name="ring_megabytes",
        title="megabytes that each rank sends in the ring all-reduce of 8 MB on 4 ranks",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="reduce_scatter_ring",
        title="the first half of the ring",
        kind="implement",
        points=4,
        parameters=("chunks",),
        cases=_reduce_scatters,
        own=lambda: _own_reduce_scatter,
        own_name="dist.all_reduce",
        hints=(
            "Think of one chunk: its partial sum visits every rank and must end on the rank of its own number. Where "
            "does it start?",
            "Chunk c starts on rank c + 1 and moves to the right. So in step s rank r sends chunk r - 1 - s and "
            "receives chunk "
            "r - 2 - s, both modulo the number of ranks.",
            "In each step: request = dist.isend(chunks[outgoing], right); dist.recv(arrived, left); chunks[incoming] "
            "+= arrived; "
            "request.wait().",
            "Room for what arrives: torch.empty_like(chunks[incoming]), anew in each step, since chunks may differ "
            "by one element.",
        ),
    ),
    Exercise(
        name="all_gather_ring",
        title="the second half of the ring",
        kind="implement",
        points=3,
        parameters=("chunks",),
        cases=_all_gathers,
        own=lambda: _own_all_gather,
        own_name="dist.all_reduce",
        hints=(
            "The same steps as before, without the addition: what arrives is finished and replaces what stands there.",
            "In the first step rank r sends chunk r, in each later step the chunk that has just arrived.",
            "dist.recv(chunks[incoming], left) with incoming = (rank - step - 1) % world puts it in its place, "
            "without a copy.",
        ),
    ),
    Exercise(
        name="ring_all_reduce",
        title="the whole ring, for any tensor",
        kind="implement",
        points=4,
        parameters=("tensor",),
        cases=_all_reduces(_ring),
        own=lambda: _own_all_reduce,
        own_name="dist.all_reduce",
        hints=(
            "Make a contiguous copy, look at it as one long row, cut the row into as many chunks as there are ranks, "
            "and run both halves.",
            "A view shares memory with the tensor it was made from: what the halves do to the chunks happens to the "
            "copy.",
            "total = tensor.clone(memory_format=torch.contiguous_format); chunks = "
            "list(total.view(-1).tensor_split(world)); "
            "then both halves; return total.",
        ),
    ),
    Exercise(
        name="halving_doubling",
        title="recursive halving and doubling, for any number of ranks",
        kind="implement",
        points=6,
        parameters=("tensor",),
        cases=_all_reduces(_halving, to_eight=True),
        own=lambda: _own_all_reduce,
        own_name="dist.all_reduce",
        hints=(
            "First write it for 2, 4 and 8 ranks. In each round the partner is rank ^ distance, with distance = "
            "world / 2, ..., 2, 1. "
            "Keep in two variables which span of the row this rank is still responsible for.",
            "Halving: middle = (low + high) // 2. The rank whose bit `distance` is 0 keeps the lower half, sends the "
            "upper one and "
            "adds the lower half that arrives; its partner does the reverse. Remember each span before you halve it.",
            "Doubling: go through the spans backwards. In each, this rank holds its half finished: send that, and "
            "receive the other "
            "half in its place.",
            "No power of two: with p the largest power below, each rank r >= p first sends all of its tensor to rank "
            "r - p and "
            "waits; the first p ranks do the work; then rank r - p sends the total back to rank r.",
        ),
    ),
    Exercise(
        name="small_winner",
        title="the quickest algorithm for 4 KB on 4 ranks, on a link with 5 ms of latency",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="bandwidths",
        title="algorithm bandwidth and bus bandwidth",
        kind="implement",
        points=2,
        parameters=("size", "seconds", "world"),
        cases=_bandwidths,
        hints=(
            "The algorithm bandwidth is what the caller sees: the size of the tensor by the time.",
            "The bus bandwidth is what a rank's link carried: how many bytes must a rank send at least?",
            "It is 2 * (world - 1) / world times the tensor. Return algorithm, algorithm * 2 * (world - 1) / world.",
        ),
    ),
    Exercise(
        name="segmented_ring",
        title="a ring that sends while it adds",
        kind="implement",
        points=5,
        parameters=("chunks", "segment"),
        cases=_segmented_rings,
        own=lambda: _own_on_chunks,
        own_name="dist.all_reduce",
        hints=(
            "Cut each chunk: pieces = [chunk.split(segment) for chunk in chunks]. The order of the chunks is that of "
            "the plain ring.",
            "Before any step: begin to send all pieces of the first chunk (isend) and keep the requests in a list. "
            "Then, step by "
            "step and piece by piece: receive, add, and begin to send it on at once.",
            "Two receives under way are enough: while you add the piece that has arrived, the next one is arriving "
            "(irecv) in a "
            "second buffer.",
            "In the second half a piece arrives where it belongs (irecv into the piece itself) and is sent on, "
            "except in the very "
            "last step. Wait for all requests before you return.",
        ),
    ),
    Exercise(
        name="average_gradients",
        title="the mean of many gradients",
        kind="debug",
        points=4,
        parameters=("gradients",),
        cases=_averages,
        own=lambda: _own_average,
        own_name="dist.all_reduce",
        hints=(
            "Two things are wrong with it, and neither shows with two small float32 gradients. Which numbers does "
            "float16 not have?",
            "(a + b) / 2 and a / 2 + b / 2 are the same number on paper. Only one of them stays within the range of "
            "float16.",
            "torch.cat of the flattened gradients is one tensor, hence one ring. Afterwards .split(sizes) cuts it "
            "again.",
            "flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) / world; then "
            "[part.view_as(gradient) for part, gradient in zip(ring_all_reduce(flat).split(sizes), gradients)].",
        ),
    ),
    Exercise(
        name="which_one_when",
        title="which all-reduce, and when",
        kind="explain",
        points=3,
    ),
)
