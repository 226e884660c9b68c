"""SyncBatchNormalization: ranks train as one process does with plain layers and the batches of all."""

import keras
import numpy as np
import pytest

import ringreduce as rr
import ringreduce.keras as hvd
from tests.keras import models
from tests.keras.models import RANK, SIZE


def model(kind):
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(5), kind(momentum=0.8), keras.layers.Activation("tanh"), kind(scale=False)]
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])


@pytest.mark.quick
def test_ranks_train_as_one_process():
    """Weights and moving averages, so gradients and values are right."""
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    together = models.fit(model(hvd.SyncBatchNormalization), wrapped, together=True)
    alone = models.fit(model(keras.layers.BatchNormalization), keras.optimizers.SGD(0.05), together=False)
    assert len(together) == 2 + 4 + 3 + 2
    models.equal_on_all_ranks(together)
    models.close(together, alone)


def rows(rank, shape):
    """Another number of rows on each rank, with a large mean."""
    return 300 + np.random.default_rng([5, rank]).normal(size=(2 * rank + 3, *shape))


CASES = {"vectors": ((4,), -1), "images": ((3, 2, 4), -1), "channels first": ((4, 3, 2), 1)}


@pytest.mark.quick
@pytest.mark.parametrize(("shape", "axis"), CASES.values(), ids=CASES)
def test_ranks_may_have_unequal_batches(shape, axis):
    layer = hvd.SyncBatchNormalization(axis=axis, momentum=0.0, epsilon=1e-3)
    mine = rows(RANK, shape)
    result = keras.ops.convert_to_numpy(layer(mine.astype(np.float32), training=True))
    everything = np.concatenate([rows(rank, shape) for rank in range(SIZE)])
    over = tuple(each for each in range(everything.ndim) if each != axis % everything.ndim)
    mean, variance = (each(axis=over, keepdims=True) for each in (everything.mean, everything.var))
    np.testing.assert_allclose(result, (mine - mean) / np.sqrt(variance + 1e-3), atol=1e-3)
    np.testing.assert_allclose(models.numbers([layer.moving_mean])[0], mean.ravel(), rtol=1e-5)
    np.testing.assert_allclose(models.numbers([layer.moving_variance])[0], variance.ravel(), rtol=1e-3)
    still = keras.ops.convert_to_numpy(layer(mine[: RANK + 1].astype(np.float32)))
    np.testing.assert_allclose(still, result[: RANK + 1], atol=1e-3, err_msg="evaluation communicates nothing")


class InTraining(keras.layers.Layer):
    """Has such a layer, which Keras calls to find its shape."""

    def __init__(self):
        super().__init__()
        self.normal = hvd.SyncBatchNormalization()

    def call(self, x):
        return self.normal(x, training=True)


@pytest.mark.quick
def test_a_rank_may_build_a_model_that_others_do_not():
    if RANK == 0:
        x = keras.Input((4,))
        assert keras.Model(x, InTraining()(x)).output_shape == (None, 4)
    rr.barrier()


def test_rows_that_are_masked_do_not_count():
    layer, mine = hvd.SyncBatchNormalization(momentum=0.0), rows(RANK, (2, 4))
    mask = np.random.default_rng([6, RANK]).random(mine.shape[:2]) < 0.6
    layer(mine.astype(np.float32), training=True, mask=mask)
    values = np.concatenate(rr.allgather_object(mine[mask]))
    np.testing.assert_allclose(models.numbers([layer.moving_mean])[0], values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(models.numbers([layer.moving_variance])[0], values.var(0), rtol=1e-3)


def test_it_is_saved_and_loaded(tmp_path):
    trained = model(hvd.SyncBatchNormalization)
    trained.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [type(each) for each in loaded.layers] == [type(each) for each in trained.layers]
    models.close(models.numbers(loaded.weights), models.numbers(trained.weights))


def test_what_is_refused():
    with pytest.raises(rr.InputError, match="SyncBatchNormalization: fused=True; expected fused=False"):
        hvd.SyncBatchNormalization(fused=True)
    with pytest.raises(rr.InputError, match=r"synchronized=True is for tf\.distribute; leave it out"):
        hvd.SyncBatchNormalization(synchronized=True)
