"""Right and wrong answers to the exercises of lesson 02, as learners write them."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from tests.exercises.judged import Family

naive_all_reduce = Family("naive_all_reduce")
tree_all_reduce = Family("tree_all_reduce")
reduce_scatter_ring = Family("reduce_scatter_ring")
all_gather_ring = Family("all_gather_ring")
ring_all_reduce = Family("ring_all_reduce")
halving_doubling = Family("halving_doubling")
segmented_ring = Family("segmented_ring")
average_gradients = Family("average_gradients")
bandwidths = Family("bandwidths")


# ---- right answers, each written in several ways


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def here() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


@naive_all_reduce.accepted
@tree_all_reduce.rejected("no rank takes more than log2(N)")
def naive_loops(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)
    arrived = torch.empty_like(total)
    if rank == 0:
        for other in range(1, world):
            dist.recv(arrived, other)
            total += arrived
        for other in range(1, world):
            dist.send(total, other)
    else:
        dist.send(total, 0)
        dist.recv(total, 0)
    return total


@naive_all_reduce.accepted
def naive_requests_at_the_last_rank(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    root = world - 1
    mine = copy_of(tensor)
    if rank != root:
        dist.isend(mine, root).wait()
        total = torch.zeros_like(mine)
        dist.irecv(total, root).wait()
        return total
    rooms = [torch.empty_like(mine) for _ in range(root)]
    for request in [dist.irecv(room, source) for source, room in enumerate(rooms)]:
        request.wait()
    total = sum(rooms, mine)
    for request in [dist.isend(total, other) for other in range(root)]:
        request.wait()
    return total


@naive_all_reduce.accepted
def naive_in_a_batch(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    mine = copy_of(tensor)
    if world == 1:
        return mine
    others = range(1, world)

    def exchange(operations: list[dist.P2POp]) -> None:
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    if rank:
        exchange([dist.P2POp(dist.isend, mine, 0)])
        exchange([dist.P2POp(dist.irecv, mine, 0)])
        return mine
    rooms = torch.empty(world - 1, *mine.shape, dtype=mine.dtype)
    exchange([dist.P2POp(dist.irecv, rooms[other - 1], other) for other in others])
    mine += rooms.sum(dim=0, dtype=mine.dtype)
    exchange([dist.P2POp(dist.isend, mine, other) for other in others])
    return mine


@tree_all_reduce.accepted
@halving_doubling.rejected("halving and doubling")
def tree_of_lowest_bits(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)
    arrived = torch.empty_like(total)
    children, distance = [], 1
    while distance < world and not rank & distance:
        if rank + distance < world:
            children.append(rank + distance)
        distance *= 2
    for child in children:
        dist.recv(arrived, child)
        total += arrived
    if rank:
        dist.send(total, rank - distance)
        dist.recv(total, rank - distance)
    for child in reversed(children):
        dist.send(total, child)
    return total


@tree_all_reduce.accepted
def tree_like_a_heap(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < world]
    parent = (rank - 1) // 2
    rooms = [torch.empty_like(total) for _ in children]
    for request in [dist.irecv(room, child) for room, child in zip(rooms, children, strict=True)]:
        request.wait()
    for room in rooms:
        total.add_(room)
    if rank:
        dist.send(total, parent)
        dist.recv(total, parent)
    for request in [dist.isend(total, child) for child in children]:
        request.wait()
    return total


@tree_all_reduce.accepted
def tree_by_recursion(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)

    def climb(low: int, high: int) -> None:
        """Bring the sum of the ranks low to high-1 to rank low, the two halves side by side."""
        if high - low > 1:
            middle = (low + high + 1) // 2
            climb(low, middle) if rank < middle else climb(middle, high)
            if rank == middle:
                dist.send(total, low)
            elif rank == low:
                arrived = torch.empty_like(total)
                dist.recv(arrived, middle)
                total.add_(arrived)

    def descend(low: int, high: int) -> None:
        if high - low > 1:
            middle = (low + high + 1) // 2
            if rank == low:
                dist.send(total, middle)
            elif rank == middle:
                dist.recv(total, low)
            descend(low, middle) if rank < middle else descend(middle, high)

    climb(0, world)
    descend(0, world)
    return total


@reduce_scatter_ring.accepted
def scatter_half(chunks: list[torch.Tensor]) -> None:
    rank, world = here()
    for step in range(world - 1):
        outgoing, incoming = (rank - step - 1) % world, (rank - step - 2) % world
        arrived = torch.empty_like(chunks[incoming])
        request = dist.isend(chunks[outgoing], (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
        chunks[incoming] += arrived
        request.wait()


@all_gather_ring.accepted
def gather_half(chunks: list[torch.Tensor]) -> None:
    rank, world = here()
    for step in range(world - 1):
        request = dist.isend(chunks[(rank - step) % world], (rank + 1) % world)
        dist.recv(chunks[(rank - step - 1) % world], (rank - 1) % world)
        request.wait()


@reduce_scatter_ring.accepted
def scatter_half_the_other_way(chunks: list[torch.Tensor]) -> None:
    rank, world = here()
    left, right = (rank - 1) % world, (rank + 1) % world
    for step in range(world - 1):
        incoming = (rank + 2 + step) % world
        arrived = torch.empty_like(chunks[incoming])
        request = dist.irecv(arrived, right)
        dist.send(chunks[(rank + 1 + step) % world], left)
        request.wait()
        chunks[incoming].add_(arrived)


@all_gather_ring.accepted
def gather_half_the_other_way(chunks: list[torch.Tensor]) -> None:
    rank, world = here()
    for step in range(world - 1):
        request = dist.irecv(chunks[(rank + 1 + step) % world], (rank + 1) % world)
        dist.send(chunks[(rank + step) % world], (rank - 1) % world)
        request.wait()


def swap(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """One step of a ring to the right."""
    rank, world = here()
    operations = [
        dist.P2POp(dist.isend, outgoing, (rank + 1) % world),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % world),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()


@reduce_scatter_ring.accepted
def scatter_half_in_batches(chunks: list[torch.Tensor]) -> None:
    rank, world = here()
    travelling = chunks[rank - 1]
    for step in range(2, world + 1):
        own = chunks[(rank - step) % world]
        arrived = torch.zeros_like(own)
        swap(travelling, arrived)
        travelling = own + arrived
    chunks[rank].copy_(travelling)


@all_gather_ring.accepted
def gather_half_in_batches(chunks: list[torch.Tensor]) -> None:
    rank, world = here()
    for step in range(world - 1):
        swap(chunks[(rank - step) % world], chunks[(rank - step - 1) % world])


@ring_all_reduce.accepted
@tree_all_reduce.rejected("In a tree every rank but the root")
@halving_doubling.rejected("halving and doubling: at most")
def ring_of_two_halves(tensor: torch.Tensor) -> torch.Tensor:
    total = copy_of(tensor)
    chunks = list(total.view(-1).tensor_split(dist.get_world_size()))
    scatter_half(chunks)
    gather_half(chunks)
    return total


@ring_all_reduce.accepted
def ring_the_other_way(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.reshape(-1).clone()
    chunks = list(total.tensor_split(dist.get_world_size()))
    scatter_half_the_other_way(chunks)
    gather_half_the_other_way(chunks)
    return total.reshape(tensor.shape)


@ring_all_reduce.accepted
def ring_padded(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    right, left = (rank + 1) % world, (rank - 1) % world
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // world)
    padded = flat.new_zeros(size * world)
    padded[: flat.numel()] = flat
    rows = padded.view(world, size)
    room = flat.new_empty(size)
    for step in range(2 * (world - 1)):
        outgoing, incoming = (rank - step) % world, (rank - step - 1) % world
        request = dist.isend(rows[outgoing], right)
        dist.recv(room, left)
        request.wait()
        if step < world - 1:
            rows[incoming] += room
        else:
            rows[incoming] = room
    return padded[: flat.numel()].view(tensor.shape)


@ring_all_reduce.accepted
def ring_in_batches(tensor: torch.Tensor) -> torch.Tensor:
    world = dist.get_world_size()
    total = copy_of(tensor)
    chunks = list(total.flatten().tensor_split(world)) if total.dim() else [total.view(1)]
    scatter_half_in_batches(chunks)
    gather_half_in_batches(chunks)
    return torch.cat(chunks).view(tensor.shape)


@halving_doubling.accepted
def halving_in_place(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)
    row = total.view(-1)
    power = 1 << (world.bit_length() - 1)
    if rank >= power:
        dist.send(row, rank - power)
        dist.recv(row, rank - power)
        return total
    if rank + power < world:
        arrived = torch.empty_like(row)
        dist.recv(arrived, rank + power)
        row += arrived
    low, high, distance, spans = 0, row.numel(), power // 2, []
    while distance:
        middle, partner = (low + high) // 2, rank ^ distance
        spans.append((low, middle, high, partner))
        keep, give = (row[low:middle], row[middle:high])[:: -1 if rank & distance else 1]
        arrived = torch.empty_like(keep)
        request = dist.isend(give, partner)
        dist.recv(arrived, partner)
        keep += arrived
        request.wait()
        low, high = (middle, high) if rank & distance else (low, middle)
        distance //= 2
    for low, middle, high, partner in reversed(spans):
        mine, theirs = (row[low:middle], row[middle:high])[:: 1 if rank < partner else -1]
        request = dist.isend(mine, partner)
        dist.recv(theirs, partner)
        request.wait()
    if rank + power < world:
        dist.send(row, rank + power)
    return total


@halving_doubling.accepted
def halving_by_recursion(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    row = tensor.reshape(-1).clone()
    power = 1
    while 2 * power <= world:
        power *= 2

    def exchange(outgoing: torch.Tensor, incoming: torch.Tensor, partner: int) -> torch.Tensor:
        operations = [dist.P2POp(dist.irecv, incoming, partner), dist.P2POp(dist.isend, outgoing, partner)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return incoming

    def solve(part: torch.Tensor, distance: int) -> None:
        if not distance:
            return
        halves = part.tensor_split(2)
        side = int(bool(rank & distance))
        mine, theirs = halves[side], halves[1 - side]
        mine += exchange(theirs, torch.empty_like(mine), rank ^ distance)
        solve(mine, distance // 2)
        exchange(mine, theirs, rank ^ distance)

    extra = world - power  # the odd ones among the first 2 * extra ranks stand aside
    if rank < 2 * extra and rank % 2:
        dist.send(row, rank - 1)
        dist.recv(row, rank - 1)
        return row.view(tensor.shape)
    if rank < 2 * extra:
        arrived = torch.empty_like(row)
        dist.recv(arrived, rank + 1)
        row += arrived
    number = rank // 2 if rank < 2 * extra else rank - extra
    actual = [2 * n if n < extra else n + extra for n in range(power)]

    def solve_renumbered(part: torch.Tensor, distance: int) -> None:
        if distance:
            halves = part.tensor_split(2)
            side = int(bool(number & distance))
            partner = actual[number ^ distance]
            halves[side].add_(exchange(halves[1 - side], torch.empty_like(halves[side]), partner))
            solve_renumbered(halves[side], distance // 2)
            exchange(halves[side], halves[1 - side], partner)

    solve_renumbered(row, power // 2)
    if rank < 2 * extra:
        dist.send(row, rank + 1)
    return row.view(tensor.shape)


@halving_doubling.accepted
def halving_with_nearest_partner_first(tensor: torch.Tensor) -> torch.Tensor:
    """Distance doubles while the tensor halves; ranks above the power of two fold in halves (Rabenseifner 2004)."""
    rank, world = here()
    row = copy_of(tensor).view(-1)
    levels = world.bit_length() - 1
    power = 1 << levels
    fold, unfold = rank + power, rank - power

    def trade(outgoing: torch.Tensor, incoming: torch.Tensor, partner: int) -> torch.Tensor:
        request = dist.isend(outgoing, partner)
        dist.recv(incoming, partner)
        request.wait()
        return incoming

    if fold < world or unfold >= 0:
        lower, upper = row.tensor_split(2)
        if unfold >= 0:
            upper += trade(lower, torch.empty_like(upper), unfold)
            dist.send(upper, unfold)
            dist.recv(row, unfold)
            return row.view(tensor.shape)
        lower += trade(upper, torch.empty_like(lower), fold)
        dist.recv(upper, fold)
    part, path = row, []
    for level in range(levels):
        distance = 1 << level
        halves = part.tensor_split(2)
        side = rank >> level & 1
        part = halves[side]
        part += trade(halves[1 - side], torch.empty_like(part), rank ^ distance)
        path.append((part, halves[1 - side], rank ^ distance))
    for mine, theirs, partner in path[::-1]:
        trade(mine, theirs, partner)
    if fold < world:
        dist.send(row, fold)
    return row.view(tensor.shape)


@segmented_ring.accepted
def segments_one_buffer_each(chunks: list[torch.Tensor], segment: int) -> None:
    rank, world = here()
    right, left = (rank + 1) % world, (rank - 1) % world
    if world == 1:
        return
    pieces = [chunk.split(segment) for chunk in chunks]
    sending = [dist.isend(piece, right) for piece in pieces[rank - 1]]
    for step in range(2 * (world - 1)):
        adding, last = step < world - 1, step == 2 * world - 3
        incoming = pieces[(rank - step - 2) % world]
        rooms = [torch.empty_like(piece) if adding else piece for piece in incoming]
        arriving = [dist.irecv(room, left) for room in rooms]
        for piece, room, request in zip(incoming, rooms, arriving, strict=True):
            request.wait()
            if adding:
                piece += room
            if not last:
                sending.append(dist.isend(piece, right))
    for request in sending:
        request.wait()


@segmented_ring.accepted
def segments_blocking_receives_to_the_left(chunks: list[torch.Tensor], segment: int) -> None:
    rank, world = here()
    right, left = (rank + 1) % world, (rank - 1) % world
    requests = []

    def pieces_of(number: int) -> list[torch.Tensor]:
        chunk = chunks[number % world]
        return [chunk[begin : begin + segment] for begin in range(0, chunk.numel(), segment)]

    def pass_on(piece: torch.Tensor) -> None:
        requests.append(dist.isend(piece, left))

    if world > 1:
        for piece in pieces_of(rank + 1):
            pass_on(piece)
    for step in range(world - 1):
        for piece in pieces_of(rank + 2 + step):
            arrived = torch.empty_like(piece)
            dist.recv(arrived, right)
            piece.add_(arrived)
            pass_on(piece)
    for step in range(world - 1):
        for piece in pieces_of(rank + 1 + step):
            dist.recv(piece, right)
            if step < world - 2:
                pass_on(piece)
    for request in requests:
        request.wait()


@segmented_ring.accepted
def segments_step_by_step(chunks: list[torch.Tensor], segment: int) -> None:
    """All segments of a step under way together; the next step begins when they are there."""
    rank, world = here()
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(2 * world - 2):
        outgoing, incoming = chunks[(rank - 1 - step) % world], chunks[(rank - 2 - step) % world]
        arrived = torch.empty_like(incoming)
        operations = [dist.P2POp(dist.isend, piece, right) for piece in outgoing.split(segment)]
        operations += [dist.P2POp(dist.irecv, piece, left) for piece in arrived.split(segment)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        if step < world - 1:
            incoming += arrived
        else:
            incoming.copy_(arrived)


@average_gradients.accepted
def mean_in_one_ring(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) / dist.get_world_size()
    parts = ring_of_two_halves(flat).split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


@average_gradients.accepted
def mean_in_a_buffer(gradients: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    buffer = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
    start, places = 0, []
    for gradient in gradients:
        places.append(buffer[start : start + gradient.numel()].view(gradient.shape))
        places[-1].copy_(gradient).div_(dist.get_world_size())
        start += gradient.numel()
    buffer = ring_padded(buffer)
    start, means = 0, []
    for gradient in gradients:
        means.append(buffer[start : start + gradient.numel()].view(gradient.shape))
        start += gradient.numel()
    return tuple(means)


@average_gradients.accepted
def mean_summed_in_float32(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The other way around the overflow costs nothing on the wire as long as halves travel: scale each half first."""
    scale = 1.0 / dist.get_world_size()
    flat = torch.nn.utils.parameters_to_vector([gradient * scale for gradient in gradients])
    total = ring_the_other_way(flat)
    means = [torch.empty_like(gradient) for gradient in gradients]
    for mean, part in zip(means, total.split([mean.numel() for mean in means]), strict=True):
        mean.copy_(part.reshape(mean.shape))
    return means


@bandwidths.accepted
def bandwidths_in_one_line(size: int, seconds: float, world: int) -> tuple[float, float]:
    return size / seconds, 2 * (world - 1) * size / (world * seconds)


@bandwidths.accepted
def bandwidths_as_a_list(size: int, seconds: float, world: int) -> list[float]:
    algorithm = size / seconds
    return [algorithm, algorithm * 2 * (1 - 1 / world)]


@bandwidths.accepted
def bandwidths_from_a_tensor(size: int, seconds: float, world: int) -> tuple[float, float]:
    rate = torch.tensor(size, dtype=torch.float64) / seconds
    return float(rate), (rate * 2 * (world - 1) / world).item()


# ---- wrong answers, and what a learner must read


@ring_all_reduce.rejected("whole tensors gives the right sum")
def ring_of_whole_tensors(tensor: torch.Tensor) -> torch.Tensor:
    """P12: the right sum, N/2 times the traffic."""
    rank, world = here()
    total, travelling = copy_of(tensor), copy_of(tensor)
    for _ in range(world - 1):
        arrived = torch.empty_like(total)
        request = dist.isend(travelling, (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
        request.wait()
        total += arrived
        travelling = arrived
    return total


@ring_all_reduce.rejected("That is the mean")
@naive_all_reduce.rejected("That is the mean")
def ring_that_averages(tensor: torch.Tensor) -> torch.Tensor:
    total = ring_of_two_halves(tensor)
    return (total / dist.get_world_size()).to(tensor.dtype)


@ring_all_reduce.rejected("3 ranks")
def ring_for_two(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)
    chunks = total.view(-1).tensor_split(2)
    if world > 1:
        for incoming, adding in ((chunks[rank % 2], True), (chunks[1 - rank % 2], False)):
            outgoing = chunks[1 - rank % 2] if adding else chunks[rank % 2]
            arrived = torch.empty_like(incoming)
            request = dist.isend(outgoing, rank ^ 1) if rank ^ 1 < world else None
            if request:
                dist.recv(arrived, rank ^ 1)
                request.wait()
                incoming.copy_(incoming + arrived if adding else arrived)
    return total


@ring_all_reduce.rejected("1 of 5 elements are wrong")
def ring_where_n_divides(tensor: torch.Tensor) -> torch.Tensor:
    world = dist.get_world_size()
    total = copy_of(tensor)
    size = total.numel() // world
    chunks = [total.view(-1)[n * size : (n + 1) * size] for n in range(world)]
    scatter_half(chunks)
    gather_half(chunks)
    return total


@ring_all_reduce.rejected("IndexError")
def ring_with_chunk(tensor: torch.Tensor) -> torch.Tensor:
    """torch.chunk(4) of five elements gives three chunks."""
    total = copy_of(tensor)
    chunks = list(total.view(-1).chunk(dist.get_world_size()))
    scatter_half(chunks)
    gather_half(chunks)
    return total


@ring_all_reduce.rejected("Work on tensor.clone()")
def ring_in_its_input(tensor: torch.Tensor) -> torch.Tensor:
    chunks = list(tensor.view(-1).tensor_split(dist.get_world_size()) if tensor.is_contiguous() else [])
    if not chunks:
        return ring_of_two_halves(tensor)
    scatter_half(chunks)
    gather_half(chunks)
    return tensor.clone()


@ring_all_reduce.rejected("a call of all_reduce")
@naive_all_reduce.rejected("a call of all_reduce")
@tree_all_reduce.rejected("a call of all_reduce")
@halving_doubling.rejected("a call of all_reduce")
def ring_that_calls_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    total = copy_of(tensor)
    dist.all_reduce(total)
    return total


@ring_all_reduce.rejected("A deadlock", "send to rank 1", "send to rank 0", state="stopped")
def ring_that_deadlocks(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)
    chunks = total.view(-1).tensor_split(world)
    for step in range(world - 1):
        arrived = torch.empty_like(chunks[(rank - step - 2) % world])
        dist.send(chunks[(rank - step - 1) % world], (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
    return total


@ring_all_reduce.rejected("too many messages wait for one another")
def ring_by_turns(tensor: torch.Tensor) -> torch.Tensor:
    """Even ranks send first, odd ranks receive first: no deadlock, and twice the rounds."""
    rank, world = here()
    right, left = (rank + 1) % world, (rank - 1) % world
    total = copy_of(tensor)
    chunks = list(total.view(-1).tensor_split(world))
    for step in range(2 * (world - 1)):
        outgoing, incoming = chunks[(rank - step - 1) % world], chunks[(rank - step - 2) % world]
        arrived = torch.empty_like(incoming)
        if rank % 2 == 0:
            dist.send(outgoing, right)
            dist.recv(arrived, left)
        else:
            dist.recv(arrived, left)
            dist.send(outgoing, right)
        incoming.copy_(incoming + arrived if step < world - 1 else arrived)
    return total


@ring_all_reduce.rejected("a rank sends to one neighbour")
@naive_all_reduce.rejected("sends its tensor to the collecting rank once")
@halving_doubling.rejected("halving and doubling")
def everyone_to_everyone(tensor: torch.Tensor) -> torch.Tensor:
    """Each rank sends chunk c straight to rank c: the ring's bytes, but not along a ring."""
    rank, world = here()
    total = copy_of(tensor)
    chunks = total.view(-1).tensor_split(world)
    others = [other for other in range(world) if other != rank]
    rooms = [torch.empty_like(chunks[rank]) for _ in others]
    requests = [dist.isend(chunks[other], other) for other in others]
    requests += [dist.irecv(room, other) for room, other in zip(rooms, others, strict=True)]
    for request in requests:
        request.wait()
    for room in rooms:
        chunks[rank].add_(room)
    requests = [dist.isend(chunks[rank], other) for other in others]
    requests += [dist.irecv(chunks[other], other) for other in others]
    for request in requests:
        request.wait()
    return total


@ring_all_reduce.rejected("whole tensors gives the right sum")
def sum_in_an_order_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)
    others = [(rank + apart) % world for apart in range(1, world)]
    rooms = [torch.empty_like(total) for _ in others]
    requests = [dist.isend(copy_of(tensor), other) for other in others]
    requests += [dist.irecv(room, other) for room, other in zip(rooms, others, strict=True)]
    for request in requests:
        request.wait()
    for room in rooms:
        total += room
    return total


@naive_all_reduce.rejected("order of addition")
def naive_whose_root_adds_again(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    if rank:
        return naive_loops(tensor)
    rooms = [torch.empty_like(copy_of(tensor)) for _ in range(1, world)]
    for other, room in enumerate(rooms, start=1):
        dist.recv(room, other)
    total, again = copy_of(tensor), copy_of(tensor)
    for room in rooms:
        total += room
    for room in reversed(rooms):
        again += room
    for other in range(1, world):
        dist.send(total, other)
    return again


@ring_all_reduce.rejected("dtype int64")
def ring_of_float32(tensor: torch.Tensor) -> torch.Tensor:
    return ring_of_two_halves(tensor.float())


@ring_all_reduce.rejected("the shape")
def ring_that_flattens(tensor: torch.Tensor) -> torch.Tensor:
    return ring_of_two_halves(tensor).view(-1)


@ring_all_reduce.rejected("no barrier is needed")
def ring_with_a_barrier(tensor: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    return ring_of_two_halves(tensor)


@ring_all_reduce.rejected("is there a return?")
def nothing_comes_back(tensor: torch.Tensor) -> None:
    ring_of_two_halves(tensor)


@naive_all_reduce.rejected("must travel back")
@tree_all_reduce.rejected("must travel back")
def sum_on_rank_0_alone(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)
    for other in range(1, world):
        if rank == 0:
            arrived = torch.empty_like(total)
            dist.recv(arrived, other)
            total += arrived
        elif rank == other:
            dist.send(total, 0)
    return total


@ring_all_reduce.rejected("return a clone")
def the_input_itself_on_one_rank(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if dist.get_world_size() == 1 else ring_of_two_halves(tensor)


@naive_all_reduce.rejected("2 rounds")
@tree_all_reduce.rejected("halves in each round")
def from_hand_to_hand(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)
    if rank:
        arrived = torch.empty_like(total)
        dist.recv(arrived, rank - 1)
        total += arrived
    if rank < world - 1:
        dist.send(total, rank + 1)
        dist.recv(total, rank + 1)
    if rank:
        dist.send(total, rank - 1)
    return total


@halving_doubling.rejected("3 ranks", "The tensor of rank 2 is missing in it.")
def halving_for_powers_of_two(tensor: torch.Tensor) -> torch.Tensor:
    """The ranks above the largest power of two take no part."""
    rank, world = here()
    total = copy_of(tensor)
    power = 1 << (world.bit_length() - 1)
    if rank >= power:
        return total
    parts, distance = [(total.view(-1), 0)], power // 2
    while distance:
        part = parts[-1][0]
        halves = part.tensor_split(2)
        side = int(bool(rank & distance))
        arrived = torch.empty_like(halves[side])
        request = dist.isend(halves[1 - side], rank ^ distance)
        dist.recv(arrived, rank ^ distance)
        request.wait()
        halves[side].add_(arrived)
        parts.append((halves[side], distance))
        distance //= 2
    for (whole, _), (part, distance) in reversed(list(itertools.pairwise(parts))):
        other = whole.tensor_split(2)[1 - int(bool(rank & distance))]
        request = dist.isend(part, rank ^ distance)
        dist.recv(other, rank ^ distance)
        request.wait()
    return total


@halving_doubling.rejected("half of what the rank is still responsible for")
def doubling_of_whole_tensors(tensor: torch.Tensor) -> torch.Tensor:
    rank, world = here()
    total = copy_of(tensor)
    if world & (world - 1):
        return halving_in_place(tensor)
    distance = 1
    while distance < world:
        arrived = torch.empty_like(total)
        request = dist.isend(total, rank ^ distance)
        dist.recv(arrived, rank ^ distance)
        request.wait()
        total += arrived
        distance *= 2
    return total


@reduce_scatter_ring.rejected("The sum stands in the list")
def scatter_into_the_list(chunks: list[torch.Tensor]) -> None:
    rank, world = here()
    for step in range(world - 1):
        incoming = (rank - step - 2) % world
        arrived = torch.empty_like(chunks[incoming])
        request = dist.isend(chunks[(rank - step - 1) % world], (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
        request.wait()
        chunks[incoming] = chunks[incoming] + arrived


@reduce_scatter_ring.rejected("Begin the journey so that chunk r ends on rank r")
def scatter_one_off(chunks: list[torch.Tensor]) -> None:
    """Chunk r + 1 ends on rank r, as in some textbooks; the lesson wants chunk r."""
    rank, world = here()
    for step in range(world - 1):
        incoming = (rank - step - 1) % world
        arrived = torch.empty_like(chunks[incoming])
        request = dist.isend(chunks[(rank - step) % world], (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
        request.wait()
        chunks[incoming] += arrived


@reduce_scatter_ring.rejected("a call of reduce")
def scatter_with_the_framework(chunks: list[torch.Tensor]) -> None:
    for root, chunk in enumerate(chunks):
        dist.reduce(chunk, root)


@reduce_scatter_ring.rejected("whole tensors")
def scatter_whole_tensors(chunks: list[torch.Tensor]) -> None:
    rank, _ = here()
    flat = torch.cat(chunks)
    total = ring_of_whole_tensors(flat)
    chunks[rank].copy_(total.tensor_split(len(chunks))[rank])


@all_gather_ring.rejected("It stands in the list")
def gather_into_the_list(chunks: list[torch.Tensor]) -> None:
    rank, world = here()
    for step in range(world - 1):
        incoming = (rank - step - 1) % world
        arrived = torch.empty_like(chunks[incoming])
        request = dist.isend(chunks[(rank - step) % world], (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
        request.wait()
        chunks[incoming] = arrived


@all_gather_ring.rejected("a rank sends to one neighbour")
def gather_from_the_owner(chunks: list[torch.Tensor]) -> None:
    rank, world = here()
    requests = [dist.isend(chunks[rank], other) for other in range(world) if other != rank]
    requests += [dist.irecv(chunk, owner) for owner, chunk in enumerate(chunks) if owner != rank]
    for request in requests:
        request.wait()


@all_gather_ring.rejected("chunk")
def gather_one_step_short(chunks: list[torch.Tensor]) -> None:
    rank, world = here()
    for step in range(world - 2):
        swap(chunks[(rank - step) % world], chunks[(rank - step - 1) % world])


@all_gather_ring.rejected("a call of broadcast")
def gather_with_broadcast(chunks: list[torch.Tensor]) -> None:
    for owner, chunk in enumerate(chunks):
        dist.broadcast(chunk, owner)


@segmented_ring.rejected("not for the segments beside it")
def segments_one_after_another(chunks: list[torch.Tensor], segment: int) -> None:
    rank, world = here()
    for step in range(2 * (world - 1)):
        outgoing = chunks[(rank - step - 1) % world].split(segment)
        incoming = chunks[(rank - step - 2) % world].split(segment)
        for number in range(max(len(outgoing), len(incoming))):
            request = dist.isend(outgoing[number], (rank + 1) % world) if number < len(outgoing) else None
            if number < len(incoming):
                arrived = torch.empty_like(incoming[number])
                dist.recv(arrived, (rank - 1) % world)
                incoming[number].copy_(incoming[number] + arrived if step < world - 1 else arrived)
            if request:
                request.wait()


@segmented_ring.rejected("one segment of one chunk")
def segments_that_are_whole_chunks(chunks: list[torch.Tensor], segment: int) -> None:
    scatter_half(chunks)
    gather_half(chunks)


@average_gradients.rejected("one ring for all of them")
def a_mean_per_gradient(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    world = dist.get_world_size()
    return [ring_of_two_halves(gradient / world) for gradient in gradients]


@average_gradients.rejected("divide first")
def a_mean_divided_last(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    flat = ring_of_two_halves(torch.cat([gradient.reshape(-1) for gradient in gradients])) / dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    return [part.view_as(gradient) for part, gradient in zip(flat.split(sizes), gradients, strict=True)]


@average_gradients.rejected("That is the sum")
def a_sum_of_gradients(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return [ring_of_two_halves(gradient) for gradient in gradients]


@average_gradients.rejected("return new tensors")
def a_mean_in_place(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    for gradient, mean in zip(gradients, mean_in_one_ring(gradients), strict=True):
        gradient.copy_(mean)
    return [gradient.clone() for gradient in gradients]


@average_gradients.rejected("a call of all_reduce")
def a_mean_by_the_framework(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    means = [gradient / dist.get_world_size() for gradient in gradients]
    for mean in means:
        dist.all_reduce(mean)
    return means


@average_gradients.rejected("one ring for all of them")
def a_mean_of_whole_tensors(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) / dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    parts = ring_of_whole_tensors(flat).split(sizes)
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


@bandwidths.rejected("2(N-1)/N")
def bandwidths_that_forgets_the_bus(size: int, seconds: float, world: int) -> object:
    return (size / seconds, size / seconds)


@bandwidths.rejected("other's place")
def bandwidths_in_the_other_order(size: int, seconds: float, world: int) -> object:
    return bandwidths_in_one_line(size, seconds, world)[::-1]


@bandwidths.rejected("two numbers")
def bandwidths_of_the_caller_alone(size: int, seconds: float, world: int) -> object:
    return size / seconds


@bandwidths.rejected("not gigabytes")
def bandwidths_in_gigabytes(size: int, seconds: float, world: int) -> object:
    return (size / seconds / 1e9, 1.0)
