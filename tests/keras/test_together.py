"""In `model.fit` all ranks stop together, whoever sets `model.stop_training`; and are warned where they steer apart."""

import keras
import numpy as np
import pytest

import ringreduce.keras as hvd
from ringreduce import runtime
from ringreduce.keras import together
from tests.keras import models
from tests.keras.models import RANK, SIZE

LAST = SIZE - 1


class Stopping(keras.callbacks.Callback):
    """Sets stop_training on the last rank, when `when` happens for the time so numbered; counts what happens on all."""

    def __init__(self, when, number):
        super().__init__()
        self.when, self.number = when, number
        self.batches = self.epochs = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.stops("batch", self.batches)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        self.stops("epoch", self.epochs)

    def stops(self, what, number):
        if (what, number, RANK) == (self.when, self.number, LAST):
            self.model.stop_training = True


class StoppingEpochs(Stopping):
    """Is not called in batches."""

    on_train_batch_end = keras.callbacks.Callback.on_train_batch_end


def fit(callbacks, optimizer=None, **options):
    trained = models.model()
    optimizer = optimizer or hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    return models.fit(trained, optimizer, together=True, callbacks=callbacks, **options), trained


def check(callback, weights, epochs, batches=None):
    """All ranks have come as far as that."""
    models.equal_on_all_ranks(weights)
    assert hvd.allgather_object(callback.epochs) == [epochs] * SIZE
    counts = hvd.allgather_object(callback.batches)
    assert counts == [counts[0]] * SIZE
    assert batches is None or counts[0] == batches


@pytest.mark.quick
@pytest.mark.parametrize(
    ("when", "number", "epochs"), [("batch", 2, 1), ("batch", 4, 1), ("batch", 6, 2), ("epoch", 2, 2)]
)
def test_all_ranks_stop_when_one_does(said, when, number, epochs):
    """In the batch after that one, or with its epoch."""
    callback = Stopping(when, number)
    weights, _ = fit([callback])
    late = SIZE > 1 and when == "batch" and number % models.BATCHES
    check(callback, weights, epochs, number + bool(late) if when == "batch" else epochs * models.BATCHES)
    assert said == [f"model.fit: rank {RANK} sets model.stop_training, so all ranks stop with it"] * (RANK == LAST > 0)


class Averaging(keras.callbacks.Callback):
    """Reduces after each batch what a loop of one's own may: the weights."""

    def on_train_batch_end(self, batch, logs=None):
        for number, each in enumerate(self.model.trainable_weights):
            each.assign(np.array(hvd.allreduce(keras.ops.convert_to_numpy(each), name=f"weight {number}")))


@pytest.mark.quick
@pytest.mark.parametrize("what", ["nothing", "metrics", "gradients", "weights", "local steps"])
def test_ranks_that_train_a_model_each_are_warned_of(said, what):
    optimizer = None if what == "gradients" else keras.optimizers.SGD(0.1)
    more = {"weights": [Averaging()], "metrics": [hvd.callbacks.MetricAverageCallback()]}
    more["local steps"] = [hvd.callbacks.LocalSGDCallback(sync_every=100)]
    fit([hvd.callbacks.BroadcastGlobalVariablesCallback(0), *more.get(what, [])], optimizer)
    alone = what in ("nothing", "metrics") and SIZE > 1
    assert said == [f"model.fit: {together.ALONE}"] * (RANK == 0 and alone)
    assert runtime.current("model.fit").engine.submitting.owed <= 0, "with which nothing is run in the caller's thread"


def test_a_rank_that_alone_has_a_callback_stops_all(said):
    """As for one that only rank 0 shows something by."""
    callback = Stopping("batch", 6)
    counting = StoppingEpochs("never", 0)
    weights, _ = fit([counting, *([callback] if RANK == LAST else [])])
    check(counting, weights, 2)


@pytest.mark.skipif(models.BACKEND != "tensorflow", reason="Keras' other backends build a model before they train it")
@pytest.mark.quick
def test_a_model_that_is_never_called_trains_others(said):
    """As a GAN does, with a tape for each: Keras does not know how many weights it has."""
    import tensorflow as tf

    import ringreduce.tensorflow

    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.pair = [models.model(seed) for seed in (RANK, SIZE + RANK)]

        def train_step(self, data):
            x, y = data
            for each in self.pair:
                with ringreduce.tensorflow.DistributedGradientTape(tf.GradientTape()) as tape:
                    loss = tf.reduce_mean((each(x) - y) ** 2)
                variables = each.trainable_variables
                for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                    variable.assign(variable - 0.1 * gradient)
            return {"loss": loss}

    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    models.equal_on_all_ranks(models.fit(Pair(), "sgd", together=True, callbacks=[broadcast]))
    assert said == []


@pytest.mark.quick
def test_what_nobody_expects_in_a_batch_waits_for_the_end_of_the_epoch(said):
    class Odd(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            if RANK == LAST:
                self.stop_training = True
            return super().compute_loss(*args, **kwargs)

    keras.utils.set_random_seed(0)
    trained = Odd([keras.Input((4,)), keras.layers.Dense(1)])
    callback = StoppingEpochs("never", 0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    weights = models.fit(trained, optimizer, together=True, callbacks=[callback], run_eagerly=models.BACKEND != "jax")
    check(callback, weights, 1)


def test_keras_own_that_stop(said):
    """A loss that is NaN on one rank; and a metric that ends on one rank first, which is said."""
    x, y = (models.share(each) for each in models.data())
    if RANK == LAST:
        x[2 * models.ROWS // SIZE] = np.nan
    trained, counting = models.model(), StoppingEpochs("never", 0)
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    callbacks = [keras.callbacks.TerminateOnNaN(), counting]
    trained.fit(x, y, batch_size=models.ROWS // SIZE, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert hvd.allgather_object(counting.epochs) == [1] * SIZE
    said.clear()
    early = keras.callbacks.EarlyStopping("loss", mode="min", min_delta=100.0 if RANK == LAST else 0.0, patience=1)
    counting = StoppingEpochs("never", 0)
    weights, _ = fit([early, counting], epochs=6)
    check(counting, weights, 2)
    ours = [text for text in said if "EarlyStopping" in text]
    assert len(ours) == (SIZE > 1 and RANK == 0)
    for text in ours:
        assert "model.fit: EarlyStopping decides based on 'loss', which after epoch 1 is " in text
        assert " on rank 0, " in text
        assert text.endswith(
            "put hvd.callbacks.MetricAverageCallback() before it, or let it use a value that is equal on all ranks"
        )


STEERING = {
    "averaged": ([hvd.callbacks.MetricAverageCallback, lambda: keras.callbacks.EarlyStopping("loss")], None),
    "averaged later": (
        [lambda: keras.callbacks.ReduceLROnPlateau("loss"), hvd.callbacks.MetricAverageCallback],
        "ReduceLROnPlateau decides based on 'loss', which after epoch 1 is",
    ),
    "alike": ([lambda: keras.callbacks.EarlyStopping("val_loss")], None),
    "rates": (
        [lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 + (RANK == LAST) * epoch / 10)],
        "after epoch 2 the learning rate is 0.1 on rank",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize(("callbacks", "expected"), STEERING.values(), ids=STEERING)
def test_what_steers_ranks_apart_is_said_once(said, callbacks, expected):
    trained = models.model()
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    same_on_all = [each[:6] for each in models.data()]
    models.fit_on(trained, [each() for each in callbacks], epochs=3, validation_data=same_on_all)
    assert len(said) == (expected is not None and SIZE > 1 and RANK == 0)
    assert all(expected in text for text in said)


UNEQUAL = {
    "batches": ({"steps_per_epoch": models.BATCHES - (RANK == LAST)}, "it has 3 epochs of 4 batches on rank"),
    "epochs": ({"epochs": 3 - (RANK == LAST)}, "it has 3 epochs of 4 batches on rank"),
    "first epochs": ({"initial_epoch": 1 + (RANK == LAST)}, "ranks have ended epoch 2 on rank"),
}


@pytest.mark.parametrize(("options", "expected"), UNEQUAL.values(), ids=UNEQUAL)
def test_ranks_that_would_leave_alone_are_warned_of_before(said, options, expected):
    """An optimizer that does not reduce in the end keeps the test from what it warns of."""
    trained, counting = models.model(), StoppingEpochs("never", 0)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), counting]
    trained.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    models.fit_on(trained, callbacks, **{"epochs": 3} | options)
    found = [each for each in said if together.ALONE not in each]
    assert len(found) == (SIZE > 1 and RANK == 0)
    for text in found:
        assert expected in text
        assert f" on rank {LAST}; ranks that end first leave the others waiting: " in text
    assert counting.epochs == options.get("epochs", 3) - options.get("initial_epoch", 0)


@pytest.mark.quick
def test_ranks_that_do_not_train_together_decide_for_themselves(said):
    """With an optimizer of Keras' own; and in a loop of one's own, which has such a list on some ranks only."""
    callback = Stopping("batch", 2)
    fit([callback], keras.optimizers.SGD(0.1))
    assert callback.epochs == (1 if RANK == LAST else 3)
    trained = models.model()
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    if RANK == LAST:
        listed = keras.callbacks.CallbackList([Stopping("batch", 1)], model=trained)
        listed.on_train_begin()
        listed.on_train_batch_end(0, {})
        listed.on_epoch_end(0, {})
        assert trained.stop_training
    assert said == []


def test_ranks_that_train_together_without_such_an_optimizer_stop_together(said):
    callback, averaging = Stopping("epoch", 2), hvd.callbacks.MetricAverageCallback()
    fit([averaging, callback], keras.optimizers.SGD(0.1), epochs=4)
    assert hvd.allgather_object(callback.epochs) == [2] * SIZE
