"""All-reduce in four ways, as a learner writes it, for simulated ranks and for real ones."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mine(length: int) -> torch.Tensor:
    """What this rank brings: different on each rank, exact in float32."""
    return torch.arange(length, dtype=torch.float32) * (dist.get_rank() + 1)


def total(length: int, nprocs: int) -> torch.Tensor:
    """What all ranks together brought."""
    return torch.arange(length, dtype=torch.float32) * (nprocs * (nprocs + 1) / 2)


def naive(length: int) -> torch.Tensor:
    """Everything through rank 0."""
    tensor = mine(length)
    others = range(1, dist.get_world_size())
    if dist.get_rank():
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return tensor
    arrived = torch.empty_like(tensor)
    for other in others:
        dist.recv(arrived, other)
        tensor += arrived
    for other in others:
        dist.send(tensor, other)
    return tensor


def tree(length: int) -> torch.Tensor:
    """Up a binomial tree and down again."""
    tensor = mine(length)
    rank, world = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(tensor)
    distance = 1
    while distance < world and not rank & distance:
        if rank + distance < world:
            dist.recv(arrived, rank + distance)
            tensor += arrived
        distance *= 2
    if rank:
        dist.send(tensor, rank - distance)
        dist.recv(tensor, rank - distance)
    while distance > 1:
        distance //= 2
        if rank + distance < world:
            dist.send(tensor, rank + distance)
    return tensor


def ring(length: int) -> torch.Tensor:
    """Chunks around a ring, twice."""
    tensor = mine(length)
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = list(tensor.tensor_split(world))
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(world - 1):
        outgoing, incoming = (rank - step) % world, (rank - step - 1) % world
        arrived = torch.empty_like(chunks[incoming])
        request = dist.isend(chunks[outgoing], right)
        dist.recv(arrived, left)
        chunks[incoming] += arrived
        request.wait()
    for step in range(world - 1):
        outgoing, incoming = (rank + 1 - step) % world, (rank - step) % world
        operations = [
            dist.P2POp(dist.irecv, chunks[incoming], left),
            dist.P2POp(dist.isend, chunks[outgoing], right),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    return tensor


def halving_doubling(length: int) -> torch.Tensor:
    """Halve the part that is mine, then double it; ranks beyond a power of two hand over and wait."""
    tensor = mine(length)
    rank, world = dist.get_rank(), dist.get_world_size()
    power = 1 << (world.bit_length() - 1)
    if rank >= power:
        dist.send(tensor, rank - power)
        dist.recv(tensor, rank - power)
        return tensor
    if rank + power < world:
        arrived = torch.empty_like(tensor)
        dist.recv(arrived, rank + power)
        tensor += arrived
    low, high = 0, length
    taken = []
    distance = power // 2
    while distance:
        middle = (low + high) // 2
        keeps_low = not rank & distance
        kept, given = ((low, middle), (middle, high)) if keeps_low else ((middle, high), (low, middle))
        arrived = torch.empty(kept[1] - kept[0])
        swap(tensor[given[0] : given[1]], arrived, rank ^ distance)
        tensor[kept[0] : kept[1]] += arrived
        taken.append((kept, given))
        low, high = kept
        distance //= 2
    distance = 1
    for kept, given in reversed(taken):
        swap(tensor[kept[0] : kept[1]], tensor[given[0] : given[1]], rank ^ distance)
        distance *= 2
    if rank + power < world:
        dist.send(tensor, rank + power)
    return tensor


def swap(outgoing: torch.Tensor, incoming: torch.Tensor, partner: int) -> None:
    """Send and receive at once."""
    request = dist.isend(outgoing, partner)
    dist.recv(incoming, partner)
    request.wait()


ALGORITHMS = {"naive": naive, "tree": tree, "ring": ring, "halving-doubling": halving_doubling}
