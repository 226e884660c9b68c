"""Small models, and training them alone and together."""

import keras
import numpy as np

import ringreduce.keras as hvd

RANK, SIZE = hvd.rank(), hvd.size()
BACKEND = keras.backend.backend()
BATCHES, ROWS = 4, 6 * 5  # rows of a batch of all ranks together: equal shares of 1, 2, 3 and 5 ranks


def model(seed=0, **options):
    """A regression of 4 numbers; the seed gives its weights."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5, activation="tanh", **options), keras.layers.Dense(1, **options)]
    return keras.Sequential([keras.Input((4,)), *layers])


def data():
    rng = np.random.default_rng(7)
    x = rng.normal(size=(BATCHES * ROWS, 4)).astype(np.float32)
    return x, (x @ [1, -2, 3, 0.5]).astype(np.float32)[:, None]


def share(array):
    """This rank's rows of every batch."""
    return array.reshape(BATCHES, SIZE, ROWS // SIZE, -1)[:, RANK].reshape(BATCHES * ROWS // SIZE, -1)


def fit(trained, optimizer, together, epochs=3, callbacks=(), **options):
    """Train a model on all data: with the other ranks, or alone; returns its weights."""
    trained.compile(optimizer=optimizer, loss="mse", **options)
    if together:
        return fit_on(trained, callbacks, epochs=epochs, shuffle=False)
    x, y = data()
    trained.fit(x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return numbers(trained.weights)


def fit_on(trained, callbacks=(), **options):
    """Train a compiled model on this rank's share; returns its weights."""
    x, y = map(share, data())
    trained.fit(x, y, batch_size=ROWS // SIZE, verbose=0, callbacks=list(callbacks), **options)
    return numbers(trained.weights)


def numbers(variables):
    return [np.array(keras.ops.convert_to_numpy(each)) for each in variables]


def close(mine, expected):
    assert len(mine) == len(expected) > 0
    for each, other in zip(mine, expected, strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-4, atol=1e-5)


def equal_on_all_ranks(values):
    for theirs in hvd.allgather_object(values):
        for mine, their in zip(values, theirs, strict=True):
            np.testing.assert_array_equal(mine, their)
