"""Right and wrong answers to the exercises of lesson 00."""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist

from tests.exercises.judged import Family

introduce = Family("introduce")
bring_home = Family("bring_home")


@introduce.accepted
def with_an_f_string():
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


@introduce.accepted
def from_the_environment():
    return "rank {RANK} of {WORLD_SIZE}".format(**os.environ)


@introduce.accepted
def with_words_joined():
    return " ".join(["rank", str(dist.get_rank()), "of", str(dist.get_world_size())])


@introduce.rejected("Nothing came back", "expected  'rank 0 of 1'", "on        rank 0")
def prints_only():
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}")


@introduce.rejected("counted from 0")
def counts_from_one():
    return f"rank {dist.get_rank() + 1} of {dist.get_world_size()}"


@introduce.rejected("in each other's place")
def swaps_the_numbers():
    return f"rank {dist.get_world_size()} of {dist.get_rank()}"


@introduce.rejected("expected  'rank 0 of 1'", "received  'rank 0 of 2'")
def knows_only_two():
    return f"rank {dist.get_rank()} of 2"


@introduce.rejected("same to the letter")
def shouts():
    return f"Rank {dist.get_rank()} of {dist.get_world_size()}."


@introduce.rejected("received  (0, 1)")
def returns_the_numbers():
    return dist.get_rank(), dist.get_world_size()


def train(model, inputs, targets):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss


@bring_home.accepted
def returns_the_state_dict(model, inputs, targets):
    train(model, inputs, targets)
    return model.state_dict()


@bring_home.accepted
def returns_copies(model, inputs, targets):
    train(model, inputs, targets)
    return {key: value.clone() for key, value in model.state_dict().items()}


@bring_home.accepted
def returns_the_named_parameters(model, inputs, targets):
    train(model, inputs, targets)
    return dict(model.named_parameters())


@bring_home.rejected("went away with the rank")
def returns_nothing(model, inputs, targets):
    train(model, inputs, targets)


@bring_home.rejected("an object of type Tensor")
def returns_the_loss(model, inputs, targets):
    return train(model, inputs, targets).detach()


@bring_home.rejected("an object of type Linear", "load_state_dict")
def returns_the_model(model, inputs, targets):
    train(model, inputs, targets)
    return model


@bring_home.rejected("weights from before the training")
def returns_an_early_copy(model, inputs, targets):
    early = copy.deepcopy(model.state_dict())
    train(model, inputs, targets)
    return early


@bring_home.rejected("Is there a step?")
def never_trains(model, inputs, targets):
    return model.state_dict()


@bring_home.rejected("Is there a step?")
def trains_a_copy(model, inputs, targets):
    pupil = copy.deepcopy(model)
    train(pupil, inputs, targets)
    return model.state_dict()


@bring_home.rejected("not the model's state_dict", "['weight']")
def forgets_the_bias(model, inputs, targets):
    train(model, inputs, targets)
    return {"weight": model.weight}
