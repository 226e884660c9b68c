"""SyncBatchNormalization of Keras 2: ranks train as one process does with plain layers and the batches of all."""

import numpy as np
import pytest
import tf_keras

import ringreduce as rr
import ringreduce.tensorflow.keras as hvd
from ringreduce.tensorflow.sync_batch_norm import SyncBatchNormalization
from tests.keras import models
from tests.keras.models import RANK, SIZE
from tests.keras.test_sync_batch_norm import CASES, rows

Plain = tf_keras.layers.BatchNormalization


def model(kind):
    tf_keras.utils.set_random_seed(4)
    layers = [tf_keras.layers.Dense(5), kind(momentum=0.8), tf_keras.layers.Activation("tanh"), kind(scale=False)]
    return tf_keras.Sequential([tf_keras.Input((4,)), *layers, tf_keras.layers.Dense(1)])


@pytest.mark.quick
def test_ranks_train_as_one_process():
    """Weights and moving averages, so gradients and values are right."""
    wrapped = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.05))
    together = models.fit(model(SyncBatchNormalization), wrapped, together=True)
    alone = models.fit(model(Plain), tf_keras.optimizers.SGD(0.05), together=False)
    assert len(together) == 2 + 4 + 3 + 2
    models.equal_on_all_ranks(together)
    models.close(together, alone)


@pytest.mark.parametrize(("shape", "axis"), [*CASES.values(), ((3, 2, 4), [1, 3])], ids=[*CASES, "two axes"])
def test_ranks_may_have_unequal_batches(shape, axis):
    layer = SyncBatchNormalization(axis=axis, momentum=0.0, epsilon=1e-3)
    mine = rows(RANK, shape)
    result = layer(mine.astype(np.float32), training=True).numpy()
    everything = np.concatenate([rows(rank, shape) for rank in range(SIZE)])
    kept = {each % everything.ndim for each in np.atleast_1d(axis)}
    over = tuple(each for each in range(everything.ndim) if each not in kept)
    mean, variance = (each(axis=over, keepdims=True) for each in (everything.mean, everything.var))
    np.testing.assert_allclose(result, (mine - mean) / np.sqrt(variance + 1e-3), atol=1e-3)
    np.testing.assert_allclose(layer.moving_mean.numpy().ravel(), mean.ravel(), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy().ravel(), variance.ravel(), rtol=1e-3)
    still = layer(mine[: RANK + 1].astype(np.float32)).numpy()
    np.testing.assert_allclose(still, result[: RANK + 1], atol=1e-3, err_msg="evaluation communicates nothing")


def test_rows_that_are_masked_do_not_count():
    layer, mine = SyncBatchNormalization(momentum=0.0), rows(RANK, (2, 4))
    mask = np.random.default_rng([6, RANK]).random(mine.shape[:2]) < 0.6
    layer(mine.astype(np.float32), training=True, mask=mask)
    values = np.concatenate(rr.allgather_object(mine[mask]))
    np.testing.assert_allclose(layer.moving_mean.numpy(), values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), values.var(0), rtol=1e-3)


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_it_is_saved_and_loaded(tmp_path, suffix):
    trained = model(SyncBatchNormalization)
    trained.save(tmp_path / f"model{suffix}")
    loaded = tf_keras.models.load_model(tmp_path / f"model{suffix}")
    assert [type(each) for each in loaded.layers] == [type(each) for each in trained.layers]
    models.close(models.numbers(loaded.weights), models.numbers(trained.weights))


@pytest.mark.quick
def test_what_is_refused():
    with pytest.raises(rr.InputError, match="SyncBatchNormalization: fused=True; expected fused=False"):
        SyncBatchNormalization(fused=True)
    with pytest.raises(rr.InputError, match=r"synchronized=True is for tf\.distribute; leave it out"):
        SyncBatchNormalization(synchronized=True)
    with pytest.raises(rr.InputError, match="virtual_batch_size is for less than a rank's batch; leave it out"):
        SyncBatchNormalization(virtual_batch_size=2)
