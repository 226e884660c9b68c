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
    with pytest.raises(rr.InputError, match=r"compiled anew after the last commit.*; commit at once after compile\(\)"):
        state.restore()
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
        rr.InputError, match=r"has 6 variables, of shapes .*, but 4 in the last commit, of .*commit at on"
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
        seen.append(state._committed.tree()["model"][0].copy())

    fit_on(trained, [keras.callbacks.LambdaCallback(on_train_batch_end=note)])
    assert len({each.tobytes() for each in seen}) == BATCHES
    np.testing.assert_array_equal(seen[-1], numbers(trained.variables)[0])
