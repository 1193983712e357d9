# %% [markdown]
# # 08 TensorFlow strategies
#
# **The same in TensorFlow?** In PyTorch you start processes, wrap a model, and the wrapper averages gradients.
# TensorFlow turns that around: you open the *scope* of a strategy, build the model as always, and the strategy
# decides where variables live, how often your step runs, and what happens to its gradients. Underneath are the
# broadcasts and all-reduces of lesson 02. What differs is who divides, and by what, and that is where most mistakes
# are made.
#
# | | |
# |---|---|
# | You build | a replica's part of the loss, a worker's `TF_CONFIG`, a step for any strategy, a worker's pipeline |
# | You mend | a step that clips before the sum |
# | You need | lesson 03 (what replicas owe each other); some Keras |
# | Time | about 2 hours, of which 65 minutes for the exercises; a good place for a break is marked |
# | Hardware | any. Two GPUs are used where they are; otherwise the CPU, as two logical devices or as two processes |

# %%
# @first-cell

# %% [markdown]
# This lesson needs TensorFlow, and `tf_keras`, the Keras 2 that goes with it. Kaggle and Colab bring both, and the
# cell leaves them as they are. Elsewhere it installs what is missing, once.

# %%
from course_utils.tensorflow_setup import ensure_tensorflow

ensure_tensorflow()
import itertools
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist

from course_utils import check, hint, launch, predict, progress
from course_utils.datasets import mnist_or_digits
from course_utils.errors import WorkerFailed, WorkerTimeout
from course_utils.exercises import answer_needed, compare
from course_utils.visuals import lines_over_steps

# %% [markdown]
# ## One process, two devices
#
# `MirroredStrategy` is for several GPUs of one machine. There is one process; each device holds a **replica**, a copy
# of all variables. Without two GPUs the CPU can play both: TensorFlow lets it be split into logical devices, as long
# as nothing has been computed yet. That is why everything in this lesson runs in `launch(...,
# framework="tensorflow")`: each call gets a process in which TensorFlow has not begun.


# %%
def two_devices():
    """Name two GPUs, or two halves of the CPU; call it before TensorFlow does anything else."""
    if len(tf.config.list_physical_devices("GPU")) >= 2:
        return ["GPU:0", "GPU:1"]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return ["CPU:0", "CPU:1"]


def in_tensorflow(fn, *args, nprocs=1, **options):
    return launch(fn, *args, nprocs=nprocs, framework="tensorflow", **options)


def look_around():
    strategy = tf.distribute.MirroredStrategy(two_devices())
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    number = strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group * 10)
    print("a variable is a", type(variable).__name__, "with", len(variable.values), "copies")
    print("a step's result is a", type(number).__name__, [int(one) for one in number.values])
    print("their sum:", int(strategy.reduce(tf.distribute.ReduceOp.SUM, number, axis=None)))


_ = in_tensorflow(look_around)

# %% [markdown]
# Three things to keep apart.
#
# - **A mirrored variable** is one variable with a copy on each device. The strategy keeps the copies equal: it sends
#   the first values to all, and lets replicas change them only together.
# - **A PerReplica value** is a bundle of different values, one for each replica. What `strategy.run` returns is one,
#   and so is a distributed batch. You cannot compute with it, you can hand it to `run`, or make one value of it with
#   `reduce`.
# - **A replica context** is where your step runs, once on each device. Outside of it, in the *cross-replica context*,
#   code runs once for all.
#
# ## The all-reduce again
#
# Inside a replica's step, `get_replica_context().all_reduce` is the all-reduce of lesson 02: every replica brings a
# tensor, every replica gets the sum, or the mean. Here are three torch ranks and three TensorFlow workers, each with
# the same numbers.

# %%
PIECES = np.random.default_rng(0).normal(size=(3, 5))


def in_torch():
    total = torch.from_numpy(PIECES[dist.get_rank()].copy())
    dist.all_reduce(total)
    return total.numpy(), (total / dist.get_world_size()).numpy()


def in_a_worker():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def step():
        context = tf.distribute.get_replica_context()
        piece = tf.constant(PIECES)[context.replica_id_in_sync_group]
        return [context.all_reduce(op, piece) for op in (tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN)]

    return strategy.run(step)


theirs = launch(in_torch, nprocs=3).results
ours = in_tensorflow(in_a_worker, nprocs=3).results
for name, torchs, tensorflows in zip(("sum ", "mean"), theirs[0], ours[0], strict=True):
    print(name, "torch     ", np.round(torchs, 6))
    print(name, "TensorFlow", np.round(tensorflows, 6))
apart = max(np.abs(np.subtract(one, other)).max() for one in theirs for other in ours)
print("no two of the six ranks differ by more than 1e-15:", bool(apart < 1e-15))

# %% [markdown]
# ## Which all-reduce?
#
# Lesson 02 built several algorithms for one sum. A `MirroredStrategy` has a choice of three, its *cross-device ops*:
# `NcclAllReduce` (NVIDIA's rings and trees between GPUs, what it takes when there are GPUs),
# `HierarchicalCopyAllReduce` (copies to one device of each group, then between groups; made for machines with 8 GPUs
# on two switches), and `ReductionToOneDevice` (everything to one device and back, the naive one). On a CPU it takes
# TensorFlow's own collectives.


# %%
def spread(strategy, parts):
    """Return PerReplica values: to each replica of the job its own part, an array or a tuple of arrays."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.nest.map_structure(tf.constant, parts[context.replica_id_in_sync_group])
    )


def summed(value):
    """Return the sum over all replicas; called in a replica's step."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def by(operations):
    strategy = tf.distribute.MirroredStrategy(two_devices(), cross_device_ops=operations and operations())
    pieces = spread(strategy, PIECES)
    total = strategy.run(summed, args=(pieces,)).values[0]
    return type(strategy.extended._get_cross_device_ops(pieces)).__name__, total


for operations in (None, tf.distribute.HierarchicalCopyAllReduce, tf.distribute.ReductionToOneDevice):
    ((used, total),) = in_tensorflow(by, operations).results
    same = np.allclose(total, PIECES[:2].sum(axis=0), rtol=0, atol=1e-15)
    print(f"{'nothing chosen' if operations is None else operations.__name__:26} uses {used:26} right: {same}")

# %% tags=["nbval-ignore-output"]
try:
    print("NCCL at work:", in_tensorflow(by, tf.distribute.NcclAllReduce).results[0][0])
except WorkerFailed as error:
    print(error.exception_message.partition(" used by")[0])

# %% [markdown]
# The sums agree, so the choice is one of speed, and the CPU cannot show it. How to choose: leave it alone where GPUs
# are NVIDIA's, for NCCL is right there. Without NCCL (another maker's devices, a driver too old for it) try
# `HierarchicalCopyAllReduce`, then `ReductionToOneDevice`. (The last cell asks for NCCL. Without two GPUs there is no
# kernel for it.)
#
# Between processes there are two choices more: `CommunicationImplementation.RING`, over gRPC, for any device, and
# `NCCL`, for GPUs. What does NCCL do in workers without a GPU?


# %%
def with_implementation(name):
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(implementation=kinds[name])
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    return strategy.run(lambda: summed(tf.ones(3)))


for name in ("RING", "NCCL", "AUTO"):
    print(name, [value.tolist() for value in in_tensorflow(with_implementation, name, nprocs=2).results])

# %% [markdown]
# For tensors on the CPU the request is passed over in silence, and the ring does the work. If a job on GPUs is slow,
# look at what it really uses before you believe its settings.
#
# ## A model, and what `fit` does
#
# Digits as in lesson 03, and a network of two layers. The seed makes all replicas and all processes of this lesson
# begin with the same weights.

# %%
train, test = mnist_or_digits("train"), mnist_or_digits("test")
print(train, test, sep="\n")
SIDE = train.images.shape[1]


def make_model(library=keras, dtype="float32"):
    """Return a classifier with the same first weights everywhere."""
    library.utils.set_random_seed(0)
    layers = [library.layers.Dense(32, "relu", dtype=dtype), library.layers.Dense(10, dtype=dtype)]
    return library.Sequential([library.layers.InputLayer((SIDE,), dtype=dtype), *layers])


def losses_of(model, images, labels):
    """Return the loss of each sample."""
    logits = model(images, training=True)
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


# %%
def fit_on(replicas, samples=1024, library=keras):
    """Train for 3 epochs with batches of 64; return the weights and what Keras reports as loss."""
    devices = two_devices()[:replicas]
    strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope():
        model = make_model(library)
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=library.optimizers.SGD(0.1), loss=loss)
    images, labels = train.images[:samples], train.labels[:samples]
    history = model.fit(images, labels, batch_size=64, epochs=3, shuffle=False, verbose=0)
    return np.concatenate([part.ravel() for part in model.get_weights()]), history.history["loss"]


(alone, lone_loss), (both, both_loss) = (in_tensorflow(fit_on, replicas).results[0] for replicas in (1, 2))
print("one replica: losses", np.round(lone_loss, 4))
print("two replicas: losses", np.round(both_loss, 4))
print("weights differ by less than 1e-5:", bool(np.abs(alone - both).max() < 1e-5))

# %% [markdown]
# Not one line of the model changed, and two replicas end where one ends. Note what `batch_size=64` means: the
# **global batch**. Each replica got 32 of them. (In PyTorch's DDP the number in your DataLoader is the batch of *one*
# rank.)
#
# Now 1,000 samples instead of 1,024: the last batch of an epoch has 40. Then 1,001, and it has 41.

# %%
for samples in (1000, 1001):
    (alone, _), (both, _) = (in_tensorflow(fit_on, replicas, samples).results[0] for replicas in (1, 2))
    print(f"{samples:,} samples: weights differ by less than 1e-5: {bool(np.abs(alone - both).max() < 1e-5)}", end="")
    print(f" (by {np.abs(alone - both).max():.0e})")

# %% [markdown]
# One batch in sixteen that does not divide, 21 samples here and 20 there, and the two trainings part. That is P3 of
# lesson 03: in `fit` each replica takes the mean over its own samples, divides by the number of replicas, and the sum
# of that is a mean of means. It is small, and it is in every epoch. In a loop of your own you can do better.
#
# ## Who divides?
#
# Keras's optimizers **sum** gradients over replicas. This is the one fact to remember of this lesson.
# `apply_gradients` in a replica's step calls `all_reduce(SUM)` on them and then updates. In PyTorch DDP averages, and
# a mean loss on each rank is right. Here a mean loss on each replica is wrong.


# %%
def gradient_applied(loss_of, counts):
    """Return how far a weight of 0 moves in one SGD step of rate 1 with these numbers of samples on the replicas."""
    strategy = tf.distribute.MirroredStrategy(two_devices())
    with strategy.scope():
        weight = keras.Variable(0.0, dtype="float64")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])
    values = spread(strategy, [part[:count] for part, count in zip(SAMPLES, counts, strict=True)])

    def step(samples):
        with tf.GradientTape() as tape:
            loss = loss_of(weight * samples, sum(counts))
        optimizer.apply_gradients([(tape.gradient(loss, weight.value), weight)])

    strategy.run(step, args=(values,))
    return -weight.value.numpy()


SAMPLES = np.array([[1.0, 2.0, 3.0, 6.0], [8.0, 4.0, 2.0, 2.0]])  # a sample's gradient is the sample itself
print("means of the two replicas:", *(np.mean(part) for part in SAMPLES), "and of all:", np.mean(SAMPLES))

# %% [markdown]
# **Predict.** Two replicas with four samples each; the gradient of the mean over all eight stands above. Each replica
# takes the mean over its own four, and Keras applies the result. How many times too large is the gradient that is
# applied?

# %%
# @exercise sum_of_means points=1 minutes=2 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 2
### END SOLUTION
predict("sum_of_means", guess, unit="times")

# %%
WAYS = {
    "mean of own samples": lambda losses, size: tf.reduce_mean(losses),
    "mean of own samples / replicas": lambda losses, size: tf.reduce_mean(losses) / 2,
    "sum of own samples / global batch": lambda losses, size: tf.reduce_sum(losses) / size,
}
applied = {}
for name, loss_of in WAYS.items():
    for counts in ((4, 4), (4, 1)):
        applied[name, counts] = in_tensorflow(gradient_applied, loss_of, counts).results[0]
        kept = [value for part, count in zip(SAMPLES, counts, strict=True) for value in part[:count]]
        print(f"{name:34} {counts}: {applied[name, counts]:6.3f}, of one process {np.mean(kept):6.3f}")

# %% [markdown]
# The mean of the own samples is too large by as much as there are replicas: "it diverges on 8 GPUs" is usually this.
# Divided by the number of replicas it is right while all have equally many samples. Only the third is right with 4
# and 1: each sample counts with one over the **global** batch, wherever it lies.
#
# A penalty on the weights (weight decay in the loss) is another matter. Each replica has the same weights, so each
# one computes the same penalty, and the sum would count it that many times.
#
# ### Exercise: a replica's part of the loss (8 minutes, 4 points)
#
# `global_batch_loss(losses, penalty, global_batch, replicas)` is called on every replica. `losses` holds one loss for
# each of *its* samples, perhaps none; `penalty` is a number that all replicas have alike; `global_batch` is the
# number of samples on all replicas, `replicas` the number of replicas. Return a number, as a tensor, such that the
# **sum** over the replicas is the mean loss of all samples plus the penalty once.


# %%
# @exercise global_batch_loss points=4 minutes=8
def global_batch_loss(losses, penalty, global_batch, replicas):
    """Return this replica's part of the loss: over all replicas the parts add up to the mean loss plus the penalty."""
    ### BEGIN SOLUTION
    return tf.reduce_sum(losses) / global_batch + penalty / replicas
    ### END SOLUTION


global_batch_loss = check("global_batch_loss", global_batch_loss)

# %% [markdown]
# TensorFlow has both halves ready: `tf.nn.compute_average_loss(losses, global_batch_size=...)` and
# `tf.nn.scale_regularization_loss(penalty)`.
#
# What does Keras *report*? In the last section's `fit` the printed loss of two replicas was that of one. Keras undoes
# its own division before it shows the number and averages over replicas. In a loop of your own nobody does that for
# you: what a replica's step returns is a *part* of a sum, and `strategy.reduce(SUM, ...)` makes the loss of it. With
# MEAN, or with the first replica's part, a log shows a loss that shrinks with the number of GPUs:

# %%
parts = [(part.sum() / SAMPLES.size).item() for part in SAMPLES]
print("parts:", parts, " SUM:", sum(parts), " MEAN:", sum(parts) / 2, " the loss of all samples:", np.mean(SAMPLES))

# %% [markdown]
# *A good place for a break.*
#
# ## Several processes: TF_CONFIG
#
# `MultiWorkerMirroredStrategy` spreads replicas over processes, on one machine or on many. Each process is a
# **worker** with one or more devices. Where lesson 01's ranks met in a store, a TensorFlow worker reads one
# environment variable, `TF_CONFIG`, before anything else, and learns from it who there is and which one it is itself.
# `launch` has written one for each process:

# %%
configs = in_tensorflow(lambda: os.environ["TF_CONFIG"], nprocs=2).results
for text in configs:
    config = json.loads(text)
    config["cluster"]["worker"] = [f"127.0.0.1:<port {place}>" for place, _ in enumerate(config["cluster"]["worker"])]
    print(config)

# %% [markdown]
# Read aloud: "The cluster consists of these two workers, at these addresses. I am a worker, number 0." The second
# says the same, but number 1. There is no master: everybody has the whole list, and listens at the address that
# stands at its own place. Worker 0 is the *chief* by convention; it writes checkpoints and logs.
#
# ### Exercise: write TF_CONFIG (5 minutes, 3 points)
#
# `tf_config(workers, index)` gets the addresses of all workers and the number of one of them, and returns that
# worker's `TF_CONFIG`, as text. `check` starts a cluster with what you wrote.


# %%
# @exercise tf_config points=3 minutes=5
def tf_config(workers, index):
    """Return the text of TF_CONFIG for worker number `index` of the workers at these addresses."""
    ### BEGIN SOLUTION
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
    ### END SOLUTION


tf_config = check("tf_config", tf_config)

# %% [markdown]
# ## One step for any strategy
#
# Now the training step. It has two levels: a function that a replica runs on its part of the batch, and around it the
# code that runs once for all: `strategy.run`, and the reduction of what comes back.
#
# ### Exercise: a distributed step (15 minutes, 5 points)
#
# `distributed_step(strategy, model, optimizer, batch, global_batch)` makes one training step and returns the mean
# loss over the global batch, before the update, the same on every worker. `batch` is a pair `(images, labels)` of
# PerReplica values, `global_batch` how many samples all replicas have together; their shares may differ. The loss of
# a sample is `losses_of(model, images, labels)`.
#
# `check` tries a `MirroredStrategy` with two replicas and 2 or 3 workers with a `MultiWorkerMirroredStrategy`, SGD
# with momentum and Adam, and compares every copy of the weights after each of 5 steps with one process, to $10^{-9}$.


# %%
# @exercise distributed_step points=5 minutes=15
def distributed_step(strategy, model, optimizer, batch, global_batch):
    """Train on one batch, which lies spread over the replicas; return the mean loss over all of it."""
    ### BEGIN SOLUTION

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(model, images, labels)) / global_batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))  # sums over replicas
        return loss

    parts = strategy.run(replica_step, args=batch)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)
    ### END SOLUTION


distributed_step = check("distributed_step", distributed_step)

# %% [markdown]
# ## The yardstick
#
# The property that carries lesson 03 holds here too: after every step, on every worker, the weights are those of one
# process that trains on the whole batch. Twenty steps of 60 samples; the replicas take very different shares of them.

# %%
STEPS, RATE = 20, 0.25
ORDER = np.random.default_rng(3).permutation(len(train))[: STEPS * 60].reshape(STEPS, 60)


def weights_of(model):
    return np.concatenate([variable.numpy().ravel() for variable in model.trainable_variables])


def train_with(kind, dtype, shares):
    """Return this worker's weights after each step."""
    if kind == "mirrored":
        strategy = tf.distribute.MirroredStrategy(two_devices())
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = make_model(dtype=dtype), keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    states, cuts = [], np.cumsum(shares)[:-1]
    for indices in ORDER:
        parts = [(train.images[mine].astype(dtype), train.labels[mine]) for mine in np.split(indices, cuts)]
        distributed_step(strategy, model, optimizer, spread(strategy, parts), len(indices))
        states.append(weights_of(model))
    return states


def one_process(dtype):
    model, optimizer, states = make_model(dtype=dtype), keras.optimizers.SGD(RATE), []
    for indices in ORDER:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses_of(model, train.images[indices].astype(dtype), train.labels[indices]))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        states.append(weights_of(model))
    return states


def farthest(states, wanted):
    """Return the largest difference after any step, relative to the largest weight."""
    return max(np.abs(got - right).max() / np.abs(right).max() for got, right in zip(states, wanted, strict=True))


found = {}
with answer_needed():
    for dtype, limit in (("float64", 1e-10), ("float32", 1e-5)):
        (wanted,) = in_tensorflow(one_process, dtype).results
        for kind, shares in (("mirrored", [10, 50]), ("multi-worker", [10, 50]), ("multi-worker", [7, 40, 13])):
            nprocs = 1 if kind == "mirrored" else len(shares)
            workers = in_tensorflow(train_with, kind, dtype, shares, nprocs=nprocs).results
            found[dtype, kind, len(shares)] = max(farthest(states, wanted) for states in workers)
            print(f"{dtype} {kind:12} {shares!s:11} within {limit:g} after every step, on every worker:", end=" ")
            print(bool(found[dtype, kind, len(shares)] < limit))

# %% [markdown]
# Equal, up to the order of additions, with shares as uneven as 10 and 50. (The learning rate is 0.25 for a reason.
# Keras keeps it as a float32, whatever the model's type. With 0.1 the model would train with another number, and be
# off by that, in float64, against a torch loop that trains with 0.1.)

# %%
print("Keras's 0.1: ", float(keras.optimizers.SGD(0.1).learning_rate))
print("Keras's 0.25:", float(keras.optimizers.SGD(0.25).learning_rate))

# %% [markdown]
# ## `fit` with several workers
#
# What about `fit`? With Keras 3, in several workers, it fails, and the message does not say why. With Keras 2, which
# lives on as `tf_keras`, it works.


# %%
def fit_in_workers(library):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model(library)
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=library.optimizers.SGD(0.1), loss=loss)
    data = tf.data.Dataset.from_tensor_slices((train.images[:1024], train.labels[:1024])).batch(64)
    return model.fit(data, epochs=3, shuffle=False, verbose=0).history["loss"]


def fit_with_keras_2():
    import tf_keras

    return fit_in_workers(tf_keras)


try:
    in_tensorflow(fit_in_workers, keras, nprocs=2)
except WorkerFailed as error:
    print(f"Keras 3: {error.exception_type}: {error.exception_message.partition(':')[0]} ...")
for rank, losses in enumerate(in_tensorflow(fit_with_keras_2, nprocs=2).results):
    print(f"Keras 2, worker {rank}: losses {np.round(losses, 4)}")
print("Keras 3, one process:    ", np.round(lone_loss, 4))

# %% [markdown]
# Keras 3 hands a bundle of values, one for each replica, to an operation that wants a tensor. It is a known gap, and
# a loop of your own, as above, goes around it. Both workers of Keras 2 report the same loss: it is reduced over
# workers before it is shown. And it is what one process with `batch_size=64` reported above, since 64 is the global
# batch here too: the strategy splits each batch that the dataset gives.
#
# ## Who reads what?
#
# Each worker runs its own input pipeline. If all of them read everything in the same order and trained on it, four
# workers would do the same work four times. TensorFlow therefore rewrites a dataset that you give to
# `experimental_distribute_dataset` (or to `fit`): it **autoshards**. By FILE, each worker opens its share of the
# files. By DATA, each worker reads *everything* and keeps every n-th element. OFF leaves it to you. AUTO tries FILE,
# and takes DATA where there are no files. Here are three files of four lines each, and two workers.

# %%
FILES = [[f"{name}{line}" for line in range(4)] for name in "abc"]  # b2: the third line of the second file


def read(policy, texts):
    """Return the lines that this worker gets, and how many it has read for them."""
    strategy, lines_read = tf.distribute.MultiWorkerMirroredStrategy(), []

    def count(line):
        lines_read.append(line)
        return line

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    with tempfile.TemporaryDirectory() as folder:
        for name, text in zip("abc", texts, strict=True):
            Path(folder, name).write_text("\n".join(text))
        files = tf.data.Dataset.list_files(f"{folder}/*", shuffle=False)
        lines = files.flat_map(tf.data.TextLineDataset).map(lambda line: tf.numpy_function(count, [line], tf.string))
        lines = lines.map(lambda line: tf.ensure_shape(line, [])).batch(4).with_options(options)
        spread = strategy.experimental_distribute_dataset(lines)
        batches = [strategy.experimental_local_results(batch)[0] for batch in spread]
    return [line.decode() for batch in batches for line in batch.numpy().tolist()], len(lines_read)


# %% [markdown]
# **Predict.** Sharded by DATA, each of the two workers gets six of the twelve lines. How many lines does each one
# *read*?

# %%
# @exercise lines_read points=1 minutes=2 kind=predict
guess = None  # put your number in place of None
### BEGIN SOLUTION
guess = 12
### END SOLUTION
predict("lines_read", guess, unit="lines")

# %%
counts = {}
for policy in ("FILE", "DATA", "OFF"):
    for rank, (lines, count) in enumerate(in_tensorflow(read, policy, FILES, nprocs=2).results):
        print(f"{policy:4} worker {rank}: reads {count:2}, gets {len(lines):2}:", " ".join(lines))
        counts[policy] = count

# %% [markdown]
# - **FILE** reads each line once. But three files do not divide by two, so one worker has twice as much as the other,
#   and goes through more batches; near the end the other one takes part with empty batches. With fewer files than
#   workers, some would have nothing at all, and TensorFlow refuses.
# - **DATA** shares out evenly, and every worker reads and parses everything. With eight workers, seven eighths of
#   that is thrown away.
# - **OFF**: all get everything, and everything counts twice.
#
# With many files of equal size, FILE. Otherwise write the pipeline yourself: `distribute_datasets_from_function`
# calls a function of yours in each worker, and tells it through a `context` how many pipelines there are and which
# one this is.
#
# ### Exercise: a pipeline for each worker (8 minutes, 4 points)
#
# `shard_dataset(dataset, context, global_batch)` returns what this worker trains on: a share of the samples of its
# own (the shares differ by one sample at most, and nothing is left out), in another order in each epoch, in batches
# for *one replica*, such that all replicas together take `global_batch` samples a step. Careful: a pipeline may feed
# several replicas. `context` is a `tf.distribute.InputContext`, which has `num_input_pipelines`, `input_pipeline_id`,
# `num_replicas_in_sync` and `get_per_replica_batch_size(global_batch)`.


# %%
# @exercise shard_dataset points=4 minutes=8
def shard_dataset(dataset, context, global_batch):
    """Return this pipeline's share of the dataset, shuffled, in batches for one replica."""
    ### BEGIN SOLUTION
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)  # before the shuffle
    return dataset.shuffle(10_000).batch(context.get_per_replica_batch_size(global_batch))
    ### END SOLUTION


shard_dataset = check("shard_dataset", shard_dataset)

# %% [markdown]
# ## The whole loop
#
# Pipeline, step and strategy together: two workers, a `tf.function` around the step, six epochs, and the accuracy on
# the test set. The batch of the last step of an epoch is smaller. How many samples it has on all workers, no worker
# knows by itself, so the replicas ask: one all-reduce of their counts.


# %%
def train_digits(epochs=6, global_batch=64):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = make_model(), keras.optimizers.SGD(0.25)
        optimizer.build(model.trainable_variables)
    whole = tf.data.Dataset.from_tensor_slices((train.images, train.labels))
    batches = strategy.distribute_datasets_from_function(lambda context: shard_dataset(whole, context, global_batch))

    @tf.function
    def step(batch):
        mine = strategy.run(lambda images, labels: tf.cast(tf.size(labels), tf.float32), args=batch)
        count = strategy.reduce(tf.distribute.ReduceOp.SUM, mine, axis=None)
        return distributed_step(strategy, model, optimizer, batch, count)

    losses = [[float(step(batch)) for batch in batches] for _ in range(epochs)]
    right = np.argmax(model(test.images), axis=1) == test.labels
    return [np.mean(epoch) for epoch in losses], right.mean()


# %% tags=["nbval-ignore-output"]
with answer_needed():
    for rank, (losses, accuracy) in enumerate(in_tensorflow(train_digits, nprocs=2).results):
        print(f"worker {rank}: loss by epoch", *(f"{loss:.2f}" for loss in losses), f"test accuracy {accuracy:.1%}")

# %% [markdown]
# ## When a worker dies
#
# A worker leaves in the middle of training. The other one is in an all-reduce and waits for it. What does it get to
# see? (The next cell can take ten seconds.)


# %% tags=["nbval-ignore-output"]
def leave():
    """Worker 1 is killed after the first step; worker 0 goes on, and returns what it meets."""
    mine = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    child = os.fork() if mine == 1 else 0  # the worker is a child of its rank: launch would end all with a rank
    if child:
        return f"killed by signal {-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    began = time.monotonic()
    try:
        for number in itertools.count():
            strategy.run(lambda: summed(tf.ones(3)))
            if mine == 1 and number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    except tf.errors.UnavailableError as error:
        return f"after {time.monotonic() - began:.1f} s an UnavailableError:{error.message.partition('aborted by:')[2]}"


for rank, met in enumerate(in_tensorflow(leave, nprocs=2).results):
    print(f"worker {rank}: {met}")

# %% [markdown]
# The survivor gets an error, at once or after some ten seconds: either gRPC notices that a connection is gone in the
# middle of a message, or the worker's heartbeats are missed. What it does not get is another partner. The size of the
# cluster is fixed in `TF_CONFIG`, and the message says what is left: restart. Fault tolerance in this strategy means:
# all workers end, all are started again, and they begin at the last checkpoint. Keras 2 has a callback for that,
# `BackupAndRestore`. Here worker 1 dies as the third epoch begins; then the same job is started a second time.


# %%
def fit_with_a_backup(folder, dies):
    import tf_keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    mine = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    class Die(tf_keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if dies and epoch == 2 and mine == 1:
                os._exit(7)

    with strategy.scope():
        model = make_model(tf_keras)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=tf_keras.optimizers.SGD(0.1), loss=loss)
    data = tf.data.Dataset.from_tensor_slices((train.images[:1024], train.labels[:1024])).batch(64)
    callbacks = [tf_keras.callbacks.BackupAndRestore(folder), Die()]
    history = model.fit(data, epochs=5, verbose=0, callbacks=callbacks)
    return dict(zip(history.epoch, np.round(history.history["loss"], 4).tolist(), strict=True))


with tempfile.TemporaryDirectory() as folder:
    try:
        in_tensorflow(fit_with_a_backup, f"{folder}/interrupted", True, nprocs=2)
    except WorkerFailed as error:
        print("first run: ", str(error).splitlines()[0])
    again = in_tensorflow(fit_with_a_backup, f"{folder}/interrupted", False, nprocs=2).results[0]
    whole = in_tensorflow(fit_with_a_backup, f"{folder}/other", False, nprocs=2).results[0]
print("second run:", again)
print("never interrupted:", whole)

# %% [markdown]
# The second run begins with epoch 2 and ends with the numbers of a run that nobody interrupted: weights, optimizer
# and epoch were kept. In a loop of your own the same is done with `tf.train.Checkpoint`, and has a trap. *Every*
# worker has to call `save`, since saving can be collective (some variables are summed over workers when they are
# read), but they must not write to the same place. The custom is that the chief keeps its file and the others write
# to a folder that is thrown away.


# %%
def save_and_restore(folder):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    mine = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with strategy.scope():
        weights, epoch = tf.Variable([1.0, 2.0]), tf.Variable(3)
    checkpoint = tf.train.Checkpoint(weights=weights, epoch=epoch)
    place = "kept" if mine == 0 else f"thrown_away_{mine}"
    tf.train.CheckpointManager(checkpoint, f"{folder}/{place}", max_to_keep=2).save()
    weights.assign([0.0, 0.0])
    ready = strategy.run(lambda: summed(tf.ones([])))  # nobody reads before the chief has written
    checkpoint.restore(tf.train.latest_checkpoint(f"{folder}/kept"))
    return weights, epoch, ready


with tempfile.TemporaryDirectory() as folder:
    for weights, epoch, _ in in_tensorflow(save_and_restore, folder, nprocs=2).results:
        print(f"restored: weights {weights.tolist()}, epoch {epoch}")

# %% [markdown]
# ## Without waiting: parameter servers
#
# The third strategy waits for nobody. In a `ParameterServerStrategy` variables live on **parameter servers** (`ps`),
# **workers** read them, compute gradients and write updates back, and a **chief** hands out the steps. Nothing is
# all-reduced, so a slow worker holds nobody up; but while a worker computes, others change the variables, and its
# gradient is *stale*. Lesson 07 builds one by hand. Here is TensorFlow's, with a chief, two workers and one server,
# on a problem with a known answer.

# %%
TRUTH = [1.0, -2.0, 3.0, 0.5]


def serve_or_coordinate(steps):
    """Workers and servers serve; the chief hands out steps and returns each one's loss and staleness."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        place = {"job_name": resolver.task_type, "task_index": resolver.task_id}
        tf.distribute.Server(resolver.cluster_spec(), protocol="grpc", **place).join()  # never returns
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights, updates = tf.Variable(tf.zeros(4)), tf.Variable(0)

    @tf.function
    def step(seed):
        before = updates.read_value()
        with tf.control_dependencies([before]):
            inputs = tf.random.stateless_normal([64, 4], [seed, 0])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.linalg.matvec(inputs, weights - tf.constant(TRUTH))) ** 2)
            change = weights.assign_sub(0.1 * tape.gradient(loss, weights))
        with tf.control_dependencies([change]):
            return loss, updates.assign_add(1).read_value() - before - 1

    results = [coordinator.schedule(step, args=(tf.constant(seed),)) for seed in range(steps)]
    coordinator.join()
    return [(float(loss), int(stale)) for loss, stale in (result.fetch() for result in results)], weights.numpy()


run = in_tensorflow(serve_or_coordinate, 100, nprocs=4, roles={"chief": 1, "worker": 2, "ps": 1})
((asynchronous, weights),) = run.by_role["chief"]
print("steps:", len(asynchronous), " found:", np.round(weights, 2), " the truth:", TRUTH)

# %% tags=["nbval-ignore-output"]
staleness = [stale for _, stale in asynchronous]
behind = {number: staleness.count(number) for number in sorted(set(staleness))}
print("updates by others while a step was computed, and how often:", behind)
title = "loss of each step, as they were handed out"
lines_over_steps({title: {"2 workers": [loss for loss, _ in asynchronous]}}, log=[title], ylabel="mean squared error")

# %% [markdown]
# It finds the answer, although steps worked with weights that were behind. How far behind, and what that costs on a
# harder problem, lesson 07 measures. `TF_CONFIG` has more kinds of tasks here (`launch` writes them from `roles`),
# and the job is over when the chief returns: servers never do.
#
# ## Four messages and what they mean
#
# These come from real programs, and none says what to do. Each is made here on purpose, then mended.
#
# **"Collective ops must be configured at program startup."** Something has used TensorFlow before the strategy was
# made: a tensor, a variable, a loaded dataset. Workers connect to each other when TensorFlow's runtime starts, and it
# has started.


# %%
def too_early():
    tf.constant(1.0)  # anything that computes: a look at the data, a seed that is drawn
    tf.distribute.MultiWorkerMirroredStrategy()


try:
    in_tensorflow(too_early, nprocs=2)
except WorkerFailed as error:
    print(error.exception_message)

# %% [markdown]
# The remedy is the first line of the program: the strategy. In a notebook whose kernel has computed anything, no
# remedy is left but new processes, which is what `launch` makes.
#
# **No message at all.** `TF_CONFIG` was set too late, or not at all:


# %%
def too_late():
    config = os.environ.pop("TF_CONFIG")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    os.environ["TF_CONFIG"] = config
    return strategy.num_replicas_in_sync


print("replicas in sync:", in_tensorflow(too_late, nprocs=2).results, " expected: [2, 2]")

# %% [markdown]
# Each worker believes that it is alone, and trains alone, without an error. So look: print `num_replicas_in_sync`
# before training, or stop if it is not what you ordered.
#
# **It hangs at the start.** `TF_CONFIG` names a worker that nobody has started. TensorFlow waits for it, for hours if
# it must. `launch` loses patience, and says for whom each one waits.


# %%
def one_too_many():
    config = json.loads(os.environ["TF_CONFIG"])
    config["cluster"]["worker"].append("127.0.0.1:9")
    os.environ["TF_CONFIG"] = json.dumps(config)
    tf.distribute.MultiWorkerMirroredStrategy()


try:
    in_tensorflow(one_too_many, nprocs=2, timeout=4)
except WorkerTimeout as error:
    for state in error.states:
        print(f"rank {state.rank} waits in {state.collective}")

# %% [markdown]
# Count what the cluster's list says and what really runs: the same number, the same list, in the same order,
# everywhere.
#
# **"Attempt to convert a value (PerReplica ..."** is the fourth, Keras 3's `fit` in several workers, which you have
# seen. A loop of your own, or `tf_keras`.
#
# ## Clip before the sum, or after it?
#
# The last one is a wrong reduction, and nothing says so. Gradients are to be clipped to a global norm. Keras's
# optimizers can do that, `SGD(0.1, global_clipnorm=1.0)`, and a step of your own can:


# %%
def clipped_update_as_found(strategy, model, optimizer, batch, global_batch, max_norm):
    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(model, images, labels)) / global_batch
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, max_norm)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    strategy.run(replica_step, args=batch)


def first_move(update, max_norm=0.05):
    """Return how far the weights move in the first step, divided by the rate: the norm of what was applied."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = make_model(dtype="float64"), keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    shares = np.split(ORDER[0], strategy.num_replicas_in_sync)
    parts = [(train.images[mine].astype("float64"), train.labels[mine]) for mine in shares]
    before = weights_of(model)
    update(strategy, model, optimizer, spread(strategy, parts), len(ORDER[0]), max_norm)
    return np.linalg.norm(weights_of(model) - before) / RATE


norms_as_found = [in_tensorflow(first_move, clipped_update_as_found, nprocs=n).results[0] for n in (1, 2, 3)]
print("norm of what is applied, limit 0.05, on 1, 2 and 3 workers:", np.round(norms_as_found, 4))

# %% [markdown]
# The limit holds for each replica's *part* of the gradient, and the parts are added up afterwards: with more workers,
# the limit grows, and the direction is another one too, since small parts are not shortened. (Keras's own `clipnorm`
# and `global_clipnorm` do the same: they act before the sum.) It is P16 of lesson 04: look at gradients after the
# synchronisation.
#
# ### Exercise: mend the reduction (8 minutes, 4 points)
#
# `clipped_update(strategy, model, optimizer, batch, global_batch, max_norm)` makes one step with the gradient of the
# global batch, its global norm limited to `max_norm`. Mind that `apply_gradients` sums over replicas, always.


# %%
# @exercise clipped_update points=4 minutes=8 kind=debug
def clipped_update(strategy, model, optimizer, batch, global_batch, max_norm):
    """Make one step with the gradient of the mean loss over the global batch, clipped to a global norm."""
    ### BEGIN SOLUTION

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(model, images, labels)) / global_batch
        gradients = tape.gradient(loss, model.trainable_variables)
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, max_norm)
        share = [gradient / context.num_replicas_in_sync for gradient in gradients]  # apply_gradients adds them up
        optimizer.apply_gradients(zip(share, model.trainable_variables, strict=True))

    strategy.run(replica_step, args=batch)
    ### END SOLUTION


clipped_update = check("clipped_update", clipped_update)

# %%
with answer_needed():
    mended = [in_tensorflow(first_move, clipped_update, nprocs=n).results[0] for n in (1, 2, 3)]
    print("norm of what is applied, mended:", np.round(mended, 4))

# %% [markdown]
# ### Explain (10 minutes, 3 points)
#
# A colleague has a Keras 3 model that trains well on one GPU with `fit(..., batch_size=64)` and `SGD(0.1)`. She puts
# it into the scope of a `MirroredStrategy` on four GPUs of one machine and changes nothing else. The result is as
# good as before, but an epoch takes hardly less time. What does each GPU get, and what is applied? What should she
# change so that the GPUs have as much work as the one had before, and what has to change with it? In the end she
# writes her own loop, keeps `reduce_mean` in each replica's loss, and it diverges: why? Six to ten sentences.

# %% [markdown]
# <!-- @exercise four_gpus points=3 minutes=10 kind=explain -->
# <!-- BEGIN SOLUTION -->
# `batch_size` is the global batch, so each GPU gets 16 of the 64 samples. Each takes the mean over its 16, Keras
# divides by the number of replicas and sums, which is the gradient of the mean over the 64: the result is that of one
# GPU, and the number of steps is the same. Each step computes on a quarter of the samples, too few to fill a GPU, and
# pays for an all-reduce of all gradients besides, so little is gained. To give each GPU 64 samples she needs
# `batch_size=64 * strategy.num_replicas_in_sync`, 256. Then there are a quarter as many steps an epoch, so the
# learning rate has to grow, linearly as a first guess (0.4) and with a warm-up, up to the limit that lesson 03
# measured, and the last, smaller batch counts as a mean of means. In her own loop, `apply_gradients` sums the
# replicas' gradients. With a mean on each replica the sum is four times the gradient of the global mean, as if the
# learning rate were four times as large; with the learning rate already multiplied that is sixteen times the old one.
# The loss has to be divided by the global batch.
# <!-- END SOLUTION -->

# %% [markdown]
# ## What you have now

# %%
factor = applied["mean of own samples", (4, 4)] / np.mean(SAMPLES)
print(f"means of own samples, summed over 2 replicas: {factor:g} times the gradient of all samples")
print(f"fit on 2 replicas, batches that do not divide: weights {np.abs(alone - both).max():.0e} from one replica's")
for n, norm in zip((1, 2, 3), norms_as_found, strict=True):
    print(f"clipped before the sum on {n} worker{'s' * (n > 1)}: norm {norm:.3f}, limit 0.05")
compare(sum_of_means=factor, lines_read=counts["DATA"])
progress()

# %% [markdown]
# - **Keras's optimizers sum over replicas.** Divide each sample's loss by the *global* batch, a penalty by the number
#   of replicas, and reduce the parts of a loss with SUM.
# - **`batch_size` in `fit` is the global batch.** DDP's is a rank's.
# - **A strategy comes first in a program**, and `TF_CONFIG` before it. Print `num_replicas_in_sync`.
# - **Every worker has the same list of addresses, in the same order.** A missing one means waiting, without a
#   message.
# - **Shard before you shuffle.** By FILE reads each sample once, by DATA reads everything everywhere.
# - **When one worker dies, all end**, and all begin again at a checkpoint that the chief wrote and every worker
#   helped to save.
#
# Lesson 09 puts one library over both frameworks, and makes a table of who sums, who divides, and when.
