"""Lesson 00, start here: what its exercises ask, and the cases that judge the answers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

from .inside import plain
from .judging import Case, Finding, Trial
from .registry import Exercise

# ---- introduce() -> "rank 1 of 4"


def _introduce(answer: Callable[[], Any]) -> Any:
    return plain(answer())


def _introductions(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    for nprocs in rng.sample(range(1, 9), 4) if thorough else (1, 2, 4):
        case = Case(f"a launch with nprocs={nprocs}", [()] * nprocs, _judge_introductions)
        yield Trial(nprocs, _introduce, [case], group=True)


def _judge_introductions(results: list[Any]) -> Finding | None:
    world = len(results)
    for rank, result in enumerate(results):
        wanted = f"rank {rank} of {world}"
        if result == ("value", wanted):
            continue
        why = ""
        if result == ("value", None):
            why = "Nothing came back: print shows a text, return hands it to the launch."
        elif result == ("value", f"rank {rank + 1} of {world}"):
            why = "Ranks are counted from 0."
        elif result == ("value", f"rank {world} of {rank}"):
            why = "The two numbers are in each other's place."
        elif isinstance(result[1], str) and result[1].strip(" .").lower() == wanted:
            why = "Nearly: the text must be the same to the letter."
        return Finding(f"nprocs={world}", repr(wanted), _told(result), rank, why)
    return None


# ---- bring_home(model, inputs, targets) -> the weights after training, as a state_dict


def _bring_home(answer: Callable[..., Any], weights: list[float], inputs: Any, targets: Any) -> dict[str, Any]:
    import torch

    model = torch.nn.Linear(len(weights), 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
        model.bias.zero_()
    before = copy.deepcopy(model.state_dict())
    value = answer(model, torch.from_numpy(inputs), torch.from_numpy(targets))
    after = model.state_dict()
    told: dict[str, Any] = {"type": type(value).__name__, "is mapping": isinstance(value, dict)}
    told["trained"] = any(not torch.equal(before[key], after[key]) for key in after)
    if isinstance(value, dict):
        told["keys"] = sorted(map(str, value))
        told["value"] = {str(key): plain(part) for key, part in value.items()}
        told["as before"] = _same(told["value"], before)
        told["as after"] = _same(told["value"], after)
    return told


def _same(told: dict[str, Any], state: dict[str, Any]) -> bool:
    import numpy as np

    return told.keys() == state.keys() and all(
        told[key][0] == "tensor" and np.array_equal(told[key][2], state[key].numpy()) for key in state
    )


def _trainings(rng: random.Random, thorough: bool) -> Iterator[Trial]:
    import numpy as np

    cases = []
    for features in [rng.randint(1, 6) for _ in range(4)] if thorough else (2,):
        draw = np.random.default_rng(rng.randrange(2**32))
        inputs = draw.normal(size=(16, features)).astype(np.float32)
        targets = (inputs.sum(axis=1, keepdims=True) + 1).astype(np.float32)
        weights = [round(rng.uniform(-0.5, 0.5), 2) for _ in range(features)]
        cases.append(
            Case(f"a Linear({features}, 1) with the weights {weights}", [(weights, inputs, targets)], _judge_training)
        )
    yield Trial(1, _bring_home, cases)


def _judge_training(results: list[Any]) -> Finding | None:
    told = results[0]
    given, wanted = "a small linear model", "the trained weights: model.state_dict()"
    if told["type"] == "NoneType":
        return Finding(
            given, wanted, "None", 0, "The training happened, and its result went away with the rank: return it."
        )
    if not told["is mapping"]:
        why = "The lesson loads what comes back with load_state_dict, which takes a dict of tensors."
        return Finding(given, wanted, f"an object of type {told['type']}", 0, why)
    if not told["trained"]:
        return Finding(given, "weights that training has changed", "the weights it started with", 0, "Is there a step?")
    if told["as before"]:
        why = "These are the weights from before the training. A copy made at the start does not follow the model."
        return Finding(given, wanted, "the weights it started with", 0, why)
    if not told["as after"]:
        return Finding(given, wanted, f"a dict with the keys {told['keys']}", 0, "It is not the model's state_dict.")
    return None


def _told(result: Any) -> str:
    return repr(result[1]) if result[0] == "value" else f"an object of type {result[1]}"


EXERCISES = (
    Exercise(
        name="process_ids",
        title="how many different processes four ranks and the notebook are",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="introduce",
        title="each rank says who it is",
        kind="implement",
        points=1,
        cases=_introductions,
        hints=(
            "torch.distributed knows both numbers once the ranks of a launch are connected.",
            "dist.get_rank() is this rank's number, dist.get_world_size() how many there are.",
            'An f-string puts them in place: f"rank {...} of {...}". Return it; printing is not enough.',
        ),
    ),
    Exercise(
        name="weight_at_home",
        title="the weight in the notebook after the ranks have trained",
        kind="predict",
        points=1,
    ),
    Exercise(
        name="bring_home",
        title="the trained weights come back",
        kind="debug",
        points=2,
        parameters=("model", "inputs", "targets"),
        cases=_trainings,
        hints=(
            "The model that the rank trains is a copy. What has to cross back to the notebook?",
            "Only what a function returns comes back, in run.results.",
            "Return model.state_dict() after the last step.",
        ),
    ),
    Exercise(
        name="two_copies",
        title="why the weight in the notebook did not change",
        kind="explain",
        points=1,
    ),
)
