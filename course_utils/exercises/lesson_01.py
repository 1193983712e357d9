"""Lesson 01, ranks and rendezvous: what its exercises ask, and the cases that judge the answers."""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from . import own
from .inside import plain, within
from .judging import Case, Finding, Trial
from .registry import Exercise
from .telling import first_numbers, shown

NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")
HOLD_SECONDS = 0.25  # how long the judge's store keeps a worker that has looked from acting on what it saw
SLACK = 3.0  # seconds that an answer may take longer than it should: the machine may be busy
GRADERS_SLACK = 8.0  # the same where it costs marks


# ---- assign_rank(store, name) -> rank


def _assign(
    answer: Callable[..., Any], port: int, names: Sequence[str], workers: int, turns: int, slack: float
) -> list[Any]:
    """Register each of this process's names in turn; between two turns, wait for the other workers."""
    ledger = _store(port)
    results = []
    for turn in range(turns):
        if turn:
            _meet(ledger, f"turn {turn}", workers)
        if turn < len(names):
            store = _watched(ledger, workers if not turn else 1)
            with within(slack + 4 * HOLD_SECONDS * workers):
                try:
                    results.append(("rank", plain(answer(store, names[turn]))))
                except ValueError as error:
                    results.append(("refused", str(error)))
    return results


def _store(port: int) -> Any:
    """Connect to the judge's store, one rank after the other.

    torch asks for the name of each caller, and a name server that loses questions asked at once costs five seconds.
    """
    import torch.distributed as dist

    time.sleep(0.01 * int(os.environ["RANK"]))
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))


def _meet(store: Any, where: str, workers: int, patience: float = 10.0) -> None:
    """Wait until that many workers are there, or for a while."""
    store.add(f"judge/{where}", 1)
    deadline = time.monotonic() + patience
    while store.add(f"judge/{where}", 0) < workers and time.monotonic() < deadline:
        time.sleep(0.005)


def _watched(store: Any, workers: int) -> Any:
    """The judge's store: whoever looks before acting is held until the others have looked too.

    That makes the unlucky interleaving happen each time. Operations that read and write in one step are not held.
    """
    import torch.distributed as dist

    class WatchedStore(dist.PrefixStore):
        looks = 0

        def _look(self) -> None:
            self.looks += 1
            _meet(store, f"look {self.looks}", workers, HOLD_SECONDS)

        def get(self, key: str) -> bytes:
            value: bytes = super().get(key)
            self._look()
            return value

        def check(self, keys: list[str]) -> bool:
            found: bool = super().check(keys)
            self._look()
            return found

        def num_keys(self) -> int:
            number: int = super().num_keys()
            self._look()
            return number

        def multi_get(self, keys: list[str]) -> list[bytes]:
            values: list[bytes] = super().multi_get(keys)
            self._look()
            return values

    return WatchedStore("course", store)


def _assignments(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    if thorough:
        for _ in range(6):
            count = rng.randint(2, 6)
            names = [f"worker-{rng.randrange(10**6)}" for _ in range(count)]
            for copied in rng.sample(range(1, count), rng.randint(0, count - 1)):
                names[copied] = names[rng.randrange(copied)]
            yield _assignment([[name] for name in names], GRADERS_SLACK)
        first, second, third = (f"worker-{number}" for number in rng.sample(range(10**6), 3))
        yield _assignment([[first, first, second], [third]], GRADERS_SLACK)
        return
    yield _assignment([["ant"]])
    yield _assignment([[name] for name in NAMES[:2]])
    yield _assignment([["ant"], ["ant"], ["bee"]])
    yield _assignment([[name] for name in NAMES[:4]])
    yield _assignment([["ant", "ant", "cat"], ["bee"]])
    yield _assignment([["ant"], ["bee"], ["ant"], ["cat"], ["bee"]])


def _assignment(names: list[list[str]], slack: float = SLACK) -> Trial:
    workers, turns = len(names), max(len(own) for own in names)
    given = f"{workers} worker{'s' * (workers > 1)} at once: {', '.join(repr(own[0]) for own in names)}"
    given += "".join(f"; then {own[turn]!r}" for turn in range(1, turns) for own in names if turn < len(own))
    inputs = [(own, workers, turns, slack) for own in names]
    overtime = "No worker has to wait for another one here. store.get waits until somebody has written its key."
    case = Case(given, inputs, lambda results: _judge_assignment(given, names, results), overtime=overtime)
    return Trial(workers, _assign, [case], store=True)


def _judge_assignment(given: str, names: list[list[str]], results: list[Any]) -> Finding | None:
    told = [
        (place, name, *result)
        for place, own in enumerate(names)
        for name, result in zip(own, results[place], strict=True)
    ]
    accepted: list[tuple[int, str, int]] = []
    for place, name, kind, value in told:
        if kind == "refused":
            if name not in value:
                why = "Whoever reads the error should learn which name was taken: put it in the message."
                return Finding(given, f"a ValueError that names {name!r}", f"ValueError: {value!r}", place, why)
            continue
        if value[0] != "value" or type(value[1]) is not int:
            why = "Nothing came back: is there a return?" if value == ("value", None) else "A rank is a whole number."
            return Finding(given, "a rank: 0, 1, 2, ...", _shown(value), place, why)
        accepted.append((place, name, value[1]))
    wanted = {name for own in names for name in own}
    times = Counter(name for _, name, _ in accepted)
    for name in sorted(wanted):
        if times[name] > 1:
            held = ", ".join(str(rank) for _, who, rank in accepted if who == name)
            refusals = sum(own.count(name) for own in names) - 1
            expected = f"one rank for {name!r}, and {refusals} ValueError"
            why = (
                f"Two workers called {name!r} may look at the same moment, and both see the name free. "
                "Claim it in one step that tells you whether you were first."
            )
            return Finding(given, expected, f"ranks {held}, all accepted", None, why)
        if times[name] == 0:
            why = "Of several workers with one name, the first keeps it."
            return Finding(given, f"a rank for one {name!r}", "every one refused", None, why)
    ranks = sorted(rank for _, _, rank in accepted)
    if ranks == list(range(len(ranks))):
        return None
    why = ""
    if len(set(ranks)) < len(ranks):
        why = "Two workers read the same number before either of them wrote. `add` reads and writes in one step."
    elif len(told) > len(accepted):
        why = "A worker that was refused has used up a rank: refuse first, count afterwards."
    elif ranks == list(range(1, len(ranks) + 1)):
        why = "`add` returns the number after adding: the first worker gets 1 from it."
    return Finding(given, f"the ranks {list(range(len(ranks)))}", f"the ranks {ranks}", None, why)


# ---- register(store, name, world_size, timeout) -> (rank, names by rank)


def _register(
    answer: Callable[..., Any], port: int, name: str, world_size: int, timeout: float, delay: float, allowed: float
) -> dict[str, Any]:
    import torch.distributed as dist

    ledger = _store(port)
    store = dist.PrefixStore("course", ledger)
    _meet(ledger, "door", int(os.environ["WORLD_SIZE"]))
    time.sleep(delay)
    start = time.monotonic()
    told: dict[str, Any]
    with within(allowed):
        try:
            told = {"kind": "returned", "value": plain(answer(store, name, world_size, timeout))}
        except TimeoutError as error:
            told = {"kind": "timeout", "message": str(error)}
        except ValueError as error:
            told = {"kind": "refused", "message": str(error)}
        except dist.DistError as error:
            told = {"kind": "torch", "type": type(error).__name__, "message": str(error)}
    told["seconds"] = time.monotonic() - start
    return told


def _registrations(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    if thorough:
        for _ in range(4):
            count = rng.randint(1, 5)
            names = [f"worker-{rng.randrange(10**6)}" for _ in range(count)]
            late = rng.randrange(count)
            delays = [0.4 * (place == late) for place in range(count)]
            yield _meetings(_registration(names, count, delays=delays, slack=GRADERS_SLACK))
        missing = rng.randint(1, 3)
        names = [f"worker-{place}" for place in range(rng.randint(1, 3))]
        timeout = rng.uniform(0.4, 0.8)
        yield _meetings(_registration(names, len(names) + missing, timeout=timeout, slack=GRADERS_SLACK))
        yield _meetings(
            _registration([f"worker-{place}" for place in (0, 1, 2, 1)], 3, slack=GRADERS_SLACK),
            _registration([f"worker-{place}" for place in range(4)], 3, slack=GRADERS_SLACK),
            _arrivals([f"worker-{place}" for place in rng.sample(range(100), 4)], gap=1.0, slack=GRADERS_SLACK),
        )
        return
    four = list(NAMES[:4])
    yield _meetings(_registration(["ant"], 1))
    yield _meetings(_registration(list(NAMES[:3]), 3), _registration(["ant", "bee", "ant"], 2))
    yield _meetings(_registration(list(NAMES[:2]), 3, timeout=0.3))
    yield _meetings(
        _registration(four, 4, delays=[0.0, 0.0, 0.0, 0.2]), _registration(four, 3), _arrivals(four, gap=0.3)
    )


def _meetings(*cases: Case) -> Trial:
    """Cases of equally many workers, in one launch."""
    return Trial(len(cases[0].inputs), _register, cases, store=True)


def _registration(
    names: list[str],
    world_size: int,
    timeout: float = 20.0,
    delays: list[float] | None = None,
    slack: float = SLACK,
) -> Case:
    delays = delays or [0.0] * len(names)
    given = f"world_size={world_size}, and these come: {', '.join(map(repr, names))}"
    if max(delays) > 0:
        given += f" ({names[delays.index(max(delays))]!r} comes late)"
    allowed = max(delays) + slack
    overtime = "Everyone had come long before. Wait for the others' keys, and go on as soon as they are there."
    if len(set(names)) < world_size:
        given += f"; timeout={timeout:.2g}"
        allowed = timeout + slack
        overtime = (
            f"Somebody is missing here, and `timeout` was {timeout:.2g} s: pass it on to whatever waits, as in "
            "store.wait(keys, timedelta(seconds=timeout))."
        )
    inputs = [(name, world_size, timeout, delay, allowed) for name, delay in zip(names, delays, strict=True)]
    return Case(
        given,
        inputs,
        lambda results: _judge_registration(given, names, world_size, timeout, results),
        overtime=overtime,
    )


def _arrivals(names: list[str], gap: float, slack: float = SLACK) -> Case:
    """All workers come, but one by one, `gap` seconds apart, and the last of them when the first must have given up."""
    timeout = round(1.7 * gap, 1)
    delays = [gap * place for place in range(len(names))]
    given = (
        f"world_size={len(names)}, timeout={timeout:g}; one after the other these come, {gap:g} s apart: "
        f"{', '.join(map(repr, names))}"
    )
    inputs = [(name, len(names), timeout, delay, timeout + slack) for name, delay in zip(names, delays, strict=True)]
    return Case(given, inputs, lambda results: _judge_patience(given, names, timeout, delays[-1], results))


def _judge_patience(
    given: str, names: list[str], timeout: float, last: float, results: list[dict[str, Any]]
) -> Finding | None:
    """The first worker must not wait for the last one; what the others do depends on how quick they are."""
    finding = _torchs_own_words(given, results)
    told = results[0]
    if finding or told["kind"] == "timeout":
        return finding
    wanted = f"TimeoutError for {names[0]!r} after {timeout:g} s: {names[-1]!r} came only after {last:.3g} s"
    if told["kind"] == "refused":
        return Finding(given, wanted, f"ValueError: {told['message'][:120]}", 0, "Nobody came twice here.")
    why = (
        "`timeout` is for the whole meeting, and here several waits add up, each of which may take that long. Wait for "
        "all keys in one call, or give each wait only what is left until a deadline: time.monotonic() + timeout."
    )
    return Finding(given, wanted, f"{_shown(told['value'])} after {told['seconds']:.1f} s", 0, why)


def _torchs_own_words(given: str, results: list[dict[str, Any]]) -> Finding | None:
    for place, told in enumerate(results):
        if told["kind"] == "torch":
            why = (
                f"{told['type']} is torch's own word for it. Catch it and raise a TimeoutError that says what is "
                "missing."
            )
            return Finding(given, "TimeoutError", f"{told['type']}: {told['message'][:120]}", place, why)
    return None


def _judge_registration(
    given: str, names: list[str], world_size: int, timeout: float, results: list[dict[str, Any]]
) -> Finding | None:
    finding = _torchs_own_words(given, results)
    if finding:
        return finding
    if len(set(names)) < world_size:
        return _judge_missing(given, len(set(names)), world_size, timeout, results)
    returned = [(place, told["value"]) for place, told in enumerate(results) if told["kind"] == "returned"]
    for place, told in enumerate(results):
        if told["kind"] == "timeout":
            why = (
                "Everyone had come. Did a worker that was refused take somebody's place, or did one never tell its "
                "name?"
            )
            return Finding(given, "a rank and the names", f"TimeoutError: {told['message'][:120]}", place, why)
    for place, value in returned:
        found = _judge_roster(given, names[place], world_size, place, value)
        if found:
            return found
    if len(returned) > world_size:
        why = "All places were taken. A worker without a place is refused with ValueError."
        return Finding(given, f"{world_size} workers with a rank", f"{len(returned)} workers with a rank", None, why)
    if len(returned) < world_size:
        refused = [place for place, told in enumerate(results) if told["kind"] == "refused"]
        why = "More workers were refused than there were too many."
        return Finding(given, f"{world_size} workers with a rank", f"{len(returned)}, and ValueError", refused[0], why)
    rosters = [list(value[1][1]) for _, value in returned]
    for (place, _), roster in zip(returned, rosters, strict=True):
        if roster != rosters[0]:
            why = "Every worker must return the same list: names[r] is the name of rank r, for everyone."
            expected = f"the same names as on rank {returned[0][0]}: {rosters[0]}"
            return Finding(given, expected, str(roster), place, why)
    for (place, value), roster in zip(returned, rosters, strict=True):
        if roster[value[1][0]] != names[place]:
            why = "names[rank] must be the worker's own name: order the list by rank."
            return Finding(given, f"{names[place]!r} at place {value[1][0]}", str(roster), place, why)
    return None


def _judge_roster(given: str, name: str, world_size: int, place: int, value: Any) -> Finding | None:
    wanted = f"(rank, names), such as (0, [{name!r}, ...])"
    if value == ("value", None):
        return Finding(given, wanted, "None", place, "Nothing came back: is there a return?")
    if value[0] != "value" or not isinstance(value[1], list | tuple) or len(value[1]) != 2:
        return Finding(
            given, wanted, _shown(value), place, "Return two things: this worker's rank, and all names by rank."
        )
    rank, names = value[1]
    if type(rank) is not int or not 0 <= rank < world_size:
        return Finding(given, f"a rank from 0 to {world_size - 1}", repr(rank), place, "")
    if not isinstance(names, list | tuple):
        return Finding(given, "a list of names", repr(names), place, "")
    if any(isinstance(name, bytes) for name in names):
        return Finding(
            given, f"texts such as {name!r}", f"{list(names)}", place, "A store gives bytes: .decode() makes text."
        )
    if len(names) != world_size:
        why = "Return only when every worker has come: wait for a key that each of them sets."
        return Finding(given, f"{world_size} names", f"{list(names)}", place, why)
    return None


def _judge_missing(
    given: str, came: int, world_size: int, timeout: float, results: list[dict[str, Any]]
) -> Finding | None:
    wanted = f"TimeoutError after about {timeout:.1f} s"
    for place, told in enumerate(results):
        if told["kind"] == "returned":
            why = "Somebody is missing: wait for every worker's key, and not longer than `timeout`."
            return Finding(given, wanted, _shown(told["value"]), place, why)
        if told["kind"] == "refused":
            return Finding(given, wanted, f"ValueError: {told['message'][:120]}", place, "Nobody came twice here.")
        if told["seconds"] < 0.6 * timeout:
            why = "The missing worker may still come: wait for the whole `timeout` before giving up."
            return Finding(given, wanted, f"TimeoutError after {told['seconds']:.1f} s", place, why)
        if not all(str(number) in told["message"] for number in (came, world_size)):
            why = (
                f"Whoever reads it wants to know how many are missing: say how many came ({came}) and how many were "
                "expected."
            )
            return Finding(
                given, f"a message with {came} and {world_size}", f"TimeoutError: {told['message']!r}", place, why
            )
    return None


def _own_register() -> Callable[..., Any]:
    """torchrun's own rendezvous (torch.distributed.elastic), which does this for real clusters."""

    def register(store: Any, name: str, world_size: int, timeout: float) -> tuple[int, list[str]]:
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
        from torch.distributed.elastic.utils.store import synchronize

        handler = DynamicRendezvousHandler.from_backend(
            "course",
            store,
            C10dRendezvousBackend(store, "course"),
            min_nodes=world_size,
            max_nodes=world_size,
            local_addr="127.0.0.1",
            timeout=RendezvousTimeout(join=timedelta(seconds=timeout)),
        )
        try:
            met = handler.next_rendezvous()
            names = synchronize(store, name.encode(), met.rank, met.world_size, "names", timeout)
        except Exception as error:
            raise TimeoutError(f"fewer than {world_size} workers came within {timeout:g} s") from error
        finally:
            handler.shutdown()
        return met.rank, [name.decode() for name in names]

    return register


# ---- average_by_hand(tensor) -> the mean over all ranks, handed from neighbour to neighbour


def _average(answer: Callable[..., Any], array: Any, transposed: bool) -> dict[str, Any]:
    import torch

    tensor = torch.from_numpy(array.copy())
    tensor = tensor.t() if transposed else tensor
    before = tensor.clone()
    value = answer(tensor)
    return {"value": plain(value), "kept": bool(torch.equal(tensor, before))}


def _averages(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    import numpy as np

    def case(nprocs: int, shape: tuple[int, ...], dtype: str = "float32", transposed: bool = False) -> Case:
        draw = np.random.default_rng(rng.randrange(2**32))
        arrays = [draw.integers(-50, 50, size=shape).astype(dtype) / 4 for _ in range(nprocs)]
        turned = [array.T if transposed else array for array in arrays]
        shown = shape[::-1] if transposed else shape
        given = f"{nprocs} rank{'s' * (nprocs > 1)}, a {dtype} tensor of shape {shown}"
        given += " that is a transposed view (not contiguous)" if transposed else ""
        if math.prod(shape) <= 4:
            given += ": " + ", ".join(str(array.tolist()) for array in arrays)
        inputs = [(array.astype(dtype), transposed) for array in arrays]
        return Case(given, inputs, lambda results: _judge_average(given, turned, dtype, results))

    if thorough:
        for _ in range(6):
            nprocs = rng.randint(1, 6)
            shapes = [(rng.randint(1, 40),), (rng.randint(1, 6), rng.randint(1, 6)), (0,)]
            cases = [case(nprocs, shape, rng.choice(["float32", "float64"])) for shape in shapes]
            yield Trial(nprocs, _average, [*cases, case(nprocs, (3, 4), transposed=True)], group=True)
        nprocs = rng.randint(4, 6)
    else:
        yield Trial(2, _average, [case(2, (2,)), case(2, (5,)), case(2, (3, 4))], group=True)
        yield Trial(1, _average, [case(1, (3,))], group=True)
        yield Trial(3, _average, [case(3, (1,)), case(3, (7,), "float64"), case(3, (0,))], group=True)
        yield Trial(5, _average, [case(5, (3,)), case(5, (4, 3), transposed=True)], group=True)
        nprocs = 4
    size = 1000
    last = case(nprocs, (size,))
    neighbours = replace(last, traffic=lambda trace: _judge_handing_on(last.given, 4 * size, trace))
    yield Trial(nprocs, _average, [neighbours], group=True)


def _judge_average(given: str, arrays: list[Any], dtype: str, results: list[dict[str, Any]]) -> Finding | None:
    import numpy as np

    world = len(results)
    expected = np.mean(arrays, axis=0, dtype=np.float64)
    of_means = [_mean_of_means(arrays), _mean_of_means(arrays[::-1])]
    wanted = f"the mean on every rank: {_numbers(expected)}"
    for rank, told in enumerate(results):
        value = told["value"]
        if value[0] != "tensor":
            why = "Nothing came back: is there a return?" if value == ("value", None) else ""
            return Finding(given, "a tensor", _shown(value), rank, why)
        _, kind, array = value
        if array.shape != expected.shape:
            return Finding(given, f"the shape {expected.shape}", f"the shape {array.shape}", rank, "")
        if kind != dtype:
            why = (
                "torch.empty makes float32 unless told otherwise: torch.empty_like(tensor) takes type and shape "
                "from a tensor."
            )
            return Finding(given, f"dtype {dtype}", f"dtype {kind}", rank, why)
        if not np.allclose(array, expected, rtol=1e-5, atol=1e-6):
            why = ""
            if world > 1 and np.allclose(array, expected * world, rtol=1e-5, atol=1e-6):
                why = "That is the sum: divide it by the number of ranks, once."
            elif world > 1 and np.allclose(array * world, expected, rtol=1e-5, atol=1e-6):
                why = "Divided twice: the mean is the sum divided by the number of ranks once."
            elif world > 2 and any(np.allclose(array, mean, rtol=1e-5, atol=1e-6) for mean in of_means):
                why = (
                    "That is a mean of means: where each rank halves the sum of what came and its own, the last tensor "
                    "counts for half of the result. Hand on the sum, and divide it once, by the number of ranks."
                )
            elif rank < world - 1 and np.allclose(results[-1]["value"][2], expected, rtol=1e-5, atol=1e-6):
                why = f"Rank {world - 1} has the mean, this rank has not: it must travel back along the chain."
            return Finding(given, wanted, _numbers(array), rank, why)
    for rank, told in enumerate(results):
        if not told["kept"]:
            why = "A caller may need its tensor again. Work on tensor.clone()."
            return Finding(given, "the tensor that was passed in, unchanged", "changed in place", rank, why)
    return None


def _mean_of_means(arrays: list[Any]) -> Any:
    """What comes out where each rank averages what has arrived with its own."""
    mean = arrays[0]
    for array in arrays[1:]:
        mean = (mean + array) / 2
    return mean


def _judge_handing_on(given: str, size: int, trace: Any) -> Finding | None:
    """The traffic of one average: neighbours only, no collective, at most two whole tensors sent by a rank."""
    world = len(trace)
    for rank, told in enumerate(trace):
        for event in told.events:
            if event.op not in ("send", "recv"):
                why = "Here the framework did the work. Use send and recv, so that you see every message."
                return Finding(given, "messages from neighbour to neighbour", f"a call of {event.op}", rank, why)
            beside = sorted({(rank - 1) % world, (rank + 1) % world})
            if event.op == "send" and event.peer not in beside:
                why = (
                    "From hand to hand: a rank speaks to the ranks beside it only "
                    "(the first and the last may count as neighbours)."
                )
                wanted = f"messages to {' or '.join(f'rank {peer}' for peer in beside)}"
                return Finding(given, wanted, f"a message to rank {event.peer}", rank, why)
    for rank, told in enumerate(trace):
        if told.bytes_sent > 2 * size:
            why = (
                "One partial sum passes each rank on its way there, and the mean once on its way back: two messages. "
                "If every rank's tensor travels past everyone, the traffic grows with the number of ranks."
            )
            sent = f"{told.messages_sent} messages, {told.bytes_sent:,} bytes"
            return Finding(given, f"at most 2 messages from a rank, {2 * size:,} bytes", sent, rank, why)
    return None


# ---- shift(tensor) -> what the left neighbour had


def _shift(answer: Callable[..., Any], array: Any, late: bool) -> dict[str, Any]:
    import torch

    tensor = torch.from_numpy(array.copy())
    before = tensor.clone()
    if late:
        time.sleep(0.3)
    value = plain(answer(tensor))
    kept = bool(torch.equal(tensor, before))
    tensor.zero_()  # its owner may do so: a message that has not left by now would carry zeros
    return {"value": value, "kept": kept}


def _shifts(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    import numpy as np

    def case(nprocs: int, shape: tuple[int, ...], dtype: str = "float32", late: int | None = None) -> Case:
        draw = np.random.default_rng(rng.randrange(2**32))
        arrays = [draw.integers(1, 100, size=shape).astype(dtype) for _ in range(nprocs)]
        given = f"{nprocs} rank{'s' * (nprocs > 1)}, {dtype} tensors of shape {shape}"
        if math.prod(shape) <= 3:
            given += ": " + ", ".join(str(array.tolist()) for array in arrays)
        if late is not None:
            given += f"; rank {late} comes late, and every caller overwrites its tensor as soon as shift has returned"
        inputs = [(array, rank == late) for rank, array in enumerate(arrays)]
        return Case(given, inputs, lambda results: _judge_shift(given, arrays, results))

    if thorough:
        for _ in range(6):
            nprocs = rng.randint(1, 6)
            shapes = [(rng.randint(1, 50),), (rng.randint(1, 5), rng.randint(1, 5)), (rng.randint(10**5, 10**6),)]
            cases = [case(nprocs, shape, rng.choice(["float32", "int64", "float16"])) for shape in shapes]
            yield Trial(nprocs, _shift, [*cases, case(nprocs, (7,), late=rng.randrange(nprocs))], group=True)
        nprocs = rng.randint(3, 6)
    else:
        yield Trial(2, _shift, [case(2, (2,)), case(2, (300_000,))], group=True)
        yield Trial(1, _shift, [case(1, (3,))], group=True)
        yield Trial(3, _shift, [case(3, (1,)), case(3, (2, 2), "int64"), case(3, (5,), "float16")], group=True)
        yield Trial(4, _shift, [case(4, (5,), late=3), case(4, (4,))], group=True)
        nprocs = 5
    size = 1000
    last = case(nprocs, (size,))
    counted = replace(last, traffic=lambda trace: _judge_shift_traffic(last.given, 4 * size, trace))
    yield Trial(nprocs, _shift, [counted], group=True)


def _judge_shift(given: str, arrays: list[Any], results: list[dict[str, Any]]) -> Finding | None:
    import numpy as np

    world = len(arrays)
    for rank, told in enumerate(results):
        left = (rank - 1) % world
        wanted, value = arrays[left], told["value"]
        expected = f"what rank {left} had: {_numbers(wanted)}"
        if value[0] != "tensor":
            why = "Nothing came back: is there a return?" if value == ("value", None) else ""
            return Finding(given, expected, _shown(value), rank, why)
        _, kind, array = value
        if kind != str(wanted.dtype) or array.shape != wanted.shape:
            why = "Make room for what arrives with torch.empty_like(tensor): same type, same shape."
            received = f"{kind}, shape {array.shape}"
            return Finding(given, f"{wanted.dtype}, shape {wanted.shape}", received, rank, why)
        if not np.array_equal(array, wanted):
            why = ""
            right = (rank + 1) % world
            if world > 2 and np.array_equal(array, arrays[right]):
                why = "It came from the right: each rank sends to rank + 1 and receives from rank - 1."
            elif world > 1 and np.array_equal(array, arrays[rank]):
                why = "That is this rank's own tensor: return the one that arrived."
            elif not array.any():
                why = (
                    "The check fills `tensor` with zeros as soon as shift has returned: a message that has not left "
                    "by then carries zeros. Wait for every request before you return."
                )
            else:
                why = "If this looks like garbage, a transfer was not complete: wait for every request."
            return Finding(given, expected, _numbers(array), rank, why)
    for rank, told in enumerate(results):
        if not told["kept"]:
            why = "Receive into a tensor of its own: the caller's must stay what it was."
            return Finding(given, "the tensor that was passed in, unchanged", "changed in place", rank, why)
    return None


def _judge_shift_traffic(given: str, size: int, trace: Any) -> Finding | None:
    world = len(trace)
    for rank, told in enumerate(trace):
        others = [event for event in told.events if event.op not in ("send", "recv", "barrier")]
        if others:
            why = "Use send and recv (or isend and irecv): the exercise is about their order."
            return Finding(given, "one message to the right", f"a call of {others[0].op}", rank, why)
        wrong = [event for event in told.events if event.op == "send" and event.peer != (rank + 1) % world]
        if wrong:
            why = "Each rank sends to its right neighbour alone."
            return Finding(given, f"a message to rank {(rank + 1) % world}", f"one to rank {wrong[0].peer}", rank, why)
        if told.bytes_sent > size:
            sent = f"{told.messages_sent} messages, {told.bytes_sent:,} bytes"
            return Finding(given, f"one message of {size:,} bytes", sent, rank, "Each tensor moves by one place, once.")
    return None


# ---- words


_numbers, _shown = partial(first_numbers, digits=4), partial(shown, digits=4)


EXERCISES = (
    Exercise(
        name="lost_updates",
        title="what the counter shows after four workers counted with get and set",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="assign_rank",
        title="a rank for each name, and no name twice",
        kind="implement",
        points=4,
        parameters=("store", "name"),
        cases=_assignments,
        hints=(
            "Two questions, in this order: is this worker the first of its name, and how many came before it?",
            "For both, looking first and writing later leaves a gap in which somebody else looks. "
            "Which operation of the store reads and writes in one step?",
            'store.add(f"joined/{name}", 1) returns 1 to exactly one worker of that name, whoever else comes.',
            "Any other return value means that the name is taken: raise ValueError with the name in it. "
            'Then store.add("count", 1) - 1 is a rank that nobody else has.',
        ),
    ),
    Exercise(
        name="register",
        title="everyone meets, or learns who is missing",
        kind="implement",
        points=6,
        parameters=("store", "name", "world_size", "timeout"),
        cases=_registrations,
        own=_own_register,
        own_name="torchrun's rendezvous (torch.distributed.elastic)",
        hints=(
            "Get a rank with assign_rank. Then the others must learn two things: that you are here, and your name.",
            'One key does both: under f"name/{rank}" stands the name of that rank. Everyone has come when all keys '
            "are there.",
            "store.wait(keys, timedelta(seconds=timeout)) returns when all keys are there and raises "
            "dist.DistStoreError when time is up.",
            "In the except branch, sum(store.check([key]) for key in keys) is how many came; raise TimeoutError "
            "with that number and world_size. A rank of world_size or more has no place: raise ValueError before "
            "setting any key.",
        ),
    ),
    Exercise(
        name="group_keys",
        title="how many keys init_process_group leaves in the store for four workers",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="finishers",
        title="how many of two ranks finish when both send first",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="chain_messages",
        title="how many messages the hand-to-hand average of four ranks takes",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="average_by_hand",
        title="the mean, from hand to hand",
        kind="implement",
        points=5,
        parameters=("tensor",),
        cases=_averages,
        own=lambda: _own_average,
        own_name="dist.all_reduce",
        hints=(
            "Two journeys along the chain: a partial sum travels up, from rank 0 to the last; the mean travels "
            "back down.",
            "On the way up, every rank but 0 first receives the sum of those before it and adds its own; every "
            "rank but the last then sends it on. Which rank is the first to know the whole sum?",
            "The last rank divides by the number of ranks. On the way down every rank but the last receives from "
            "rank + 1, and every rank but 0 sends to rank - 1.",
            "Start with total = tensor.clone(memory_format=torch.contiguous_format), and make room with "
            "torch.empty_like(total): send and recv need one solid block of memory.",
        ),
    ),
    Exercise(
        name="shift",
        title="everyone passes to the right at once",
        kind="debug",
        points=4,
        parameters=("tensor",),
        cases=_shifts,
        hints=(
            "Read the places in the verdict: in which call does each rank wait, and for whom?",
            "Everyone waits for a neighbour that waits as well. Somebody must receive first, or nobody may block.",
            "isend begins a message and returns at once; the request that it returns has wait(). Keep the request, "
            "and do not return before it has been waited for: a message whose request is dropped may never arrive.",
            "With one rank, left and right are the rank itself, and gloo refuses a message to oneself: return a clone.",
        ),
    ),
    Exercise(
        name="one_size_hangs",
        title="why one library hangs at every size, and another only at large ones",
        kind="explain",
        points=2,
    ),
)


def _own_average(tensor: Any) -> Any:
    """Return the mean over all ranks."""
    import torch
    import torch.distributed as dist

    total = tensor.clone(memory_format=torch.contiguous_format)
    own.all_reduce(total)
    return total / dist.get_world_size()
