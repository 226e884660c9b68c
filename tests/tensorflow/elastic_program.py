"""Horovod's elastic example for TensorFlow 2 under `ringrun --elastic`: a rank is killed, and the others go on.

ringrun --elastic -np 3 --min-np 2 python -m tests.tensorflow.elastic_program RANK BATCH [variables]
"""

import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import ringreduce.tensorflow as hvd

BATCHES, ROWS = 7, 6
ORIGIN = int(os.environ["OMPI_COMM_WORLD_RANK"])
KILLED, AT, *KIND = sys.argv[1:]

hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
table = tf.Variable(tf.ones([9, 1]))  # its gradients are IndexedSlices
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)


@tf.function
def training_step(x, y, allreduce=True):
    with tf.GradientTape() as tape:
        words = tf.cast(tf.abs(x[:, 0]) * 3, tf.int32) % 9
        loss = tf.reduce_mean((model(x, training=True) + tf.nn.embedding_lookup(table, words) - y) ** 2)
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    of_table, *gradients = tape.gradient(loss, [table, *model.trainable_variables])
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    table.assign_sub(0.1 * tf.convert_to_tensor(of_table))
    return loss


def batch_of(step, *ranks):
    """What ranks of the job's start train on in a step."""
    parts = [np.random.default_rng([step, rank]).normal(size=(ROWS, 4)) for rank in ranks]
    x = np.concatenate(parts).astype(np.float32)
    return tf.constant(x), tf.constant(x.sum(1, keepdims=True))


@tf.function
def gradients_of(x, factor):
    """Those of collectives whose gradients depend on how many ranks there are, and on which is which."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        results = [hvd.allgather(x), hvd.reducescatter(x, op=hvd.Sum), hvd.broadcast(x, 1), hvd.alltoall(x)]
        rows = [tf.cast(tf.range(tf.shape(each)[0])[:, None], tf.float32) for each in results]
        losses = [tf.reduce_sum(each * (at + factor)) for each, at in zip(results, rows, strict=True)]
    return [tape.gradient(each, x) for each in losses]


def gradients_are_those_of_now():
    """What was traced when there were more ranks gives what is computed at once, without a graph."""
    values = tf.constant(np.random.default_rng([7, ORIGIN]).normal(size=(ROWS, 1)), tf.float32), ORIGIN + 1.0
    for traced, expected in zip(gradients_of(*values), gradients_of.python_function(*values), strict=True):
        np.testing.assert_allclose(traced, expected, rtol=1e-5)


class Table:
    """As an attribute of a state of another model."""

    def state_dict(self):
        return {"values": table.numpy()}

    def load_state_dict(self, state):
        table.assign(state["values"])


@hvd.elastic.run
def train(state):
    start = state.batch
    for number in range(BATCHES - start):
        if (hvd.size(), ORIGIN, state.batch) == (3, int(KILLED), int(AT)):
            os.kill(os.getpid(), signal.SIGKILL)
        training_step(*batch_of(state.batch, ORIGIN))
        gradients_are_those_of_now()
        state.history.append(hvd.allgather_object(ORIGIN))
        state.batch = start + number + 1
        state.commit()


training_step(*batch_of(99, ORIGIN), allreduce=False)  # each rank's own: the state is synchronized
variables = [table, *model.variables, *optimizer.variables]
if KIND:
    state = hvd.elastic.TensorFlowState(variables, batch=0, history=[], resets=0)
else:
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, table=Table(), batch=0, history=[], resets=0)
state.sync()
first = [each.numpy() for each in variables]


def on_state_reset():
    state.resets += 1


state.register_reset_callbacks([on_state_reset])
train(state)
weights = [each.numpy() for each in variables]
for theirs in hvd.allgather_object(weights):
    for mine, their in zip(weights, theirs, strict=True):
        np.testing.assert_array_equal(mine, their)
if hvd.rank() == 0:
    for variable, value in zip(variables, first, strict=True):
        variable.assign(value)
    for step, ranks in enumerate(state.history):
        training_step(*batch_of(step, *ranks), allreduce=False)
    for mine, expected in zip(weights, variables, strict=True):
        np.testing.assert_allclose(mine, expected.numpy(), rtol=1e-4, atol=1e-5)
    print(f"replayed {state.history}, resets: {state.resets}", flush=True)
