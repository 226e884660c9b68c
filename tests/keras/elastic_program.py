"""Keras' `model.fit` under `ringrun --elastic`: a rank is killed, the others go on, and one repeats it alone.

ringrun --elastic -np 3 --min-np 2 python -m tests.keras.elastic_program RANK BATCH
"""

import os
import sys

import keras

import ringreduce.keras as hvd
from tests.support.keras_fits import assert_all_have, assert_replayed, fit_what_is_left

ORIGIN = int(os.environ["OMPI_COMM_WORLD_RANK"])
KILLED = tuple(map(int, sys.argv[1:]))


def new_model(seed, wrap=lambda optimizer: optimizer):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
    model.compile(optimizer=wrap(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    return model


@hvd.elastic.run
def train(state):
    fit_what_is_left(hvd, keras.callbacks, state, ORIGIN, KILLED)


def main():
    train(state)
    weights = model.get_weights()
    assert_all_have(hvd, weights)
    if hvd.rank() == 0:
        assert_replayed(new_model(seed=0), state, weights)
        print(f"replayed {state.history}, epochs: {state.epoch}", flush=True)


hvd.init()
model = new_model(hvd.rank(), hvd.DistributedOptimizer)
state = hvd.elastic.KerasState(model, epoch=0, batch=0, history=[])
main()
