# %% [markdown]
# # 05 PyTorch DDP
#
# **What does the wrapper do for me, and what does it leave to me?** `DistributedDataParallel` averages gradients. It
# does that well, and nothing else: who evaluates, what happens when one rank runs out of data, whose batch statistics
# are used, who writes the checkpoint, what an overflow on one rank means for the others, all of that is your code. This
# lesson goes through these places one by one. In most of them the wrong version raises no error.
#
# | | |
# |---|---|
# | You build | a correct distributed evaluation, training on uneven inputs, a synchronised batch norm |
# | You mend | a step that bypasses the wrapper, a mixed-precision step in which one rank overflows |
# | You need | lesson 03 (what replicas owe each other), lesson 04 (buckets, hooks, `no_sync`) |
# | Time | about 2 hours, of which 65 minutes for the exercises; a good place for a break is marked |
# | Hardware | any. Two GPUs or more are used where they are; otherwise two processes on the CPU |

# %%
# @first-cell

# %%
import contextlib
import io
import itertools
import math
import os
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from course_utils import check, hardware, hint, launch, predict, progress
from course_utils.datasets import mnist_or_digits
from course_utils.errors import WorkerTimeout
from course_utils.exercises import answer_needed, compare
from course_utils.visuals import lines_over_steps, step_timeline

# %% [markdown]
# ## One process, one device
#
# Each rank drives one device. Which one is told by its **local rank**, its number on its own machine: rank 5 of 8 on
# two machines with four GPUs each has local rank 1, and takes `cuda:1`. With fewer GPUs than ranks on a machine there
# is nothing to hand out one each, NCCL refuses to run two ranks on one GPU, and everything runs on the CPU over gloo.


# %%
def device_of(local_rank, ranks_here):
    """Return the device of a rank: a GPU of its own if there is one for each rank on this machine, else the CPU."""
    return torch.device("cuda", local_rank) if len(hardware(show=False).gpus) >= ranks_here else torch.device("cpu")


def backend_for(ranks_here):
    """Return the backend that fits: NCCL moves GPU tensors, gloo CPU tensors."""
    return "cpu:gloo,cuda:nccl" if device_of(0, ranks_here).type == "cuda" else "gloo"


# %% tags=["nbval-ignore-output"]
WORLD = 2
print("devices:", *(device_of(local_rank, WORLD) for local_rank in range(WORLD)), "over", backend_for(WORLD))

# %% [markdown]
# ## Three ways to start
#
# A data-parallel program is one program, started once for each rank. This one can be started by `mp.spawn`, which
# makes the processes itself, and by `torchrun`, which makes them and sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
# `MASTER_ADDR` and `MASTER_PORT`. Both import the file again in each new process. That is why it is a file, and why the
# last lines are guarded: functions that exist in a notebook's memory alone cannot be found.

# %%
# %%writefile lesson_05_start.py
import os
import sys

import torch
import torch.distributed as dist


def main(rank, world, meeting=None):
    # torchrun has set the address in the environment; mp.spawn has not, so a file is the place to meet
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=meeting)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    if rank == 0:
        print(f"{world} ranks, the sum of their numbers is {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        torch.multiprocessing.spawn(main, args=(2, f"file://{sys.argv[1]}/meeting"), nprocs=2)


# %%
def output_of(arguments):
    """Run Python with these arguments in a process of its own; return what it prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100)
    return done.stdout + (done.stderr if done.returncode else "")


with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:  # both at once: it takes some seconds
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    starts = {"mp.spawn": ["lesson_05_start.py", folder], "torchrun": [*torchrun, "lesson_05_start.py"]}
    for name, output in zip(starts, pool.map(output_of, starts.values()), strict=True):
        print(f"{name}: {output}", end="")
Path("lesson_05_start.py").unlink(missing_ok=True)  # before you run this again, run the cell above

# %% [markdown]
# (`torchrun` is short for `python -m torch.distributed.run`. `--standalone` lets it choose a free port;
# `--max-restarts` says how often it starts everything anew when a rank dies, and hides the first error if you let it.)
#
# The third way is the course's `launch`: like `torchrun` it sets these variables and forms the group, but it takes a
# function out of this notebook, and it returns what the ranks returned. The rest of the lesson uses it.

# %%
print(launch(lambda: f"local rank {os.environ['LOCAL_RANK']} of {dist.get_world_size()}").results)

# %% [markdown]
# ## The wrapper
#
# The constructor compares the shapes of all parameters across ranks, sends rank 0's values to all, and registers hooks,
# as your own wrapper of lesson 04 did. The trace shows it: what it sends in the constructor, and in a step.

# %%
train, test = mnist_or_digits("train"), mnist_or_digits("test")
images, labels = torch.from_numpy(train.images), torch.from_numpy(train.labels)
test_images, test_labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)
print(train, test, sep="\n")


def make_model():
    torch.manual_seed(0)
    sizes = (images.shape[1], 256, 256, 10)
    first, second, last = (torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
    return torch.nn.Sequential(first, torch.nn.ReLU(), second, torch.nn.ReLU(), last)


# %%
def one_step():
    ddp = DDP(make_model())
    dist.barrier()  # marks the end of the constructor in the trace
    F.cross_entropy(ddp(images[:32]), labels[:32]).backward()


events = launch(one_step, trace=True).trace[0].events
built = [event.op for event in events].index("barrier")
gradient_kilobytes = sum(event.bytes for event in events[built:] if event.op == "all_reduce") / 1e3
print("constructor:", *(f"{event.op} {event.bytes:,} bytes;" for event in events[:built]))
print(
    "step:       ", *(f"{event.op} {event.bytes:,} bytes;" for event in events[built + 1 :] if event.op == "all_reduce")
)

# %% [markdown]
# In the constructor, two short messages with which ranks make sure that their parameters have the same shapes, then one
# broadcast of all parameters. In the step, one all-reduce as long as all gradients. (A first step has one bucket,
# however large the model; the end of the lesson shows what comes after it.)
#
# ## A ruler first: evaluation
#
# Before training anything, a way to measure. Evaluation in parallel goes wrong in four ways.
#
# - **The mean of the ranks' accuracies.** It counts a sample on a small shard for more than one on a large shard.
# - **A sampler made for training.** `DistributedSampler` gives every rank equally many samples, so it repeats some, or
#   leaves some out with `drop_last=True`. The DataLoader has a `drop_last` of its own.

# %%
right, taken = torch.tensor([90, 90, 0]), torch.tensor([100, 100, 1])
mean_of_means = (right / taken).mean().item()
print(f"three ranks took {taken.tolist()} samples and got {right.tolist()} of them right")
print(f"mean of the accuracies {mean_of_means:.1%}, accuracy {(right.sum() / taken.sum()).item():.1%}")
for drop_last in (False, True):
    parts = [DistributedSampler(test_labels, 7, rank, shuffle=False, drop_last=drop_last) for rank in range(7)]
    seen = [index for part in parts for index in part]
    print(f"7 ranks, drop_last={drop_last!s:5}: {len(seen)} taken, ", end="")
    print(f"{len(set(seen))} of {len(test_labels)} samples among them")

# %% [markdown]
# - **Training mode.** Batch norm would use the batch's own statistics, and dropout would drop.
# - **Rank 0 alone.** "Rank 0 evaluates, the others go on" is fine as long as rank 0 calls nothing collective. But it is
#   easy to call something collective: a wrapped model with buffers (batch norm has some) sends rank 0's buffers to all
#   at the start of a forward. Under `torch.no_grad()` it does so in the first forward after a training step, and then
#   no more, so all seems well until one rank makes that first forward and another does not.


# %%
def rank_0_evaluates():
    ddp = DDP(torch.nn.Sequential(torch.nn.Linear(images.shape[1], 10), torch.nn.BatchNorm1d(10))).eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            ddp(test_images)
    dist.barrier()


try:
    launch(rank_0_evaluates, timeout=2)
except WorkerTimeout as error:
    for state in error.states:
        print(f"rank {state.rank} is stuck in: {state.code}")

# %% [markdown]
# Rank 0 waits in a broadcast that nobody else has entered, the others in a barrier that rank 0 never reaches. The same
# happens where a rank's shard is empty. For evaluation, the plain model inside, `ddp.module`, is what you want: its
# forward sends nothing, and ranks may call it as often as they like, or not at all.
#
# ### Exercise: evaluate (12 minutes, 4 points)
#
# `evaluate(ddp, images, labels, batch_size)` is called on every rank with the whole test set. It returns the accuracy,
# from 0 to 1, as a Python float, the same on every rank. Each sample goes through a model once, on *one* rank, in
# batches of at most `batch_size`, and in evaluation mode; afterwards the model is in the mode in which it was. There
# may be fewer samples than ranks.


# %%
# @exercise evaluate points=4 minutes=12
def evaluate(ddp, images, labels, batch_size):
    """Return the share of samples whose largest output is that of their label, over all ranks."""
    ### BEGIN SOLUTION
    rank, world, model = dist.get_rank(), dist.get_world_size(), ddp.module
    images, labels = images[rank::world], labels[rank::world]
    mode = model.training
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)  # right ones, all
    with torch.no_grad():
        for start in range(0, len(labels), batch_size):
            part = slice(start, start + batch_size)
            counts[0] += (model(images[part]).argmax(dim=1) == labels[part]).sum()
            counts[1] += len(labels[part])
    model.train(mode)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()
    ### END SOLUTION


evaluate = check("evaluate", evaluate)

# %% [markdown]
# ## The whole example
#
# The classic first example, handwritten digits on two devices, from the sampler to the accuracy. What is new against a
# loop for one process stands in six places: device, wrapper, sampler, `set_epoch`, the loss that is kept (each rank has
# its own), the evaluation.


# %%
EPOCHS = 6


def fit(epochs=EPOCHS, prepare=lambda ddp: None):
    """Train; return, for each epoch, the loss on this rank's last batch and the test accuracy over all ranks."""
    device = device_of(int(os.environ["LOCAL_RANK"]), dist.get_world_size())
    ddp = DDP(make_model().to(device), device_ids=[device.index] if device.type == "cuda" else None)
    prepare(ddp)
    data = TensorDataset(images.to(device), labels.to(device))
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=32, sampler=sampler)  # 32 on each rank
    optimizer, history = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
        accuracy = evaluate(ddp, test_images.to(device), test_labels.to(device), 64)
        history.append((loss.item(), accuracy))
    return history


# %% tags=["nbval-ignore-output"]
trained = launch(fit, nprocs=WORLD).results
for rank, history in enumerate(trained):
    print(f"rank {rank}: test accuracy by epoch:", *(f"{accuracy:.2f}" for _, accuracy in history))

# %% [markdown]
# The accuracy is one number for all ranks. The loss in `history` is not: it is that of a rank's own last batch. Where a
# loss is written to a log it has to be averaged, with an all-reduce that *all* ranks call, or be called what it is.
#
# ## Uneven inputs
#
# `DistributedSampler` gives all ranks equally many samples, so they make equally many steps. Real pipelines do not
# always: files of different lengths, filtered samples, sentences packed into batches. Each `backward` is an all-reduce
# that waits for all. The rank that runs out of batches leaves its loop; the other one starts one more step and waits.


# %%
def leave_early():
    ddp = DDP(torch.nn.Linear(4, 1))
    for _ in range(2 + dist.get_rank()):
        ddp(torch.ones(2, 4)).sum().backward()
    dist.barrier()


try:
    launch(leave_early, timeout=2)
except WorkerTimeout as error:
    for state in error.states:
        print(f"rank {state.rank} is stuck in: {state.code}")

# %% [markdown]
# Three ways out: every rank drops what is beyond the shortest one (`drop`), repeats a batch until all have equally many
# (`pad`), or the ranks that are through go on answering the others' collectives. PyTorch has the last one as a context,
# `with ddp.join():`. In it, a rank that has left the loop keeps taking part in every all-reduce with zeros, until all
# are through; then the parameters of one that was last are sent to all. Note what it divides by: the world
# size, unless you say `divide_by_initial_world_size=False`; then it is the number of ranks that still have batches.
#
# ### Exercise: train on uneven inputs (10 minutes, 4 points)
#
# `train_uneven(ddp, optimizer, batches)` makes one step for each batch in `batches`, a list of `(inputs, targets)` of
# at least one batch. Ranks have different numbers of them. The loss of a batch is `F.mse_loss`. No batch is left out or
# used twice, and at the end all ranks have equal parameters: those of a process in which a step's gradient is the sum
# over the ranks that still have a batch, divided by the world size or by the number of those ranks.


# %%
# @exercise train_uneven points=4 minutes=10
def train_uneven(ddp, optimizer, batches):
    """Train on this rank's batches, of which other ranks have more or fewer."""
    ### BEGIN SOLUTION
    with ddp.join():
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
    ### END SOLUTION


train_uneven = check("train_uneven", train_uneven)


# %%
def uneven_ranks():
    torch.manual_seed(0)
    ddp, batches = (
        DDP(torch.nn.Linear(4, 1)),
        [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(2 + dist.get_rank())],
    )
    train_uneven(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), batches)
    return len(batches), ddp.module.weight.detach()


with answer_needed():
    (few, ours), (many, theirs) = launch(uneven_ranks).results
    print(f"{few} and {many} batches; equal parameters in the end: {torch.equal(ours, theirs)}")

# %% [markdown]
# `join` costs an additional small all-reduce in each step, to ask who is still there. And a rank that is through makes
# no steps of its own: its parameters are sent to it in the end, its optimizer's state (momentum, Adam's means) stays
# behind. Where you can, make counts equal; where you cannot, join.
#
# ## Whose batch statistics?
#
# Batch norm is the one common layer whose output for a sample depends on the *other* samples of the batch. DDP averages
# gradients; it does nothing about statistics. Each rank normalises with the mean and the variance of its own shard.
# That is not the network that one process with the whole batch would train. How far off it is depends on how few
# samples a shard has, and on whether shards differ from each other: below, two ranks, once with samples from one
# distribution, and once with rank 1's shifted by one standard deviation.


# %%
def as_batch_norm(values):
    return F.batch_norm(values, None, None, training=True)


def columns(rank, samples=(3, 5), shift=1.0):
    numbers = torch.randn(samples[rank], 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return numbers + shift * rank


def output_on_each_rank(normalise, *kind):
    return normalise(columns(dist.get_rank(), *kind))


for samples in ((3, 5), (32, 32)):
    for shift in (0.0, 1.0):
        whole = as_batch_norm(torch.cat([columns(rank, samples, shift) for rank in range(2)]))
        each = torch.cat(launch(output_on_each_rank, as_batch_norm, samples, shift).results)
        batch_norm_error = ((each - whole).norm() / whole.norm()).item()
        print(f"{samples[0]:2} and {samples[1]:2} samples, shifted by {shift:g}: off by {batch_norm_error:.0%}")
whole = as_batch_norm(torch.cat([columns(0), columns(1)]))

# %% [markdown]
# More samples help against chance, not against shards that differ. (The running statistics, which evaluation uses,
# differ too. DDP sends rank 0's to all at the start of a training forward, so in the end everybody has rank 0's, and
# the other ranks' are lost.)
#
# `torch.nn.SyncBatchNorm` computes the statistics over all ranks. It needs GPUs, and so we build it. One part is not
# obvious: the statistics depend on all inputs of all ranks, so **gradients flow through the communication**. The loss
# of rank 1 depends, through the mean, on the inputs of rank 0. `dist.all_reduce` knows nothing of autograd: it writes a
# sum into the tensor, and backward goes on as if it were this rank's own.
#
# What is the gradient of a sum over ranks? Every rank's output contains every rank's input once. So the gradient that
# reaches an input is the sum of the gradients at all the outputs: backward of an all-reduce is an all-reduce.


# %%
class SumOverRanks(torch.autograd.Function):
    """The sum over all ranks, through which gradients flow: `SumOverRanks.apply(tensor)`."""

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


def gradient_through(total_of):
    x = torch.tensor(float(dist.get_rank() + 1), requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch warn of what is to be shown here
        (x * total_of(x)).backward()  # with both ranks' losses added up: (x0 + x1) squared
    return x.grad.item()


def plain_all_reduce(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


print("the derivative of (1 + 2) squared by either number: 6")
for name, total_of in {"dist.all_reduce": plain_all_reduce, "SumOverRanks": SumOverRanks.apply}.items():
    print(f"{name:16} {launch(gradient_through, total_of).results}")

# %% [markdown]
# ### Exercise: synchronised batch norm (15 minutes, 5 points)
#
# `sync_batch_norm(x, eps)` gets this rank's shard, of shape `(samples, channels)`, and returns it normalised: $(x -
# \mu) / \sqrt{\sigma^2 + \epsilon}$, with the mean and the variance (the one that divides by $n$) of each channel over
# *all* samples of all ranks. Shards have different numbers of samples. The gradient with respect to `x` must be that of
# one process on the whole batch, where the losses of all ranks are added up. `SumOverRanks` above is yours to use.


# %%
# @exercise sync_batch_norm points=5 minutes=15
def sync_batch_norm(x, eps):
    """Normalise each channel with the mean and the variance over all ranks."""
    ### BEGIN SOLUTION
    count = torch.full((1,), float(len(x)), dtype=x.dtype, device=x.device)
    sums, count = SumOverRanks.apply(torch.cat([x.sum(dim=0), count])).split([x.shape[1], 1])
    centred = x - sums / count
    variance = SumOverRanks.apply(centred.pow(2).sum(dim=0)) / count  # two passes: E[x^2] - mean^2 would cancel
    return centred / (variance + eps).sqrt()
    ### END SOLUTION


sync_batch_norm = check("sync_batch_norm", sync_batch_norm)

# %% [markdown]
# Held against one process; and, where there is a GPU for each rank, torch's own layer beside it. (In a model,
# `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` replaces every batch norm, before the model is wrapped.)


# %%
def torchs_sync_batch_norm(values):
    device = device_of(int(os.environ["LOCAL_RANK"]), dist.get_world_size())
    layer = torch.nn.SyncBatchNorm(values.shape[1]).to(device, torch.float64)
    return layer(values.to(device)).detach().cpu()


if "nccl" in backend_for(WORLD):
    each = torch.cat(launch(output_on_each_rank, torchs_sync_batch_norm).results)
    print("torch's agrees with one process:", torch.allclose(each, whole, atol=1e-6))
with answer_needed():
    each = torch.cat(launch(output_on_each_rank, lambda values: sync_batch_norm(values, 1e-5)).results)
    print(f"within 1e-12 of one process: {((each - whole).norm() / whole.norm()).item() < 1e-12}")

# %% [markdown]
# *(A good place for a break.)*
#
# ## Parameters that are not used
#
# A bucket leaves when all its gradients are there. A parameter that took no part in this forward gets no gradient, so
# its bucket would wait for ever. Your wrapper of lesson 04 had `synchronize` to send what is left. DDP has no such
# call, and three settings.


# %%
class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, inputs):
        return self.used(inputs)


def two_steps(**options):
    ddp = DDP(TwoHeads(), **options)
    try:
        for _ in range(2):
            ddp(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error).split(".")[0] + "."
    return f"fine; the unused gradient is {ddp.module.unused.weight.grad}"


for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
    print(options or "no option", "->", launch(two_steps, **options).results[0])

# %% [markdown]
# Without an option, the *second* step complains: the first is not complete. `find_unused_parameters` walks through the
# graph after each forward and marks what it does not find, which costs time in every step. `static_graph` looks once,
# in the first step, and believes that all others are the same; if they are not, the result is an error or wrong
# gradients. Best is a model without unused parameters.
#
# ## Sending less: communication hooks
#
# A **communication hook** takes the place of the all-reduce of a bucket. It gets the bucket's gradients and returns a
# future of what is to become the mean. PyTorch brings some. `fp16_compress_hook` halves every number. PowerSGD
# (Vogels et al. 2019) sends a weight matrix $M$ of $n \times m$ as two thin ones, $P$ of $n \times r$ and $Q$ of $m
# \times r$, with $P Q^T \approx M$, and adds what was lost to the next step's gradient (error feedback). Biases go as
# they are.

# %%
shapes = [tuple(parameter.shape) for parameter in make_model().parameters()]
print("parameters:", *shapes)
print(f"without a hook: {gradient_kilobytes:.1f} kB of gradients a step")

# %% [markdown]
# **Predict.** How many kB does a rank bring to the all-reduces of a step with `fp16_compress_hook`?

# %%
# @exercise fp16_kilobytes points=1 minutes=2 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 170
### END SOLUTION
predict("fp16_kilobytes", guess, unit="kB")

# %% [markdown]
# **Predict.** And how many *times* fewer bytes than without a hook does PowerSGD bring, with $r = 2$? Count $r(n + m)$
# numbers for a weight of $n \times m$, and biases in full.

# %%
# @exercise powersgd_times points=1 minutes=4 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 31
### END SOLUTION
predict("powersgd_times", guess, unit="times")


# %%
START = 10  # PowerSGD begins after some steps of plain all-reduce, whose gradients are large and wild


def fp16(ddp):
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def power_sgd(ddp):
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=START)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS = {"no hook": lambda ddp: None, "fp16": fp16, "PowerSGD, rank 2": power_sgd}


def a_few_steps(prepare, steps=START + 2):
    ddp = DDP(make_model())
    prepare(ddp)
    for _ in range(steps):
        dist.barrier()  # marks the beginning of a step in the trace
        F.cross_entropy(ddp(images[:32]), labels[:32]).backward()


def last_step(run):
    """Return the sizes of the all-reduces that rank 0 has made in the last step."""
    events = run.trace[0].events
    start = max(place for place, event in enumerate(events) if event.op == "barrier")
    return [event.bytes for event in events[start:] if event.op == "all_reduce"]


sent = {name: last_step(launch(a_few_steps, prepare, trace=True)) for name, prepare in HOOKS.items()}
for name, sizes in sent.items():
    print(f"{name:17} {sum(sizes):8,} bytes a step in {len(sizes)} all-reduces")
fp16_kilobytes = sum(sent["fp16"]) / 1e3
powersgd_times = sum(sent["no hook"]) / sum(sent["PowerSGD, rank 2"])

# %% [markdown]
# And what does it cost in accuracy? The same training, with each hook, against the bytes counted above.

# %% tags=["nbval-ignore-output"]
curves, final = {}, {}
for name, prepare in HOOKS.items():
    history = trained[0] if name == "no hook" else launch(fit, EPOCHS, prepare).results[0]
    steps = math.ceil(math.ceil(len(labels) / WORLD) / 32)  # in an epoch
    plain = [min(START, steps * (epoch + 1)) if "PowerSGD" in name else 0 for epoch in range(EPOCHS)]
    megabytes = [
        (first * sum(sent["no hook"]) + (steps * (epoch + 1) - first) * sum(sent[name])) / 1e6
        for epoch, first in enumerate(plain)
    ]
    curves[name] = {mb: 100 * accuracy for mb, (_, accuracy) in zip(megabytes, history, strict=True)}
    final[name] = history[-1][1]
    print(f"{name:17} {megabytes[-1]:5.1f} MB brought to all-reduces, accuracy {final[name]:.2f} in the end")
lines_over_steps(
    {"One point an epoch": curves},
    "megabytes that a rank has brought to all-reduces",
    "test accuracy in percent",
    marked=True,
)

# %% [markdown]
# The three curves climb to about the same height, on very different budgets. Whether that saves *time* is another
# question: PowerSGD computes, and sends three messages in place of one, each with its latency. It pays on a slow
# network and for large matrices.
#
# ## A checkpoint: one writes, all read
#
# All replicas are equal, so one of them is enough. Two things go wrong. The state of the wrapper has a prefix in all
# its names, and a plain model does not know them. And the others must not read before the file is whole, so a barrier
# stands between writing and reading; one that *all* ranks reach, so not inside the `if`.


# %%
def checkpoint(folder):
    path = Path(folder) / "model.pt"
    ddp = DDP(make_model())
    if dist.get_rank() == 0:
        torch.save(ddp.module.state_dict(), path)
    else:
        with torch.no_grad():
            ddp.module[0].weight.zero_()  # to see that it comes back
    dist.barrier()
    state = torch.load(path, map_location="cpu", weights_only=True)  # not onto the device that rank 0 saved from
    ddp.module.load_state_dict(state)
    return next(iter(ddp.state_dict())), next(iter(state)), torch.equal(ddp.module[0].weight, state["0.weight"])


with tempfile.TemporaryDirectory() as folder:
    for rank, (wrapped, written, same) in enumerate(launch(checkpoint, folder).results):
        print(f"rank {rank}: {wrapped!r} in the wrapper, {written!r} in the file, restored: {same}")

# %% [markdown]
# Restoring on rank 0 alone, in a model that has been wrapped, would be as wrong as evaluating there alone: DDP sends
# parameters in its constructor, once, and never again. And a checkpoint to go on from holds the optimizer's state and
# the epoch too.
#
# ## Around the wrapper
#
# That prefix tempts people to unwrap once and for all. Here is a step as it is found in many repositories.


# %%
def train_step_as_found(ddp, optimizer, inputs, targets):
    model = ddp.module  # the model itself, so that names have no prefix
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def replicas_after(step, steps=5):
    """Return this rank's weights and losses."""
    torch.manual_seed(0)
    ddp = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    inputs, targets = torch.randn(16, 4), torch.randn(16, 1)
    losses = [step(ddp, optimizer, inputs, targets) for _ in range(steps)]
    return ddp.module.weight.detach(), losses


run = launch(replicas_after, train_step_as_found, trace=True)
(ours, losses), (theirs, _) = run.results
found_apart = (ours - theirs).norm().item()
print(f"the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}; the replicas are {found_apart:.2f} apart")

# %% [markdown]
# Two models, each trained on half of the data, and no error: one sees a falling loss. The hooks on the parameters are
# there and are called, but DDP arms them in its *own* forward, which notes whether this backward is to synchronise; a
# forward of `ddp.module` never gets there. (Its relatives: `copy.deepcopy(ddp.module)` to train on, and changing a
# model after it has been wrapped, by `.to(...)`, `.half()` or a new layer. DDP knows what it was given, and no more.)
#
# ### Exercise: mend the step (4 minutes, 3 points)
#
# `train_step(ddp, optimizer, inputs, targets)` makes one step with the mean of all ranks' gradients, and returns this
# rank's loss, a float.


# %%
# @exercise train_step points=3 minutes=4 kind=debug
def train_step(ddp, optimizer, inputs, targets):
    """Make one step on this rank's batch, with gradients averaged over all ranks; return this rank's loss."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    loss = F.mse_loss(ddp(inputs), targets)  # through the wrapper, whose forward prepares the synchronisation
    loss.backward()
    optimizer.step()
    return loss.item()
    ### END SOLUTION


train_step = check("train_step", train_step)

# %%
with answer_needed():
    (ours, _), (theirs, _) = launch(replicas_after, train_step).results
    print(f"apart: {(ours - theirs).norm().item():.2f} (as found: {found_apart:.2f})")

# %% [markdown]
# `.module` is right for what sends nothing: saving, loading, evaluating. It is wrong for the forward of a training
# step.
#
# ## Mixed precision: an overflow on one rank
#
# In float16 the largest number is 65,504 and small gradients vanish, so the loss is multiplied by a **scale**, as large
# as it can be. When a gradient overflows all the same, `GradScaler` skips the step and halves the scale; after some
# good steps it doubles it. `scaler.unscale_(optimizer)` divides the gradients by the scale *and notes whether one is
# infinite*; `scaler.step` steps if none was; `scaler.update` sets the new scale.
#
# Now suppose that the batch of one rank alone overflows. With torch's DDP in the usual order all goes well: gradients
# are averaged inside `backward`, a mean with an infinite part is infinite, so every rank sees the overflow. With a
# wrapper like yours of lesson 04, or Horovod's, there is a call between backward and step, and an order to get wrong.


# %%
def scaled_step_as_found(optimizer, scaler, loss, synchronize, max_norm):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    synchronize()  # makes every gradient the mean over all ranks
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
    scaler.step(optimizer)
    scaler.update()


def with_an_overflow(step, steps=4):
    """Return, after each step, the scale and whether all parameters are finite; rank 1 overflows in step 2."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def synchronize():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    seen = []
    for number in range(1, steps + 1):
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(torch.ones(4, 8))
        loss = outputs.float().pow(2).sum() * (1000 if number == 2 and dist.get_rank() == 1 else 1)
        step(optimizer, scaler, loss, synchronize, 1.0)
        seen.append((scaler.get_scale(), all(bool(p.isfinite().all()) for p in model.parameters())))
    return seen


def tell(results):
    for rank, seen in enumerate(results):
        print(f"rank {rank}:", *(f"scale {scale:.0f}{'' if finite else ' NaN'};" for scale, finite in seen))


tell(launch(with_an_overflow, scaled_step_as_found).results)

# %% [markdown]
# In step 2 rank 1 notes its overflow, skips and halves its scale. Rank 0's own gradients were fine, so it has noted
# nothing; then it gets rank 1's infinity in the mean, and steps. Its parameters are lost, and the scales, which must
# be equal for a mean of scaled gradients to mean anything, differ.
#
# ### Exercise: mend the order (8 minutes, 4 points)
#
# `scaled_step(optimizer, scaler, loss, synchronize, max_norm)` makes one step. `synchronize()` makes every gradient the
# mean over all ranks. Where a gradient of some rank overflows, no rank steps and all lower their scale; otherwise the
# norm of the *unscaled mean* is clipped to `max_norm`.


# %%
# @exercise scaled_step points=4 minutes=8 kind=debug
def scaled_step(optimizer, scaler, loss, synchronize, max_norm):
    """Make a step in mixed precision, or skip it on all ranks."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    synchronize()  # an infinity on one rank is one on all from here on
    scaler.unscale_(optimizer)  # so that all of them note it
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
    scaler.step(optimizer)
    scaler.update()
    ### END SOLUTION


scaled_step = check("scaled_step", scaled_step)

# %%
with answer_needed():
    tell(launch(with_an_overflow, scaled_step).results)

# %% [markdown]
# bfloat16 has the range of float32, needs no scale, and has none of this trouble; older GPUs, a T4 among them, have
# float16 only.
#
# ## Looking inside: the profiler
#
# PyTorch's profiler records what the processor does in each thread, and the collectives too. Run it in the ranks and
# take home what you want to see; `export_chrome_trace(path)` writes all of it for a browser's trace viewer.

# %%
NAMES = {"DistributedDataParallel.forward": "forward", "gloo:all_reduce": "all-reduce"}


def profiled():
    """Return the spans of one step: (what, start, end), in microseconds."""
    ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))), bucket_cap_mb=2)
    inputs, spans = torch.randn(256, 512), []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(4):  # the first ones warm up, and buckets are made anew
            dist.barrier()
            ddp(inputs).sum().backward()
    for event in profiler.events():
        what = NAMES.get(event.name) or ("backward" if event.name.startswith("autograd::engine") else None)
        spans += [(what, event.time_range.start, event.time_range.end)] if what else []
    last = max(start for what, start, _ in spans if what == "forward")
    return [span for span in spans if span[1] >= last]


# %% tags=["nbval-ignore-output"]
with contextlib.redirect_stdout(io.StringIO()):  # the profiler tells when it starts and stops
    run = launch(profiled)
lanes = {}
for rank, spans in enumerate(run.results):
    begin = min(start for _, start, _ in spans)
    told = [(what, (start - begin) / 1e6, (end - begin) / 1e6) for what, start, end in spans]
    lanes[f"rank {rank} compute"] = [span for span in told if span[0] != "all-reduce"]
    lanes[f"rank {rank} network"] = [span for span in told if span[0] == "all-reduce"]
step_timeline({"One step of DDP, as the profiler saw it": lanes})

# %% [markdown]
# Each rank is counted from the start of its own forward; a block of backward is one node of the graph. The all-reduces
# begin while backward still runs, bucket by bucket: lesson 04's picture, recorded by torch itself.
#
# DDP also keeps a diary of its own. It is there for bug reports and dashboards; the name begins with an underscore, so
# do not build on it.

# %%
DIARY = ("world_size", "num_parameter_tensors", "total_parameter_size_bytes", "bucket_cap_bytes", "bucket_sizes")
DIARY += ("has_rebuilt_buckets", "rebuilt_bucket_sizes", "comm_hook", "find_unused_parameters", "iteration")


def diary():
    ddp = DDP(make_model(), bucket_cap_mb=0.1)
    fp16(ddp)
    for _ in range(3):
        F.cross_entropy(ddp(images[:32]), labels[:32]).backward()
    return {name: value for name, value in ddp._get_ddp_logging_data().items() if name in DIARY}


for name, value in sorted(launch(diary).results[0].items()):
    print(f"{name:28} {value}")

# %% [markdown]
# The constructor puts everything into one bucket, whatever the cap. After the first step DDP knows the order in which
# the gradients really come, and makes the buckets anew. A rebuilt bucket can be larger than the cap, as lesson 04 has
# it: the parameter with which it reaches the cap closes it, and one weight alone may be above it.
#
# ## Explain (10 minutes, 3 points, read by a person)
#
# A colleague's training on 8 GPUs reports a validation accuracy of 91.8%. The same checkpoint, evaluated by one
# process, gives 89.9%. There are 8,000 validation samples, and the batch size is 64 on each GPU. The code: DDP; a model
# with batch norm; validation with a `DistributedSampler` and
# `drop_last=True` in the DataLoader; each rank computes the accuracy of its batches, and rank 0 prints *its* value.
# Name at least three possible causes, how large each can be and in which direction, and how you would find out which it
# is. About eight sentences.

# %% [markdown]
# <!-- @exercise two_accuracies points=3 minutes=10 kind=explain -->
# <!-- BEGIN SOLUTION -->
# (1) Rank 0 prints the accuracy of its own eighth. That is a random sample of the validation set: with 1,000 samples a
# rank, the standard error at 90% is about 0.9 points, so 1.9 points would be a bit unusual, but possible, in either
# direction. Summing correct ones and counts over ranks and dividing once settles it. (2) drop_last leaves out the last
# partial batch of each rank, and the sampler repeats or drops up to 7 samples. If the set is ordered (by class, say)
# those are not like the others; the effect is at most the share that is left out, in either direction. Counting the
# samples and the different indices shows it. (3) If the model was not in evaluation mode, batch norm normalised with
# the statistics of the validation batch: the accuracy then depends on the batch size and can be better or worse. Look
# at model.training, and evaluate with another batch size: the result must not change. (4) The running statistics are
# those of rank 0's shards; a checkpoint that was written by another rank, or before the last forward, can hold others.
# Compare the buffers across ranks. Evaluate the same checkpoint with one process on each rank's shard: if the eighth of
# rank 0 gives 91.8%, it was (1).
# <!-- END SOLUTION -->

# %% [markdown]
# ## What you have now

# %%
print(f"mean of the accuracies of unequal shards: {mean_of_means:.1%}, the accuracy: {(right.sum() / taken.sum()):.1%}")
print(f"batch norm with statistics per rank: off by {batch_norm_error:.0%} with 32 samples a rank, where shards differ")
print(f"around the wrapper: replicas {found_apart:.2f} apart after 5 steps, no error")
for name in HOOKS:
    print(f"{name:17} {sum(sent[name]) / 1e3:6.1f} kB a step")
compare(fp16_kilobytes=fp16_kilobytes, powersgd_times=powersgd_times)
progress()

# %% [markdown]
# - **DDP averages gradients, and sends buffers.** Everything else that concerns several ranks is your code.
# - **Every collective is everybody's.** A forward through the wrapper can be one. Nothing collective behind
#   `if rank == 0`.
# - **Metrics:** add up counts over ranks, divide once. No padding, no dropping, evaluation mode.
# - **Train through the wrapper**; save, load and evaluate through `.module`.
# - **Statistics** that cross ranks need gradients that cross ranks.
# - **Look at gradients after the synchronisation**: unscaling and clipping come behind it, so that all ranks decide
#   alike.
#
# Lesson 06 takes up what you met twice here: a rank that waits for ever, and how to find out for whom.
