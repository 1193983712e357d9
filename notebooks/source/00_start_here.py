# %% [markdown]
# # 00 Start here
#
# **What can this machine do?** Training on many machines sounds like something that needs many machines. To
# understand it you need two or more *processes*, and any laptop runs those. In this lesson you start some, from a
# cell, and get to know the few commands of the course.
#
# | | |
# |---|---|
# | You build | nothing yet but trust: functions that run in several processes and bring something back |
# | You need | Python; having trained a small network in PyTorch once |
# | Time | about 25 minutes, of which 14 for the exercises |
# | Hardware | any; a GPU is used where there is one, and never needed |

# %%
# @first-cell

# %% [markdown]
# The three lines above say where this notebook runs, what is there, and what the lessons will use here. Two GPUs are
# used when a machine has them. Everywhere else the same code runs as two or more processes on the CPU: slower, but
# with the same messages, the same mistakes and the same results, and those are what the course is about.

# %%
import os
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from course_utils import check, hardware, hint, launch, predict, progress
from course_utils.errors import WorkerFailed
from course_utils.exercises import answer_needed, compare


# %% [markdown]
# ## A function in several processes
#
# `launch` takes a function and runs it in as many new processes as you ask for. Each of them is called a **rank** and
# has a number, counted from
# 0. What a rank prints appears below the cell, with its number in front.


# %%
def hello():
    print("good morning from rank", os.environ["RANK"])
    return int(os.environ["RANK"]) ** 2


run = launch(hello, nprocs=4)

# %% [markdown]
# All four ran the same function at the same time. What each returned is in `run.results`, by rank; all that it
# printed is in `run.logs`.

# %%
print("results:", run.results)
print("rank 2 printed:", run.logs[2].strip())

# %% [markdown]
# Ranks are processes, not threads. Every process has a number from the operating system, its process id, and
# `os.getpid()` tells it.
#
# **Predict.** Four ranks return their process id, and this notebook has one too. How many different numbers are that?
#
# A prediction is kept before you see the result, and shown beside it at the end of the lesson. It counts that you
# made one, not that it is right: a wrong prediction is where you learn something.

# %%
# @exercise process_ids points=1 minutes=1 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 5
### END SOLUTION
predict("process_ids", guess, unit="processes")

# %%
run = launch(os.getpid, nprocs=4)
different = len({*run.results, os.getpid()})
print("different process ids:", different)

# %% [markdown]
# Starting a process and loading PyTorch in it takes a few seconds. So a helper process stays ready with PyTorch
# loaded, and only the first launch of a notebook waits for it.

# %% tags=["nbval-ignore-output"]
begin = time.perf_counter()
launch(os.getpid, nprocs=2)
print(f"two ranks started, connected and ended in {time.perf_counter() - begin:.2f} s")

# %% [markdown]
# ## Ranks know of each other
#
# When your function begins, the ranks are already connected: they form a **process group**. `torch.distributed`,
# imported as `dist`, is what they talk through. Here each rank brings a number, and `all_reduce` replaces it, on all
# ranks, by the sum of all.


# %%
def add_up():
    number = torch.tensor(10.0 * dist.get_rank())
    dist.all_reduce(number)
    return number.item()


print("the sum, as each rank knows it:", launch(add_up, nprocs=4).results)

# %% [markdown]
# ### Exercise: who am I? (4 minutes, 1 point)
#
# Write `introduce()`, which returns a text such as `rank 1 of 4`. `dist.get_rank()` is the number of the rank that
# asks, `dist.get_world_size()` how many ranks there are.
#
# Replace the line that raises, then run the cell. `check` runs your function in launches of different sizes and says
# what it found. It never stops the notebook: as long as an answer is missing or wrong, the lesson goes on without it.


# %%
# @exercise introduce points=1 minutes=4
def introduce():
    """Return who this rank is, such as "rank 1 of 4"."""
    ### BEGIN SOLUTION
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"
    ### END SOLUTION


introduce = check("introduce", introduce)

# %% [markdown]
# Stuck? `hint` gives one hint at a time; each call goes a step further.

# %%
hint("introduce")

# %% [markdown]
# ## What travels, and what does not
#
# A launched function may use anything that the notebook has: arguments, variables, models.
#
# **Predict.** The model below has one weight, and it begins at 0. Two ranks train it to multiply by 3, and they find
# the 3. What is the weight in the notebook afterwards?

# %%
# @exercise weight_at_home points=1 minutes=1 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 3
### END SOLUTION
predict("weight_at_home", guess)

# %%
inputs = torch.linspace(-1, 1, 20).view(-1, 1)
targets = 3 * inputs
model = torch.nn.Linear(1, 1)
torch.nn.init.zeros_(model.weight)
torch.nn.init.zeros_(model.bias)


def train_and_forget(model, inputs, targets):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(50):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    print(f"trained: the weight is {model.weight.item():.2f}")


launch(train_and_forget, model, inputs, targets, nprocs=2)
at_home = model.weight.item()
print(f"in the notebook, the weight is {at_home:.2f}")

# %% [markdown]
# The training worked, in two processes that are gone by now, and their weights went with them. The model in the
# notebook never took a step. A rank shares no variable with this notebook: when you launch a function, *a copy* of all
# that it refers to goes along, and when it is done, a copy of what it returns comes back. Nothing else does. A list
# shows it as well:

# %%
shopping = ["bread"]


def go_shopping():
    shopping.append(f"apples, says rank {dist.get_rank()}")
    return shopping


run = launch(go_shopping, nprocs=2)
print("returned by rank 0:", run.results[0])
print("returned by rank 1:", run.results[1])
print("in the notebook:   ", shopping)

# %% [markdown]
# Three lists: each rank wrote on its own.
#
# ### Exercise: bring it home (5 minutes, 2 points)
#
# Here is the training again. Complete it so that the trained weights come back, as a `state_dict`.


# %%
# @exercise bring_home points=2 minutes=5 kind=debug
def bring_home(model, inputs, targets):
    """Train `model` and return its weights, as a state_dict."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(50):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    ### BEGIN SOLUTION
    return model.state_dict()
    ### END SOLUTION


bring_home = check("bring_home", bring_home)

# %%
with answer_needed():
    run = launch(bring_home, model, inputs, targets, nprocs=2)
    model.load_state_dict(run.results[0])
    print(f"in the notebook, the weight is now {model.weight.item():.2f}")

# %% [markdown]
# (Both ranks did the same work on the same data here, so either one's weights will do. Sharing the work is what
# lessons 03 and 04 are about.)
#
# If a later cell needs an answer that you do not have yet, it says so and goes on; `with answer_needed():` marks such
# cells.

# %% [markdown]
# ## When a rank fails
#
# Sooner or later a rank raises an exception, while the others wait for it. Then every rank has something to complain
# about, and the complaint that matters is easily buried. `launch` looks for the *first* failure and tells you that
# one.


# %%
def divide_the_cake(guests):
    share = 12 // guests[dist.get_rank()]
    dist.barrier()  # here every rank waits for all the others
    return share


try:
    launch(divide_the_cake, [4, 3, 0, 6], nprocs=4)
except WorkerFailed as error:
    print("rank at fault:", error.rank)
    print("what it raised:", error.exception_type, "-", error.exception_message)
    print(error.traceback)

# %% [markdown]
# The number of the rank, its own exception, and the line in the cell. That the other ranks lost a partner in the
# barrier is a consequence; `print(error)` shows those too, folded to a line each.
#
# Usually you do not catch the error: it stops the cell and shows the same. A function that waits forever is stopped
# as well, with the line in which each rank stands. Lesson 01 makes that happen. And *Interrupt* (the square button)
# ends a launch at any time.

# %% [markdown]
# ## What can this machine do?
#
# Are two processes twice as fast as one? Ask the machine. Every rank multiplies matrices for a moment; we add up how
# many they managed, and keep the best of three tries.


# %%
def multiply_for_a_while(seconds=0.3):
    torch.set_num_threads(1)  # one core a rank
    matrix, count = torch.ones(200, 200), 0
    dist.barrier()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix
        count += 1
    return count / seconds


ranks = [1, 2, 4, 8]
per_second = [max(sum(launch(multiply_for_a_while, nprocs=n).results) for _ in range(3)) for n in ranks]

figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.plot(ranks, [rate / per_second[0] for rate in per_second], "o-", label="measured")
axes.plot(ranks, ranks, "--", color="0.6", label="as many times as ranks")
axes.axvline(hardware(show=False).cores, color="0.85", linewidth=6, zorder=0, label="cores of this machine")
axes.set(xlabel="ranks", ylabel="work, one rank = 1", xticks=ranks, title="More ranks, more work - up to the cores")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The line rises while there are cores left, and then it bends: ranks beyond the cores share them. (Where something
# else keeps the machine busy, more ranks win a larger share of it, and the line goes on climbing a little.) On one
# machine, then, this course cannot show you that sixteen workers are sixteen times faster, and it does not pretend
# to. It shows *what they say to each other*, counts it, and works out from the count what it costs on hardware where
# it matters.
#
# Every lesson has one question that a person reads. In two sentences: why was the weight in the notebook unchanged
# after the ranks had trained, and what changed when you returned it?

# %% [markdown]
# <!-- @exercise two_copies points=1 minutes=3 kind=explain -->
# <!-- BEGIN SOLUTION -->
# The ranks are processes with a memory of their own, so what they trained was a copy of the model that travelled with
# the call; the notebook's model never took a step. A returned state_dict is copied back into the notebook's memory,
# where load_state_dict can put it into the model.
# <!-- END SOLUTION -->

# %% [markdown]
# ## Where the course goes
#
# | lesson | question |
# |---|---|
# | 01 ranks and rendezvous | How do workers find each other? |
# | 02 all-reduce from scratch | How do N workers agree on a sum? |
# | 03 data parallel by hand | Why is it the same as one big batch? |
# | 04 build your own DDP | When can communication start? |
# | 05 PyTorch DDP | What does the wrapper do for me? |
# | 06 when synchronization breaks | Why does it hang? |
# | 07 synchronous or asynchronous | Must everyone wait? |
# | 08 TensorFlow strategies | The same in TensorFlow? |
# | 09 Horovod | One API over both? |
# | 10 GCN on Amazon Products | Does it carry a real graph? |
#
# Take 01 to 04 in order: each one uses what the one before has built.

# %% [markdown]
# ## How to hand in
#
# 1. Choose *Run All* once more, from a fresh kernel, and look through the verdicts. A missing answer costs its own
#    points and no others.
# 2. Save the notebook, and hand in that one `.ipynb` file, in the way that your instructor asks for. On Kaggle and
#    Colab you find it under *File*, *Download*.
# 3. Leave the first line of an exercise cell as it is (it begins with `# @exercise`): answers are found by it.
#    Everything else is yours: add cells, import what you need, write helper functions.
#
# If you learn on your own, the verdicts are all you need.

# %% [markdown]
# ## What you have now
#
# Ranks are processes with copies; what they return comes back, and nothing else does; and the first failure is the
# one to read. Your predictions, beside what this notebook computed, and the points so far:

# %%
compare(process_ids=different, weight_at_home=at_home)
progress()
