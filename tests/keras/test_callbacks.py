"""The callbacks: what each promises; and the functions on tensors of the backend."""

import copy
import functools
import inspect

import keras
import numpy as np
import pytest

import ringreduce.keras as hvd
from tests.keras.models import BATCHES, RANK, SIZE, close, data, equal_on_all_ranks, fit, fit_on, model, numbers, share
from tests.support import names
from tests.support.keras_fits import recorder
from tests.support.tiers import extended, parted

callbacks = hvd.callbacks
RANKS = np.arange(SIZE)


def everything(trained):
    """All that a step depends on."""
    return numbers([*trained.weights, *trained.optimizer.variables])


Recorded = functools.partial(recorder, keras.callbacks, everything)


@pytest.mark.quick
def test_variables_are_broadcast_before_the_first_step():
    recorded = Recorded()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (RANK + 1)))
    trained = model(seed=RANK)
    optimizer.build(trained.trainable_variables)
    optimizer.variables[2].assign(optimizer.variables[2] + RANK)  # such as a state that one rank has loaded
    fit(trained, optimizer, True, 1, [callbacks.BroadcastGlobalVariablesCallback(SIZE - 1), recorded])
    equal_on_all_ranks(recorded.before)
    close = np.testing.assert_allclose
    close(recorded.rates, 0.01 * SIZE, rtol=1e-6)
    for mine, theirs in zip(recorded.before, numbers(model(seed=SIZE - 1).weights), strict=False):
        close(mine, theirs)
    equal_on_all_ranks(numbers([*trained.weights, *optimizer.variables]))


def test_ranks_may_have_made_other_numbers_of_layers_before():
    """So that Keras calls their layers dense_1 and dense_3, say: a rank has loaded a model, or evaluates one."""
    keras.utils.set_random_seed(RANK)
    for _ in range(RANK):
        keras.layers.Dense(1)
    trained = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(1)])
    paths = hvd.allgather_object([each.path for each in trained.weights])
    assert SIZE == 1 or paths[0] != paths[1]
    broadcast = callbacks.BroadcastGlobalVariablesCallback(SIZE - 1)
    weights = fit(trained, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), True, 1, [broadcast])
    equal_on_all_ranks([*weights, *numbers(trained.optimizer.variables)])
    different = keras.Sequential([keras.Input((4 + RANK,)), keras.layers.Dense(5)])
    if SIZE > 1:
        with pytest.raises(hvd.MismatchError, match=r"'0\.sequential/dense/kernel'"):
            hvd.broadcast_variables(different.weights, 0)


def test_local_variables_stay_with_what_the_optimizer_keeps_of_them():
    trained = model(seed=RANK)
    own = trained.weights[0]
    before = numbers([own])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0, momentum=0.9))
    optimizer.build(trained.trainable_variables)
    for velocity in optimizer.momentums:
        velocity.assign(velocity + RANK)
    callback = callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[own])
    recorded = Recorded()
    fit(trained, optimizer, True, 1, [callback, recorded])
    place = len(trained.weights) + [each is optimizer.momentums[0] for each in optimizer.variables].index(True)
    np.testing.assert_array_equal(recorded.before[0], before[0])
    np.testing.assert_array_equal(recorded.before[place], np.full_like(before[0], RANK))
    equal_on_all_ranks([each for at, each in enumerate(recorded.before) if at not in (0, place)])


@pytest.mark.quick
def test_layers_follow_the_weights_that_they_get():
    """Normalization computes with what it has made of them before: of each rank's own data, or none."""
    normal = keras.layers.Normalization()
    normal.adapt(RANK + share(data()[0]))
    trained = keras.Sequential([keras.Input((4,)), normal, keras.layers.Dense(1)])
    broadcast = callbacks.BroadcastGlobalVariablesCallback(0)
    fit(trained, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), True, 1, [broadcast])
    equal_on_all_ranks([keras.ops.convert_to_numpy(normal(np.ones((1, 4), np.float32)))])


def test_weights_that_one_rank_does_not_have_yet_are_broadcast_after_the_first_step():
    keras.utils.set_random_seed(RANK)
    trained = keras.Sequential([keras.layers.Dense(1)])
    callback = callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(trained)
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    if RANK == 0:
        trained.build((None, 4))
    before = numbers(trained.weights)
    callback.on_train_begin()
    if SIZE > 1 and RANK == 0:
        np.testing.assert_array_equal(trained.get_weights()[0], before[0])
    x, y = data()
    trained.train_on_batch(share(x), share(y))
    callback.on_train_batch_end(0)
    equal_on_all_ranks(numbers([*trained.weights, *trained.optimizer.variables]))


class SaidToBeBuilt(keras.Model):
    """As a model that trains others says of itself; its layers have their weights from the first batch on."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)
        self.built = True

    def call(self, x):
        return self.other(self.one(x))


@pytest.mark.quick
@pytest.mark.parametrize("has_some", [False, True])
def test_weights_that_a_model_gets_in_the_first_step_are_broadcast_after_it(has_some):
    keras.utils.set_random_seed(RANK)
    trained, callback = SaidToBeBuilt(), callbacks.BroadcastGlobalVariablesCallback(0)
    if has_some:
        trained.other.build((None, 5))
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    callback.set_model(trained)
    callback.on_train_begin()
    x, y = data()
    trained.train_on_batch(share(x), share(y))
    callback.on_train_batch_end(0)
    equal_on_all_ranks(numbers([*trained.weights, *trained.optimizer.variables]))


def test_metrics_are_averages():
    own, averaged = Recorded(), Recorded()
    trained = model(seed=RANK)
    x, y = data()
    trained.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    arguments = {"epochs": 2, "verbose": 0, "validation_data": (x[: 9 + RANK], y[: 9 + RANK])}
    history = trained.fit(share(x), share(y), callbacks=[own, callbacks.MetricAverageCallback(), averaged], **arguments)
    for epoch, logs in enumerate(own.logs):
        everyones = hvd.allgather_object(logs)
        assert set(logs) == {"loss", "mae", "val_loss", "val_mae"} == set(averaged.logs[epoch])
        for name in logs:
            mean = np.mean([each[name] for each in everyones])
            np.testing.assert_allclose(averaged.logs[epoch][name], mean, rtol=1e-6)
            assert history.history[name][epoch] == averaged.logs[epoch][name]


@pytest.mark.quick
def test_the_learning_rate_warms_up(capsys):
    recorded = Recorded()
    warmup = callbacks.LearningRateWarmupCallback(0.1 * SIZE, warmup_epochs=2, verbose=1)
    fit(model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * SIZE)), True, 3, [warmup, recorded])
    epochs = np.arange(1, 2 * BATCHES + 1) / BATCHES
    expected = [*0.1 * (epochs * (SIZE - 1) / 2 + 1), *[0.1 * SIZE] * BATCHES]
    np.testing.assert_allclose(recorded.rates, expected, rtol=1e-5)
    np.testing.assert_allclose([each["lr"] for each in recorded.logs], expected[BATCHES - 1 :: BATCHES], rtol=1e-5)
    said = f"Epoch 2: finished gradual learning rate warmup to {0.1 * SIZE:g}." in capsys.readouterr().out
    assert said == (RANK == 0)


def test_a_copy_counts_for_itself():
    """As tools that search for hyperparameters copy callbacks for each trial."""
    recorded = Recorded()
    warmup = copy.deepcopy(callbacks.LearningRateWarmupCallback(0.1 * SIZE, warmup_epochs=1))
    fit(model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * SIZE)), True, 1, [warmup, recorded])
    epochs = np.arange(1, BATCHES + 1) / BATCHES
    np.testing.assert_allclose(recorded.rates, 0.1 * (epochs * (SIZE - 1) + 1), rtol=1e-5)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras has no steps_per_execution there")
@pytest.mark.parametrize("at_once", [3, BATCHES])
def test_a_warm_up_ends_at_the_whole_rate_with_several_steps_at_once(at_once):
    recorded = Recorded()
    warmup = callbacks.LearningRateWarmupCallback(0.1 * SIZE, warmup_epochs=2)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * SIZE))
    fit(model(), optimizer, True, 3, [warmup, recorded], steps_per_execution=at_once)
    executions = len(recorded.rates) // 3
    epochs = [epoch + (at_once * number + 1) / BATCHES for epoch in range(2) for number in range(executions)]
    expected = [*0.1 * (np.array(epochs) * (SIZE - 1) / 2 + 1), *[0.1 * SIZE] * executions]
    np.testing.assert_allclose(recorded.rates, expected, rtol=1e-5)
    np.testing.assert_allclose([each["lr"] for each in recorded.logs[1:]], [0.1 * SIZE] * 2, rtol=1e-5)


@pytest.mark.parametrize(("given", "steps"), [(None, 2), (8, 8)])
def test_a_schedule_has_the_steps_of_each_fit_unless_they_are_given(given, steps):
    recorded = Recorded()
    schedule = callbacks.LearningRateScheduleCallback(0.2, 0.5, staircase=False, steps_per_epoch=given)
    trained = model()
    fit(trained, hvd.DistributedOptimizer(keras.optimizers.SGD(0.2)), True, 1, [schedule])
    fit_on(trained, [schedule, recorded], epochs=1, steps_per_epoch=2)
    np.testing.assert_allclose(recorded.rates, 0.2 * 0.5 ** (np.arange(2) / steps), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"multiplier": 0.5, "start_epoch": 1, "end_epoch": 3}, [1, 1, 0.5, 0.5]),
        ({"multiplier": 0.5, "staircase": False}, 0.5 ** (np.arange(16).reshape(4, 4) / 4)),
        ({"multiplier": lambda epoch: 0.1**epoch, "start_epoch": 2}, [1, 1, 0.01, 0.001]),
        ({"multiplier": lambda epoch: 1 / (1 + epoch), "staircase": False}, 1 / (1 + np.arange(16).reshape(4, 4) / 4)),
    ],
)
def test_the_learning_rate_follows_a_schedule(arguments, expected):
    recorded = Recorded()
    schedule = callbacks.LearningRateScheduleCallback(0.2, **arguments)
    fit(model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.2)), True, 4, [schedule, recorded])
    by_batch = np.broadcast_to(np.reshape(expected, (4, -1)), (4, BATCHES))  # one for an epoch, or one for each batch
    np.testing.assert_allclose(recorded.rates, 0.2 * by_batch.reshape(-1), rtol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("corrects", parted([True, False], lambda corrects: corrects))
@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, pytest.param(keras.optimizers.RMSprop, marks=extended)])
def test_momentum_is_corrected(optimizer, corrects):
    """Against the same optimizer, step by step, its velocity scaled by hand as the rate changes."""
    rates = 0.1 / (1 + np.arange(3 * BATCHES) / BATCHES)
    schedule = callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: 1 / (1 + epoch), staircase=False, momentum_correction=corrects
    )
    trained = fit(model(), hvd.DistributedOptimizer(optimizer(0.1, momentum=0.9)), True, 3, [schedule])
    expected = model()
    plain = optimizer(0.1, momentum=0.9)
    expected.compile(optimizer=plain, loss="mse", run_eagerly=True)
    x, y = data()
    before = 0.1
    for number, rate in enumerate(rates):
        rows = slice(number % BATCHES * len(x) // BATCHES, (number % BATCHES + 1) * len(x) // BATCHES)
        plain.learning_rate = rate
        for velocity in (getattr(plain, "momentums", None) or getattr(plain, "_momentums", ())) if corrects else ():
            velocity.assign(velocity * (rate / before))
        before = rate
        expected.train_on_batch(x[rows], y[rows])
    for mine, theirs in zip(trained, numbers(expected.weights), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.quick
def test_functions_on_tensors_of_the_backend():
    tensor = keras.ops.convert_to_tensor(np.float32([RANK, 2 * RANK]))

    def check(result, expected):
        assert type(result) is type(tensor)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(result), expected, rtol=1e-6)

    check(hvd.allreduce(tensor), [RANKS.mean(), 2 * RANKS.mean()])
    check(hvd.allreduce(keras.Variable(tensor), op=hvd.Sum, name="sum"), [RANKS.sum(), 2 * RANKS.sum()])
    check(hvd.allreduce([1.0, RANK], average=False), [SIZE, RANKS.sum()])
    check(hvd.allreduce({"a": tensor, "b": {"c": 1.0}})["a"], [RANKS.mean(), 2 * RANKS.mean()])
    check(hvd.allgather(tensor), np.outer(RANKS, [1, 2]).reshape(-1))
    check(hvd.broadcast(tensor, SIZE - 1), [SIZE - 1, 2 * SIZE - 2])
    check(hvd.reducescatter(keras.ops.ones(SIZE), op=hvd.Sum), [SIZE])
    variables = [keras.Variable([1.0 + RANK]), keras.Variable(RANK, dtype="int32", trainable=False)]
    hvd.broadcast_variables(variables, SIZE - 1)
    np.testing.assert_array_equal(np.concatenate([np.ravel(each) for each in numbers(variables)]), [SIZE, SIZE - 1])


def test_what_is_ours_has_its_names():
    names.assert_has_them(hvd)


@pytest.mark.quick
def test_what_two_modules_of_horovods_have_in_different_orders_goes_by_name():
    orders = {
        hvd.DistributedOptimizer: "optimizer name device_dense device_sparse compression sparse_as_dense "
        "gradient_predivide_factor op",
        hvd.callbacks.BestModelCheckpoint: "monitor verbose",
    }
    orders[hvd.PartialDistributedOptimizer] = orders[hvd.DistributedOptimizer]
    for function, order in orders.items():
        parameters = inspect.signature(function).parameters.items()
        assert [each for each, it in parameters if it.kind is it.POSITIONAL_OR_KEYWORD] == order.split()


def test_every_name_of_horovods_is_there_or_says_what_to_use():
    with names.standing_in():
        assert names.unexplained("horovod.keras") == []


@pytest.mark.quick
def test_rank_0_saves_the_best_model_for_all(tmp_path_factory, said):
    """By the metric that all ranks have: the best epoch of each alone is another one."""
    path = hvd.broadcast_object(str(tmp_path_factory.mktemp("best") / "best.keras"), 0)
    own = [[3.0, 1.0, 2.0, 0.5], [1.0, 1.5, 9.0, 9.0], [2.0, 0.5, 2.0, 9.0]][RANK % 3]  # the mean is least in epoch 2
    kept = []

    class Metric(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["quality"] = own[epoch]
            kept.append(numbers(self.model.weights))

    best = hvd.callbacks.BestModelCheckpoint("quality", mode="min", filepath=path)
    trained = model()
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    fit_on(trained, [Metric(), hvd.callbacks.MetricAverageCallback(), best], epochs=4)
    hvd.barrier()
    close(numbers(keras.models.load_model(path).weights), kept[3 if SIZE == 1 else 1])
    assert said == []
    assert best.monitor == "quality"
    with pytest.raises(
        hvd.InputError, match=r"BestModelCheckpoint: no path to save to; pass it: filepath='best\.keras'"
    ):
        hvd.callbacks.BestModelCheckpoint()
