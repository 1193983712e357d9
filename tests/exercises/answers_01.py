"""Right and wrong answers to the exercises of lesson 01, as learners write them."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.exercises.judged import Family

assign_rank = Family("assign_rank")
register = Family("register")
average_by_hand = Family("average_by_hand")
shift = Family("shift")


# ---- assign_rank


@assign_rank.accepted
def adds_twice(store, name):
    if store.add(f"joined/{name}", 1) > 1:
        raise ValueError(f"{name} has joined already")
    return store.add("workers", 1) - 1


@assign_rank.accepted
def claims_with_compare_and_set(store, name):
    me = uuid.uuid4().hex.encode()
    if store.compare_set(f"owner of {name}", "", me.decode()) != me:
        raise ValueError(f"the name {name} is taken")
    rank = 0
    while store.compare_set(f"rank {rank}", "", me.decode()) != me:
        rank += 1
    return rank


@assign_rank.accepted
def keeps_one_list(store, name):
    store.compare_set("list", "", "[]")
    while True:
        before = store.get("list").decode()
        names = json.loads(before)
        if [name, None] in [[known, None] for known, _ in names]:
            raise ValueError(f"no second {name}")
        after = json.dumps([*names, [name, uuid.uuid4().hex]])
        if store.compare_set("list", before, after) == after.encode():
            return len(names)


@assign_rank.accepted
def looks_first_but_claims_in_one_step(store, name):
    own = dist.PrefixStore("registration", store)
    if store.check([f"seen/{name}"]):
        raise ValueError(name)
    if own.add(name, 1) != 1:
        raise ValueError(name)
    store.set(f"seen/{name}", "yes")
    return own.add("/count", 1) - 1


@assign_rank.rejected("one rank for 'ant', and 1 ValueError", "both see the name free")
def looks_then_joins(store, name):
    if store.check([name]):
        raise ValueError(f"{name} is taken")
    store.set(name, "here")
    return store.add("workers", 1) - 1


@assign_rank.rejected("2 workers at once: 'ant', 'bee'", "expected  the ranks [0, 1]", "received  the ranks [0, 0]")
def counts_with_get_and_set(store, name):
    if store.add(f"joined/{name}", 1) > 1:
        raise ValueError(f"{name} is taken")
    store.compare_set("workers", "", "0")
    rank = int(store.get("workers"))
    store.set("workers", str(rank + 1))
    return rank


@assign_rank.rejected("`add` returns the number after adding")
def starts_at_one(store, name):
    if store.add(f"joined/{name}", 1) > 1:
        raise ValueError(f"{name} is taken")
    return store.add("workers", 1)


@assign_rank.rejected("refuse first, count afterwards")
def counts_before_it_refuses(store, name):
    rank = store.add("workers", 1) - 1
    if store.add(f"joined/{name}", 1) > 1:
        raise ValueError(f"{name} is taken")
    return rank


@assign_rank.rejected("one rank for 'ant', and 1 ValueError", "all accepted")
def refuses_nobody(store, name):
    return store.add("workers", 1) - 1


@assign_rank.rejected("all accepted")
def compares_the_name_with_itself(store, name):
    if store.compare_set(f"owner of {name}", "", name) != name.encode():
        raise ValueError(f"{name} is taken")
    return store.add("workers", 1) - 1


@assign_rank.rejected("a ValueError that names 'ant'", "put it in the message")
def refuses_without_a_name(store, name):
    if store.add(f"joined/{name}", 1) > 1:
        raise ValueError("taken")
    return store.add("workers", 1) - 1


@assign_rank.rejected("KeyError", "on        rank")
def raises_another_error(store, name):
    if store.add(f"joined/{name}", 1) > 1:
        raise KeyError(name)
    return store.add("workers", 1) - 1


@assign_rank.rejected("Nothing came back")
def returns_nothing(store, name):
    store.add("workers", 1)


@assign_rank.rejected("A rank is a whole number", "b'1'")
def returns_bytes(store, name):
    store.add("workers", 1)
    return store.get("workers")


@assign_rank.rejected("every one refused")
def refuses_everyone(store, name):
    store.add(name, 1)
    if store.add(name, 1) > 1:
        raise ValueError(f"{name} is taken")
    return store.add("workers", 1) - 1


@assign_rank.rejected("Nothing came back")
def returns_none_to_a_double(store, name):
    if store.add(f"joined/{name}", 1) == 1:
        return store.add("workers", 1) - 1
    return None


_count = 0


@assign_rank.rejected("received  the ranks [0, 0]")
def counts_in_a_variable(store, name):
    global _count
    if store.add(f"joined/{name}", 1) > 1:
        raise ValueError(f"{name} is taken")
    _count += 1
    return _count - 1


@assign_rank.rejected("refuse first, count afterwards")
def asks_the_environment(store, name):
    if os.environ["RANK"] == "0":
        time.sleep(0.3)  # so that of two copies the other one comes first
    if store.add(f"joined/{name}", 1) > 1:
        raise ValueError(f"{name} is taken")
    return int(os.environ["RANK"])


@assign_rank.rejected("still running after 4 seconds", "store.get waits until somebody", state="stopped")
def waits_for_a_key_that_nobody_writes(store, name):
    return int(store.get("the next free rank"))


# ---- register


def _join(store, name):
    if store.add(f"joined/{name}", 1) > 1:
        raise ValueError(f"{name} has joined already")
    return store.add("workers", 1) - 1


def _keys(world_size):
    return [f"name/{rank}" for rank in range(world_size)]


def _place(store, name, world_size):
    rank = _join(store, name)
    if rank >= world_size:
        raise ValueError(f"no place for {name}")
    store.set(_keys(world_size)[rank], name)
    return rank


@register.accepted
def waits_for_all_keys(store, name, world_size, timeout):
    rank, keys = _place(store, name, world_size), _keys(world_size)
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        came = sum(store.check([key]) for key in keys)
        raise TimeoutError(f"{came} of {world_size} came") from error
    return rank, [store.get(key).decode() for key in keys]


@register.accepted
def asks_again_and_again(store, name, world_size, timeout):
    rank, keys = _place(store, name, world_size), _keys(world_size)
    deadline = time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {world_size}, came: {[store.check([key]) for key in keys].count(True)}")
        time.sleep(0.01)
    return rank, tuple(value.decode() for value in store.multi_get(keys))


@register.accepted
def waits_for_one_after_the_other(store, name, world_size, timeout):
    rank, names, deadline = _place(store, name, world_size), [], time.monotonic() + timeout
    for place, key in enumerate(_keys(world_size)):
        try:
            store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError:
            came = place + sum(store.check([later]) for later in _keys(world_size)[place:])
            raise TimeoutError(f"{came} workers came, {world_size} were expected") from None
        names.append(store.get(key).decode())
    return rank, names


@register.accepted
def last_one_opens_the_door(store, name, world_size, timeout):
    rank = _join(store, name)
    if rank >= world_size:
        raise ValueError(f"full: {name}")
    store.set(f"name/{rank}", name)
    if store.add("here", 1) == world_size:
        store.set("door", "open")
    try:
        store.wait(["door"], timedelta(seconds=timeout))
    except Exception:
        raise TimeoutError(f"{store.add('here', 0)}/{world_size}") from None
    return rank, [store.get(f"name/{place}").decode() for place in range(world_size)]


@register.rejected("Return only when every worker has come")
def returns_who_is_there(store, name, world_size, timeout):
    rank = _place(store, name, world_size)
    return rank, [store.get(key).decode() for key in _keys(world_size) if store.check([key])]


@register.rejected("DistStoreError", "torch's own word for it")
def lets_torch_complain(store, name, world_size, timeout):
    rank, keys = _place(store, name, world_size), _keys(world_size)
    store.wait(keys, timedelta(seconds=timeout))
    return rank, [store.get(key).decode() for key in keys]


@register.rejected(
    "still running after 3.3 seconds", "`timeout` was 0.3 s", "store.wait(_keys(world_size))", state="stopped"
)
def ignores_the_timeout(store, name, world_size, timeout):
    rank = _place(store, name, world_size)
    store.wait(_keys(world_size))
    return rank, [store.get(key).decode() for key in _keys(world_size)]


@register.rejected("still running after 3.3 seconds", "`timeout` was 0.3 s", state="stopped")
def asks_for_ever(store, name, world_size, timeout):
    rank, keys = _place(store, name, world_size), _keys(world_size)
    while not store.check(keys):
        time.sleep(0.01)
    return rank, [store.get(key).decode() for key in keys]


@register.rejected("0.3 s apart", "TimeoutError for 'ant' after 0.5 s", "several waits add up", "on        rank 0")
def waits_the_whole_timeout_for_each(store, name, world_size, timeout):
    rank, keys = _place(store, name, world_size), _keys(world_size)
    for key in keys:
        try:
            store.wait([key], timedelta(seconds=timeout))
        except dist.DistStoreError:
            came = sum(store.check([one]) for one in keys)
            raise TimeoutError(f"{came} of {world_size}") from None
    return rank, [store.get(key).decode() for key in keys]


@register.rejected("0.3 s apart", "several waits add up")
def begins_to_count_again_with_each_arrival(store, name, world_size, timeout):
    rank, keys = _place(store, name, world_size), _keys(world_size)
    came, since = 0, time.monotonic()
    while came < world_size:
        now = sum(store.check([key]) for key in keys)
        if now > came:
            came, since = now, time.monotonic()
        if time.monotonic() - since > timeout:
            raise TimeoutError(f"{came} of {world_size}")
        time.sleep(0.01)
    return rank, [store.get(key).decode() for key in keys]


@register.rejected(".decode() makes text")
def returns_bytes_for_names(store, name, world_size, timeout):
    rank, names = waits_for_all_keys(store, name, world_size, timeout)
    return rank, [name.encode() for name in names]


@register.rejected("names[rank] must be the worker's own name")
def sorts_the_names_backwards(store, name, world_size, timeout):
    rank, names = waits_for_all_keys(store, name, world_size, timeout)
    return rank, names[1:] + names[:1]


@register.rejected("the same list", "same names as on rank")
def puts_itself_first(store, name, world_size, timeout):
    rank, names = waits_for_all_keys(store, name, world_size, timeout)
    return rank, [name, *(other for other in names if other != name)]


@register.rejected("All places were taken", "4 workers with a rank")
def lets_everyone_in(store, name, world_size, timeout):
    rank = _join(store, name)
    keys = _keys(world_size)
    store.set(f"name/{rank}", name)
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except dist.DistStoreError:
        raise TimeoutError(f"{sum(store.check([key]) for key in keys)} of {world_size}") from None
    return min(rank, world_size - 1), [store.get(key).decode() for key in keys]


@register.rejected("a message with 2 and 3", "say how many came (2)")
def says_only_that_time_is_up(store, name, world_size, timeout):
    rank, keys = _place(store, name, world_size), _keys(world_size)
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except dist.DistStoreError:
        raise TimeoutError("time is up") from None
    return rank, [store.get(key).decode() for key in keys]


@register.rejected("Return two things")
def returns_only_the_rank(store, name, world_size, timeout):
    return waits_for_all_keys(store, name, world_size, timeout)[0]


@register.rejected("expected  a rank from 0 to 0")
def returns_them_in_the_other_order(store, name, world_size, timeout):
    return waits_for_all_keys(store, name, world_size, timeout)[::-1]


@register.rejected("Nothing came back")
def prints_the_roster(store, name, world_size, timeout):
    print(waits_for_all_keys(store, name, world_size, timeout))


@register.rejected("TimeoutError", "Everyone had come")
def gives_up_at_once(store, name, world_size, timeout):
    rank, keys = _place(store, name, world_size), _keys(world_size)
    if not store.check(keys):
        raise TimeoutError(f"{sum(store.check([key]) for key in keys)} of {world_size}")
    return rank, [store.get(key).decode() for key in keys]


@register.rejected("still running after 3 seconds", "go on as soon as they are there", state="stopped")
def sleeps_through_the_timeout(store, name, world_size, timeout):
    rank, keys = _place(store, name, world_size), _keys(world_size)
    time.sleep(timeout)
    if not store.check(keys):
        raise TimeoutError(f"{sum(store.check([key]) for key in keys)} of {world_size}")
    return rank, [store.get(key).decode() for key in keys]


@register.rejected("Everyone had come", "never tell its name")
def keeps_the_name_for_itself(store, name, world_size, timeout):
    rank, keys = _join(store, name), _keys(world_size)
    try:
        store.wait(keys, timedelta(seconds=min(timeout, 1)))
    except dist.DistStoreError:
        raise TimeoutError(f"0 of {world_size}") from None
    return rank, []


# ---- average_by_hand


@average_by_hand.accepted
def up_and_down_the_chain(tensor):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    total = tensor.clone(memory_format=torch.contiguous_format)
    if rank > 0:
        below = torch.empty_like(total)
        dist.recv(below, rank - 1)
        total += below
    if rank < last:
        dist.send(total, rank + 1)
        dist.recv(total, rank + 1)
    else:
        total /= last + 1
    if rank > 0:
        dist.send(total, rank - 1)
    return total


@average_by_hand.accepted
def down_the_chain_first(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    share = (tensor / world).contiguous()
    room = torch.zeros_like(share)
    if rank + 1 < world:
        dist.recv(room, rank + 1)
    sum_above = share + room
    if rank:
        dist.send(sum_above, rank - 1)
        dist.recv(sum_above, rank - 1)
    if rank + 1 < world:
        dist.send(sum_above, rank + 1)
    return sum_above


@average_by_hand.accepted
def twice_around_the_ring(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return tensor.clone()
    left, right = (rank - 1) % world, (rank + 1) % world
    mean = tensor.detach().clone().contiguous()
    room = torch.empty_like(mean)
    if rank:
        dist.recv(room, left)
        mean.add_(room)
    if rank == world - 1:
        mean.div_(world)
    dist.send(mean, right)
    if rank < world - 1:
        dist.recv(mean, left)
        if rank < world - 2:
            dist.send(mean, right)
    else:
        pass
    return mean if world > 1 else tensor


def _exchange(value, peer):
    room = torch.empty_like(value)
    operations = [dist.P2POp(dist.isend, value, peer), dist.P2POp(dist.irecv, room, peer)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return room


@average_by_hand.accepted
def from_both_ends_at_once(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    own = tensor.contiguous()
    below, above = torch.zeros_like(own), torch.zeros_like(own)
    requests = []
    if rank:
        dist.recv(below, rank - 1)
    if rank < world - 1:
        requests.append((dist.isend(up := own + below, rank + 1), up))
        dist.recv(above, rank + 1)
    if rank:
        requests.append((dist.isend(down := own + above, rank - 1), down))
    for request, _ in requests:
        request.wait()
    return (own + below + above) / world


@average_by_hand.rejected("That is the sum: divide it")
def forgets_to_divide(tensor):
    return up_and_down_the_chain(tensor) * dist.get_world_size()


@average_by_hand.rejected("Divided twice")
def divides_twice(tensor):
    return up_and_down_the_chain(tensor) / dist.get_world_size()


@average_by_hand.rejected("3 ranks", "That is a mean of means", "divide it once")
def halves_at_every_hand(tensor):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    mean = tensor.clone().contiguous()
    if rank > 0:
        below = torch.empty_like(mean)
        dist.recv(below, rank - 1)
        mean = (mean + below) / 2
    if rank < last:
        dist.send(mean, rank + 1)
        dist.recv(mean, rank + 1)
    if rank > 0:
        dist.send(mean, rank - 1)
    return mean


@average_by_hand.rejected("3 ranks", "That is a mean of means")
def halves_on_the_way_down(tensor):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    mean, room = tensor.contiguous(), torch.empty_like(tensor.contiguous())
    if rank < last:
        dist.recv(room, rank + 1)
        mean = torch.stack([mean, room]).mean(dim=0)
    if rank:
        dist.send(mean, rank - 1)
        dist.recv(room, rank - 1)
        mean = room
    if rank < last:
        dist.send(mean, rank + 1)
    return mean


@average_by_hand.rejected("on        rank 0", "must travel back along the chain")
def keeps_it_at_the_top(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    total = tensor.clone().contiguous()
    if rank > 0:
        below = torch.empty_like(total)
        dist.recv(below, rank - 1)
        total += below
    if rank < world - 1:
        dist.send(total, rank + 1)
        return total
    return total / world


@average_by_hand.rejected("a call of all_reduce", "Use send and recv")
def lets_the_framework_do_it(tensor):
    total = tensor.clone().contiguous()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@average_by_hand.rejected("a call of all_gather", "Use send and recv")
def gathers_everything(tensor):
    tensors = [torch.empty_like(tensor.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor.contiguous())
    return torch.stack(tensors).mean(dim=0)


@average_by_hand.rejected("From hand to hand", "messages to rank 1 or rank 3", "a message to rank 2")
def sends_everything_to_rank_zero(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    total = tensor.clone().contiguous()
    if rank == 0:
        for other in range(1, world):
            room = torch.empty_like(total)
            dist.recv(room, other)
            total += room
        total /= world
        for other in range(1, world):
            dist.send(total, other)
    else:
        dist.send(total, 0)
        dist.recv(total, 0)
    return total


@average_by_hand.rejected("at most 2 messages from a rank", "3 messages", "grows with the number of ranks")
def passes_every_tensor_past_everyone(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    total, travelling = tensor.clone().contiguous(), tensor.clone().contiguous()
    for _ in range(world - 1):
        room = torch.empty_like(travelling)
        request = dist.isend(travelling, (rank + 1) % world)
        dist.recv(room, (rank - 1) % world)
        request.wait()
        travelling = room
        total = total + travelling
    return total / world


@average_by_hand.rejected("changed in place", "tensor.clone()")
def adds_into_the_callers_tensor(tensor):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    total = tensor
    if rank > 0:
        below = torch.empty_like(total)
        dist.recv(below, rank - 1)
        total += below
    if rank < last:
        dist.send(total, rank + 1)
        dist.recv(total, rank + 1)
    else:
        total /= last + 1
    if rank > 0:
        dist.send(total, rank - 1)
    return total


@average_by_hand.rejected("3 ranks", state="stopped")
def knows_only_two_ranks(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return tensor.clone()
    return (tensor + _exchange(tensor, 1 - rank if rank < 2 else 0)) / 2


@average_by_hand.rejected("1 rank", "A rank cannot send to itself")
def forgets_the_single_rank(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    total = tensor.clone().contiguous()
    if rank == 0:
        dist.send(total, (rank + 1) % world)
        dist.recv(total, (rank + 1) % world)
        return total
    below = torch.empty_like(total)
    dist.recv(below, rank - 1)
    total += below
    if rank < world - 1:
        dist.send(total, rank + 1)
        dist.recv(total, rank + 1)
    else:
        total /= world
    dist.send(total, rank - 1)
    return total


@average_by_hand.rejected("SIGABRT", "float64", state="stopped")
def makes_room_for_float32(tensor):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    total = tensor.clone().contiguous()
    room = torch.empty(total.shape)
    if rank > 0:
        dist.recv(room, rank - 1)
        total += room
    if rank < last:
        dist.send(total, rank + 1)
        dist.recv(total, rank + 1)
    else:
        total /= last + 1
    if rank > 0:
        dist.send(total, rank - 1)
    return total


@average_by_hand.rejected("transposed view (not contiguous)", ".contiguous() makes one", "on        rank 0")
def sends_a_view(tensor):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    total = tensor.clone()
    if rank > 0:
        below = torch.empty_like(total)
        dist.recv(below, rank - 1)
        total += below
    if rank < last:
        dist.send(total, rank + 1)
        dist.recv(total, rank + 1)
    else:
        total /= last + 1
    if rank > 0:
        dist.send(total, rank - 1)
    return total


@average_by_hand.rejected("A deadlock", "rank 1  waits in recv from rank 0", state="stopped")
def receives_before_anyone_sends(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    room = torch.empty_like(tensor)
    dist.recv(room, (rank - 1) % world)
    dist.send(tensor + room, (rank + 1) % world)
    return room


@average_by_hand.rejected("a tensor", "Nothing came back")
def works_in_place_and_returns_nothing(tensor):
    tensor.copy_(up_and_down_the_chain(tensor))


@average_by_hand.rejected("the shape (3, 4)", "the shape (12,)")
def flattens(tensor):
    return up_and_down_the_chain(tensor.reshape(-1))


@average_by_hand.rejected("the mean on every rank", "on        rank 0")
def averages_neighbours_only(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    mean = tensor.clone().contiguous()
    if world > 1 and rank < 2:
        mean = (mean + 2 * _exchange(mean, 1 - rank)) / 3
    return mean


# ---- shift


@shift.accepted
def begins_the_send_and_waits(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return tensor.clone()
    arrived = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % world)
    dist.recv(arrived, (rank - 1) % world)
    request.wait()
    return arrived


@shift.accepted
def takes_turns(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    arrived = tensor.clone()
    if world > 1 and rank % 2 == 0:
        dist.send(tensor, right)
        dist.recv(arrived, left)
    elif world > 1:
        dist.recv(arrived, left)
        dist.send(tensor, right)
    return arrived


@shift.accepted
def batches_both(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return tensor
    arrived = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.irecv, arrived, (rank - 1) % world),
        dist.P2POp(dist.isend, tensor, (rank + 1) % world),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return arrived


@shift.accepted
def rank_zero_receives_first(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = tensor.clone()
    if world > 1:
        if rank == 0:
            dist.recv(arrived, world - 1)
            dist.send(tensor, 1)
        else:
            dist.send(tensor, (rank + 1) % world)
            dist.recv(arrived, rank - 1)
    return arrived


@shift.accepted
def opens_the_letter_box_first(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = tensor.clone()
    if world > 1:
        request = dist.irecv(arrived, (rank - 1) % world)
        dist.send(tensor, (rank + 1) % world)
        request.wait()
    return arrived


@shift.rejected("A deadlock", "rank 0  waits in send to rank 1", "rank 1  waits in send to rank 0", state="stopped")
def as_reported(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = tensor.clone()
    if world > 1:
        dist.send(tensor, (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
    return arrived


@shift.rejected("A deadlock", "rank 0  waits in recv from rank 1", state="stopped")
def everyone_receives_first(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = tensor.clone()
    if world > 1:
        dist.recv(arrived, (rank - 1) % world)
        dist.send(tensor, (rank + 1) % world)
    return arrived


@shift.rejected("It came from the right", "3 ranks")
def goes_to_the_left(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = tensor.clone()
    if world > 1:
        request = dist.isend(tensor, (rank - 1) % world)
        dist.recv(arrived, (rank + 1) % world)
        request.wait()
    return arrived


@shift.rejected("this rank's own tensor")
def returns_its_own(tensor):
    begins_the_send_and_waits(tensor)
    return tensor


@shift.rejected("changed in place")
def receives_into_the_callers_tensor(tensor):
    tensor.copy_(begins_the_send_and_waits(tensor))
    return tensor


@shift.rejected("isend to rank 1: nobody waited for it", "take its message with it", "2 ranks")
def drops_its_request(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(tensor)
    if world == 1:
        return tensor.clone()
    dist.isend(tensor, (rank + 1) % world)
    dist.recv(arrived, (rank - 1) % world)
    return arrived


@shift.rejected("nobody waited for it", "the receiver waits for ever")
def drops_every_request(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = torch.full_like(tensor, -1)
    if world == 1:
        return tensor.clone()
    dist.isend(tensor, (rank + 1) % world)
    dist.irecv(arrived, (rank - 1) % world)
    while (arrived == -1).any():
        time.sleep(0.001)
    return arrived


@shift.rejected("a message that has not left by then carries zeros")
def leaves_the_send_to_a_thread(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = tensor.clone()
    if world > 1:
        threading.Thread(target=dist.send, args=(tensor, (rank + 1) % world), daemon=True).start()
        dist.recv(arrived, (rank - 1) % world)
        time.sleep(0.05)  # long enough, unless the right neighbour is late
    return arrived


@shift.rejected("isend to rank 1: nobody waited for it")
def does_not_wait_for_its_send(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = tensor.clone()
    if world > 1:
        does_not_wait_for_its_send.request = dist.isend(tensor, (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
    return arrived


@shift.rejected("irecv from rank 1: nobody waited for it")
def does_not_wait_for_its_receive(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = torch.zeros_like(tensor)
    if world > 1:
        does_not_wait_for_its_receive.request = dist.irecv(arrived, (rank - 1) % world)
        dist.send(tensor, (rank + 1) % world)
        time.sleep(0.05)  # long enough, unless the left neighbour is late
        return arrived
    return tensor.clone()


@shift.rejected("int64", state="stopped")
def makes_room_for_numbers_of_one_type(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty(tensor.shape)
    if world == 1:
        return tensor.clone()
    request = dist.isend(tensor, (rank + 1) % world)
    dist.recv(arrived, (rank - 1) % world)
    request.wait()
    return arrived


@shift.rejected("1 rank", "A rank cannot send to itself")
def forgets_the_single_rank_in_the_ring(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % world)
    dist.recv(arrived, (rank - 1) % world)
    request.wait()
    return arrived


@shift.rejected("a call of all_gather")
def gathers_and_picks(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(everyone, tensor)
    return everyone[(rank - 1) % world]


@shift.rejected("shape (2, 2)", "shape (4,)")
def flattens_the_parcel(tensor):
    return begins_the_send_and_waits(tensor.reshape(-1))


@shift.rejected("one message of 4,000 bytes", "2 messages, 8,000 bytes")
def sends_it_twice_to_be_sure(tensor):
    begins_the_send_and_waits(tensor)
    return begins_the_send_and_waits(tensor)
