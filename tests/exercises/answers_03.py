"""Right and wrong answers to the exercises of lesson 03, as learners write them."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.exercises.judged import Family

broadcast_parameters = Family("broadcast_parameters")
shard = Family("shard")
reduce_gradients = Family("reduce_gradients")
train_replicas = Family("train_replicas")
start_replica = Family("start_replica")


# ---- broadcast_parameters


@broadcast_parameters.accepted
def broadcast_state(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


@broadcast_parameters.accepted
def broadcast_parameters_and_buffers(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)


@broadcast_parameters.accepted
def broadcast_as_an_object(model):
    box = [model.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    model.load_state_dict(box[0])


@broadcast_parameters.accepted
def broadcast_in_one_piece(model):
    """All numbers of a dtype in one message."""
    tensors = list(model.state_dict().values())
    for dtype in (torch.float32, torch.float64, torch.int64):
        some = [tensor for tensor in tensors if tensor.dtype == dtype]
        if some:
            flat = torch.cat([tensor.reshape(-1) for tensor in some])
            dist.broadcast(flat, src=0)
            for tensor, part in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(part.view_as(tensor))


@broadcast_parameters.accepted
def broadcast_by_messages(model):
    rank, world = dist.get_rank(), dist.get_world_size()
    for tensor in model.state_dict().values():
        if rank == 0:
            for other in range(1, world):
                dist.send(tensor, other)
        else:
            dist.recv(tensor, 0)


@broadcast_parameters.accepted
def broadcast_as_a_sum(model):
    for tensor in model.state_dict().values():
        if dist.get_rank() > 0:
            tensor.zero_()
        dist.all_reduce(tensor)


@broadcast_parameters.rejected("replicas that start apart stay apart")
def no_broadcast(model):
    pass


@broadcast_parameters.rejected("model.buffers()")
def broadcast_without_buffers(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


@broadcast_parameters.rejected("A frozen parameter is not trained, but the forward uses it")
def broadcast_of_what_is_trained(model):
    for tensor in (*(one.data for one in model.parameters() if one.requires_grad), *model.buffers()):
        dist.broadcast(tensor, src=0)


@broadcast_parameters.rejected("That is the mean over all ranks")
def broadcast_of_the_mean(model):
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
        else:
            dist.broadcast(tensor, src=0)


@broadcast_parameters.rejected("Rank 0 is the source")
def broadcast_from_the_last(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=dist.get_world_size() - 1)


@broadcast_parameters.rejected("Rank 0 is the source")
def broadcast_by_seeding(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)


@broadcast_parameters.rejected("the same Parameter objects")
def broadcast_into_new_parameters(model):
    broadcast_state(model)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))


@broadcast_parameters.rejected("deadlock", state="stopped")
def broadcast_on_rank_0_alone(model):
    if dist.get_rank() == 0:
        broadcast_state(model)
    else:
        dist.recv(torch.zeros(1), 0)


# ---- shard


@shard.accepted
def shard_by_strides(length, rank, world, epoch, seed):
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator)[rank::world].tolist()


@shard.accepted
def shard_by_pieces_of_a_tensor(length, rank, world, epoch, seed):
    generator = torch.Generator()
    generator.manual_seed(seed * 7919 + epoch)
    return torch.randperm(length, generator=generator).tensor_split(world)[rank]


@shard.accepted
def shard_with_random(length, rank, world, epoch, seed):
    order = list(range(length))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order[rank::world]


@shard.accepted
def shard_with_numpy(length, rank, world, epoch, seed):
    order = np.random.default_rng([seed, epoch]).permutation(length)
    return np.array_split(order, world)[rank]


@shard.rejected("one that each draws for itself leaves samples out and takes others twice")
def shard_with_the_rank_in_the_seed(length, rank, world, epoch, seed):
    generator = torch.Generator().manual_seed(seed + epoch + 100 * rank)
    return torch.randperm(length, generator=generator)[rank::world].tolist()


@shard.rejected("one that each draws for itself leaves samples out and takes others twice")
def shard_without_a_seed(length, rank, world, epoch, seed):
    return torch.randperm(length)[rank::world].tolist()


@shard.rejected("as with DistributedSampler.set_epoch")
def shard_without_the_epoch(length, rank, world, epoch, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(length, generator=generator)[rank::world].tolist()


@shard.rejected("reseeds the whole process")
def shard_that_seeds_the_process(length, rank, world, epoch, seed):
    torch.manual_seed(seed + epoch)
    return torch.randperm(length)[rank::world].tolist()


@shard.rejected("are dropped")
def shard_that_drops(length, rank, world, epoch, seed):
    generator = torch.Generator().manual_seed(seed + epoch)
    size = length // world
    return torch.randperm(length, generator=generator)[rank * size : (rank + 1) * size].tolist()


@shard.rejected("Do not pad")
def shard_that_pads(length, rank, world, epoch, seed):
    """What DistributedSampler does."""
    sampler = torch.utils.data.DistributedSampler(range(length), num_replicas=world, rank=rank, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@shard.rejected("Permute first, all samples, and divide afterwards")
def shard_that_shuffles_at_home(length, rank, world, epoch, seed):
    mine = list(range(length))[rank::world]
    random.Random(seed + epoch).shuffle(mine)
    return mine


@shard.rejected("an ascending order")
def shard_in_order_of_size(length, rank, world, epoch, seed):
    return sorted(shard_by_strides(length, rank, world, epoch, seed))


@shard.rejected("In epoch 0 the seed has no effect")
def shard_with_the_epoch_times_the_seed(length, rank, world, epoch, seed):
    return shard_by_strides(length, rank, world, epoch * (seed + 1), 0)


@shard.rejected("In epoch 0 the seed has no effect")
def shard_that_forgets_the_seed(length, rank, world, epoch, seed):
    return shard_by_strides(length, rank, world, epoch, 0)


@shard.rejected("the shards differ by one sample at most")
def shard_with_the_rest_on_the_last(length, rank, world, epoch, seed):
    order = shard_by_strides(length, 0, 1, epoch, seed)
    size = length // world
    return order[rank * size : (rank + 1) * size if rank < world - 1 else length]


@shard.rejected("is there a return?")
def shard_of_nothing(length, rank, world, epoch, seed):
    shard_by_strides(length, rank, world, epoch, seed)


@shard.rejected("indices from 0 to")
def shard_that_counts_from_one(length, rank, world, epoch, seed):
    return [index + 1 for index in shard_by_strides(length, rank, world, epoch, seed)]


# ---- reduce_gradients


def total_of(count):
    total = torch.tensor(float(count), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


@reduce_gradients.accepted
def reduce_one_by_one(model, count):
    total = total_of(count)
    for parameter in model.parameters():
        there = torch.tensor(float(count > 0 and parameter.grad is not None))
        dist.all_reduce(there)
        if there == 0:
            parameter.grad = None
            continue
        has = count > 0 and parameter.grad is not None
        part = parameter.grad * (count / total) if has else torch.zeros_like(parameter)
        dist.all_reduce(part)
        parameter.grad = part


@reduce_gradients.accepted
def reduce_in_one_piece(model, count):
    """Sums, flags and the number of samples travel in one tensor."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    if count == 0:
        model.zero_grad()
    sums = [torch.zeros_like(one) if one.grad is None else one.grad * count for one in parameters]
    flags = torch.tensor([float(one.grad is not None) for one in parameters], dtype=sums[0].dtype)
    flat = torch.cat([*(one.reshape(-1) for one in sums), flags, flags.new_tensor([count])])
    dist.all_reduce(flat)
    flat, flags, total = flat[: -len(flags) - 1], flat[-len(flags) - 1 : -1], flat[-1]
    parts = flat.split([one.numel() for one in parameters])
    for one, part, flag in zip(parameters, parts, flags, strict=True):
        one.grad = (part / total).view_as(one) if flag else None


@reduce_gradients.accepted
def reduce_by_gathering(model, count):
    mine = [one.grad for one in model.parameters()]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (count, mine))
    total = sum(samples for samples, _ in everyone)
    for place, one in enumerate(model.parameters()):
        one.grad = None
        for samples, gradients in everyone:
            if samples and gradients[place] is not None:
                part = gradients[place] * samples / total
                one.grad = part if one.grad is None else one.grad + part


@reduce_gradients.accepted
def reduce_in_place_with_a_maximum(model, count):
    share = count / total_of(count)
    for one in model.parameters():
        used = torch.zeros(1, dtype=torch.int64)
        if count and one.grad is not None:
            used += 1
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        if not used.item():
            continue
        if one.grad is None:
            one.grad = torch.zeros_like(one)
        elif count:
            one.grad.mul_(share)
        else:
            one.grad.zero_()
        dist.all_reduce(one.grad)


def reduce_with(weigh):
    """A reduction that is right but for its weights."""

    def reduce(model, count):
        total, world = total_of(count), dist.get_world_size()
        for parameter in model.parameters():
            has = count > 0 and parameter.grad is not None
            there = torch.tensor(float(has))
            dist.all_reduce(there)
            part = parameter.grad * weigh(count, total, world) if has else torch.zeros_like(parameter)
            dist.all_reduce(part)
            parameter.grad = part if there else None

    return reduce


@reduce_gradients.rejected("nothing has come from the others")
def reduce_nothing(model, count):
    pass


@reduce_gradients.rejected("The gradients are summed")
def reduce_to_the_sum(model, count):
    reduce_with(lambda count, total, world: 1.0)(model, count)


@reduce_gradients.rejected("mean of the ranks' means")
def reduce_to_the_mean_of_means(model, count):
    reduce_with(lambda count, total, world: 1 / world)(model, count)


@reduce_gradients.rejected("Divided twice by the number of ranks")
def reduce_and_divide_by_ranks_twice(model, count):
    reduce_with(lambda count, total, world: 1 / world**2)(model, count)


@reduce_gradients.rejected("Divided twice")
def reduce_and_divide_by_both(model, count):
    reduce_with(lambda count, total, world: count / total / world)(model, count)


@reduce_gradients.rejected("That is the sum over all samples")
def reduce_to_the_sum_over_samples(model, count):
    reduce_with(lambda count, total, world: count)(model, count)


@reduce_gradients.rejected("then divided by the number of ranks")
def reduce_by_samples_and_divide_by_ranks(model, count):
    reduce_with(lambda count, total, world: count / world)(model, count)


@reduce_gradients.rejected("the means of the ranks that have samples")
def reduce_over_ranks_with_samples(model, count):
    """Right as long as no rank is empty, then a mean of means after all."""
    filled = total_of(count > 0)
    empty = filled < dist.get_world_size()
    reduce_with(lambda count, total, world: 1 / filled if empty else count / total)(model, count)


@reduce_gradients.rejected("NaN")
def reduce_nan_times_zero(model, count):
    total = total_of(count)
    for parameter in model.parameters():
        there = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(there)
        part = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * (count / total)
        dist.all_reduce(part)
        parameter.grad = part if there else None


@reduce_gradients.rejected("right, but rounded to float32 on the way", "total.item()")
def reduce_with_weights_in_float32(model, count):
    total = torch.tensor(float(count))
    dist.all_reduce(total)
    reduce_with(lambda count, _, world: count / total)(model, count)


@reduce_gradients.rejected("weight decay and momentum would move it")
def reduce_with_zeros_for_none(model, count):
    total = total_of(count)
    for parameter in model.parameters():
        has = count > 0 and parameter.grad is not None
        part = parameter.grad * (count / total) if has else torch.zeros_like(parameter)
        dist.all_reduce(part)
        parameter.grad = part


@reduce_gradients.rejected("Only gradients change here")
def reduce_and_step(model, count):
    reduce_one_by_one(model, count)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


@reduce_gradients.rejected("its replica takes the same step as all the others")
def reduce_where_there_is_something(model, count):
    """Gathers, and then leaves the empty rank as it was."""
    before = [one.grad for one in model.parameters()]
    reduce_by_gathering(model, count)
    if count == 0:
        for one, gradient in zip(model.parameters(), before, strict=True):
            one.grad = gradient if gradient is None else torch.zeros_like(one)


@reduce_gradients.rejected(state="stopped")
def reduce_that_skips_none(model, count):
    """The rank without gradients calls no collective, and the others wait."""
    total = total_of(count)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= count / total
            dist.all_reduce(parameter.grad)


# ---- train_replicas


@train_replicas.accepted
def train_by_parts(model, optimizer, batches, after_step):
    broadcast_state(model)
    for inputs, labels in batches:
        optimizer.zero_grad()
        if len(labels):
            F.cross_entropy(model(inputs), labels).backward()
        reduce_one_by_one(model, len(labels))
        optimizer.step()
        after_step()


@train_replicas.accepted
def train_on_a_share_of_the_loss(model, optimizer, batches, after_step):
    """The loss is divided by the samples of all ranks, so that gradients only have to be added."""
    broadcast_in_one_piece(model)
    for inputs, labels in batches:
        model.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs), labels, reduction="sum") / total_of(len(labels))
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:  # an empty sum has gradients too, of zero
                dist.all_reduce(parameter.grad)
        optimizer.step()
        after_step()


@train_replicas.accepted
def train_with_autograd_grad(model, optimizer, batches, after_step):
    broadcast_as_an_object(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    for inputs, labels in batches:
        loss = F.cross_entropy(model(inputs), labels, reduction="sum")
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        total = total_of(len(labels))
        for one, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                gradient = gradient.contiguous()
                dist.all_reduce(gradient)
                one.grad = gradient / total
        optimizer.step()
        after_step()


@train_replicas.accepted
def train_on_everything_everywhere(model, optimizer, batches, after_step):
    broadcast_state(model)
    for batch in batches:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, batch)
        inputs, labels = (torch.cat(parts) for parts in zip(*everyone, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        after_step()


@train_replicas.accepted
def train_through_empty_batches(model, optimizer, batches, after_step):
    """The loss of an empty batch is NaN; its gradients are not looked at."""
    broadcast_state(model)
    for inputs, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        reduce_one_by_one(model, len(labels))
        optimizer.step()
        after_step()


def train_with(reduce, broadcast=broadcast_state):
    def train(model, optimizer, batches, after_step):
        broadcast(model)
        for inputs, labels in batches:
            optimizer.zero_grad()
            if len(labels):
                F.cross_entropy(model(inputs), labels).backward()
            reduce(model, len(labels))
            optimizer.step()
            after_step()

    return train


@train_replicas.rejected("the replicas started apart and stay apart")
def train_without_a_broadcast(model, optimizer, batches, after_step):
    train_with(reduce_one_by_one, no_broadcast)(model, optimizer, batches, after_step)


@train_replicas.rejected("The gradients are summed")
def train_on_sums(model, optimizer, batches, after_step):
    train_with(reduce_to_the_sum)(model, optimizer, batches, after_step)


@train_replicas.rejected("Divided twice by the number of ranks")
def train_with_two_divisions(model, optimizer, batches, after_step):
    train_with(reduce_and_divide_by_ranks_twice)(model, optimizer, batches, after_step)


@train_replicas.rejected("The gradients are summed")
def train_with_a_scaled_rate(model, optimizer, batches, after_step):
    """ "The learning rate must be multiplied because there are more ranks": not for the same step."""
    for group in optimizer.param_groups:
        group["lr"] *= dist.get_world_size()
    train_with(reduce_one_by_one)(model, optimizer, batches, after_step)


@train_replicas.rejected("mean of the ranks' means")
def train_on_the_mean_of_means(model, optimizer, batches, after_step):
    train_with(reduce_to_the_mean_of_means)(model, optimizer, batches, after_step)


@train_replicas.rejected("trained on its own shard alone")
def train_apart(model, optimizer, batches, after_step):
    train_with(reduce_nothing)(model, optimizer, batches, after_step)


@train_replicas.rejected("Gradients of earlier steps are still in it")
def train_without_zero_grad(model, optimizer, batches, after_step):
    broadcast_state(model)
    for inputs, labels in batches:
        if len(labels):
            F.cross_entropy(model(inputs), labels).backward()
        reduce_one_by_one(model, len(labels))
        optimizer.step()
        after_step()


@train_replicas.rejected("nothing was trained")
def train_that_looks_too_early(model, optimizer, batches, after_step):
    broadcast_state(model)
    for inputs, labels in batches:
        after_step()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels, reduction="sum").backward()
        reduce_one_by_one(model, len(labels))
        optimizer.step()


@train_replicas.rejected(state="stopped")
def train_that_skips_empty_batches(model, optimizer, batches, after_step):
    broadcast_state(model)
    for inputs, labels in batches:
        if len(labels):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            reduce_one_by_one(model, len(labels))
            optimizer.step()
        after_step()


@train_replicas.rejected("calls of after_step")
def train_that_reports_rarely(model, optimizer, batches, after_step):
    train_by_parts(model, optimizer, batches, lambda: None)
    after_step()


@train_replicas.rejected("after step")
def train_and_average_the_parameters(model, optimizer, batches, after_step):
    """Local steps, then a mean of parameters: the same for equal shards and plain SGD, not for others."""
    broadcast_state(model)
    for inputs, labels in batches:
        optimizer.zero_grad()
        if len(labels):
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
        after_step()


# ---- start_replica


@start_replica.accepted
def start_and_seed_again(make_model, seed):
    torch.manual_seed(seed)
    model = make_model()
    torch.manual_seed(seed + 1 + dist.get_rank())
    return model


@start_replica.accepted
def start_and_broadcast(make_model, seed):
    torch.manual_seed(seed * 1000 + dist.get_rank())
    model = make_model()
    broadcast_state(model)
    return model


@start_replica.accepted
def start_in_a_fork(make_model, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model()
    torch.manual_seed(hash((seed, dist.get_rank())))
    return model


@start_replica.rejected("Both drop the same units")
def start_from_one_seed(make_model, seed):
    torch.manual_seed(seed)
    return make_model()


@start_replica.rejected("Same weights first")
def start_from_a_seed_per_rank(make_model, seed):
    torch.manual_seed(seed + dist.get_rank())
    return make_model()


@start_replica.rejected("follow from the seed too, not from the rank alone")
def start_with_noise_from_the_rank_alone(make_model, seed):
    torch.manual_seed(seed)
    model = make_model()
    torch.manual_seed(dist.get_rank())
    return model


@start_replica.rejected("from a second call")
def start_and_let_go(make_model, seed):
    torch.manual_seed(seed)
    model = make_model()
    torch.seed()
    return model


@start_replica.rejected("The seed is not used")
def start_from_a_constant(make_model, seed):
    return start_and_seed_again(make_model, 0)


@start_replica.rejected("Both drop the same units")
def start_with_odd_and_even_ranks(make_model, seed):
    torch.manual_seed(seed)
    model = make_model()
    torch.manual_seed(seed + dist.get_rank() % 2)
    return model


@start_replica.rejected("Return what make_model() gave")
def start_without_a_return(make_model, seed):
    start_and_seed_again(make_model, seed)
