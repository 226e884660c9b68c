"""JaxState: what is committed comes back, whether arrays were donated or not; all ranks get the root's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringreduce.jax as hvd

OPTIMIZER = optax.adam(0.1)
RANK = hvd.rank()


def new_state():
    """Of other values on each rank."""
    params = {"w": jnp.arange(6.0).reshape(2, 3) + RANK, "b": jnp.ones(3, jnp.bfloat16) * RANK}
    key = jax.random.key(RANK)
    return hvd.elastic.JaxState(params=params, opt_state=OPTIMIZER.init(params), key=key, table=np.arange(3), step=RANK)


def stepping(donates):
    @functools.partial(jax.jit, donate_argnums=(0, 1) if donates else ())
    def step(params, opt_state):
        updates, opt_state = OPTIMIZER.update(jax.tree.map(jnp.cos, params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def go_on(state, step):
    state.params, state.opt_state = step(state.params, state.opt_state)
    state.key, _ = jax.random.split(state.key)
    state.table += 1
    state.step += 1


def values(state):
    """All of it, as NumPy arrays."""
    leaves = jax.tree.leaves([state.params, state.opt_state, jax.random.key_data(state.key), state.table, state.step])
    return [np.asarray(each).astype(float) for each in leaves]


def assert_equal(one, other):
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("donates", [False, True])
def test_training_goes_on_from_a_commit_as_it_went_on_the_first_time(donates):
    step, state = stepping(donates), new_state()
    state.sync()
    first = values(state)
    for theirs in hvd.allgather_object(first):
        assert_equal(theirs, first)
    for commits in range(3):
        results = []
        for _ in range(3):
            go_on(state, step)
            go_on(state, step)
            results.append(values(state))
            state.restore()
            assert_equal(values(state), first)
        assert_equal(results[0], results[1])
        assert_equal(results[0], results[2])
        go_on(state, step)
        state.commit()
        first = values(state)
        assert state.step == state.commits - 1 == commits + 1
    assert (type(state.opt_state), type(state.table)) == (type(OPTIMIZER.init(state.params)), np.ndarray)


@pytest.mark.quick
def test_a_commit_copies_nothing_but_what_is_donated():
    state = new_state()
    state.sync()
    for donates, arrays in ((False, 1), (True, 9), (False, 9)):
        go_on(state, stepping(donates))
        state.commit()
        assert -(-state._committed.memory.nbytes // 64) == arrays, donates


def test_what_was_donated_for_the_first_time_since_the_commit_is_an_error():
    state = new_state()
    state.sync()
    go_on(state, stepping(donates=False))
    state.commit()
    go_on(state, stepping(donates=True))
    with pytest.raises(ValueError, match="arrays of the last commit were donated to a jitted function"):
        state.restore()


def test_a_key_that_is_local_is_each_ranks_own_and_goes_back():
    state = hvd.elastic.JaxState(step=RANK, key=jax.random.key(RANK), local=("key",))
    state.sync()
    draws = []
    for _ in range(2):
        state.key, key = jax.random.split(state.key)
        draws.append(jax.random.uniform(key).item())
        state.restore()
    assert draws == [jax.random.uniform(jax.random.split(jax.random.key(RANK))[1]).item()] * 2
    assert state.step == 0


def test_a_state_goes_back_to_the_form_in_which_it_was_committed():
    """Layers, shapes, types and the optimizer may change; and ranks take the root's form."""
    state = new_state()
    if RANK == 0:
        state.params |= {"head": {"w": jnp.ones((2, 2), jnp.bfloat16)}, "b": jnp.ones(5)}
        state.opt_state = optax.sgd(0.1, 0.9).init(state.params)
    state.sync()
    first, form = values(state), jax.tree.structure((state.params, state.opt_state))
    for theirs in hvd.allgather_object(first):
        assert_equal(theirs, first)
    del state.params["head"]
    state.params["w"] = state.params["w"][:1]
    state.opt_state = OPTIMIZER.init(state.params)
    state.table = np.arange(4)
    state.restore()
    assert jax.tree.structure((state.params, state.opt_state)) == form
    assert_equal(values(state), first)
