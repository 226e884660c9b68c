"""Keras' `model.fit` under `ringrun --elastic`: a rank is killed, the others go on, and one repeats it alone.

ringrun --elastic -np 3 --min-np 2 python -m tests.keras.elastic_program RANK BATCH
"""

import os
import signal
import sys

import keras
import numpy as np

import ringreduce.keras as hvd

BATCHES, ROWS = 7, 6
ORIGIN = int(os.environ["OMPI_COMM_WORLD_RANK"])
KILLED, AT = map(int, sys.argv[1:])


def new_model(seed, wrap=lambda optimizer: optimizer):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
    model.compile(optimizer=wrap(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    return model


def batch_of(step, rank):
    """What a rank of the job's start trains on in a step."""
    x = np.random.default_rng([step, rank]).normal(size=(ROWS, 4)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def batches(steps, *ranks):
    pairs = [batch_of(step, rank) for step in steps for rank in ranks]
    return [np.concatenate(each) for each in zip(*pairs, strict=True)]


class Watched(keras.callbacks.Callback):
    """Kills a rank before a batch; notes who took part in each."""

    def on_train_batch_begin(self, batch, logs=None):
        if (ORIGIN, state.batch) == (KILLED, AT):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch, logs=None):
        state.history.append(hvd.allgather_object(ORIGIN))


@hvd.elastic.run
def train(state):
    counting = [Watched(), hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state)]
    callbacks = [*counting, hvd.elastic.CommitStateCallback(state)]
    own = batches(range(state.batch, BATCHES), ORIGIN)
    model.fit(*own, batch_size=ROWS, epochs=1 - state.epoch, shuffle=False, verbose=0, callbacks=callbacks)


def main():
    train(state)
    weights = [keras.ops.convert_to_numpy(each) for each in model.weights]
    for theirs in hvd.allgather_object(weights):
        for mine, their in zip(weights, theirs, strict=True):
            np.testing.assert_array_equal(mine, their)
    if hvd.rank() == 0:
        alone = new_model(seed=0)
        for step, ranks in enumerate(state.history):
            alone.train_on_batch(*batches([step], *ranks))
        for mine, expected in zip(weights, alone.weights, strict=True):
            np.testing.assert_allclose(mine, keras.ops.convert_to_numpy(expected), rtol=1e-4, atol=1e-5)
        print(f"replayed {state.history}, epochs: {state.epoch}", flush=True)


hvd.init()
model = new_model(hvd.rank(), hvd.DistributedOptimizer)
state = hvd.elastic.KerasState(model, epoch=0, batch=0, history=[])
main()
