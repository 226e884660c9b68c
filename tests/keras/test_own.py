"""Layers that are one rank's own, of another size on each, beside one that all share: as NumPy trains them together."""

import keras
import numpy as np
import pytest

import ringreduce as rr
import ringreduce.keras as hvd
from tests.keras import models
from tests.keras.models import RANK, SIZE

RATE, ROWS, BATCHES = 0.1, 5, 4


def data(rank):
    rng = np.random.default_rng([3, rank])
    x = rng.normal(size=(BATCHES * ROWS, 4)).astype(np.float32)
    return x, x @ rng.normal(size=(4, 1 + rank)).astype(np.float32)


def start(rank):
    """The weights of the shared layer, and of the rank's own."""
    return np.random.default_rng(1).normal(size=(4, 3)) / 2, np.random.default_rng([2, rank]).normal(size=(3, 1 + rank))


def new_model():
    layers = [
        keras.layers.Dense(width, use_bias=False, name=name) for width, name in ((3, "shared"), (1 + RANK, "own"))
    ]
    trained = keras.Sequential([keras.Input((4,)), *layers])
    trained.set_weights([each.astype(np.float32) for each in start(RANK)])
    return trained


def alone(scales=True, passes=1, total=1.0):
    """What this rank's two layers are after an epoch, in float64, with the layers of all ranks."""
    shared, heads = start(0)[0], [start(rank)[1] for rank in range(SIZE)]
    of_shared, of_heads = 0.0, [0.0] * SIZE
    for step in range(BATCHES):
        for rank in range(SIZE):
            x, y = (each[step * ROWS : (step + 1) * ROWS].astype(np.float64) for each in data(rank))
            error = 2 * (x @ shared @ heads[rank] - y) / y.size
            of_shared += x.T @ error @ heads[rank].T * total / SIZE
            of_heads[rank] += (x @ shared).T @ error / (SIZE if scales else 1)
        if step % passes == passes - 1:
            shared = shared - RATE * of_shared
            heads = [head - RATE * each for head, each in zip(heads, of_heads, strict=True)]
            of_shared, of_heads = 0.0, [0.0] * SIZE
    return [shared, heads[RANK]]


def trained_by(optimizer, trained, **options):
    trained.compile(optimizer=optimizer, loss="mse", **options)
    trained.fit(*data(RANK), batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    return models.numbers(trained.weights)


def partial(trained, make=keras.optimizers.SGD, **options):
    return hvd.PartialDistributedOptimizer(make(RATE), local_layers=[trained.get_layer("own")], **options)


CASES = {
    "scaled": ({}, {}),
    "not scaled": ({"scale_local_gradients": False}, {"scales": False}),
    "a sum of passes": ({"backward_passes_per_step": 2}, {"passes": 2}),
    "a sum": ({"op": hvd.Sum}, {"total": SIZE}),
    "predivided": ({"gradient_predivide_factor": 4.0}, {}),
}


@pytest.mark.quick
@pytest.mark.parametrize(("options", "expected"), CASES.values(), ids=CASES)
def test_a_layer_of_one_rank_s_own(options, expected):
    trained = new_model()
    models.close(trained_by(partial(trained, **options), trained), alone(**expected))


@pytest.mark.quick
def test_registered_variables_with_a_loss_scale_and_eagerly():
    for wrap, options in [
        (keras.optimizers.LossScaleOptimizer, {}),
        (lambda optimizer: optimizer, {"run_eagerly": True}),
    ]:
        trained = new_model()
        optimizer = hvd.DistributedOptimizer(wrap(keras.optimizers.SGD(RATE)))
        for each in trained.get_layer("own").trainable_variables:
            optimizer.register_local_var(each)
        models.close(trained_by(optimizer, trained, **options), alone())


def test_gradients_without_variables_of_which_some_are_missing():
    """Keras leaves out the variables that have no gradient."""
    trained = new_model()
    own, optimizer = trained.get_layer("own").kernel, partial(trained)
    variables = [keras.Variable([1.0, 2.0], name="unused"), own, trained.get_layer("shared").kernel]
    before = models.numbers(variables)
    gradients = [None, keras.ops.ones(own.shape) * (RANK + 1), keras.ops.ones((4, 3)) * (RANK + 1)]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply(gradients, variables)
    unused, mine, shared = models.numbers(variables)
    np.testing.assert_array_equal(unused, before[0])
    np.testing.assert_allclose(mine, before[1] - RATE * (RANK + 1) / SIZE, rtol=1e-5)
    np.testing.assert_allclose(shared, before[2] - RATE * (SIZE + 1) / 2, rtol=1e-5)


def test_the_callback_that_broadcasts_leaves_them_alone():
    """And their momentum, which has other shapes elsewhere."""
    trained = new_model()
    trained.get_layer("shared").kernel.assign_add(np.full((4, 3), RANK, np.float32))
    own = trained.get_layer("own")
    before = models.numbers(own.weights)
    trained.compile(optimizer=partial(trained, lambda rate: keras.optimizers.SGD(rate, momentum=0.9)), loss="mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    for each in own.trainable_variables:
        callback.register_local_var(each)
    callback.set_model(trained)
    callback.on_train_begin()
    models.close(models.numbers(trained.weights), [start(0)[0], *before])


def test_the_check_for_divergence_leaves_them_out(found):
    trained = new_model()
    trained_by(partial(trained, lambda rate: keras.optimizers.SGD(rate, momentum=0.9)), trained)
    found(None)
    trained.get_layer("shared").kernel.assign_add(np.full((4, 3), float(RANK == SIZE - 1), np.float32))
    trained.fit(*data(RANK), batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    found("parameter '0.sequential[_0-9]*/shared/kernel' differs|shared/kernel' differs")


def test_a_saved_model_knows_them(tmp_path):
    trained = new_model()
    trained_by(partial(trained, scale_local_gradients=False), trained)
    trained.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras")
    again = [each.fit(*data(RANK), batch_size=ROWS, shuffle=False, verbose=0) and each for each in (trained, loaded)]
    models.close(*(models.numbers(each.weights) for each in again))


def test_what_is_no_layer_or_has_no_variables():
    for layers, says in [
        (["own"], r"PartialDistributedOptimizer: local_layers has 'own'; expected layers of Keras"),
        (keras.layers.Dense(1, name="late"), r"layer 'late' of local_layers is not built, so it has no variables yet"),
    ]:
        with pytest.raises(rr.InputError, match=says):
            hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=layers)
