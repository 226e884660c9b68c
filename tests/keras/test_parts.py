"""check=divergence in Keras: what an optimizer trains and keeps, in every step; and in model.fit what it does not."""

import keras
import numpy as np
import pytest

import ringreduce.keras as hvd
from ringreduce.keras import parts
from ringreduce.keras.own import OwnVariables
from tests.keras import models
from tests.keras.models import RANK, SIZE

LAST = SIZE - 1


class At(keras.callbacks.Callback):
    """Calls a function with the model on the last rank, before the epoch of this number."""

    def __init__(self, number, function):
        super().__init__()
        self.number, self.function = number, function

    def on_epoch_begin(self, epoch, logs=None):
        if (epoch, RANK) == (self.number, LAST):
            self.function(self.model)


def changes(model):
    model.layers[-1].kernel.assign_add([[0.5]] * 5)


def sets_the_rate(model):
    model.optimizer.learning_rate = 0.25


def other_momentum(model):
    model.optimizer.momentums[1].assign_add([0.5] * 5)


CASES = {
    "equal": (99, changes, None),
    "seed": (0, changes, r"after 1 step \(not compared before\) parameter '2.sequential/dense/kernel' differs"),
    "a change": (1, changes, r"after 5 steps \(equal after 3\) parameter '2.sequential/dense/kernel' differs"),
    "a rate": (1, sets_the_rate, rf"value 'optimizer.1.sgd/learning_rate' differs: .*rank {LAST} has 0.25"),
    "momentum": (1, other_momentum, r"so do 1 more of 8: 'optimizer.3.sgd/[\w/]*momentum'"),
}


@pytest.mark.quick
@pytest.mark.parametrize(("number", "function", "expected"), CASES.values(), ids=CASES)
def test_who_differs_is_named(found, number, function, expected):
    """Also where ranks have made different numbers of layers before."""
    for _ in range(RANK):
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125, momentum=0.5))
    models.fit(models.model(), optimizer, together=True, callbacks=[At(number, function)])
    found(expected)


def test_a_model_that_the_first_step_builds(found):
    keras.utils.set_random_seed(RANK)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125))
    layers = [keras.layers.Dense(5), keras.layers.Dense(1)]
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    models.fit(keras.Sequential(layers), optimizer, together=True, callbacks=callbacks)
    found(None)


@pytest.mark.parametrize("options", [{"backward_passes_per_step": 2}, {"op": hvd.Adasum}], ids=str)
def test_what_is_each_ranks_own_is_left_out(found, options):
    if "op" in options and SIZE == 3:
        pytest.skip("takes a power of two")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), **options)
    models.fit(models.model(), optimizer, together=True)
    found(None)


@pytest.mark.skipif(models.BACKEND == "tensorflow", reason="TensorFlow's XLA cannot call ringreduce")
def test_compiled_and_scaled_steps(found):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.125))
    optimizer = hvd.DistributedOptimizer(optimizer)
    models.fit(models.model(), optimizer, together=True, callbacks=[At(1, changes)], jit_compile=True)
    found(r"after 5 steps \(equal after 3\) parameter '2.sequential/dense/kernel' differs")


@pytest.mark.parametrize("number", [99, 1])
def test_what_is_not_trained_is_compared_between_epochs(found, number):
    """But not the states of random seeds; and of a frozen layer what differs."""
    keras.utils.set_random_seed(RANK)
    dropout = keras.layers.Dropout(0.5)
    keras.utils.set_random_seed(0)
    frozen = keras.layers.Dense(3, trainable=False)
    layers = [keras.Input((4,)), frozen, keras.layers.BatchNormalization(), dropout, keras.layers.Dense(1)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125))
    callbacks = [At(number, lambda model: frozen.bias.assign_add([0.5] * 3))]
    models.fit(keras.Sequential(layers), optimizer, together=True, callbacks=callbacks)
    first = "1.sequential/dense/bias" if number == 1 else "2.sequential/batch_normalization/moving_mean"
    found(rf"after 4 steps \(equal after 0\) buffer '{first}' differs")


@pytest.mark.quick
def test_a_layer_that_one_rank_has_frozen(found):
    """It would take no part in the reduction, which the others wait for; so this is found before."""
    layers = [keras.Input((4,)), keras.layers.Dense(3, trainable=RANK != LAST), keras.layers.Dense(1)]
    frozen, optimizer = keras.Sequential(layers), keras.optimizers.SGD(0.125)
    optimizer.build(frozen.trainable_variables)
    parts.compare_buffers(frozen, hvd.global_process_set, 4)
    names = [each.name for each in frozen.trainable_variables]
    parts.compare(optimizer, hvd.global_process_set, names, OwnVariables(None))
    missing = rf"On rank {LAST}, '\d.sequential/dense/kernel' is missing: build the same model on all ranks"
    found(rf"after 0 steps .not compared before. parameter '\d.sequential/dense/\w+' differs: .* {missing}")


def test_a_loop_of_ones_own(found):
    trained = models.model()
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)), loss="mse")
    x, y = map(models.share, models.data())
    for number in range(6):
        if (number, RANK) == (3, LAST):
            changes(trained)
        trained.train_on_batch(x[number::6], y[number::6])
    found(r"after 3 steps \(equal after 1\) parameter '2.sequential/dense/kernel' differs")
    assert np.isfinite(models.numbers(trained.weights)[0]).all()
