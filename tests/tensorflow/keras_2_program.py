"""Horovod's elastic example for `tf.keras`, as it was with Keras 2: a rank is killed, and the others go on.

TF_USE_LEGACY_KERAS=1 ringrun --horovod --elastic -np 3 python -m tests.tensorflow.keras_2_program RANK BATCH FILE.h5
"""

import os
import sys

import horovod.keras
import horovod.tensorflow
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

from tests.support.keras_fits import BATCHES, ROWS, assert_all_have, assert_replayed, batches, fit_what_is_left

ORIGIN = int(os.environ["OMPI_COMM_WORLD_RANK"])
KILLED = tuple(map(int, sys.argv[1:3]))


def new_model(seed, wrap=lambda optimizer: optimizer):
    tf.keras.utils.set_random_seed(seed)
    layers = [tf.keras.layers.Dense(5, activation="tanh"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential(layers)  # is built by its first step
    optimizer = wrap(tf.optimizers.legacy.SGD(0.1, momentum=0.9))
    model.compile(loss=tf.losses.MeanSquaredError(), optimizer=optimizer, experimental_run_tf_function=False)
    return model


def on_state_reset():
    tf.keras.backend.set_value(state.model.optimizer.lr, 0.1)
    state.resets += 1


@hvd.elastic.run
def train(state):
    fit_what_is_left(hvd, tf.keras.callbacks, state, ORIGIN, KILLED)


def main():
    train(state)
    weights = model.get_weights()
    assert_all_have(hvd, weights)
    if hvd.rank() == 0:
        alone = new_model(seed=0)
        alone.build((None, 4))
        alone.set_weights(first)
        assert_replayed(alone, state, weights)
        model.save(sys.argv[3])
    hvd.allgather_object("saved")
    loaded = hvd.load_model(sys.argv[3])
    assert isinstance(loaded.optimizer, tf.optimizers.legacy.SGD)
    again = batches(range(BATCHES), ORIGIN)
    for each in (loaded, model):
        each.fit(*again, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    for mine, expected in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
    if hvd.rank() == 0:
        print(f"replayed {state.history}, epochs: {state.epoch}, resets: {state.resets}", flush=True)


hvd.init()
assert issubclass(horovod.tensorflow.SyncBatchNormalization, tf.keras.layers.BatchNormalization)
model = new_model(hvd.rank(), horovod.keras.DistributedOptimizer)
model.fit(*batches([99], ORIGIN), steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)
for velocity in model.optimizer.variables()[1:]:
    velocity.assign(velocity * 0)
state = hvd.elastic.KerasState(model, epoch=0, batch=0, history=[], resets=0)
state.register_reset_callbacks([on_state_reset])
state.sync()
first = model.get_weights()
main()
