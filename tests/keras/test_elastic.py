"""KerasState: what is committed comes back, in all variables; all ranks get the root's; and the callbacks that commit.

Ranks that really die: end_to_end/test_frameworks.py.
"""

import keras
import numpy as np
import pytest

import ringreduce as rr
import ringreduce.keras as hvd
from tests.keras.models import BATCHES, RANK, SIZE, equal_on_all_ranks, fit_on, model, numbers

elastic = hvd.elastic


def with_dropout(seed):
    trained = model(seed)
    trained.add(keras.layers.Dropout(0.3, seed=seed + 3))
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (seed + 1))), loss="mse")
    return trained


def everything(trained):
    """All that a step depends on: weights, states of seeds, the optimizer's variables."""
    return numbers([*trained.variables, *trained.optimizer.variables])


def same(one, other):
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.quick
def test_training_goes_on_from_a_commit_as_it_went_on_the_first_time():
    """Also when it was broken off in the middle of an epoch, where only Keras' loop has JAX's arrays."""
    trained = with_dropout(seed=RANK)
    state = elastic.KerasState(trained, epoch=RANK, table=np.arange(3) * RANK)
    state.sync()
    first = everything(trained)
    equal_on_all_ranks(first)
    assert (state.epoch, state.table.tolist()) == (0, [0, 0, 0])

    def broken_off(batch, logs):
        if batch == 2:
            raise RuntimeError("broken off")

    for commits in range(2):
        results = []
        for _ in range(2):
            fit_on(trained, shuffle=False)
            results.append(everything(trained))
            assert not same(results[-1], first)
            with pytest.raises(RuntimeError, match="broken off"):
                fit_on(trained, [keras.callbacks.LambdaCallback(on_train_batch_end=broken_off)])
            state.restore()
            assert same(everything(trained), first)
        assert same(*results)
        fit_on(trained)
        state.epoch += 1
        state.commit()
        first = everything(trained)
        assert state.epoch == state.commits - 1 == commits + 1


def test_an_attribute_may_be_another_model():
    state = elastic.KerasState(with_dropout(0), critic=model(seed=RANK))
    state.sync()
    equal_on_all_ranks(numbers(state.critic.weights))


@pytest.mark.quick
def test_layers_follow_the_weights_that_they_get():
    """Normalization computes with what it has made of them before."""
    normal, rows = keras.layers.Normalization(), np.float32([[1, 2], [3, 5]])
    normal.adapt(rows + RANK)
    results = lambda: [keras.ops.convert_to_numpy(normal(rows))]  # noqa: E731
    trained = keras.Sequential([keras.Input((2,)), normal])
    trained.compile(optimizer="sgd")
    state = elastic.KerasState(trained)
    state.sync()
    first = results()
    equal_on_all_ranks(first)
    normal.adapt(rows + 7)
    state.restore()
    assert same(results(), first)


def test_a_layers_random_seed_may_be_local():
    trained = with_dropout(RANK)
    own = numbers(trained.layers[-1].variables)
    state = elastic.KerasState(trained, dropout=trained.layers[-1], local=("dropout",))
    state.sync()
    trained.layers[-1](np.ones((1, 3)), training=True)
    state.restore()
    assert same(numbers(trained.layers[-1].variables), own)
    assert len({each.tobytes() for (each,) in rr.allgather_object(own)}) == SIZE
    equal_on_all_ranks(numbers(trained.weights))


@pytest.mark.quick
def test_layers_that_are_unfrozen_between_two_commits():
    """The model is compiled anew for that, so it has another optimizer, with more variables."""
    trained = model(seed=0)
    trained.layers[0].trainable = False
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    state = elastic.KerasState(trained, epoch=0)
    state.sync()
    fit_on(trained, shuffle=False)
    state.commit()
    trained.layers[0].trainable = True
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    state.commit()
    first, results = everything(trained), []
    for _ in range(2):
        fit_on(trained, shuffle=False)
        results.append(everything(trained))
        state.restore()
        assert same(everything(trained), first)
    assert same(*results)
    trained.add(keras.layers.Dense(2))
    with pytest.raises(
        rr.InputError, match=r"sequential/dense/kernel \(3\)' has the shape .*, but in the .* not there"
    ):
        state.restore()


def test_a_model_without_weights_is_refused():
    with pytest.raises(rr.InputError, match=r"the model has no weights yet; build it first: model\.build\(input_shape"):
        elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


class Commits(elastic.ObjectState):
    """Notes what each commit had, of itself and of the model."""

    def __init__(self, watched, **attributes):
        super().__init__(**attributes)
        self.watched, self.seen = watched, []

    def save(self):
        self.seen.append((self.epoch, self.batch))
        super().save()


def test_a_model_may_be_compiled_later():
    network = keras.Sequential([keras.layers.Dense(2)])
    network.build((None, 3))
    state = hvd.elastic.KerasState(network)
    state.commit()
    network.layers[0].kernel.assign(network.layers[0].kernel + 1)
    state.restore()
    assert state.optimizer is None
    network.compile("adam", "mse")
    kernel = np.array(network.layers[0].kernel)
    state.commit()
    network.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    state.restore()
    assert state.optimizer is network.optimizer
    np.testing.assert_array_equal(network.layers[0].kernel, kernel)


def test_the_callbacks_count_and_commit():
    trained = with_dropout(0)
    state = Commits(trained, epoch=0, batch=0)
    counting = [elastic.UpdateEpochStateCallback(state), elastic.UpdateBatchStateCallback(state)]
    fit_on(trained, [*counting, elastic.CommitStateCallback(state, batches_per_commit=3)], epochs=2)
    assert BATCHES == 4
    assert state.seen == [(0, 3), (1, 0), (1, 2), (2, 0)], "after batches 3 and 6, and after each epoch"
    state.seen, state.batch = [], 2  # as after a loss in the third epoch
    fit_on(trained, [*counting, elastic.CommitStateCallback(state, 2)], initial_epoch=2, epochs=4, steps_per_epoch=2)
    assert state.seen == [(2, 4), (3, 0), (3, 2), (4, 0)]


def test_a_commit_during_an_epoch_has_the_weights_of_that_batch():
    trained = with_dropout(0)
    state, seen = elastic.KerasState(trained), []

    def note(batch, logs):
        state.commit()
        seen.append(state._committed.tree()["model"].arrays[0].copy())

    fit_on(trained, [keras.callbacks.LambdaCallback(on_train_batch_end=note)])
    assert len({each.tobytes() for each in seen}) == BATCHES
    np.testing.assert_array_equal(seen[-1], numbers(trained.variables)[0])


def base_and_head(frozen=True, **options):
    """A model of which the first layer may be frozen."""
    keras.utils.set_random_seed(3)
    body = [keras.layers.Dense(5, activation="tanh"), keras.layers.BatchNormalization()]
    trained = keras.Sequential([keras.Input((4,)), *body, keras.layers.Dense(1)])
    trained.layers[0].trainable = not frozen
    compiled(trained, **options)
    return trained


def compiled(trained, kind=keras.optimizers.Adam, scaled=False, **options):
    optimizer = hvd.DistributedOptimizer(kind(0.05), **options)
    trained.compile(optimizer=keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, loss="mse")


@pytest.mark.parametrize("options", [{}, {"scaled": True}, {"backward_passes_per_step": 2}], ids=str)
@pytest.mark.parametrize("frozen", [True, False])
def test_what_was_frozen_or_not_in_a_commit_is_so_again(frozen, options):
    """Also in the optimizer that the model was compiled with since."""
    trained = base_and_head(frozen, **options)
    state = elastic.KerasState(trained)
    state.sync()
    fit_on(trained, shuffle=False)
    state.save()
    fit_on(trained, shuffle=False)
    expected = everything(trained)
    trained.layers[0].trainable = frozen
    compiled(trained, **options)
    fit_on(trained)
    state.restore()
    assert state.optimizer is trained.optimizer
    assert trained.layers[0].trainable is not frozen
    fit_on(trained, shuffle=False)
    for mine, other in zip(everything(trained), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    equal_on_all_ranks(numbers(trained.trainable_weights))


def test_a_rank_that_comes_trains_what_the_root_does():
    """Also one that has made other layers before."""
    for _ in range(RANK):
        keras.layers.Dense(1).build((1, 2))
    trained = base_and_head(frozen=RANK > 0)
    state = elastic.KerasState(trained)
    state.sync()
    assert trained.layers[0].trainable
    fit_on(trained)
    equal_on_all_ranks(numbers([*trained.trainable_weights, *trained.optimizer.variables]))


def of_width(width, kind=keras.optimizers.Adam):
    trained = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width), keras.layers.Dense(1)])
    compiled(trained, kind)
    trained.optimizer.build(trained.trainable_variables)
    return trained


@pytest.mark.parametrize(
    ("width", "kind", "expected"),
    [
        (
            5,
            keras.optimizers.Adam,
            r"the model's variable 'sequential/dense/kernel' has the shape \(4, 5\), but in the last .*3",
        ),
        (3, keras.optimizers.SGD, "the optimizer is SGD, but in the last commit Adam"),
        (3, keras.optimizers.Nadam, "the optimizer is Nadam, but in the last commit Adam"),
    ],
)
def test_what_cannot_be_made_again_is_named(width, kind, expected):
    state = elastic.KerasState(of_width(3))
    state.save()
    state.model = of_width(width, kind)
    before = everything(state.model)
    with pytest.raises(rr.InputError, match=f"KerasState: {expected}.*; commit after you change a model"):
        state.restore()
    assert width == 3 or same(everything(state.model), before)
