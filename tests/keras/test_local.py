"""LocalSGDCallback and DiLoCoCallback: against models that train by themselves and are averaged by hand."""

import copy

import keras
import numpy as np
import pytest

import ringreduce as rr
import ringreduce.keras as hvd
from tests.keras.models import BATCHES, RANK, SIZE, close, data, equal_on_all_ranks, fit_on, model, numbers

callbacks = hvd.callbacks


def trained(epochs=1, callback=None, optimizer=None):
    made = model()
    made.compile(optimizer=optimizer or keras.optimizers.SGD(0.1), loss="mse")
    fit_on(made, [callback] if callback else [], epochs=epochs, shuffle=False)
    return made


@pytest.mark.quick
def test_parameters_are_averaged_every_few_batches():
    """With plain SGD the mean of parameters that were averaged after every batch is that of averaged gradients."""
    together = trained(2, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    close(numbers(trained(2, callbacks.LocalSGDCallback(1)).weights), numbers(together.weights))
    inside = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=hvd.host_process_set)
    close(numbers(trained(2, callbacks.LocalSGDCallback(3), inside).weights), numbers(together.weights))
    own = numbers(trained().weights)
    expected = [np.mean(each, axis=0) for each in zip(*hvd.allgather_object(own), strict=True)]
    callback = callbacks.LocalSGDCallback(BATCHES)
    averaged = trained(1, callback)
    close(numbers(averaged.weights), expected)
    equal_on_all_ranks(numbers(averaged.weights))
    state = hvd.elastic.KerasState(averaged, averaging=callback)
    fit_on(averaged, [callback], epochs=1, steps_per_epoch=1)
    state.restore()
    close(numbers(averaged.weights), expected)


@pytest.mark.quick
def test_fragments_are_averaged_while_training_goes_on():
    callback = callbacks.DiLoCoCallback(BATCHES, fragments=2, delay=1, outer=rr.Nesterov(0.7, 0.5))
    made = trained(3, callback)
    before = numbers(made.weights)
    with callback.averaged():
        mean = numbers(made.weights)
    for each, (own, inside) in enumerate(zip(before, mean, strict=True)):
        np.testing.assert_allclose(inside, np.mean([all_[each] for all_ in hvd.allgather_object(before)], axis=0), 1e-4)
        assert SIZE == 1 or not np.array_equal(own, inside)
    close(numbers(made.weights), before)
    x, y = data()
    assert made.evaluate(x, y, verbose=0) < model_loss()


def test_a_copy_begins_anew():
    """As tools that search for hyperparameters copy callbacks for each trial."""
    callback = callbacks.DiLoCoCallback(BATCHES, outer=rr.Nesterov(0.7, 0.5))
    made = [numbers(trained(1, copy.deepcopy(callback)).weights) for _ in range(2)]
    close(*made)
    assert callback.state_dict() == {}


@pytest.mark.quick
def test_a_layer_that_is_unfrozen_moves_no_others_average():
    """Its variables come before theirs, and have their shapes."""
    made = keras.Sequential([keras.layers.Dense(3, name=f"dense_{each}") for each in range(3)])
    made.build((None, 3))
    for number, each in enumerate(made.weights):
        each.assign(np.linspace(0, 1, int(np.prod(each.shape))).reshape(each.shape) + number)
    made.layers[0].trainable = False
    callback = callbacks.DiLoCoCallback(1, outer=rr.Nesterov(1.0, 0.0))
    callback.set_model(made)
    callback.on_train_begin()
    for step in range(4):
        if step == 2:
            made.layers[0].trainable = True
        expected = [each + RANK * each.size for each in numbers(made.weights)]
        for variable, value in zip(made.weights, expected, strict=True):
            if any(variable is each for each in made.trainable_variables):
                variable.assign(value)
        before = numbers(made.weights)
        callback.on_train_batch_end(step)
        means = [np.mean(each, axis=0) for each in zip(*hvd.allgather_object(before), strict=True)]
        close(numbers(made.weights), means)


def model_loss():
    made = model()
    made.compile(loss="mse")
    x, y = data()
    return made.evaluate(x, y, verbose=0)


@pytest.mark.quick
def test_what_cannot_be_done_is_refused():
    with pytest.raises(rr.InputError, match="LocalSGDCallback: sync_every=0"):
        callbacks.LocalSGDCallback(0)
    with pytest.raises(
        TypeError, match=r"DiLoCo: for an optimizer of Keras pass ringreduce.keras.callbacks.DiLoCoCallb"
    ):
        rr.DiLoCo(keras.optimizers.SGD(0.1), sync_every=4)
    callback = callbacks.LocalSGDCallback(4)
    callback.set_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(rr.InputError, match="LocalSGDCallback: the model has no weights yet"):
        callback.on_train_begin()
    assert RANK < SIZE
