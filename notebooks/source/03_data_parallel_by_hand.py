# %% [markdown]
# # 03 Data parallel by hand
#
# **Why do $N$ workers train the same model as one big batch would?** Data-parallel training is five words: replicate,
# broadcast, shard, average, step. Each of them can be got wrong in a way that raises no error: the loss falls, and the
# model is not the one you meant. You build each of the five, break each on purpose, and hold the result to one strict
# yardstick: after every step, on every rank, the parameters are those of a single process on all the data.
#
# | | |
# |---|---|
# | You build | a broadcast of a model, a sharding sampler, a weighted gradient average, the training loop around them |
# | You need | lesson 02: what an all-reduce is; PyTorch's `backward` and `optimizer.step` |
# | Time | about 2 hours, of which 81 minutes for the exercises; a good place for a break is marked |
# | Hardware | any; everything here runs on the CPU, also where there are GPUs |

# %%
# @first-cell

# %%
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_utils import check, hint, launch, predict, progress
from course_utils.datasets import mnist_or_digits
from course_utils.exercises import answer_needed, answered, compare
from course_utils.visuals import lines_over_steps, share_bars

# %% [markdown]
# ## The model and the data
#
# Where MNIST can be had without a download (a data set attached on Kaggle, or the cache of a library) it is used;
# otherwise the digits that scikit-learn carries. The data object says which. Either way a small piece is enough: this
# lesson is about being *equal*, and for that a small network shows more than a large one.

# %%
WORLD = 4
train, test = mnist_or_digits("train"), mnist_or_digits("test")
images, labels = torch.from_numpy(train.images)[:1437], torch.from_numpy(train.labels)[:1437]
test_images, test_labels = torch.from_numpy(test.images)[:1000], torch.from_numpy(test.labels)[:1000]
print(train)
print(f"used here: {len(labels):,} to train on, {len(test_labels):,} to test on")


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(images.shape[1], 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


print(f"the model has {len(flat(make_model())):,} parameters")

# %% [markdown]
# ## Why it should be the same
#
# The loss of a batch of $n$ samples is a mean. Cut the batch into shards of $n_1, \dots, n_N$ samples. Gradients are
# linear, so the gradient of the whole is a weighted mean of the gradients $g_r$ that the ranks compute on their shards:
#
# $$g = \frac{1}{n}\sum_{i=1}^{n} \nabla \ell_i = \sum_{r=1}^{N} \frac{n_r}{n}\, g_r$$
#
# If all replicas start equal and all take a step along this same $g$, they stay equal, and equal to the one process.
# Two conditions hide in that sentence, *start equal* and *this same $g$*, and each has a section below.
#
# ## Start equal
#
# Suppose nobody sees to the first condition. Each rank makes its model with the seed that it happens to have, and from
# then on all goes well: every gradient is averaged over all ranks.


# %%
def train_from(start, steps=100, rate=0.1):
    """Return this rank's losses, and its distance to rank 0's parameters, after each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    model = make_model()
    start(model)
    losses, distances = [], []
    for _ in range(steps + 1):
        of_rank_0 = flat(model)
        dist.broadcast(of_rank_0, src=0)
        distances.append((flat(model) - of_rank_0).norm().item())
        loss = F.cross_entropy(model(images[rank::world]), labels[rank::world])
        losses.append(loss.item())
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
            dist.all_reduce(gradient)
            parameter.data -= rate * gradient / world
    return losses, distances


def as_it_comes(model):
    """No broadcast."""


# %% [markdown]
# **Predict.** Two replicas start a distance $d$ apart (the length of the difference of their parameters). They make 100
# steps, in each of which the gradients are averaged over all ranks. What is their distance then, divided by $d$? Near 0
# if averaging pulls them together, more than 1 if they drift.

# %%
# @exercise drift_ratio points=1 minutes=3 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 1
### END SOLUTION
predict("drift_ratio", guess, unit="times the distance at the start")

# %%
apart = launch(train_from, as_it_comes, nprocs=WORLD).results
for rank, (losses, distances) in enumerate(apart):
    print(f"rank {rank}: loss {losses[0]:.2f} -> {losses[-1]:.2f}; ", end="")
    print(f"distance to rank 0: {distances[0]:.3f} at the start, {distances[-1]:.3f} at the end")
drift_ratio = apart[1][1][-1] / apart[1][1][0]

# %% [markdown]
# The distance has not moved at all. All replicas subtract *the same* numbers in every step, so whatever separated them
# at the start separates them at the end. Averaging gradients never repairs parameters. (With momentum it would be the
# same; weight decay would shrink the distance, slowly.) And there was no error: four losses fell.
#
# ### Exercise: broadcast the model (10 minutes, 3 points)
#
# Write `broadcast_parameters(model)`: afterwards every rank's model has rank 0's values, bit for bit. That is
# everything the forward depends on: parameters, also frozen ones that no optimizer touches, and buffers, such as the
# running statistics of a batch norm or a counter of integers. Write into the tensors in place; an optimizer made
# earlier holds on to the parameter objects. From this lesson on, `dist.broadcast`, `dist.all_reduce` and the like are
# yours to use.


# %%
# @exercise broadcast_parameters points=3 minutes=10
def broadcast_parameters(model):
    """Give rank 0's parameters and buffers to the models of all ranks, in place."""
    ### BEGIN SOLUTION
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)  # .data: autograd would object to a change of a leaf
    ### END SOLUTION


broadcast_parameters = check("broadcast_parameters", broadcast_parameters)

# %%
together = launch(train_from, broadcast_parameters, nprocs=WORLD).results
panels = {"loss of rank 1 on its own shard": {}, "distance from rank 1 to rank 0": {}}
for name, result in (("no broadcast", apart), ("broadcast", together)):
    for panel, values in zip(panels, result[1], strict=True):
        panels[panel][name] = values
lines_over_steps(panels)

# %%
for name, result in (("no broadcast", apart), ("broadcast", together)):
    mean = sum(losses[-1] for losses, _ in result) / WORLD
    print(f"{name:13} mean loss after 100 steps {mean:.3f}, largest distance {max(d[-1] for _, d in result):.3f}")
cost = (sum(r[0][-1] for r in apart) - sum(r[0][-1] for r in together)) / WORLD

# %% [markdown]
# The loss without a broadcast falls too, only less: each replica follows gradients that were computed, for the most
# part, at other points. That is what makes the fault so hard to see. In a real run there is no second curve to compare
# with. So compare what can be compared: print the distance between replicas once, after some steps. It has to be 0.
#
# ## Every sample once
#
# Now the data. In every epoch each rank should take its share of the samples: all of them taken, none twice, in another
# order each epoch. A tempting way is to let each rank shuffle for itself and take an $N$-th of what it has.
#
# **Predict.** Four ranks each draw a random quarter of the samples, each with a seed of its own. What percentage of the
# samples does nobody see in this epoch?

# %%
# @exercise samples_missed points=1 minutes=3 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 31.6
### END SOLUTION
predict("samples_missed", guess, unit="percent")


# %%
def visits(seeds):
    """Return by how many ranks each sample is taken, where rank r cuts the permutation of seeds[r]."""
    seen = torch.zeros(len(labels), dtype=torch.int64)
    for rank, seed in enumerate(seeds):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        seen[order[rank :: len(seeds)]] += 1
    return seen


def percentages(seen):
    return [100 * (seen == count).float().mean().item() for count in range(WORLD + 1)]


shares = {
    "one permutation for all": percentages(visits([7] * WORLD)),
    "a permutation per rank": percentages(visits([7, 8, 9, 10])),
}
samples_missed = shares["a permutation per rank"][0]
counts = ["nobody", *(f"{count} rank{'s' * (count > 1)}" for count in range(1, WORLD + 1))]
share_bars(shares, counts, "In one epoch on 4 ranks, a sample is taken by", "percent of the samples")

# %%
print(f"taken by nobody: {samples_missed:.1f}%; (3/4)^4 = {100 * 0.75**4:.1f}%")
print(f"taken more than once: {sum(shares['a permutation per rank'][2:]):.1f}%")

# %% [markdown]
# Each rank leaves a sample out with probability 3/4, all four with $(3/4)^4$. The remedy costs nothing: all ranks draw
# *the same* permutation, from a seed that they share, and each cuts its own part. No communication is needed, only
# agreement.
#
# ### Exercise: shard (8 minutes, 4 points)
#
# Write `shard(length, rank, world, epoch, seed)`, which returns this rank's indices for this epoch: a random
# permutation of `range(length)` that is the same on all ranks, another one in each epoch, divided so that the shards
# differ by at most one sample. Nothing is doubled, dropped or padded. Draw from a generator of its own:
# `torch.manual_seed` would reseed the whole process, which comes back to haunt us below.


# %%
# @exercise shard points=4 minutes=8
def shard(length, rank, world, epoch, seed):
    """Return the indices of the samples that this rank takes in this epoch."""
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator)[rank::world].tolist()
    ### END SOLUTION


shard = check("shard", shard)


# %% [markdown]
# A `DataLoader` wants a sampler, an object that is asked anew for its indices at the start of each epoch. It cannot
# know which epoch it is; somebody has to say so. That is all that `set_epoch` does, here and in PyTorch's own
# `DistributedSampler`.


# %%
class ShardSampler(torch.utils.data.Sampler):
    def __init__(self, length, rank, world, seed=0):
        self.arguments, self.seed, self.epoch = (length, rank, world), seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(shard(*self.arguments, self.epoch, self.seed))

    def __len__(self):
        length, rank, world = self.arguments
        return len(range(rank, length, world))


def batches_in(epochs, sampler, tell_epoch):
    """Return the batches of 16 of all epochs, each as the set of its samples."""
    seen = []
    for epoch in range(epochs):
        if tell_epoch:
            sampler.set_epoch(epoch)
        loader = torch.utils.data.DataLoader(range(len(labels)), batch_size=16, sampler=sampler)
        seen += [frozenset(batch.tolist()) for batch in loader]
    return seen


for tell_epoch in (True, False):
    seen = batches_in(5, ShardSampler(len(labels), rank=0, world=WORLD), tell_epoch)
    samples = len(frozenset().union(*seen))
    print(f"set_epoch {'called:   ' if tell_epoch else 'forgotten:'} {len(seen)} batches in 5 epochs, ", end="")
    print(f"{len(set(seen))} of them different; rank 0 has met {samples:,} of {len(labels):,} samples")

# %% [markdown]
# Without `set_epoch` each epoch repeats the first one, batch for batch, and rank 0 never meets more than its first
# quarter. Again nothing fails. PyTorch's sampler differs from ours in one point: it pads, so that all ranks have
# equally many samples.

# %%
padded = torch.zeros(len(labels), dtype=torch.int64)
for rank in range(WORLD):
    sampler = torch.utils.data.DistributedSampler(range(len(labels)), num_replicas=WORLD, rank=rank)
    padded += torch.bincount(torch.tensor(list(sampler)), minlength=len(labels))
sizes = [len(ShardSampler(len(labels), rank, WORLD)) for rank in range(WORLD)]
print(f"DistributedSampler: {len(sampler)} samples on each rank, {int((padded > 1).sum())} of the samples taken twice")
print("ours, by rank:", sizes)

# %% [markdown]
# Two or three doubled samples do little harm in training, and equal counts make life simple, as you will see. In an
# evaluation they falsify the result. *(A good place for a break.)*
#
# ## Sum or mean
#
# The second condition: *the same $g$*, the gradient of the mean over all samples. An all-reduce gives sums. One opinion
# that you will meet is that summing is fine, "the learning rate must just be adapted to the number of workers".
#
# **Predict.** Four ranks with equal shards average their gradients and train with a learning rate of 0.8. A colleague
# sums them instead. With which learning rate does the colleague's model take the same steps?

# %%
# @exercise sum_learning_rate points=1 minutes=2 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 0.2
### END SOLUTION
predict("sum_learning_rate", guess)


# %%
def losses_with(factor, rate, steps=60):
    """Train on all ranks, with the sum of the gradients times `factor`; return the mean loss before each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model everywhere
    model, losses = make_model(), []
    for _ in range(steps):
        loss = F.cross_entropy(model(images[rank:1436:world]), labels[rank:1436:world])  # equal shards
        gradients = torch.autograd.grad(loss, model.parameters())
        told = loss.detach() / world
        dist.all_reduce(told)
        losses.append(told.item())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            dist.all_reduce(gradient)
            parameter.data -= rate * factor * gradient
    return losses


def run_all(settings):
    return {name: losses_with(*setting) for name, setting in settings.items()}


settings = {"mean, 0.8": (1 / WORLD, 0.8), "divided twice, 0.8": (1 / WORLD**2, 0.8), "sum, 0.8": (1, 0.8)}
settings |= {f"sum, {rate}": (1, rate) for rate in (0.2, 0.1)}
losses = launch(run_all, settings, nprocs=WORLD).results[0]
lines_over_steps({"4 ranks, equal shards": losses}, ylabel="mean loss")

# %%
gaps = {
    name: max(abs(a - b) for a, b in zip(values, losses["mean, 0.8"], strict=True)) for name, values in losses.items()
}
for name, gap in gaps.items():
    print(f"{name:18} loss {losses[name][0]:.2f} -> {losses[name][-1]:.2f}, at most {gap:.1f} from the mean at 0.8")
sum_learning_rate = float(min((name for name in gaps if name.startswith("sum")), key=gaps.get).removeprefix("sum, "))

# %% [markdown]
# The sum at a quarter of the rate lies on the mean's curve, and the sum at the full rate is what the mean would do at
# four times 0.8: far too long a step. So the opinion is true and useless: it makes the learning rate depend on how many
# machines happen to run. With the mean, a setting found on one machine holds on four, *as long as the union of the
# batches is the same*. (0.8 is close to the longest step that this model stands: hence the bumps.) The curve that was
# divided twice is the fault that hides best: it looks like a learning rate
# that was chosen too small, and that is exactly what it is.
#
# ## Unequal shards
#
# With equal shards the weights $\frac{n_r}{n}$ are all $\frac{1}{N}$ and the mean of the ranks' means is right. But the
# last batch of an epoch is seldom full, and nothing says that ranks must get batches of one size. Three ranks with 2,
# 10 and 60 samples, sorted by label so that the shards have little in common:

# %%
order = labels[:72].argsort(stable=True)
pieces = order.split([2, 10, 60])


def gradient_on(indices):
    torch.manual_seed(0)
    model = make_model().double()
    loss = F.cross_entropy(model(images[indices].double()), labels[indices])
    return torch.cat([gradient.reshape(-1) for gradient in torch.autograd.grad(loss, model.parameters())])


whole = gradient_on(order)
means = torch.stack([gradient_on(piece) for piece in pieces])
weights = torch.tensor([len(piece) / len(order) for piece in pieces], dtype=torch.float64)


def off(gradient):
    return ((gradient - whole).norm() / whole.norm()).item()


mean_of_means_error = off(means.mean(dim=0))
cosine = F.cosine_similarity(means.mean(dim=0), whole, dim=0).item()
print(
    f"mean of the three means: off by {mean_of_means_error:.0%} of the gradient's length, {cosine:.2f} its cosine to it"
)
print("weighted by samples: off by less than 1e-12 of it:", off((weights[:, None] * means).sum(dim=0)) < 1e-12)

# %% [markdown]
# The mean of means is not a little inexact. It has another length and another direction (equal directions have a cosine
# of 1): two samples have as much say as sixty.
#
# ### Exercise: reduce the gradients (25 minutes, 5 points)
#
# Write `reduce_gradients(model, count)`. Each rank has run `backward` on the *mean* loss of its own `count` samples.
# Afterwards each parameter's `.grad` is, on every rank, the gradient of the mean over the samples of all ranks. Three
# things make it harder than it looks:
#
# - `count` may be 0 on some ranks (not on all). Such a rank has gradients of `None`, or none worth anything: a mean
#   over no samples is $\frac{0}{0}$. It contributes zero and still takes part in every collective, else the others wait
#   for ever.
# - A parameter whose gradient is `None` on *every* rank that has samples (frozen, or unused in this step) gets `None`.
#   An optimizer skips `None`, but with a gradient of zeros, weight decay and momentum move the parameter.
# - A rank must not decide by what it alone knows whether to call a collective.


# %%
# @exercise reduce_gradients points=5 minutes=25
def reduce_gradients(model, count):
    """Replace each gradient by that of the mean loss over the samples of all ranks."""
    ### BEGIN SOLUTION
    total = torch.tensor(float(count), dtype=torch.float64)
    dist.all_reduce(total)
    for parameter in model.parameters():
        mine = parameter.grad if count > 0 else None
        holders = torch.tensor(0.0 if mine is None else 1.0)
        dist.all_reduce(holders)  # whether anyone has a gradient: all ranks must come to the same decision
        if holders == 0:
            parameter.grad = None
            continue
        part = torch.zeros_like(parameter) if mine is None else mine * (count / total.item())
        dist.all_reduce(part)
        parameter.grad = part
    ### END SOLUTION


reduce_gradients = check("reduce_gradients", reduce_gradients)


# %% [markdown]
# Two all-reduces per parameter, most of them tiny: right, and slow. Lesson 02 says why (each pays its rounds), lesson
# 04 mends it. First, the same gradients as above, now from ranks, and once with a rank that has nothing:


# %%
def reduced(pieces):
    mine = pieces[dist.get_rank()]
    torch.manual_seed(0)
    model = make_model().double()
    if len(mine):
        F.cross_entropy(model(images[mine].double()), labels[mine]).backward()
    reduce_gradients(model, len(mine))
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


for sizes in ([2, 10, 60], [12, 0, 60]):
    results = launch(reduced, order.split(sizes), nprocs=3).results
    same = all(torch.equal(result, results[0]) for result in results)
    print(f"{sizes} samples: off by less than 1e-12: {max(map(off, results)) < 1e-12}; same bits on all ranks: {same}")

# %% [markdown]
# ## The whole step
#
# ### Exercise: train replicas (12 minutes, 5 points)
#
# Put it together. `train_replicas(model, optimizer, batches, after_step)` gets this rank's model, an optimizer of its
# parameters, and a list of this rank's batches, pairs of `(images, labels)`; every rank has equally many, but some may
# be empty. Start equal. For each batch make one step of `F.cross_entropy`, on every rank, and call `after_step()` when
# it is done.
#
# `check` is strict here. Models have tied, frozen and unused parameters, each rank has a seed of its own, there are 2
# to 4 ranks with unequal and empty batches, and after *each* step *each* rank is compared with one process that trains
# on the union: to $10^{-10}$ in float64, to $10^{-5}$ in float32.


# %%
# @exercise train_replicas points=5 minutes=12
def train_replicas(model, optimizer, batches, after_step):
    """Train the replicas of all ranks as one process would train on the union of their batches."""
    ### BEGIN SOLUTION
    broadcast_parameters(model)
    for images, labels in batches:
        optimizer.zero_grad()
        if len(labels):
            F.cross_entropy(model(images), labels).backward()
        reduce_gradients(model, len(labels))
        optimizer.step()
        after_step()
    ### END SOLUTION


train_replicas = check("train_replicas", train_replicas)

# %% [markdown]
# ## The yardstick
#
# Now the experiment of this lesson. Twenty steps on batches of 60 samples; ranks take very different shares of them,
# and one of them nothing. Beside it, one process that takes the 60 at once.

# %%
STEPS = 20
BATCHES = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))[: STEPS * 60].split(60)
SHARES = {2: [10, 50], 3: [7, 0, 53], 4: [5, 30, 0, 25]}


def replicas(dtype, rate=0.2):
    """Return this rank's parameters after each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # rank 0 has seed 0, as one_process has
    model = make_model().to(dtype)
    mine = [batch.split(SHARES[world])[rank] for batch in BATCHES]
    states = []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    batches = [(images[indices].to(dtype), labels[indices]) for indices in mine]
    train_replicas(model, optimizer, batches, lambda: states.append(flat(model)))
    return states


def one_process(dtype, batches=BATCHES, rate=0.2):
    torch.manual_seed(0)
    model, states = make_model().to(dtype), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for indices in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images[indices].to(dtype)), labels[indices]).backward()
        optimizer.step()
        states.append(flat(model))
    return states


def distances(states, wanted):
    """Return the largest difference after each step, relative to the largest parameter."""
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(states, wanted, strict=True)]


# %%
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
alone = {dtype: one_process(dtype) for dtype in BOUNDS}
gaps = {}
for world, sizes in SHARES.items():
    for dtype, bound in BOUNDS.items():
        results = launch(replicas, dtype, nprocs=world).results
        gaps[world, dtype] = [
            max(both) for both in zip(*(distances(one, alone[dtype]) for one in results), strict=True)
        ]
        same = all(torch.equal(a, b) for one in results for a, b in zip(one, results[0], strict=True))
        name = str(dtype).removeprefix("torch.")
        print(f"{sizes!s:15} {name}: within {bound:g} after each step: {max(gaps[world, dtype]) < bound}; ", end="")
        print("ranks equal to the last bit:", same)

# %% [markdown]
# On every rank, after each of the 20 steps, whatever the shares. This is what data parallelism promises: the number of
# ranks is a matter of speed alone. If your training fails this test, it is broken, however nicely the loss falls.
#
# ## Why not the very same bits?
#
# The replicas agree with each other to the last bit, but with one process only nearly. Is that a fault too, a small
# one? Floating-point addition rounds, so the order of addition shows in the last digits, and ranks add in another order
# than one process. If that is the whole reason, one process must differ from *itself* by as much when it merely meets
# the same 60 samples of each batch in another order.

# %%
turned = [batch.flip(0) for batch in BATCHES]
itself = {dtype: distances(one_process(dtype, turned), alone[dtype]) for dtype in BOUNDS}
weighted_wrongly = []
torch.manual_seed(0)
model = make_model().double()
for batch in BATCHES:  # the sum of the ranks' means, divided by 4 although one rank has no samples
    pieces = [piece for piece in batch.split(SHARES[4]) if len(piece)]
    loss = sum(F.cross_entropy(model(images[piece].double()), labels[piece]) for piece in pieces) / WORLD
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
        parameter.data -= 0.2 * gradient
    weighted_wrongly.append(flat(model))
curves = {
    "mean of means, float64": distances(weighted_wrongly, alone[torch.float64]),
    "4 ranks, float32": gaps[4, torch.float32],
    "one process, other order, float32": itself[torch.float32],
    "4 ranks, float64": gaps[4, torch.float64],
    "one process, other order, float64": itself[torch.float64],
}
by_step = {name: dict(enumerate(values, start=1)) for name, values in curves.items()}
lines_over_steps({"Distance to one process": by_step}, ylabel="relative distance", log=["Distance to one process"])

# %% tags=["nbval-ignore-output"]
for name, values in curves.items():
    print(f"{name:34} after step 1: {values[0]:.0e}, after step {STEPS}: {values[-1]:.0e}")
for dtype in (torch.float32, torch.float64):
    print(f"the rounding step of {str(dtype).removeprefix('torch.')}: {torch.finfo(dtype).eps:.0e}")

# %%
for dtype in BOUNDS if answered(train_replicas) else ():
    ratio = max(gaps[4, dtype]) / max(itself[dtype])
    name = str(dtype).removeprefix("torch.")
    print(f"{name}: ranks differ from one process about as much as it does from itself:", 0.1 < ratio < 10)
if not answered(train_replicas):
    print(
        "what stands in for your train_replicas gathers all samples and adds like one process: its curves say nothing"
    )
wrong = curves["mean of means, float64"][-1]
print(f"the mean of means: {wrong:.1%} of the largest parameter; as a multiple of 1e-5: {wrong / 1e-5:,.0f}")

# %% [markdown]
# Two kinds of difference, orders of magnitude apart. Rounding begins at the precision of the number format, grows
# slowly, and falls by nine powers of ten when you compute in float64. A wrong average does not care about the format.
# So here is a method for real life: *when replicas and one process disagree, run both in float64*. If the difference
# all but vanishes it was rounding. If it stays, look for a fault.
#
# ## A seed for everything
#
# A colleague dislikes the broadcast: "If all ranks use the same seed, they make the same model, and I save a message."
# Look at what else comes from that seed once the model has dropout.


# %%
def start_as_reported(make_model, seed):
    torch.manual_seed(seed)
    return make_model()


def with_dropout():
    return torch.nn.Sequential(make_model(), torch.nn.Dropout(0.5))


def noise(start, seed=0, draws=4000):
    """Return this rank's first weights, the beginning of its dropout mask, and the variance of the ranks' mean mask."""
    model = start(with_dropout, seed)
    mask = model[1](torch.ones(draws))
    mean = mask / dist.get_world_size()
    dist.all_reduce(mean)
    return flat(model)[:2].tolist(), mask[:10].int().tolist(), mean.var().item()


def show(start):
    results = launch(noise, start, nprocs=WORLD).results
    for rank, (weights, mask, _) in enumerate(results):
        print(f"rank {rank}: weights {[round(weight, 3) for weight in weights]}, mask {mask}")
    print(f"variance of the mean over {WORLD} ranks: {results[0][2]:.2f}")
    return results[0][2]


variance_as_reported = show(start_as_reported)

# %% [markdown]
# The weights are equal, as promised, and so are the masks: every rank drops the same units. Dropout is noise that is
# meant to average out over the samples of a batch. With independent masks the mean over 4 ranks has a quarter of the
# variance of one; here it has all of it. On the other hand, a seed per rank alone gives different weights, and you know
# how that ends.
#
# ### Exercise: mend the seeds (8 minutes, 3 points)
#
# Write `start_replica(make_model, seed)`: return a model that has equal weights on all ranks, and leave torch's
# generator so that ranks draw *different* numbers from then on. Everything has to follow from `seed` and the rank, so
# that a run can be repeated.


# %%
# @exercise start_replica points=3 minutes=8 kind=debug
def start_replica(make_model, seed):
    """Return a model with the same weights on all ranks; what is drawn afterwards differs from rank to rank."""
    ### BEGIN SOLUTION
    torch.manual_seed(seed)
    model = make_model()
    torch.manual_seed(seed + 1 + dist.get_rank())
    return model
    ### END SOLUTION


start_replica = check("start_replica", start_replica)

# %%
variance_mended = None
with answer_needed():
    variance_mended = show(start_replica)

# %% [markdown]
# Equal weights, four masks, and about a quarter of the variance. In practice one does both: seeds *and* a broadcast,
# since a seed gives equal weights only as long as every rank makes the same calls in the same order.
#
# ## More ranks, larger batches
#
# So far the union of the batches stayed what it was. More often one keeps the batch *per rank*: with $N$ ranks the
# batch is $N$ times as large and an epoch has $N$ times fewer steps. To get as far with fewer steps, each must be
# longer. The **linear scaling rule** (Goyal et al., 2017) multiplies the learning rate by $N$: as long as the gradient
# hardly changes from step to step, one step of length $N\eta$ comes to the same as $N$ steps of length $\eta$.
#
# Here the property pays off: since $N$ ranks equal one process with the larger batch, one process can stand in for 32.
# (Twelve trainings: this cell takes some ten seconds.)


# %%
def trained(batch, rate, epochs=10):
    """Return the loss on the training data and the accuracy on the test data."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for epoch in range(epochs):
        for indices in torch.as_tensor(shard(len(labels), 0, 1, epoch, seed=0)).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(images[indices]), labels[indices]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
        return F.cross_entropy(model(images), labels).item(), accuracy


RANKS = [1, 2, 4, 8, 16, 32]
threads = torch.get_num_threads()
torch.set_num_threads(1)  # for matrices as small as these, sharing the work out takes longer than the work
rules = {"rate kept": lambda ranks: 0.1, "rate times ranks": lambda ranks: 0.1 * ranks}
scaling = {name: {ranks: trained(16 * ranks, rule(ranks)) for ranks in RANKS} for name, rule in rules.items()}
torch.set_num_threads(threads)
panels = {"training loss after 10 epochs": 0, "test accuracy after 10 epochs": 1}
lines_over_steps(
    {
        title: {name: {n: pair[k] for n, pair in result.items()} for name, result in scaling.items()}
        for title, k in panels.items()
    },
    xlabel="ranks of 16 samples each",
    doubling=True,
    marked=True,
)

# %% tags=["nbval-ignore-output"]
steps = {ranks: 10 * math.ceil(len(labels) / (16 * ranks)) for ranks in RANKS}
print("ranks  steps   rate kept: loss, accuracy   rate times ranks: loss, accuracy")
for ranks in RANKS:
    (loss, right), (scaled_loss, scaled_right) = (scaling[name][ranks] for name in rules)
    print(f"{ranks:5} {steps[ranks]:6}   {loss:15.2f} {right:8.0%}   {scaled_loss:20.2f} {scaled_right:8.0%}")
best = scaling["rate times ranks"][1][0]
holds = max(
    ranks for ranks in RANKS if all(scaling["rate times ranks"][n][0] < 1.5 * best for n in RANKS if n <= ranks)
)
print(f"the rule keeps the loss within a factor of 1.5 up to {holds} ranks, a learning rate of {0.1 * holds:.1f}")

# %% [markdown]
# With the rate kept, more ranks mean less training. With the rate scaled, all runs get equally far, up to a point, and
# beyond it the assumption of the rule is false: a step is so long that the gradient at its end is another one, and
# training breaks down. Warm-up (small steps at the start, where the gradient changes most) moves the limit; it does not
# remove it. Note what this is *not*: it has nothing to do with sums. The gradient is a mean before and after; the rate
# is scaled because the batch has grown.
#
# ## Explain (10 minutes, 3 points, read by a person)
#
# After a thousand steps on 8 ranks, a team compares its model with that of one process on the same batches. (a) The
# parameters differ by about $10^{-5}$ relative, in float32, and all ranks agree to the last bit. (b) In another project
# they differ by $10^{-2}$, and all ranks agree to the last bit as well. Which of the two is a fault? What does the
# agreement of the ranks prove, and what not? Name two faults of this lesson that would look like (b), one that would
# not, and one experiment that tells (a) from (b). About eight sentences.

# %% [markdown]
# <!-- @exercise bits_and_biases points=3 minutes=10 kind=explain -->
# <!-- BEGIN SOLUTION -->
# (a) is what rounding looks like: float32 is exact to about 1e-7, ranks add in another order than one process, and over
# a thousand steps the last digits spread. (b) is far too large for that. That the ranks agree bit for bit proves that
# they started equal and always took the same step; it does not prove that it was the right step. A mean of means with
# unequal shards looks like (b): every rank has the same wrong gradient. So does a sum in place of the mean, or a
# division twice, or a sampler that doubles some samples and misses others. A missing broadcast does not look like (b):
# then the replicas themselves differ, by as much as at the start. To tell the two apart, run both in float64: if the
# difference falls to about 1e-14 it was rounding, if it stays at 1e-2 it is a fault. Comparing after a single step
# helps as well, since a wrong average shows at once and rounding hardly.
# <!-- END SOLUTION -->

# %% [markdown]
# ## What you have now
#
# Your predictions, beside what this notebook computed:

# %%
compare(drift_ratio=drift_ratio, samples_missed=samples_missed, sum_learning_rate=sum_learning_rate)

# %%
print(f"no broadcast: replicas stay {drift_ratio:.2f} times as far apart, and the mean loss is {cost:.2f} higher")
print(f"a permutation per rank: {samples_missed:.0f}% of the samples are missed in an epoch")
print(f"the mean of means, on shards of 2, 10 and 60 samples: off by {mean_of_means_error:.0%}")
print(f"one seed for all: the variance of dropout over {WORLD} ranks is {variance_as_reported:.2f}", end="")
print(f", mended {variance_mended:.2f}" if variance_mended is not None else "")
print(f"linear scaling held up to {holds} ranks of 16 samples")

# %% [markdown]
# - **Replicate and broadcast.** Averaging gradients never brings parameters together: who starts apart stays apart.
# - **Shard.** One permutation for all ranks, from seed and epoch; each rank cuts its own part.
# - **Average.** The gradient of the union is the mean weighted by samples. An empty shard brings zeros, and comes along
#   to every collective.
# - **Step.** Then every replica equals one process on the union, after every step, up to rounding. Test for that, in
#   float64.
# - Weights from one seed, noise from one seed per rank.
# - The learning rate belongs to the size of the whole batch, not to the number of ranks.
#
# What you have is right and slow: no gradient travels before the last one is computed, and each travels alone. In
# lesson 04 you build what `DistributedDataParallel` does about it.

# %% tags=["nbval-ignore-output"]
progress()
