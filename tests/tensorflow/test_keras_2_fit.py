"""The callbacks in the `fit` of Keras 2, of tf_keras, and states of its models."""

import functools

import numpy as np
import pytest
import tf_keras

import ringreduce as rr
import ringreduce.tensorflow.keras as hvd
from ringreduce.settings.log import JOB
from tests.keras import models
from tests.keras.models import BATCHES, RANK, SIZE, equal_on_all_ranks, fit_on, numbers
from tests.support.keras_fits import recorder
from tests.support.tiers import parted
from tests.tensorflow.test_keras_2 import legacy, model, of_2022, optimizers, scaled, sgd

callbacks = hvd.callbacks
KINDS = [sgd, of_2022]
quick_first = parted(KINDS, lambda kind: kind is of_2022)


@pytest.fixture
def said(monkeypatch):
    """What the log warns of."""
    texts = []
    monkeypatch.setattr(JOB, "warning", texts.append)
    return texts


def everything(trained):
    """All that a step depends on."""
    own = trained.optimizer.variables
    rate = np.array(trained.optimizer.learning_rate)
    return [*numbers([*trained.variables, *(own() if callable(own) else own)]), rate]


Recorded = functools.partial(recorder, tf_keras.callbacks, everything)


@pytest.mark.quick
@pytest.mark.parametrize("kind", quick_first)
def test_variables_are_broadcast_before_the_first_step(kind):
    recorded, trained = Recorded(), model(seed=RANK)
    optimizer = hvd.DistributedOptimizer(kind(0.01 * (RANK + 1)))
    models.fit(trained, optimizer, True, 1, [callbacks.BroadcastGlobalVariablesCallback(SIZE - 1), recorded])
    equal_on_all_ranks(recorded.before)
    np.testing.assert_allclose(recorded.rates, 0.01 * SIZE, rtol=1e-6)
    for mine, theirs in zip(recorded.before, numbers(model(seed=SIZE - 1).weights), strict=False):
        np.testing.assert_allclose(mine, theirs)
    equal_on_all_ranks(everything(trained))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_not_built_is_broadcast_after_the_first_step(kind):
    """As that of Horovod's example, which has no Input."""
    tf_keras.utils.set_random_seed(RANK)
    trained = tf_keras.Sequential([tf_keras.layers.Dense(5, activation="tanh"), tf_keras.layers.Dense(1)])
    models.fit(trained, hvd.DistributedOptimizer(kind()), True, 1, [callbacks.BroadcastGlobalVariablesCallback(0)])
    equal_on_all_ranks(everything(trained))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_have_made_other_numbers_of_layers_before(kind):
    for _ in range(RANK):
        tf_keras.layers.Dense(1)
    trained = model(RANK, tf_keras.layers.Dense(4))
    names = rr.allgather_object([each.name for each in trained.weights])
    assert SIZE == 1 or names[0] != names[1]
    models.fit(trained, hvd.DistributedOptimizer(kind()), True, 1, [callbacks.BroadcastGlobalVariablesCallback(0)])
    equal_on_all_ranks(everything(trained))


@pytest.mark.quick
def test_metrics_are_averages_and_the_rate_warms_up(said, capsys):
    own, averaged = Recorded(), Recorded()
    warmup = callbacks.LearningRateWarmupCallback(0.1 * SIZE, warmup_epochs=2, verbose=1)
    trained = model(seed=0)
    trained.compile(optimizer=hvd.DistributedOptimizer(of_2022(0.1 * SIZE)), loss="mse", metrics=["mae"])
    x, y = models.data()
    x, y = x[: 9 + RANK], y[: 9 + RANK]
    fit_on(trained, [own, callbacks.MetricAverageCallback(), warmup, averaged], epochs=3, validation_data=(x, y))
    epochs = np.arange(1, 2 * BATCHES + 1) / BATCHES
    expected = [*0.1 * (epochs * (SIZE - 1) / 2 + 1), *[0.1 * SIZE] * BATCHES]
    np.testing.assert_allclose(averaged.rates, expected, rtol=1e-5)
    reached = f"Epoch 2: finished gradual learning rate warmup to {0.1 * SIZE:g}."
    assert (reached in capsys.readouterr().out) == (RANK == 0)
    for epoch, logs in enumerate(own.logs):
        everyones = rr.allgather_object(logs)
        assert set(logs) == {"loss", "mae", "val_loss", "val_mae"} == set(averaged.logs[epoch]) - {"lr"}
        for name in logs:
            mean = np.mean([each[name] for each in everyones])
            np.testing.assert_allclose(averaged.logs[epoch][name], mean, rtol=1e-6)
            assert trained.history.history[name][epoch] == averaged.logs[epoch][name]
    assert said == []


@pytest.mark.quick
@pytest.mark.parametrize("kind", parted([*KINDS, optimizers.RMSprop, legacy.RMSprop], lambda kind: kind is of_2022))
def test_momentum_is_corrected(kind):
    """Against SGD step by step, its velocity scaled by hand as the rate changes; of RMSprop the velocity alone."""
    options = {} if kind in KINDS else {"momentum": 0.9}
    optimizer = hvd.DistributedOptimizer(kind(0.1, **options))
    schedule = callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch)
    models.fit(model(), optimizer, together=True, epochs=1, callbacks=[schedule])
    velocities = [each["momentum"] for each in optimizer._slots.values()] if hasattr(optimizer, "_slots") else None
    velocities = velocities or getattr(optimizer, "momentums", None) or optimizer._momentums
    before = numbers(velocities)
    assert any(each.any() for each in before)
    schedule.set_model(type("Model", (), {"optimizer": optimizer}))
    schedule.on_epoch_begin(1)
    schedule.on_train_batch_begin(0)
    models.close(numbers(velocities), [each * 0.5 for each in before])


@pytest.mark.parametrize("saved", ["best.keras", "best.h5"])
def test_rank_0_saves_the_best_model_for_all(tmp_path_factory, saved):
    path = rr.broadcast_object(str(tmp_path_factory.mktemp("best") / saved), 0)
    own = [[3.0, 1.0, 2.0, 0.5], [1.0, 1.5, 9.0, 9.0], [2.0, 0.5, 2.0, 9.0]][RANK % 3]  # the mean is least in epoch 2
    kept = []

    class Metric(tf_keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["quality"] = own[epoch]
            kept.append(numbers(self.model.weights))

    best = callbacks.BestModelCheckpoint("quality", mode="min", filepath=path)
    trained = model()
    trained.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    fit_on(trained, [Metric(), callbacks.MetricAverageCallback(), best], epochs=4)
    rr.barrier()
    models.close(numbers(tf_keras.models.load_model(path).weights), kept[3 if SIZE == 1 else 1])


@pytest.mark.skipif(SIZE == 1, reason="ranks must differ")
@pytest.mark.parametrize("kind", KINDS)
def test_who_differs_is_named(found, kind):
    """With check=divergence."""
    trained = model()

    def changes(batch, logs):
        if batch == 1 and RANK == SIZE - 1:
            trained.weights[0].assign_add(np.ones((4, 5)))

    change = tf_keras.callbacks.LambdaCallback(on_train_batch_end=changes)
    models.fit(trained, hvd.DistributedOptimizer(kind()), together=True, callbacks=[change])
    found(r"after 3 steps \(equal after 1\) parameter '0.dense[_0-9]*/kernel:0' differs")


class Stops(tf_keras.callbacks.Callback):
    """On one rank."""

    def __init__(self, batch):
        super().__init__()
        self.at, self.batches = batch, 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if RANK == SIZE - 1 and self.batches == self.at:
            self.model.stop_training = True


@pytest.mark.quick
@pytest.mark.skipif(SIZE == 1, reason="ranks must differ")
def test_all_ranks_stop_together(said):
    stops, trained = Stops(2), model()
    models.fit(trained, hvd.DistributedOptimizer(sgd()), together=True, callbacks=[stops])
    assert rr.allgather_object(stops.batches) == [3] * SIZE
    equal_on_all_ranks(everything(trained))
    assert [f"model.fit: rank {SIZE - 1} sets model.stop_training, so all ranks stop with it"] * (
        RANK == SIZE - 1
    ) == said


@pytest.mark.skipif(SIZE == 1, reason="one rank needs nobody")
def test_a_plain_optimizer_is_warned_of(said):
    models.fit(model(), sgd(), together=True, callbacks=[callbacks.MetricAverageCallback()])
    assert any("nothing reduces the gradients" in each for each in said) == (RANK == 0)


def test_local_steps():
    trained = model(seed=RANK)
    trained.compile(optimizer=sgd(), loss="mse")
    fit_on(trained, [callbacks.BroadcastGlobalVariablesCallback(0), callbacks.LocalSGDCallback(2)], epochs=2)
    equal_on_all_ranks(numbers(trained.weights))


STATES = {
    "new": sgd,
    "legacy": of_2022,
    "legacy adam": lambda: legacy.Adam(0.01 * (RANK + 1)),
    "scaled": lambda: scaled(sgd()),
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", parted(STATES, lambda kind: kind == "legacy adam"))
def test_training_goes_on_from_a_commit_as_it_went_on_the_first_time(kind):
    trained = model(seed=RANK)
    trained.compile(optimizer=hvd.DistributedOptimizer(STATES[kind]()), loss="mse")
    state = hvd.elastic.KerasState(trained, epoch=RANK, batch=0)
    state.sync()
    first = everything(trained)
    equal_on_all_ranks(first)
    counting = [hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state)]
    for _ in range(2):
        results = []
        for _ in range(2):
            fit_on(trained, counting, shuffle=False)
            results.append(everything(trained))
            assert any(np.any(mine != theirs) for mine, theirs in zip(results[-1], first, strict=True))
            state.restore()
            models.close(everything(trained), first)
        models.close(*results)
        fit_on(trained, [*counting, hvd.elastic.CommitStateCallback(state)])
        first = everything(trained)
    assert (state.epoch, state.batch) == (2, 0)


def test_accumulated_gradients_are_committed():
    trained = model(seed=RANK)
    optimizer = hvd.DistributedOptimizer(of_2022(), backward_passes_per_step=3)
    trained.compile(optimizer=optimizer, loss="mse")
    state = hvd.elastic.KerasState(trained)
    state.sync()
    fit_on(trained, shuffle=False)
    assert BATCHES % 3 == 1
    state.save()
    results = []
    for _ in range(2):
        fit_on(trained, shuffle=False, epochs=2)
        results.append(everything(trained))
        state.restore()
    models.close(*results)


def test_layers_that_were_frozen_are_so_again():
    trained = model()
    trained.layers[0].trainable = False
    trained.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    state = hvd.elastic.KerasState(trained)
    trained.layers[0].trainable = True
    state.restore()
    assert not trained.layers[0].trainable
    trained.layers[0].trainable = True
    trained.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    with pytest.raises(rr.InputError, match=r"KerasState: the optimizer's variable .* has the shape .*; commit after"):
        state.restore()
