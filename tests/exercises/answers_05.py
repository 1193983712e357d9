"""Right and wrong answers to the exercises of lesson 05, as learners write them."""

from __future__ import annotations

import itertools
import math
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join

from tests.exercises.judged import Family

evaluate = Family("evaluate")
train_uneven = Family("train_uneven")
sync_batch_norm = Family("sync_batch_norm")
train_step = Family("train_step")
scaled_step = Family("scaled_step")


# ---- evaluate


def right_ones(model, images, labels, batch_size):
    """How many are right, in batches, in evaluation mode, with the mode put back."""
    mode = model.training
    model.eval()
    right = 0
    with torch.no_grad():
        for start in range(0, len(labels), batch_size):
            part = slice(start, start + batch_size)
            right += int((model(images[part]).argmax(dim=1) == labels[part]).sum())
    model.train(mode)
    return right


@evaluate.accepted
def evaluate_by_all_reduce(ddp, images, labels, batch_size):
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = images[rank::world], labels[rank::world]
    counts = torch.tensor([float(right_ones(ddp.module, images, labels, batch_size)), float(len(labels))])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


@evaluate.accepted
def evaluate_contiguous_shards(ddp, images, labels, batch_size):
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(len(labels)).tensor_split(world)[rank]
    right = torch.tensor(right_ones(ddp.module, images[mine], labels[mine], batch_size))
    dist.all_reduce(right)
    return right.item() / len(labels)


@evaluate.accepted
def evaluate_gathering_objects(ddp, images, labels, batch_size):
    """Through the wrapper, with equally many forwards everywhere, some of them empty."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mode = ddp.training
    ddp.eval()
    mine = torch.arange(len(labels))[rank::world]
    forwards = math.ceil(math.ceil(len(labels) / world) / batch_size)
    right = 0
    with torch.inference_mode():
        for number in range(forwards):
            part = mine[number * batch_size : (number + 1) * batch_size]
            right += int((ddp(images[part]).argmax(dim=-1) == labels[part]).sum())
    ddp.train(mode)
    everyone = [None] * world
    dist.all_gather_object(everyone, right)
    return sum(everyone) / len(labels)


@evaluate.rejected("lower bound")
def evaluate_with_a_range_that_starts_behind_the_end(ddp, images, labels, batch_size):
    """Where there are two samples fewer than ranks, the last rank's range is refused."""
    mine = torch.arange(dist.get_rank(), len(labels), dist.get_world_size())
    return evaluate_gathering_objects(ddp, images, labels, batch_size) + 0 * len(mine)


@evaluate.rejected("ddp(x)", state="stopped")
def evaluate_on_rank_0_alone(ddp, images, labels, batch_size):
    accuracy = None
    if dist.get_rank() == 0:
        ddp.eval()
        with torch.no_grad():
            right = sum((ddp(x).argmax(1) == y).sum() for x, y in batches_of(images, labels, batch_size))
        accuracy = right.item() / len(labels)
    dist.barrier()
    return accuracy


@evaluate.rejected(state="stopped")
def evaluate_on_rank_0_and_broadcast(ddp, images, labels, batch_size):
    """The others' broadcast meets that of the wrapper's buffers: gloo ends a rank, or both wait."""
    accuracy = torch.zeros(1)
    if dist.get_rank() == 0:
        ddp.eval()
        with torch.no_grad():
            right = sum((ddp(x).argmax(1) == y).sum() for x, y in batches_of(images, labels, batch_size))
        accuracy += right / len(labels)
    dist.broadcast(accuracy, 0)
    return accuracy.item()


def batches_of(images, labels, batch_size):
    return zip(images.split(batch_size), labels.split(batch_size), strict=True)


@evaluate.rejected("Nothing came back on this rank")
def evaluate_and_tell_rank_0_alone(ddp, images, labels, batch_size):
    if dist.get_rank() == 0:
        return right_ones(ddp.module, images, labels, batch_size) / len(labels)
    return None


@evaluate.rejected("a share of the samples on each rank")
def evaluate_on_rank_0_for_all(ddp, images, labels, batch_size):
    accuracy = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 0:
        accuracy += right_ones(ddp.module, images, labels, batch_size) / len(labels)
    dist.broadcast(accuracy, 0)
    return accuracy.item()


@evaluate.rejected("on a small shard for more")
def evaluate_by_the_mean_of_accuracies(ddp, images, labels, batch_size):
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = images[rank::world], labels[rank::world]
    accuracy = torch.tensor([right_ones(ddp.module, images, labels, batch_size) / max(1, len(labels))])
    dist.all_reduce(accuracy)
    return (accuracy / world).item()


@evaluate.rejected("Ranks return different numbers")
def evaluate_its_own_shard(ddp, images, labels, batch_size):
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = images[rank::world], labels[rank::world]
    return right_ones(ddp.module, images, labels, batch_size) / max(1, len(labels))


def with_the_sampler(ddp, images, labels, batch_size, **options):
    data = torch.utils.data.TensorDataset(images, labels)
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False, drop_last=options.pop("sampler_drops", False))
    loader = torch.utils.data.DataLoader(data, batch_size, sampler=sampler, **options)
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([float(right_ones(ddp.module, x, y, batch_size)), float(len(y))])
    dist.all_reduce(counts)
    return (counts[0] / counts[1].clamp(min=1)).item()


@evaluate.rejected("DistributedSampler pads")
def evaluate_with_padded_shards(ddp, images, labels, batch_size):
    return with_the_sampler(ddp, images, labels, batch_size)


@evaluate.rejected("is something dropped?")
def evaluate_with_a_sampler_that_drops(ddp, images, labels, batch_size):
    return with_the_sampler(ddp, images, labels, batch_size, sampler_drops=True)


@evaluate.rejected("never went through a model")
def evaluate_with_a_loader_that_drops(ddp, images, labels, batch_size):
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = images[rank::world], labels[rank::world]
    whole = len(labels) // batch_size * batch_size
    counts = torch.tensor([float(right_ones(ddp.module, images[:whole], labels[:whole], batch_size)), float(whole)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1].clamp(min=1)).item()


@evaluate.rejected("the work is not shared out")
def evaluate_everything_everywhere(ddp, images, labels, batch_size):
    return right_ones(ddp.module, images, labels, batch_size) / len(labels)


@evaluate.rejected("statistics of the batch")
def evaluate_in_training_mode(ddp, images, labels, batch_size):
    rank, world = dist.get_rank(), dist.get_world_size()
    right = torch.zeros(1)
    with torch.no_grad():
        for start in range(rank * batch_size, len(labels), world * batch_size):
            part = slice(start, start + batch_size)
            images_here = torch.cat([images[part], images[part]])[: max(2, len(images[part]))]
            right += (ddp.module(images_here).argmax(1)[: len(labels[part])] == labels[part]).sum()
    dist.all_reduce(right)
    return right.item() / len(labels)


@evaluate.rejected("back in training mode")
def evaluate_and_stay_in_evaluation_mode(ddp, images, labels, batch_size):
    accuracy = evaluate_by_all_reduce(ddp, images, labels, batch_size)
    ddp.eval()
    return accuracy


@evaluate.rejected("a batch of")
def evaluate_in_one_forward(ddp, images, labels, batch_size):
    return evaluate_by_all_reduce(ddp, images, labels, 10**6)


@evaluate.rejected("A Python float")
def evaluate_to_a_tensor(ddp, images, labels, batch_size):
    return torch.tensor(evaluate_by_all_reduce(ddp, images, labels, batch_size))


# ---- train_uneven


def one_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()


@train_uneven.accepted
def uneven_in_join(ddp, optimizer, batches):
    with ddp.join():
        for inputs, targets in batches:
            one_step(ddp, optimizer, inputs, targets)


@train_uneven.accepted
def uneven_by_those_who_are_there(ddp, optimizer, batches):
    with Join([ddp], divide_by_initial_world_size=False):
        for inputs, targets in batches:
            one_step(ddp, optimizer, inputs, targets)


@train_uneven.accepted
def uneven_by_agreement(ddp, optimizer, batches):
    """Agree on the number of steps; whoever has no batch brings zeros."""
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    for step in range(int(steps)):
        inputs, targets = batches[min(step, len(batches) - 1)]
        optimizer.zero_grad()
        loss = F.mse_loss(ddp(inputs), targets)
        (loss * (step < len(batches))).backward()
        optimizer.step()


@train_uneven.accepted
def uneven_by_hand(ddp, optimizer, batches):
    """Ask in every step who is there, and sum the gradients without the wrapper."""
    model = ddp.module
    for step in itertools.count():
        there = torch.tensor(float(step < len(batches)))
        mine = there.item()
        dist.all_reduce(there)
        if not there:
            return
        optimizer.zero_grad()
        inputs, targets = batches[step] if mine else batches[0]
        (F.mse_loss(model(inputs), targets) * mine).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= there
        optimizer.step()


@train_uneven.rejected("batches", state="stopped")
def uneven_without_join(ddp, optimizer, batches):
    for inputs, targets in batches:
        one_step(ddp, optimizer, inputs, targets)


@train_uneven.rejected("beyond the shortest list are left out")
def uneven_that_drops(ddp, optimizer, batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    uneven_without_join(ddp, optimizer, batches[: int(steps)])


@train_uneven.rejected("its last batch again")
def uneven_that_pads(ddp, optimizer, batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    uneven_without_join(ddp, optimizer, batches + batches[-1:] * (int(steps) - len(batches)))


@train_uneven.rejected("Each rank has trained alone")
def uneven_around_the_wrapper(ddp, optimizer, batches):
    for inputs, targets in batches:
        one_step(ddp.module, optimizer, inputs, targets)


@train_uneven.rejected("Replicas must be equal in the end")
def uneven_and_the_rest_alone(ddp, optimizer, batches):
    """The common steps together, the others each rank for itself."""
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    uneven_without_join(ddp, optimizer, batches[: int(steps)])
    uneven_around_the_wrapper(ddp, optimizer, batches[int(steps) :])


@train_uneven.rejected("Nothing has moved")
def uneven_without_a_step(ddp, optimizer, batches):
    with ddp.join():
        for inputs, targets in batches:
            F.mse_loss(ddp(inputs), targets).backward()


# ---- sync_batch_norm


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def summed(tensor):
    """The sum over ranks of what needs no gradient."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


@sync_batch_norm.accepted
def norm_in_two_passes(x, eps):
    count = summed(torch.tensor([float(len(x))], dtype=x.dtype))
    centred = x - SumOverRanks.apply(x.sum(dim=0)) / count
    variance = SumOverRanks.apply(centred.pow(2).sum(dim=0)) / count
    return centred / (variance + eps).sqrt()


@sync_batch_norm.accepted
def norm_in_one_pass(x, eps):
    sums = torch.stack([x.sum(dim=0), x.pow(2).sum(dim=0), torch.full_like(x[0], len(x))])
    total, squares, count = SumOverRanks.apply(sums)
    mean = total / count
    return (x - mean) * torch.rsqrt(squares / count - mean**2 + eps)


@sync_batch_norm.accepted
def norm_with_torchs_differentiable_all_reduce(x, eps):
    from torch.distributed.nn.functional import all_reduce

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = all_reduce(torch.tensor(float(len(x)), dtype=x.dtype))
        mean = all_reduce(x.sum(dim=0)) / count
        variance = all_reduce((x - mean).square().sum(dim=0)) / count
    return (x - mean) / torch.sqrt(variance + eps)


@sync_batch_norm.accepted
def norm_with_a_backward_by_hand(x, eps):
    class Normalise(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            count = summed(torch.tensor(len(x)))
            centred = x - summed(x.sum(0)) / count
            deviation = (summed(centred.pow(2).sum(0)) / count + eps).sqrt()
            out = centred / deviation
            context.save_for_backward(out, deviation, count)
            return out

        @staticmethod
        def backward(context, gradient):
            out, deviation, count = context.saved_tensors
            mean = summed(gradient.sum(0)) / count
            along = summed((gradient * out).sum(0)) / count
            return (gradient - mean - out * along) / deviation

    return Normalise.apply(x)


@sync_batch_norm.rejected("this rank's own shard")
def norm_per_rank(x, eps):
    return F.batch_norm(x, None, None, training=True, eps=eps) if len(x) > 1 else x * 0


@sync_batch_norm.rejected("mean of the ranks' means and variances")
def norm_by_the_mean_of_means(x, eps):
    world = dist.get_world_size()
    mean = SumOverRanks.apply(x.mean(dim=0)) / world
    variance = SumOverRanks.apply(x.var(dim=0, unbiased=False)) / world
    return (x - mean) / (variance + eps).sqrt()


@sync_batch_norm.rejected("more than one of a long shard")
def norm_around_an_unweighted_mean(x, eps):
    mean = SumOverRanks.apply(x.mean(dim=0)) / dist.get_world_size()
    squares = (x - mean).pow(2)
    variance = SumOverRanks.apply(squares.mean(dim=0)) / dist.get_world_size()
    return (x - mean) / (variance + eps).sqrt()


@sync_batch_norm.rejected("of variance + eps, together")
def norm_with_eps_outside_the_root(x, eps):
    count = summed(torch.tensor(len(x)))
    centred = x - SumOverRanks.apply(x.sum(dim=0)) / count
    return centred / ((SumOverRanks.apply(centred.pow(2).sum(dim=0)) / count).sqrt() + eps)


@sync_batch_norm.rejected("misses the distance between their means")
def norm_by_the_mean_of_variances(x, eps):
    count = summed(torch.tensor(len(x)))
    mean = SumOverRanks.apply(x.sum(dim=0)) / count
    variance = SumOverRanks.apply(x.var(dim=0, unbiased=False) * len(x)) / count
    return (x - mean) / (variance + eps).sqrt()


@sync_batch_norm.rejected("n - 1")
def norm_with_the_unbiased_variance(x, eps):
    count = summed(torch.tensor(len(x)))
    centred = x - SumOverRanks.apply(x.sum(dim=0)) / count
    return centred / (SumOverRanks.apply(centred.pow(2).sum(dim=0)) / (count - 1) + eps).sqrt()


@sync_batch_norm.rejected("the statistics count as constants")
def norm_with_statistics_without_gradient(x, eps):
    count = summed(torch.tensor(len(x)))
    centred = x - summed(x.sum(dim=0)) / count
    return centred / (summed(centred.pow(2).sum(dim=0)) / count + eps).sqrt()


@sync_batch_norm.rejected("dist.all_reduce knows nothing of autograd")
def norm_with_a_plain_all_reduce(x, eps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = summed(torch.tensor(len(x)))
        total = x.sum(dim=0)
        dist.all_reduce(total)
        centred = x - total / count
        squares = centred.pow(2).sum(dim=0)
        dist.all_reduce(squares)
    return centred / (squares / count + eps).sqrt()


@sync_batch_norm.rejected("nothing leads back to x")
def norm_detached(x, eps):
    return norm_in_two_passes(x, eps).detach()


@sync_batch_norm.rejected("its own shard")
def norm_of_the_whole_batch(x, eps):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, x.detach())
    return F.batch_norm(torch.cat(everyone), None, None, training=True, eps=eps)


@sync_batch_norm.rejected("is there a return?")
def norm_without_a_return(x, eps):
    norm_in_two_passes(x, eps)


# ---- train_step


@train_step.accepted
def step_through_the_wrapper(ddp, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = F.mse_loss(ddp(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


@train_step.accepted
def step_that_clears_afterwards(ddp, optimizer, inputs, targets):
    difference = ddp(inputs) - targets
    loss = (difference**2).mean()
    loss.backward()
    optimizer.step()
    ddp.zero_grad()
    return float(loss)


@train_step.accepted
def step_that_averages_by_hand(ddp, optimizer, inputs, targets):
    model = ddp.module
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())
    optimizer.step()
    return loss.detach().item()


@train_step.rejected("goes around it")
def step_around_the_wrapper(ddp, optimizer, inputs, targets):
    model = ddp.module
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


@train_step.rejected("goes around it")
def step_without_synchronisation(ddp, optimizer, inputs, targets):
    with ddp.no_sync():
        return step_through_the_wrapper(ddp, optimizer, inputs, targets)


@train_step.rejected("clear the gradients")
def step_that_never_clears(ddp, optimizer, inputs, targets):
    loss = F.mse_loss(ddp(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


@train_step.rejected("a mean of parameters after the step")
def step_alone_and_average_parameters(ddp, optimizer, inputs, targets):
    loss = step_around_the_wrapper(ddp, optimizer, inputs, targets)
    for p in ddp.module.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
    return loss


@train_step.rejected("not averaged")
def step_that_tells_the_mean_loss(ddp, optimizer, inputs, targets):
    loss = torch.tensor(step_through_the_wrapper(ddp, optimizer, inputs, targets), dtype=torch.float64)
    dist.all_reduce(loss)
    return (loss / dist.get_world_size()).item()


@train_step.rejected("the sum of the gradients")
def step_of_the_sum(ddp, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = F.mse_loss(ddp(inputs), targets)
    (loss * dist.get_world_size()).backward()
    optimizer.step()
    return loss.item()


@train_step.rejected("Nothing has moved")
def step_that_does_not_step(ddp, optimizer, inputs, targets):
    loss = F.mse_loss(ddp(inputs), targets)
    loss.backward()
    return loss.item()


@train_step.rejected("loss.item()")
def step_that_tells_nothing(ddp, optimizer, inputs, targets):
    step_through_the_wrapper(ddp, optimizer, inputs, targets)


# ---- scaled_step


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@scaled_step.accepted
def scaled_in_order(optimizer, scaler, loss, synchronize, max_norm):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), max_norm)
    scaler.step(optimizer)
    scaler.update()


@scaled_step.accepted
def scaled_and_cleared_afterwards(optimizer, scaler, loss, synchronize, max_norm):
    (loss * scaler.get_scale()).backward()
    scaler.scale(torch.zeros(1))  # a scaler wants to have been used
    synchronize()
    scaler.unscale_(optimizer)
    parameters = parameters_of(optimizer)
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    if norm > max_norm and norm.isfinite():
        for p in parameters:
            p.grad.mul_(max_norm / (norm + 1e-6))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@scaled_step.accepted
def scaled_and_decided_by_hand(optimizer, scaler, loss, synchronize, max_norm):
    """Skips by itself; the scaler's own note is made where it looks, behind the mean."""
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    synchronize()
    scaler.unscale_(optimizer)
    parameters = parameters_of(optimizer)
    if all(bool(p.grad.isfinite().all()) for p in parameters):
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
    scaler.update()


@scaled_step.rejected("unscale after it")
def scaled_and_unscaled_first(optimizer, scaler, loss, synchronize, max_norm):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    synchronize()
    torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), max_norm)
    scaler.step(optimizer)
    scaler.update()


@scaled_step.rejected("scales differ")
def scaled_and_skipped_after_the_mean(optimizer, scaler, loss, synchronize, max_norm):
    """Nobody steps on an infinity, but each scaler goes by its own gradients."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    synchronize()
    parameters = parameters_of(optimizer)
    if all(bool(p.grad.isfinite().all()) for p in parameters):
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        scaler.step(optimizer)
    scaler.update()


@scaled_step.rejected("have moved differently")
def scaled_and_never_synchronised(optimizer, scaler, loss, synchronize, max_norm):
    scaled_in_order(optimizer, scaler, loss, lambda: None, max_norm)


@scaled_step.rejected("unscale, then clip")
def scaled_and_clipped_with_the_scale(optimizer, scaler, loss, synchronize, max_norm):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    synchronize()
    torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), max_norm)
    scaler.step(optimizer)
    scaler.update()


@scaled_step.rejected("not clipped")
def scaled_and_not_clipped(optimizer, scaler, loss, synchronize, max_norm):
    scaled_in_order(optimizer, scaler, loss, synchronize, 1e9)


@scaled_step.rejected("scaler.update() ends every step")
def scaled_without_an_update(optimizer, scaler, loss, synchronize, max_norm):
    optimizer.zero_grad()
    (loss * scaler.get_scale()).backward()
    synchronize()
    parameters = parameters_of(optimizer)
    for p in parameters:
        p.grad /= scaler.get_scale()
    if all(bool(p.grad.isfinite().all()) for p in parameters):
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()


@scaled_step.rejected("Nothing has moved")
def scaled_without_a_step(optimizer, scaler, loss, synchronize, max_norm):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    synchronize()
    scaler.unscale_(optimizer)
    scaler.update()
