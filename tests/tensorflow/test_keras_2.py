"""Optimizers of Keras 2, of tf_keras, in the process in which Keras 3 is: they train as one process does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ringreduce as rr
import ringreduce.tensorflow
import ringreduce.tensorflow.keras as hvd
from ringreduce import runtime
from tests.keras import models
from tests.support.tiers import parted

optimizers, legacy = tf_keras.optimizers, tf_keras.optimizers.legacy
scaled = tf_keras.mixed_precision.LossScaleOptimizer
RANK, SIZE, BATCHES = models.RANK, models.SIZE, models.BATCHES


def model(seed=0, *layers):
    tf_keras.utils.set_random_seed(seed)
    dense = [tf_keras.layers.Dense(5, activation="tanh"), tf_keras.layers.Dense(1)]
    return tf_keras.Sequential([tf_keras.Input((4,)), *layers, *dense])


def sgd(rate=0.1, **options):
    return optimizers.SGD(rate, momentum=0.9, **options)


def of_2022(rate=0.1, **options):
    return legacy.SGD(rate, momentum=0.9, **options)


PASSES = {"backward_passes_per_step": 2}
CASES = {
    "sgd": (sgd, {}, sgd, {}),
    "legacy": (of_2022, {}, of_2022, {}),
    "adamw": (lambda: optimizers.AdamW(0.01), {}) * 2,
    "legacy adam": (lambda: legacy.Adam(0.01), {}) * 2,
    "all clipped": (lambda: sgd(global_clipnorm=0.1), {}) * 2,
    "clipped, legacy": (lambda: of_2022(clipnorm=0.1), {}) * 2,
    "averaged weights": (lambda: sgd(use_ema=True, ema_overwrite_frequency=3), {}) * 2,
    "predivided": (sgd, {"gradient_predivide_factor": 2.0}, sgd, {}),
    "a sum": (of_2022, {"op": hvd.Sum}, lambda: of_2022(0.1 * SIZE), {}),
    "scaled": (lambda: scaled(sgd()), {}, sgd, {}),
    "scaled, legacy": (lambda: scaled(of_2022()), {}, of_2022, {}),
    "eager": (of_2022, {}, of_2022, {"run_eagerly": True}),
    "steps at once": (sgd, {}, sgd, {"steps_per_execution": 3}),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", parted(CASES, lambda case: case in ("sgd", "legacy")))
def test_ranks_train_as_one_process(case):
    make, options, alone, compiled = CASES[case]
    wrapped = hvd.DistributedOptimizer(make(), **options)
    recorder = runtime.current("test").engine.recorder
    recorder.start()
    compiled = {"experimental_run_tf_function": False, **compiled}  # as in Horovod's examples
    trained = models.fit(model(), wrapped, together=True, **compiled)
    recorder.recording = False
    assert recorder.steps[-1].number + 1 == int(wrapped.iterations), "each is recorded"
    models.equal_on_all_ranks(trained)
    models.close(trained, models.fit(model(), alone(), together=False))


ACCUMULATING = {
    "new": sgd,
    "legacy": of_2022,
    "scaled": lambda rate=0.1: scaled(sgd(rate)),
    "scaled, legacy": lambda rate=0.1: scaled(of_2022(rate)),
}


@pytest.mark.parametrize("kind", ACCUMULATING.values(), ids=ACCUMULATING)
@pytest.mark.parametrize("average", [True, False])
def test_passes_are_accumulated(kind, average):
    """Against one process with a batch of two at once, as many of theirs. Once a step they are reduced."""
    wrapped = hvd.DistributedOptimizer(kind(), **PASSES, average_aggregated_gradients=average)
    recorder = runtime.current("test").engine.recorder
    recorder.start()
    trained = models.fit(model(), wrapped, together=True)
    recorder.recording = False
    assert recorder.steps[-1].number + 1 == 3 * BATCHES / 2
    models.equal_on_all_ranks(trained)
    alone = model()
    alone.compile(optimizer=kind(0.1 if average else 0.2), loss="mse")
    x, y = models.data()
    alone.fit(x, y, batch_size=2 * models.ROWS, epochs=3, shuffle=False, verbose=0)
    models.close(trained, models.numbers(alone.weights))
    assert int(wrapped.iterations) == 3 * BATCHES / 2


@pytest.mark.quick
@pytest.mark.parametrize("kind", parted([sgd, of_2022], lambda kind: kind is sgd))
@pytest.mark.parametrize("eagerly", parted([False, True], lambda eagerly: not eagerly))
def test_a_pass_that_is_not_finite_on_one_rank_counts_on_none(kind, eagerly):
    optimizer = hvd.DistributedOptimizer(scaled(kind(), initial_scale=8.0), **PASSES)
    trained, alone = model(), model()
    trained.compile(optimizer=optimizer, loss="mse", run_eagerly=eagerly)
    alone.compile(optimizer=kind(0.2), loss="mse")
    x, y = models.data()
    mine, of_y = models.share(x)[:12], models.share(y)[:12]
    own = np.where(RANK == SIZE - 1, np.inf, mine[:4])
    for inputs, targets in ((mine[4:8], of_y[4:8]), (own, of_y[:4]), (mine[8:], of_y[8:])):
        trained.train_on_batch(inputs, targets)
    assert float(optimizer.loss_scale) == 4.0
    everyones = [np.concatenate(hvd.allgather_object(each[4:])) for each in (mine, of_y)]
    alone.train_on_batch(*everyones)
    models.equal_on_all_ranks(trained.get_weights())
    models.close(trained.get_weights(), alone.get_weights())


@pytest.mark.quick
@pytest.mark.parametrize("kind", [sgd, of_2022])
def test_a_loop_of_ones_own(run, kind):
    trained, optimizer = model(), rr.DistributedOptimizer(kind())

    @run
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((trained(x) - y) ** 2)
        gradients = tape.gradient(loss, trained.trainable_variables)
        optimizer.apply_gradients(zip(gradients, trained.trainable_variables, strict=True))

    x, y = map(models.share, models.data())
    for batch in np.array_split(np.arange(len(x)), BATCHES) * 3:
        step(tf.constant(x[batch]), tf.constant(y[batch]))
    models.close(models.numbers(trained.weights), models.fit(model(), kind(), together=False))


@pytest.mark.quick
@pytest.mark.parametrize("kind", parted([sgd, of_2022], lambda kind: kind is sgd))
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(kind):
    optimizer = hvd.DistributedOptimizer(scaled(kind(), initial_scale=8.0))
    trained = model()
    trained.compile(optimizer=optimizer, loss="mse")
    before = trained.get_weights()
    x, y = models.data()
    x, y = models.share(x)[:4], models.share(y)[:4]
    trained.train_on_batch(np.where(RANK == SIZE - 1, np.inf, x), y)
    models.close(trained.get_weights(), before)
    assert float(optimizer.loss_scale) == 4.0
    trained.train_on_batch(x, y)
    models.equal_on_all_ranks(trained.get_weights())
    assert not np.array_equal(trained.get_weights()[0], before[0])


def test_mixed_precision():
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        trained = model()
        weights = models.fit(trained, hvd.DistributedOptimizer(optimizers.Adam(0.03)), together=True, epochs=10)
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
    assert isinstance(trained.optimizer, scaled)
    models.equal_on_all_ranks(weights)
    losses = trained.history.history["loss"]
    assert losses[-1] < losses[0] / 4


@pytest.mark.quick
def test_it_stays_what_it_is():
    plain, wrapped = sgd(name="mine"), sgd(name="mine")
    assert hvd.DistributedOptimizer(wrapped) is wrapped
    assert type(wrapped) is type(plain)
    assert optimizers.serialize(wrapped) == optimizers.serialize(plain)
    for again in (wrapped, scaled(wrapped)):
        with pytest.raises(ValueError, match="is already wrapped; wrap it once"):
            hvd.DistributedOptimizer(again)
    with pytest.raises(ValueError, match="backward_passes_per_step=0; expected a whole number of 1 or more"):
        hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0)


def test_xla_is_refused():
    with pytest.raises(Exception, match=r"XLA cannot call it .* pass jit_compile=False to model.compile"):
        models.fit(model(), hvd.DistributedOptimizer(sgd()), together=True, epochs=1, jit_compile=True)


@pytest.mark.skipif(SIZE == 1, reason="the only set is that of all ranks")
def test_ranks_outside_the_process_set_train_alone():
    last = rr.add_process_set([SIZE - 1])
    weights = models.fit(model(), hvd.DistributedOptimizer(sgd(), process_set=last), together=True, epochs=1)
    models.close(weights, models.fit(model(), sgd(), together=True, epochs=1))
    rr.remove_process_set(last)


@pytest.mark.parametrize("kind", [sgd, of_2022])
def test_layers_of_one_rank_s_own(kind):
    tf_keras.utils.set_random_seed(RANK)
    shared, own = tf_keras.layers.Dense(5), tf_keras.layers.Dense(1 + RANK)
    trained = tf_keras.Sequential([tf_keras.Input((4,)), shared, own])
    before = models.numbers(trained.weights)
    optimizer = hvd.PartialDistributedOptimizer(kind(), local_layers=own, **PASSES)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=own.trainable_variables)
    weights = models.fit(trained, optimizer, together=True, epochs=1, callbacks=[broadcast])
    models.equal_on_all_ranks(weights[:2])
    assert all(np.any(mine != first) for mine, first in zip(weights, before, strict=True))


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("kind", [optimizers.SGD, legacy.SGD])
def test_embeddings(kind, sparse_as_dense):
    def trained(optimizer, rank, size):
        tf_keras.utils.set_random_seed(0)
        words = np.random.default_rng(3).integers(0, 20, (24, 3))[rank::size]
        layers = [tf_keras.layers.Embedding(20, 4), tf_keras.layers.Flatten(), tf_keras.layers.Dense(1)]
        table = tf_keras.Sequential([tf_keras.Input((3,)), *layers])
        table.compile(optimizer=optimizer, loss="mse")
        table.fit(words, np.float32(words[:, :1]), batch_size=24 // size, epochs=3, shuffle=False, verbose=0)
        return models.numbers(table.weights)

    together = trained(hvd.DistributedOptimizer(kind(0.1), sparse_as_dense=sparse_as_dense), RANK, SIZE)
    models.equal_on_all_ranks(together)
    models.close(together, trained(kind(0.1), 0, 1))


def test_variables_are_broadcast_inside_a_function_too(run):
    trained = model(seed=RANK)
    run(lambda: ringreduce.tensorflow.broadcast_variables(trained.variables, SIZE - 1))()
    models.close(models.numbers(trained.weights), models.numbers(model(seed=SIZE - 1).weights))


@pytest.mark.quick
def test_keras_3_trains_beside_it():
    """Each has its own optimizers in one process, and neither takes the other's."""
    for _ in range(2):
        ours = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        theirs = hvd.DistributedOptimizer(of_2022())
        one, other = models.fit(models.model(), ours, together=True), models.fit(model(), theirs, together=True)
        models.close(one, models.fit(models.model(), keras.optimizers.SGD(0.1, momentum=0.9), together=False))
        models.close(other, models.fit(model(), of_2022(), together=False))
