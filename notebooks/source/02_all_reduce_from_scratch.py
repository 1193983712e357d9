# %% [markdown]
# # 02 All-reduce from scratch
#
# **How do $N$ workers agree on a sum?** Every step of data-parallel training ends with the same question: each worker
# holds a gradient, and all of them need the sum. The operation is called *all-reduce*. There are many ways to do it,
# all of them give the same numbers, and some take a hundred times as long as others. You build five, count what they
# send, and find out when each one wins.
#
# | | |
# |---|---|
# | You build | a naive all-reduce, a tree, a ring, halving and doubling, and a ring that sends while it adds |
# | You need | lesson 01: ranks, `send` and `recv`, `isend` and `wait` |
# | Time | about 3 1/2 hours, of which 2 1/2 for the exercises; good places for a break are marked |
# | Hardware | any; everything here runs on the CPU, also where there are GPUs |

# %%
# @first-cell

# %%
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_utils import Link, check, hint, launch, predict, progress
from course_utils.datasets import digits
from course_utils.exercises import answer_needed, answered, compare
from course_utils.simulate import run_simulated
from course_utils.visuals import chunk_movement, message_rounds, time_against_size

# %% [markdown]
# ## What has to be summed
#
# The data are the handwritten digits of lesson 01, the network is larger, so that its gradient is worth talking about.

# %%
WORLD = 4
data = digits("train")
count = len(data) - len(data) % WORLD
images, labels = torch.from_numpy(data.images)[:count], torch.from_numpy(data.labels)[:count]


def make_model():
    torch.manual_seed(2)
    layers = [torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))


def gradients_of(model, images, labels):
    return list(torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters())))


whole = gradients_of(make_model(), images, labels)
length = sum(gradient.numel() for gradient in whole)
print(f"{len(whole)} gradients with {length:,} numbers: {4 * length / 1e6:.2f} MB")
print(f"divided among {WORLD} ranks: {length // WORLD:,} each, and {length % WORLD} left over")

# %% [markdown]
# Six tensors, a little over a megabyte, and a length that four does not divide. Language models have gradients of many
# gigabytes, and they are reduced in every step. What follows is about the sum; who wants the mean divides (and the last
# exercise shows where).
#
# ## Everything through one rank
#
# The first idea: every rank sends its tensor to rank 0, rank 0 adds them up and sends the sum back to everyone.
#
# **Predict.** Four ranks, a tensor of 8 MB. How many MB does rank 0 *send*?

# %%
# @exercise naive_megabytes points=1 minutes=2 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 24
### END SOLUTION
predict("naive_megabytes", guess, unit="MB")

# %% [markdown]
# ### Exercise: the naive all-reduce (8 minutes, 2 points)
#
# Write `naive_all_reduce(tensor)`: return the sum of all ranks' tensors, on every rank, in a new tensor. It has to work
# for any number of ranks and any shape. A tensor may be a transposed view, and `send` takes only contiguous ones: begin
# with `tensor.clone(memory_format=torch.contiguous_format)`.
#
# `check` tries 1 to 5 ranks, and in this lesson it also counts messages, bytes and **rounds**. A message that waits for
# no other is in round 1; one that could be sent only after another had arrived at its sender is in the round after that
# one. So messages that a rank sends one after the other share a round, as long as it need not receive in between. Here:
# two messages for every rank but rank 0, in two rounds. `hint("naive_all_reduce")` helps.


# %%
# @exercise naive_all_reduce points=2 minutes=8
def naive_all_reduce(tensor):
    """Return the sum of `tensor` over all ranks, added up by rank 0."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    total = tensor.clone(memory_format=torch.contiguous_format)
    if rank > 0:
        dist.send(total, 0)
        dist.recv(total, 0)
        return total
    arrived = torch.empty_like(total)
    for other in range(1, world):
        dist.recv(arrived, other)
        total += arrived
    for other in range(1, world):
        dist.send(total, other)
    return total
    ### END SOLUTION


naive_all_reduce = check("naive_all_reduce", naive_all_reduce)


# %% [markdown]
# Run it on 8 MB with `trace=True`, which notes every message that leaves a rank.

# %%
EIGHT_MB = torch.ones(2_000_000)
traces = {}


def report(trace):
    print("MB sent by each rank:    ", [round(rank.bytes_sent / 1e6, 2) for rank in trace])
    print("MB received by each rank:", [round(rank.bytes_received / 1e6, 2) for rank in trace])
    print("messages in all:", sum(rank.messages_sent for rank in trace), " rounds:", trace.rounds)


def count_messages(name, all_reduce):
    trace = launch(all_reduce, EIGHT_MB, nprocs=WORLD, trace=True).trace
    report(trace)
    if trace.rounds:
        traces[name] = trace
    else:
        print("(no messages: as long as your own version is not right, the framework does the work)")


count_messages("naive", naive_all_reduce)

# %% [markdown]
# Only two rounds, since the tensors travel to rank 0 side by side. But rank 0 sends and receives $(N-1)S$ bytes each
# while every other rank moves $S$ and waits. With 100 ranks, rank 0 would move 99 times as much as anyone else: its
# cable decides how long all of them take.
#
# ## Up a tree and down again
#
# The adding can be shared. In the first round rank 1 gives its tensor to rank 0, rank 3 to rank 2, and so on: half of
# the ranks are done. In the next round rank 2 gives its partial sum to rank 0, rank 6 to rank 4. After $\lceil \log_2 N
# \rceil$ rounds rank 0 has the total, and it goes back down the same way. It is called a *binomial tree*.
#
# ### Exercise: the tree (20 minutes, 4 points)
#
# Write `tree_all_reduce(tensor)` with at most $2 \lceil \log_2 N \rceil$ rounds and $2(N-1)$ messages in all, for any
# $N$. No rank may receive (or send) more than $\lceil \log_2 N \rceil$ messages. The lowest bit of a rank that is set,
# `rank & -rank`, is how far below it the rank stands to which it gives its sum: 1 for rank 5, 2 for rank 6, 4 for rank
# 4. (It is 0 for rank 0, which keeps the sum.)


# %%
# @exercise tree_all_reduce points=4 minutes=20
def tree_all_reduce(tensor):
    """Return the sum of `tensor` over all ranks, added up along a binomial tree."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    total = tensor.clone(memory_format=torch.contiguous_format)
    arrived = torch.empty_like(total)
    distance, children = 1, []
    while distance < world and not rank & distance:
        if rank + distance < world:
            children.append(rank + distance)
        distance *= 2
    for child in children:
        dist.recv(arrived, child)
        total += arrived
    if rank > 0:
        dist.send(total, rank - distance)
        dist.recv(total, rank - distance)
    for child in reversed(children):  # the farthest first: it has the most to pass on
        dist.send(total, child)
    return total
    ### END SOLUTION


tree_all_reduce = check("tree_all_reduce", tree_all_reduce)

# %%
count_messages("tree", tree_all_reduce)

# %% [markdown]
# The same six messages. The busiest rank has less to do, $S \log_2 N$ in place of $(N-1)S$ each way, which is a small
# gain for 4 ranks and a large one for 64. But look at the unused capacity: in each round most ranks are idle, and every
# message still carries the whole tensor.
#
# ## One chunk at a time
#
# Nothing forces one rank to add the whole tensor. Cut it into $N$ chunks and let rank $r$ be responsible for chunk $r$.
# The ranks stand in a ring. A partial sum of chunk $r$ starts at rank $r+1$ and moves to the right, from rank to rank,
# everyone adding its own part, until it is finished on rank $r$. All $N$ chunks travel at the same time, so in every
# round *every* rank sends one chunk and receives one. This half is called **reduce-scatter**. Then the finished chunks
# go around once more, to be handed out: **all-gather**. The two make an all-reduce (Patarasuk and Yuan, 2009).
#
# **Predict.** Four ranks, a tensor of 8 MB. How many MB does each rank *send* in total?

# %%
# @exercise ring_megabytes points=1 minutes=2 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 12
### END SOLUTION
predict("ring_megabytes", guess, unit="MB")

# %% [markdown]
# First, a trap. PyTorch has two functions that cut a tensor into $N$ parts.

# %%
five = torch.arange(5.0)
print("chunk(4):       ", [part.tolist() for part in five.chunk(WORLD)])
print("tensor_split(4):", [part.tolist() for part in five.tensor_split(WORLD)])
parts = five.tensor_split(WORLD)
parts[1].add_(10)
print("the tensor after parts[1].add_(10):", five.tolist())

# %% [markdown]
# `chunk(4)` of five numbers gives *three* chunks, and rank 3 would have none. `tensor_split` gives as many as were
# asked for, which differ by at most one number. Its parts are views: what is done to a part in place happens to the
# tensor.
#
# Before the real thing, one round of the journey in slow motion. `run_simulated` runs a function in ranks that live in
# this one process and take turns; it shows who sent what, and one variable, round by round. Rank $r$ brings the numbers
# $10r$ to $10r + 3$.


# %%
def first_round(numbers):
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = numbers + 10 * rank
    chunks = numbers.tensor_split(world)
    outgoing, incoming = chunks[(rank - 1) % world], chunks[(rank - 2) % world]
    arrived = torch.empty_like(incoming)
    request = dist.isend(outgoing, (rank + 1) % world)  # not a blocking send: all ranks would wait for each other
    dist.recv(arrived, (rank - 1) % world)
    incoming += arrived
    request.wait()


run_simulated(first_round, torch.arange(4.0), nprocs=WORLD, watch="numbers").steps

# %% [markdown]
# Rank 0 sent its chunk 3 to rank 1, which added its own, and so on: each row now has one number (marked `*`) with the
# parts of two ranks. Two more such rounds, each with the chunk that has just arrived, and every rank has one finished
# sum.
#
# ### Exercise: the reduce-scatter half (15 minutes, 4 points)
#
# Write `reduce_scatter_ring(chunks)`. `chunks` is a list of $N$ views of one flat tensor, as `tensor_split` makes them.
# Work on them in place: at the end, `chunks[rank]` must hold the finished sum; what is left in the others does not
# matter. Each rank sends $N-1$ messages of one chunk, all to the same neighbour, in $N-1$ rounds. Chunks may have
# different lengths, and some none at all.


# %%
# @exercise reduce_scatter_ring points=4 minutes=15
def reduce_scatter_ring(chunks):
    """Sum chunk r over all ranks into chunks[r] of rank r, in place, around a ring."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    room = torch.empty_like(chunks[0])  # tensor_split puts the longest chunk first
    for step in range(world - 1):
        outgoing, incoming = chunks[(rank - step - 1) % world], chunks[(rank - step - 2) % world]
        arrived = room[: len(incoming)]
        receiving = dist.irecv(arrived, left)  # before the send: whoever sends then finds the room ready
        sending = dist.isend(outgoing, right)
        receiving.wait()
        incoming += arrived
        sending.wait()
    ### END SOLUTION


reduce_scatter_ring = check("reduce_scatter_ring", reduce_scatter_ring)

# %% [markdown]
# ### Exercise: the all-gather half (8 minutes, 3 points)
#
# Write `all_gather_ring(chunks)`. On entry `chunks[r]` is finished on rank $r$ alone; at the end all chunks are
# finished everywhere. Again in place, again $N-1$ messages and rounds.


# %%
# @exercise all_gather_ring points=3 minutes=8
def all_gather_ring(chunks):
    """Give chunks[r] of rank r to every rank, in place, around a ring."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    receiving = [dist.irecv(chunks[(rank - step - 1) % world], left) for step in range(world - 1)]  # in order
    for step, arriving in enumerate(receiving):
        sending = dist.isend(chunks[(rank - step) % world], right)
        arriving.wait()
        sending.wait()
    ### END SOLUTION


all_gather_ring = check("all_gather_ring", all_gather_ring)

# %% [markdown]
# ### Exercise: the whole ring (10 minutes, 4 points)
#
# Write `ring_all_reduce(tensor)` from the two halves: any shape, any length, contiguous or not, integers as well as
# floats. The input stays as it is. `check` counts: each rank may send between $2(N-1)\lfloor L/N \rfloor$ and
# $2(N-1)\lceil L/N \rceil$ of the $L$ numbers, in $2(N-1)$ rounds.


# %%
# @exercise ring_all_reduce points=4 minutes=10
def ring_all_reduce(tensor):
    """Return the sum of `tensor` over all ranks, by a ring."""
    ### BEGIN SOLUTION
    total = tensor.clone(memory_format=torch.contiguous_format)
    chunks = list(total.view(-1).tensor_split(dist.get_world_size()))
    reduce_scatter_ring(chunks)
    all_gather_ring(chunks)
    return total
    ### END SOLUTION


ring_all_reduce = check("ring_all_reduce", ring_all_reduce)

# %% [markdown]
# Theory says $2\frac{N-1}{N}S$ bytes and $2(N-1)$ rounds for each rank. Count.

# %%
count_messages("ring", ring_all_reduce)
for world in (2, 3, 4, 6, 8) if "ring" in traces else ():
    trace = launch(ring_all_reduce, EIGHT_MB, nprocs=world, trace=True).trace
    sent, theory = max(rank.bytes_sent for rank in trace) / 1e6, 2 * (world - 1) / world * 8
    print(f"{world} ranks: {sent:5.2f} MB sent by a rank (theory {theory:5.2f}), ", end="")
    print(f"{trace.rounds:2} rounds (theory {2 * (world - 1):2})")

# %% [markdown]
# What one rank sends hardly grows with the number of ranks: it approaches $2S$ and never gets there. Can one do with
# less? Each number of the result has $N$ addends on $N$ ranks. It takes $N-1$ transfers to bring them together and
# $N-1$ more to hand the sum out, so all ranks together send at least $2(N-1)S$: on average $2\frac{N-1}{N}S$ each, and
# the busiest one no less. (With the naive way ranks 1 to 3 send only $S$, and rank 0 pays for it.) In the ring all
# ranks send just the average: it is **bandwidth-optimal**. What does grow is the number of rounds.
#
# Here are the chunks on their way, drawn from the messages that were traced. A colour is one chunk, numbered after the
# rank where its journey begins.

# %%
chunk_movement(traces["ring"], "A ring of 4 ranks: 8 MB in chunks of 2 MB") if "ring" in traces else None

# %% [markdown]
# Follow one colour: three rounds of adding, and then three more of handing out, without a pause. Then look at one
# column: every rank sends and every rank receives, in every round.
#
# ### A ring that is none
#
# Two widely used courses teach this one. It needs a ring of ranks too, and its sum is right.


# %%
def passing_everything_on(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    total, outgoing = tensor.clone(), tensor.clone()
    for _ in range(world - 1):
        arrived = torch.empty_like(tensor)
        request = dist.isend(outgoing, (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
        request.wait()
        total += arrived
        outgoing = arrived
    return total


run = launch(passing_everything_on, EIGHT_MB, nprocs=WORLD, trace=True)
print("the sum is right:", all(bool((total == WORLD).all()) for total in run.results))
report(run.trace)

# %% [markdown]
# Twice the bytes of the ring with 4 ranks, and $N/2$ times with $N$: each rank sends the whole tensor $N-1$ times. A
# test of the value alone cannot tell the two apart. That is why `check` counts. *(A good place for a break.)*
#
# ## Halving and doubling
#
# The ring takes $2(N-1)$ rounds, the tree $2\log_2 N$. Can one have the bytes of the ring in the rounds of the tree?
# For that, exchange with *distant* ranks and halve what you are responsible for each time. With 4 ranks:
#
# - Round 1: rank 0 and rank 2 are partners, and 1 and 3. Rank 0 will be responsible for the first half of the tensor,
#   rank 2 for the second. Each sends the half that the other is responsible for, and adds what arrives to its own half.
# - Round 2: partners are 0 and 1, 2 and 3. Each pair halves its half in the same way. Now every rank has one finished
#   quarter: a reduce-scatter in two rounds.
# - Then the same backwards: partners exchange what they have finished, and that doubles in each round.
#
# In general the partner is `rank ^ distance`, for distances $N/2, \dots, 2, 1$ and back, and `rank & distance` tells
# which of two partners takes the second half. If $N$ is no power of two, let
# $p$ be the largest power of two below it. Each rank $r \ge p$ gives its tensor to rank $r - p$ and waits for the
# result; the first $p$ ranks do the work (Thakur, Rabenseifner and Gropp, 2005).
#
# ### Exercise: halving and doubling (35 minutes, 6 points)
#
# Write `halving_doubling(tensor)` for any $N$: at most $2 \log_2 p$ rounds, and two more if $N$ is no power of two.
# Write it for powers of two first. `check` tries 1 to 5 ranks, and 8.


# %%
# @exercise halving_doubling points=6 minutes=35
def halving_doubling(tensor):
    """Return the sum of `tensor` over all ranks, by recursive halving and doubling."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    total = tensor.clone(memory_format=torch.contiguous_format)
    row = total.view(-1)
    power = 1 << (world.bit_length() - 1)
    if rank >= power:  # folded: a partner below does the work
        dist.send(row, rank - power)
        dist.recv(row, rank - power)
        return total
    if rank + power < world:
        arrived = torch.empty_like(row)
        dist.recv(arrived, rank + power)
        row += arrived

    def exchange(outgoing, incoming, partner):
        request = dist.isend(outgoing, partner)
        dist.recv(incoming, partner)
        request.wait()
        return incoming

    mine, path, distance = row, [], power // 2
    while distance:
        lower, upper = mine.tensor_split(2)
        mine, theirs = (upper, lower) if rank & distance else (lower, upper)
        mine += exchange(theirs, torch.empty_like(mine), rank ^ distance)
        path.append((mine, theirs, rank ^ distance))
        distance //= 2
    for mine, theirs, partner in reversed(path):
        exchange(mine, theirs, partner)
    if rank + power < world:
        dist.send(row, rank + power)
    return total
    ### END SOLUTION


halving_doubling = check("halving_doubling", halving_doubling)

# %%
count_messages("halving-doubling", halving_doubling)
for world in (4, 5, 8) if "halving-doubling" in traces else ():
    trace = launch(halving_doubling, EIGHT_MB, nprocs=world, trace=True).trace
    busiest = max(rank.bytes_sent for rank in trace) / 1e6
    print(f"{world} ranks: {trace.rounds} rounds, the busiest rank sends {busiest:5.2f} MB")

# %% [markdown]
# With 4 and 8 ranks: the bytes of the ring in the rounds of the tree. With 5 ranks, one rank more than 4, two more
# rounds, and the rank that does the work for the fifth sends another whole tensor. That is the price of not being a
# power of two.
#
# The four side by side. An arrow is a message, as thick as it is large.

# %%
message_rounds(traces) if len(traces) == 4 else None

# %% [markdown]
# Left to right: fewer and fatter, or more and thinner. Which is quicker is a question of price.
#
# ## What a message costs
#
# The simplest useful model of a network has two numbers (Hockney, 1994). A message of $m$ bytes takes $\alpha + \beta
# m$ seconds: $\alpha$ for being a message at all (latency), $\beta$ for each byte (one over the bandwidth). For an
# algorithm, $\alpha$ counts once in every round, and $\beta$ for the bytes that go over the link one after the other:
#
# | | rounds | bytes, one after the other |
# |---|---|---|
# | naive | $2$ | $N S$ |
# | tree | $2 \log_2 N$ | $2 S \log_2 N$ |
# | ring | $2(N-1)$ | $2 \frac{N-1}{N} S$ |
# | halving-doubling | $2 \log_2 N$ | $2 \frac{N-1}{N} S$ |
#
# (Naive: the tensors travel to rank 0 side by side, one $S$, and back one by one, $(N-1)S$.)
#
# From here on the four are timed. One that is not yours yet is left out: what stands in for it would be timed under a
# wrong name.

# %%
FOUR = {
    "naive": naive_all_reduce,
    "tree": tree_all_reduce,
    "ring": ring_all_reduce,
    "halving-doubling": halving_doubling,
}
ALGORITHMS = {name: FOUR[name] for name in FOUR if name in traces}
if len(ALGORITHMS) < len(FOUR):
    print("left out until your own version is right:", ", ".join(name for name in FOUR if name not in traces))


def rounds_and_bytes(name, world, size):
    """What the table says; `world` is a power of two."""
    levels, share = world.bit_length() - 1, 2 * (world - 1) / world * size
    return {
        "naive": (2, world * size),
        "tree": (2 * levels, 2 * levels * size),
        "ring": (2 * (world - 1), share),
        "halving-doubling": (2 * levels, share),
    }[name]


def modelled(name, world, size, alpha, beta):
    rounds, bytes_in_turn = rounds_and_bytes(name, world, size)
    return alpha * rounds + beta * bytes_in_turn


print("seconds for 64 GB on 1,024 ranks, with alpha = 10 us and 25 GB/s:")
for name in FOUR:
    print(f"  {name:17} {modelled(name, 1024, 64e9, 10e-6, 1 / 25e9):9.2f}")

# %% [markdown]
# That is a gradient of 16 billion numbers on a fast network. With the naive way, one step would take three quarters of
# an hour.
#
# A link of our own lets us check the model: `launch(..., link=Link(latency, bandwidth))` holds every message back for
# as long as such a link would need. The messages are real, the waiting is *emulated*. We take a slow one, 5 ms and 100
# MB/s, so that what this machine adds does not matter.
#
# **Predict.** Four ranks, a tensor of 4 KB, this link. Which of the four is quickest: "naive", "tree", "ring" or
# "halving-doubling"?

# %%
# @exercise small_winner points=1 minutes=3 kind=predict
guess = None  # put one of the four names, in quotes, in place of None
### BEGIN SOLUTION
guess = "naive"
### END SOLUTION
predict("small_winner", guess)


# %%
def time_all(algorithms, sizes, repeats):
    """Seconds of each algorithm at each size in bytes: the quickest of some tries, the slowest rank of each."""
    times = {name: {} for name in algorithms}
    for size in sizes:
        tensor = torch.ones(size // 4)
        for name, all_reduce in algorithms.items():
            tries = []
            for _ in range(repeats):
                dist.barrier()
                start = time.perf_counter()
                all_reduce(tensor)
                tries.append(time.perf_counter() - start)
            slowest = torch.tensor(tries)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[name][size] = slowest.min().item()
    return times


link = Link(latency=5e-3, bandwidth=100e6)
SIZES = [4_000, 64_000, 256_000, 1_000_000, 4_000_000]
emulated = launch(time_all, ALGORITHMS, SIZES, 2, nprocs=WORLD, link=link).results[0]


# %% [markdown]
# Now fit the two numbers to the measured times. Every measurement gives one equation, $\alpha \cdot \text{rounds} +
# \beta \cdot \text{bytes} = \text{seconds}$; least squares finds the pair that is least wrong. Each equation is divided
# by its own seconds, so that 10% too much weighs the same at 4 KB and at 4 MB.


# %% tags=["nbval-ignore-output"]
def fit(times, world):
    """Alpha, beta and the median and the largest relative error of the model that fits `times` best."""
    rows, seconds = [], []
    for name, measured in times.items():
        for size, took in measured.items():
            rows.append(rounds_and_bytes(name, world, size))
            seconds.append(took)
    rows, seconds = torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    alpha, beta = torch.linalg.lstsq(rows / seconds[:, None], ones).solution[:, 0]
    errors = ((rows[:, 0] * alpha + rows[:, 1] * beta) / seconds - 1).abs()
    return alpha.item(), beta.item(), errors.median().item(), errors.max().item()


if ALGORITHMS:
    alpha, beta, error, worst = fit(emulated, WORLD)
    print(f"fitted: alpha {1e3 * alpha:.2f} ms (the link has 5), {1 / beta / 1e6:.0f} MB/s (the link has 100)")
    print(f"error of the model: {error:.1%} at the median, {worst:.1%} at worst")
    for size in SIZES:
        print(f"quickest at {size / 1000:5,.0f} KB:", min(emulated, key=lambda name: emulated[name][size]))

# %%
lines = {name: lambda size, name=name: modelled(name, WORLD, size, alpha, beta) for name in emulated}
title = "4 ranks, emulated link of 5 ms and 100 MB/s"
time_against_size(emulated, lines, title, emulated=True) if ALGORITHMS else None

# %% [markdown]
# Points are measured, lines are the model with the two fitted numbers. What the machine itself takes, to copy and to
# wake a rank, is not in the model: it is why $\alpha$ comes out above the link's own 5 ms, and why some points lie off
# their line.
#
# Where a line is flat, latency rules, and the fewest rounds win: naive. Where it climbs, bytes rule, and the ring and
# halving-doubling win. Naive and the ring cross where $2\alpha + N S \beta = 2(N-1)\alpha + 2\frac{N-1}{N} S \beta$.
# Naive and halving-doubling cross earlier, since the latter has fewer rounds:


# %%
def crossing(first, second):
    """The size in bytes at which two algorithms take equally long on this link, by the model."""
    rounds, more_rounds = (rounds_and_bytes(name, WORLD, 1)[0] for name in (first, second))
    share, smaller_share = (rounds_and_bytes(name, WORLD, 1)[1] for name in (first, second))
    return (more_rounds - rounds) * link.latency / ((share - smaller_share) / link.bandwidth)


for name in ("ring", "halving-doubling"):
    print(f"by the model, naive and {name} cross at {crossing('naive', name) / 1e3:.0f} KB")

# %% [markdown]
# One caution. The table charges nothing for *receiving* three messages at once, and this emulated link does not either.
# Where a rank can take in one message at a time, naive pays $2(N-1)\alpha$ and loses sooner. The simulation counts that
# way, and it has room for 64 ranks: your own functions, unchanged, timed on paper.


# %%
def simulated_ms(all_reduce, size, world):
    return 1e3 * run_simulated(all_reduce, torch.ones(size // 4), nprocs=world).schedule(link).seconds


print("simulated ms on this link:  64 ranks, 4 KB   64 ranks, 4 MB")
for name, all_reduce in ALGORITHMS.items():
    small, large = simulated_ms(all_reduce, 4_000, 64), simulated_ms(all_reduce, 4_000_000, 64)
    print(f"  {name:17} {small:22,.0f} {large:16,.0f}")
for name in [name for name in ("tree", "halving-doubling") if name in ALGORITHMS]:
    print(f"1,000 ranks, 4 KB, {name}: {simulated_ms(ALGORITHMS[name], 4_000, 1_000):,.0f} ms")

# %% [markdown]
# With 64 ranks the 126 rounds of the ring are so dear on this link that it loses to the tree even at 4 MB; halving and
# doubling has few rounds *and* few bytes, since 64 is a power of two. Naive is out of the question. Remember that the
# ring's rounds grow with $N$: on large clusters it is for large tensors.
#
# ## The link you have
#
# Now without an emulated link: loopback, the memory of this machine. And with it the yardstick, `dist.all_reduce`. It
# works in place, so to give it the same job it gets a copy.
#
# ### Exercise: two bandwidths (5 minutes, 2 points)
#
# "How many GB/s?" has two answers. The **algorithm bandwidth** is the size of the tensor by the seconds: what the
# caller sees. It falls with $N$ even if the network is perfect, since a rank has to send $2\frac{N-1}{N}$ times the
# tensor. The **bus bandwidth** multiplies by that factor: what a link really carried, to be compared with what the
# manufacturer promised. (So do NCCL's own tests.) Write `bandwidths(size, seconds, world)`, which returns both in bytes
# per second.


# %%
# @exercise bandwidths points=2 minutes=5
def bandwidths(size, seconds, world):
    """Return (algorithm bandwidth, bus bandwidth) of an all-reduce of `size` bytes, in bytes per second."""
    ### BEGIN SOLUTION
    algorithm = size / seconds
    return algorithm, algorithm * 2 * (world - 1) / world
    ### END SOLUTION


bandwidths = check("bandwidths", bandwidths)


# %% tags=["nbval-ignore-output"]
def framework_all_reduce(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


MORE_SIZES = [4_000, 64_000, 1_000_000, 16_000_000]
contenders = {**ALGORITHMS, "dist.all_reduce": framework_all_reduce}
loopback = launch(time_all, contenders, MORE_SIZES, 5, nprocs=WORLD).results[0]
if ALGORITHMS:
    alpha, beta, error, worst = fit({name: loopback[name] for name in ALGORITHMS}, WORLD)
    print(f"fitted: alpha {1e6 * alpha:.0f} us, {1 / beta / 1e9:.2f} GB/s")
    print(f"error of the model: {error:.0%} at the median, {worst:.0%} at worst")
with answer_needed():
    for name, times in loopback.items():
        took = times[MORE_SIZES[-1]]
        seen, carried = bandwidths(MORE_SIZES[-1], took, WORLD)
        print(f"{name:17} 16 MB in {1e3 * took:6.1f} ms: ", end="")
        print(f"algorithm {seen / 1e9:5.2f} GB/s, bus {carried / 1e9:5.2f} GB/s")


# %%
time_against_size(loopback, title="4 ranks on this machine's loopback")

# %% [markdown]
# Everything is quicker, and the model is a good deal further off: its error is printed above. It knows links, and here
# the links are not the bottleneck. Four ranks share the cores and the memory of one machine; every byte "sent" is
# copied by some core, and every round needs a turn of the scheduler. A model is worth its two parameters only where the
# thing it describes is what limits you. So from here on, whatever this course says about communication it shows on an
# emulated link as well. *(A good place for a break.)*
#
# ## Send while you add
#
# Watch one rank of the ring: it sends and receives, and *then* it adds, and while it adds the link is idle. Cut each
# chunk into segments, and the link can carry the next segment while the last one is being added. It is the same ring,
# with the same bytes, and its rounds stay $2(N-1)$ as well: a segment waits only for the message that brought *its own*
# partial sum.
#
# ### Exercise: a ring in segments (30 minutes, 5 points)
#
# Write `segmented_ring(chunks, segment)`: both halves in one function, in place, in messages of at most `segment`
# numbers. Begin to send all segments of the first chunk. Then pass each segment on as soon as it has arrived and been
# added, before you wait for the next.


# %%
# @exercise segmented_ring points=5 minutes=30
def segmented_ring(chunks, segment):
    """Sum all chunks over all ranks, in place, by a ring whose messages hold at most `segment` numbers."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return
    right, left = (rank + 1) % world, (rank - 1) % world
    pieces = [chunk.split(segment) for chunk in chunks]
    summing = [piece for step in range(world - 1) for piece in pieces[(rank - step - 2) % world]]
    sharing = [piece for step in range(world - 1) for piece in pieces[(rank - step - 1) % world]]
    rooms = [chunks[0].new_empty(segment) for _ in range(2)]  # one is filled while the other is added

    def receive(number):
        room = rooms[number % 2][: len(summing[number])]
        return room, dist.irecv(room, left)

    under_way = [receive(number) for number in range(min(2, len(summing)))]
    sending = [dist.isend(piece, right) for piece in pieces[rank - 1]]
    for number, piece in enumerate(summing):
        room, request = under_way.pop(0)
        request.wait()
        piece += room
        sending.append(dist.isend(piece, right))
        if number + 2 < len(summing):
            under_way.append(receive(number + 2))
    arriving = [dist.irecv(piece, left) for piece in sharing]
    to_pass_on = len(sharing) - len(pieces[(rank + 1) % world])  # the right neighbour has the last chunk already
    for number, request in enumerate(arriving):
        request.wait()
        if number < to_pass_on:
            sending.append(dist.isend(sharing[number], right))
    for request in sending:
        request.wait()
    ### END SOLUTION


segmented_ring = check("segmented_ring", segmented_ring)

# %% [markdown]
# The two rings and `dist.all_reduce`, on 64 MB. All three work in place here.


# %% tags=["nbval-ignore-output"]
def plain_in_place(tensor):
    chunks = list(tensor.tensor_split(dist.get_world_size()))
    reduce_scatter_ring(chunks)
    all_gather_ring(chunks)


def segmented_in_place(tensor):
    segmented_ring(list(tensor.tensor_split(dist.get_world_size())), segment=2**20)


in_place = {}
if answered(reduce_scatter_ring) and answered(all_gather_ring):
    in_place["plain ring"] = plain_in_place
if answered(segmented_ring):
    in_place["ring in segments"] = segmented_in_place
in_place["dist.all_reduce"] = dist.all_reduce
for world in (2, WORLD):
    times = launch(time_all, in_place, [64_000_000], 5, nprocs=world).results[0]
    milliseconds = {name: 1e3 * took[64_000_000] for name, took in times.items()}
    for name, took in milliseconds.items():
        ratio = took / milliseconds["dist.all_reduce"]
        print(f"{world} ranks: {name:17} {took:6.1f} ms, {ratio:.2f} times dist.all_reduce")

# %% [markdown]
# Some twenty lines of Python beside a library in C++, and they are close to each other: most of the time goes into
# moving bytes, and all of them move the same number. With 2 ranks and a core for each, a rank seldom waits, and the
# segments have little to win; they may even lose, since each message has its price. With 4 ranks, waiting is what
# costs, and a rank that has several segments under way waits less. A good library never lets the link wait.
#
# ## Repair: the mean of many gradients
#
# A colleague needs the mean of all gradients of a model and has your ring. In the first test, with two small tensors,
# this was right.


# %%
def average_as_reported(gradients):
    return [ring_all_reduce(gradient) / dist.get_world_size() for gradient in gradients]


def try_it(average, dtype):
    gradients = [torch.full((3,), 30_000.0, dtype=dtype) for _ in range(6)]
    return average(gradients)[0].tolist()


for dtype in (torch.float32, torch.float16):
    run = launch(try_it, average_as_reported, dtype, nprocs=WORLD, trace=True)
    rounds = run.trace.rounds or "none, since the framework stands in for your ring"
    print(dtype, "mean:", run.results[0], " rounds:", rounds)

# %% [markdown]
# Two things are wrong. With float16, which many train in, the mean of four times 30,000 is infinite. And six gradients
# cost six rings, one after the other: 36 rounds, each of which pays $\alpha$ for very few bytes.
#
# ### Exercise: average gradients (12 minutes, 4 points)
#
# Write `average_gradients(gradients)`, which returns the means of a list of tensors, in new tensors of the same shapes,
# and mends both: no overflow where the mean itself is in range, and one ring for all.


# %%
# @exercise average_gradients points=4 minutes=12 kind=debug
def average_gradients(gradients):
    """Return the mean of each gradient over all ranks, from a single ring."""
    ### BEGIN SOLUTION
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat = ring_all_reduce(flat / dist.get_world_size())  # divide first: float16 sums overflow
    parts = flat.split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    ### END SOLUTION


average_gradients = check("average_gradients", average_gradients)


# %% [markdown]
# And now what all of this was for: every rank takes a quarter of the digits, and the ranks agree on the gradient of all
# of them.


# %%
def reduced_gradients():
    rank, world = dist.get_rank(), dist.get_world_size()
    return average_gradients(gradients_of(make_model(), images[rank::world], labels[rank::world]))


run = launch(reduced_gradients, nprocs=WORLD, trace=True)
pairs = [(mean, wanted) for means in run.results for mean, wanted in zip(means, whole, strict=True)]
gap = max((mean - wanted).abs().max().item() for mean, wanted in pairs)
same = all(torch.equal(a, b) for means in run.results for a, b in zip(means, run.results[0], strict=True))
print(f"largest difference to the gradient of all digits: {gap:.6f}; the same bits on all ranks: {same}")
print(f"rounds: {run.trace.rounds}; numbers sent by each rank:", [rank.bytes_sent // 4 for rank in run.trace])

# %% [markdown]
# Not every rank sends the same, since four does not divide the length. And all ranks hold the same bits, not only
# nearly the same numbers: each chunk was finished by one rank and handed out. Replicas that start equal stay equal.
#
# ## Explain (8 minutes, 3 points, read by a person)
#
# A team trains a model whose gradient has 400 MB on 16 machines, and also reduces a single number, the loss, in every
# step. Which of your algorithms would you take for each, and why? What changes if it is 12 machines? Use rounds and
# bytes, in about six sentences.

# %% [markdown]
# <!-- @exercise which_one_when points=3 minutes=8 kind=explain -->
# <!-- BEGIN SOLUTION -->
# For the 400 MB the bytes decide: the ring and halving-doubling each send 2 * 15/16 of the tensor per rank, 750 MB, the
# least that is possible; a tree would move eight times 400 MB one after the other, and the naive way sixteen times.
# Halving-doubling takes 8 rounds and the ring 30, but at 400 MB a few rounds more or less do not matter, and a ring's
# neighbours can be placed next to each other in the network. For the single number only rounds count: halving-doubling
# or a tree take 8, the naive way 2 on paper, but then one machine must take 15 messages one after the other; I would
# take the tree. With 12 machines halving-doubling has to fold four of them, which costs two rounds and another whole
# tensor for the machines that stand in, 400 MB more than the optimum, while the ring stays at 2 * 11/12 of the tensor.
# So for the gradient the ring is now clearly better.
# <!-- END SOLUTION -->

# %% [markdown]
# ## What you have now
#
# Your predictions, beside what this notebook computed:

# %%
compare(
    naive_megabytes=traces["naive"][0].bytes_sent / 1e6 if "naive" in traces else None,
    ring_megabytes=traces["ring"][0].bytes_sent / 1e6 if "ring" in traces else None,
    small_winner=min(FOUR, key=lambda name: emulated[name][SIZES[0]]) if len(ALGORITHMS) == 4 else None,
)

# %%
for name, trace in traces.items():
    busiest = max(rank.bytes_sent for rank in trace) / 1e6
    print(f"8 MB on {WORLD} ranks, {name:17} {trace.rounds} rounds, the busiest rank sends {busiest:4.1f} MB")
print(f"the gradient of {count:,} digits from {WORLD} ranks: off by {gap:.6f}, in {run.trace.rounds} rounds")

# %% [markdown]
# - An **all-reduce** gives every rank the sum. All algorithms give the same value; they differ in rounds and in bytes.
# - A **ring** is a reduce-scatter and an all-gather. A rank sends $2\frac{N-1}{N}S$ bytes, the least possible, in
#   $2(N-1)$ rounds.
# - **Halving and doubling** has the ring's bytes in $2\log_2 N$ rounds, if $N$ is a power of two.
# - $\alpha$ times the rounds plus $\beta$ times the bytes says which one wins: few rounds for small tensors, few bytes
#   for large ones.
# - Right values prove nothing about an algorithm. Count.
# - Divide before you sum, and reduce many small tensors as one.
#
# In lesson 03 the ring goes to work: data-parallel training by hand, and the ways in which it can silently go wrong.

# %% tags=["nbval-ignore-output"]
progress()
