"""Right and wrong answers to the exercises of lesson 08, as learners write them."""

from __future__ import annotations

import json

import tensorflow as tf

from tests.exercises.judged import Family

tf_config = Family("tf_config")
global_batch_loss = Family("global_batch_loss")
distributed_step = Family("distributed_step")
shard_dataset = Family("shard_dataset")
clipped_update = Family("clipped_update")

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


# ---- tf_config


@tf_config.accepted
def config_by_dumps(workers, index):
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


@tf_config.accepted
def config_by_hand(workers, index):
    addresses = ", ".join(f'"{address}"' for address in workers)
    return f'{{"task": {{"index": {index}, "type": "worker"}}, "cluster": {{"worker": [{addresses}]}}}}'


@tf_config.accepted
def config_with_more(workers, index):
    config = {"cluster": {"worker": list(workers)}, "environment": "cloud"}
    config["task"] = {"type": "worker", "index": index}
    return json.dumps(config, indent=2)


@tf_config.rejected("holds text")
def config_as_a_dict(workers, index):
    return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}


@tf_config.rejected("no JSON")
def config_by_str(workers, index):
    return str({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


@tf_config.rejected("counted from 0")
def config_with_the_index_as_text(workers, index):
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": str(index)}})


@tf_config.rejected("counted from 0")
def config_counted_from_1(workers, index):
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index + 1}})


@tf_config.rejected("same on every worker, in the same order")
def config_with_its_own_address_first(workers, index):
    mine = [workers[index], *(one for one in workers if one != workers[index])]
    return json.dumps({"cluster": {"worker": mine}, "task": {"type": "worker", "index": 0}})


@tf_config.rejected("same on every worker")
def config_of_the_others(workers, index):
    others = [one for place, one in enumerate(workers) if place != index]
    return json.dumps({"cluster": {"worker": others}, "task": {"type": "worker", "index": index}})


@tf_config.rejected("in the singular")
def config_in_the_plural(workers, index):
    return json.dumps({"cluster": {"workers": workers}, "task": {"type": "worker", "index": index}})


@tf_config.rejected("in the singular")
def config_with_a_chief(workers, index):
    cluster = {"chief": workers[:1], "worker": workers[1:]}
    return json.dumps({"cluster": cluster, "task": {"type": "chief" if index == 0 else "worker", "index": index}})


@tf_config.rejected('"cluster" and "task"')
def config_without_a_task(workers, index):
    return json.dumps({"cluster": {"worker": workers}})


@tf_config.rejected('The type of the task is "worker"')
def config_of_another_type(workers, index):
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "master", "index": index}})


# ---- global_batch_loss


@global_batch_loss.accepted
def loss_by_two_divisions(losses, penalty, global_batch, replicas):
    return tf.reduce_sum(losses) / global_batch + penalty / replicas


@global_batch_loss.accepted
def loss_by_tensorflows_own(losses, penalty, global_batch, replicas):
    average = tf.nn.compute_average_loss(losses, global_batch_size=global_batch)
    return average + tf.nn.scale_regularization_loss(penalty)


@global_batch_loss.accepted
def loss_with_the_penalty_on_each_sample(losses, penalty, global_batch, replicas):
    return tf.add_n([tf.math.divide(tf.reduce_sum(losses), global_batch), tf.multiply(penalty, 1 / replicas)])


@global_batch_loss.rejected("divide by the global batch")
def loss_by_the_mean(losses, penalty, global_batch, replicas):
    return tf.reduce_mean(losses) + penalty / replicas


@global_batch_loss.rejected("mean of the replicas' means")
def loss_by_the_mean_of_means(losses, penalty, global_batch, replicas):
    return (tf.reduce_mean(losses) + penalty) / replicas


@global_batch_loss.rejected("0 / 0")
def loss_weighted_by_its_own_size(losses, penalty, global_batch, replicas):
    size = tf.cast(tf.shape(losses)[0], losses.dtype)
    return tf.reduce_mean(losses) * size / global_batch + penalty / replicas


@global_batch_loss.rejected("counts that often")
def loss_with_the_penalty_on_every_replica(losses, penalty, global_batch, replicas):
    return tf.reduce_sum(losses) / global_batch + penalty


@global_batch_loss.rejected("it grows with the batch")
def loss_by_the_sum(losses, penalty, global_batch, replicas):
    return tf.reduce_sum(losses) + penalty / replicas


@global_batch_loss.rejected("Divided once too often")
def loss_divided_twice(losses, penalty, global_batch, replicas):
    return tf.reduce_sum(losses) / global_batch / replicas + penalty / replicas


@global_batch_loss.rejected("a tensor without dimensions")
def loss_of_each_sample(losses, penalty, global_batch, replicas):
    return losses / global_batch + penalty / replicas


@global_batch_loss.rejected("a tensor without dimensions")
def loss_as_a_number(losses, penalty, global_batch, replicas):
    return float(tf.reduce_sum(losses)) / global_batch


@global_batch_loss.rejected("no gradient flows back")
def loss_held_constant(losses, penalty, global_batch, replicas):
    return tf.stop_gradient(loss_by_two_divisions(losses, penalty, global_batch, replicas))


@global_batch_loss.rejected("its gradient is not")
def loss_with_a_constant_penalty(losses, penalty, global_batch, replicas):
    return tf.reduce_sum(losses) / global_batch + tf.stop_gradient(penalty) / replicas


# ---- distributed_step


def losses_of(model, images, labels):
    logits = model(images, training=True)
    return tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


@distributed_step.accepted
def step_as_in_the_guide(strategy, model, optimizer, batch, global_batch):
    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(model, images, labels)) / global_batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return strategy.reduce(SUM, strategy.run(replica_step, args=batch), axis=None)


@distributed_step.accepted
def step_in_a_function(strategy, model, optimizer, batch, global_batch):
    @tf.function
    def step(images, labels):
        def replica_step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(losses_of(model, x, y), global_batch_size=global_batch)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels)), axis=None)

    return float(step(*batch))


@distributed_step.accepted
def step_that_reduces_inside(strategy, model, optimizer, batch, global_batch):
    """Sums by hand, and gives apply_gradients its part; the loss is summed by the replicas themselves."""
    variables = model.trainable_variables

    def replica_step(images, labels):
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(model, images, labels))
        gradients = context.all_reduce(SUM, tape.gradient(loss, variables))
        share = [gradient / (global_batch * context.num_replicas_in_sync) for gradient in gradients]
        optimizer.apply_gradients(zip(share, variables, strict=True))
        return context.all_reduce(SUM, loss) / global_batch

    with strategy.scope():
        losses = strategy.run(replica_step, args=batch)
    return strategy.experimental_local_results(losses)[0].numpy()


@distributed_step.rejected("Keras applies gradients inside strategy.run")
def step_that_applies_outside(strategy, model, optimizer, batch, global_batch):
    """The summed gradients are applied once, in the cross-replica context."""

    def gradients_of(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(model, images, labels)) / global_batch
        return loss, tape.gradient(loss, model.trainable_variables)

    loss, gradients = strategy.run(gradients_of, args=batch)
    summed = [strategy.reduce(SUM, gradient, axis=None) for gradient in gradients]
    with strategy.scope():
        optimizer.apply_gradients(zip(summed, model.trainable_variables, strict=True))
    return strategy.reduce(SUM, loss, axis=None)


def step_with(loss_of, reduced=SUM, before=lambda gradients: gradients):
    """A step with the parts of it that go wrong given."""

    def step(strategy, model, optimizer, batch, global_batch):
        def replica_step(images, labels):
            with tf.GradientTape() as tape:
                loss = loss_of(losses_of(model, images, labels), global_batch, strategy)
            gradients = before(tape.gradient(loss, model.trainable_variables))
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        losses = strategy.run(replica_step, args=batch)
        return losses if reduced is None else strategy.reduce(reduced, losses, axis=None)

    return step


def by_global_batch(losses, global_batch, strategy):
    return tf.reduce_sum(losses) / global_batch


@distributed_step.rejected("the mean over its own samples")
def step_with_means(strategy, model, optimizer, batch, global_batch):
    return step_with(lambda losses, *_: tf.reduce_mean(losses))(strategy, model, optimizer, batch, global_batch)


@distributed_step.rejected("mean of the replicas' means")
def step_with_the_mean_of_means(strategy, model, optimizer, batch, global_batch):
    loss_of = lambda losses, _, strategy: tf.reduce_mean(losses) / strategy.num_replicas_in_sync  # noqa: E731
    return step_with(loss_of)(strategy, model, optimizer, batch, global_batch)


@distributed_step.rejected("divide by the global batch")
def step_with_sums(strategy, model, optimizer, batch, global_batch):
    return step_with(lambda losses, *_: tf.reduce_sum(losses))(strategy, model, optimizer, batch, global_batch)


@distributed_step.rejected("Divided once too often")
def step_divided_twice(strategy, model, optimizer, batch, global_batch):
    loss_of = lambda losses, size, strategy: tf.reduce_sum(losses) / size / strategy.num_replicas_in_sync  # noqa: E731
    return step_with(loss_of)(strategy, model, optimizer, batch, global_batch)


@distributed_step.rejected("summed twice")
def step_that_sums_twice(strategy, model, optimizer, batch, global_batch):
    def before(gradients):
        return tf.distribute.get_replica_context().all_reduce(SUM, gradients)

    return step_with(by_global_batch, before=before)(strategy, model, optimizer, batch, global_batch)


@distributed_step.rejected("strategy.reduce makes one of them")
def step_that_returns_every_loss(strategy, model, optimizer, batch, global_batch):
    return step_with(by_global_batch, reduced=None)(strategy, model, optimizer, batch, global_batch)


@distributed_step.rejected("adds them, and nothing more")
def step_that_returns_the_mean_of_losses(strategy, model, optimizer, batch, global_batch):
    return step_with(by_global_batch, reduced=MEAN)(strategy, model, optimizer, batch, global_batch)


@distributed_step.rejected("a loss of")
def step_that_returns_nothing(strategy, model, optimizer, batch, global_batch):
    step_as_in_the_guide(strategy, model, optimizer, batch, global_batch)


@distributed_step.rejected("Nothing has moved")
def step_without_an_update(strategy, model, optimizer, batch, global_batch):
    losses = strategy.run(lambda x, y: tf.reduce_sum(losses_of(model, x, y)) / global_batch, args=batch)
    return strategy.reduce(SUM, losses, axis=None)


@distributed_step.rejected("Keras applies gradients inside strategy.run")
def step_outside_of_run(strategy, model, optimizer, batch, global_batch):
    """Each process trains on its first replica's samples, outside of strategy.run."""
    images, labels = (strategy.experimental_local_results(part)[0] for part in batch)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(losses_of(model, images, labels))
    gradients = tape.gradient(loss, model.trainable_variables)
    with strategy.scope():
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@distributed_step.rejected("nothing was synchronised")
def step_that_each_worker_makes_alone(strategy, model, optimizer, batch, global_batch):
    """Right in one process; a worker with one replica moves its weights itself."""
    replicas = strategy.experimental_local_results
    if len(replicas(batch[0])) > 1:
        return step_as_in_the_guide(strategy, model, optimizer, batch, global_batch)
    images, labels = (replicas(part)[0] for part in batch)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(losses_of(model, images, labels))
    for variable, gradient in zip(
        model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
    ):
        variable.assign(variable - tf.cast(optimizer.learning_rate, gradient.dtype) * gradient)
    return loss


@distributed_step.rejected("PerReplica")
def step_without_run(strategy, model, optimizer, batch, global_batch):
    images, labels = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(losses_of(model, images, labels)) / global_batch
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@distributed_step.rejected("matched by their order")
def step_whose_first_worker_alone_reduces(strategy, model, optimizer, batch, global_batch):
    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(model, images, labels)) / global_batch
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = strategy.run(replica_step, args=batch)
    resolver = strategy.cluster_resolver
    if resolver is None or resolver.task_id in (None, 0):
        return strategy.reduce(SUM, losses, axis=None)
    return None


# ---- shard_dataset


@shard_dataset.accepted
def shard_shuffle_batch(dataset, context, global_batch):
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.shuffle(1000, seed=0).batch(context.get_per_replica_batch_size(global_batch))


@shard_dataset.accepted
def shard_by_enumerating(dataset, context, global_batch):
    size = global_batch // context.num_replicas_in_sync
    mine = dataset.enumerate().filter(lambda i, _: i % context.num_input_pipelines == context.input_pipeline_id)
    return mine.map(lambda _, sample: sample).shuffle(10_000).batch(size).prefetch(2)


@shard_dataset.accepted
def shard_contiguously(dataset, context, global_batch):
    count, pipelines, mine = int(dataset.cardinality()), context.num_input_pipelines, context.input_pipeline_id
    first, last = count * mine // pipelines, count * (mine + 1) // pipelines
    share = dataset.skip(first).take(last - first).shuffle(last - first)
    return share.batch(context.get_per_replica_batch_size(global_batch))


@shard_dataset.accepted
def shard_after_one_order_for_all(dataset, context, global_batch):
    """Every worker shuffles with the same seed, and in the same way in each epoch, before it takes its share."""
    dataset = dataset.shuffle(1000, seed=7, reshuffle_each_iteration=False)
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id).shuffle(1000)
    return dataset.batch(context.get_per_replica_batch_size(global_batch))


@shard_dataset.rejected("share out first")
def shard_after_the_shuffle(dataset, context, global_batch):
    dataset = dataset.shuffle(1000).shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.batch(context.get_per_replica_batch_size(global_batch))


@shard_dataset.rejected("a share of its own")
def shard_nothing(dataset, context, global_batch):
    return dataset.shuffle(1000).batch(context.get_per_replica_batch_size(global_batch))


@shard_dataset.rejected("get_per_replica_batch_size")
def shard_in_global_batches(dataset, context, global_batch):
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).shuffle(1000).batch(global_batch)


@shard_dataset.rejected("get_per_replica_batch_size")
def shard_by_workers_and_not_replicas(dataset, context, global_batch):
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id).shuffle(1000)
    return dataset.batch(global_batch // context.num_input_pipelines)


@shard_dataset.rejected("Nothing may be left out")
def shard_and_drop(dataset, context, global_batch):
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id).shuffle(1000)
    return dataset.batch(context.get_per_replica_batch_size(global_batch), drop_remainder=True)


@shard_dataset.rejected("share out evenly", "differ by one sample")
def shard_by_batches(dataset, context, global_batch):
    """Whole batches are dealt out, so one worker can get a batch more."""
    batches = dataset.batch(context.get_per_replica_batch_size(global_batch))
    mine = batches.shard(context.num_input_pipelines, context.input_pipeline_id).unbatch().shuffle(1000)
    return mine.batch(context.get_per_replica_batch_size(global_batch))


@shard_dataset.rejected("another order in each epoch")
def shard_in_one_order(dataset, context, global_batch):
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.batch(context.get_per_replica_batch_size(global_batch))


@shard_dataset.rejected("another order in each epoch")
def shard_shuffled_once(dataset, context, global_batch):
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    dataset = dataset.shuffle(1000, reshuffle_each_iteration=False)
    return dataset.batch(context.get_per_replica_batch_size(global_batch))


@shard_dataset.rejected("no repeat()")
def shard_without_end(dataset, context, global_batch):
    return shard_shuffle_batch(dataset, context, global_batch).repeat()


@shard_dataset.rejected("The last step is batch")
def shard_without_batches(dataset, context, global_batch):
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).shuffle(1000)


@shard_dataset.rejected("a tf.data.Dataset")
def shard_to_a_list(dataset, context, global_batch):
    return list(dataset.as_numpy_iterator())


# ---- clipped_update


def gradients_of(model, images, labels, global_batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(losses_of(model, images, labels)) / global_batch
    return tape.gradient(loss, model.trainable_variables)


@clipped_update.accepted
def clip_sum_and_divide(strategy, model, optimizer, batch, global_batch, max_norm):
    def replica_step(images, labels):
        gradients = gradients_of(model, images, labels, global_batch)
        gradients = tf.distribute.get_replica_context().all_reduce(SUM, gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, max_norm)
        gradients = [gradient / strategy.num_replicas_in_sync for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    strategy.run(replica_step, args=batch)


@clipped_update.rejected("Keras applies gradients inside strategy.run")
def clip_outside_of_run(strategy, model, optimizer, batch, global_batch, max_norm):
    local = strategy.run(lambda x, y: gradients_of(model, x, y, global_batch), args=batch)
    summed = [strategy.reduce(SUM, gradient, axis=None) for gradient in local]
    clipped, _ = tf.clip_by_global_norm(summed, max_norm)
    with strategy.scope():
        optimizer.apply_gradients(zip(clipped, model.trainable_variables, strict=True))


@clipped_update.accepted
def clip_by_a_common_factor(strategy, model, optimizer, batch, global_batch, max_norm):
    """Each replica shortens its own part by what the norm of the sum asks for; apply_gradients adds the parts."""

    @tf.function
    def replica_step(images, labels):
        gradients = gradients_of(model, images, labels, global_batch)
        norm = tf.linalg.global_norm(tf.distribute.get_replica_context().all_reduce(SUM, gradients))
        factor = tf.minimum(tf.constant(1.0, norm.dtype), max_norm / norm)
        optimizer.apply([gradient * factor for gradient in gradients], model.trainable_variables)

    strategy.run(replica_step, args=batch)


@clipped_update.accepted
def clip_the_mean_to_its_share(strategy, model, optimizer, batch, global_batch, max_norm):
    def replica_step(images, labels):
        gradients = gradients_of(model, images, labels, global_batch)
        gradients = tf.distribute.get_replica_context().all_reduce(MEAN, gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, max_norm / strategy.num_replicas_in_sync)
        optimizer.apply(gradients, model.trainable_variables)

    strategy.run(replica_step, args=batch)


def clip_with(before):
    def update(strategy, model, optimizer, batch, global_batch, max_norm):
        def replica_step(images, labels):
            gradients = before(gradients_of(model, images, labels, global_batch), max_norm, strategy)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(replica_step, args=batch)

    return update


def summed(gradients):
    return tf.distribute.get_replica_context().all_reduce(SUM, gradients)


@clipped_update.rejected("sum first, then clip")
def clip_before_the_sum(strategy, model, optimizer, batch, global_batch, max_norm):
    before = lambda gradients, most, _: tf.clip_by_global_norm(gradients, most)[0]  # noqa: E731
    clip_with(before)(strategy, model, optimizer, batch, global_batch, max_norm)


@clipped_update.rejected("sums over replicas once more")
def clip_and_sum_twice(strategy, model, optimizer, batch, global_batch, max_norm):
    before = lambda gradients, most, _: tf.clip_by_global_norm(summed(gradients), most)[0]  # noqa: E731
    clip_with(before)(strategy, model, optimizer, batch, global_batch, max_norm)


@clipped_update.rejected("sums over replicas once more")
def clip_the_mean(strategy, model, optimizer, batch, global_batch, max_norm):
    def before(gradients, most, strategy):
        gradients = tf.distribute.get_replica_context().all_reduce(MEAN, gradients)
        return tf.clip_by_global_norm(gradients, most)[0]

    clip_with(before)(strategy, model, optimizer, batch, global_batch, max_norm)


@clipped_update.rejected("Nothing is clipped")
def clip_nothing(strategy, model, optimizer, batch, global_batch, max_norm):
    clip_with(lambda gradients, *_: gradients)(strategy, model, optimizer, batch, global_batch, max_norm)


@clipped_update.rejected("in step 1 the first weights move by")
def clip_each_gradient(strategy, model, optimizer, batch, global_batch, max_norm):
    def before(gradients, most, strategy):
        parts = [tf.clip_by_norm(gradient, most) for gradient in summed(gradients)]
        return [part / strategy.num_replicas_in_sync for part in parts]

    clip_with(before)(strategy, model, optimizer, batch, global_batch, max_norm)


@clipped_update.rejected("in step 1 the first weights move by")
def clip_and_divide_too_early(strategy, model, optimizer, batch, global_batch, max_norm):
    def before(gradients, most, strategy):
        parts = [gradient / strategy.num_replicas_in_sync for gradient in summed(gradients)]
        return tf.clip_by_global_norm(parts, most)[0]

    clip_with(before)(strategy, model, optimizer, batch, global_batch, max_norm)
