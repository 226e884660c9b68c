"""Optimizers of optax that look at the loss, or call it: all ranks steer by the loss of the global batch."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import ringreduce as rr
import ringreduce.jax as hvd

RANK, SIZE = hvd.rank(), hvd.size()
X = np.random.default_rng(0).normal(size=(SIZE, 12, 3)).astype(np.float32)
Y = (X @ [1, -2, 3]).astype(np.float32) + np.random.default_rng(1).normal(size=(SIZE, 12)).astype(np.float32)

MODEL = eqx.nn.Linear(3, 1, key=jax.random.key(0))


def loss_of(params, x, y):
    return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def by_value(optimizer, loss, params, state, x, y):
    value, gradients = jax.value_and_grad(loss)(params)
    return optimizer.update(gradients, state, params, value=value)


def by_function(optimizer, loss, params, state, x, y):
    value, gradients = jax.value_and_grad(loss)(params)
    return optimizer.update(gradients, state, params, value=value, grad=gradients, value_fn=loss)


def by_function_and_batch(optimizer, loss, params, state, x, y):
    """Which is each rank's own, and taken by the function."""
    value, gradients = jax.value_and_grad(loss)(params)
    arguments = {"value": value, "grad": jax.tree.map(jnp.copy, gradients), "value_fn": loss_of, "x": x, "y": y}
    return optimizer.update(gradients, state, params, **arguments)


def by_state(optimizer, loss, params, state, x, y):
    value, gradients = optax.value_and_grad_from_state(loss)(params, state=state)
    return optimizer.update(gradients, state, params, value=value, grad=gradients, value_fn=loss)


def by_objective(optimizer, loss, params, state, x, y):
    return optimizer.update(jax.grad(loss)(params), state, params, obj_fn=loss)


def by_gradient_function(optimizer, loss, params, state, x, y):
    return optimizer.update(jax.grad(loss)(params), state, params, grad_fn=lambda each, _: jax.grad(loss)(each))


def by_name(optimizer, loss, params, state, x, y):
    """An own transformation's argument, beside a model, which is no function of the parameters though it is called."""
    value, gradients = jax.value_and_grad(loss)(params)
    return optimizer.update(gradients, state, params, loss=value, model=MODEL)


def scaled_by_loss():
    def update(gradients, state, params, *, loss, model, **_):
        assert model is MODEL
        return jax.tree.map(lambda each: -0.05 * each / (1 + loss), gradients), loss

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)


def searching(search):
    return lambda: optax.chain(optax.sgd(1.0), search)


def sharpness_aware():
    return optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2, opaque_mode=True)


plateau = optax.contrib.reduce_on_plateau
backtracking = functools.partial(optax.scale_by_backtracking_linesearch, max_backtracking_steps=8)
STEERED = {
    "plateau": (lambda: optax.chain(optax.sgd(0.3, momentum=0.9), plateau(patience=1, factor=0.5)), by_value),
    "polyak": (optax.polyak_sgd, by_value),
    "own": (scaled_by_loss, by_name),
    "lbfgs": (optax.lbfgs, by_function),
    "lbfgs that remembers": (optax.lbfgs, by_state),
    "zoom": (searching(optax.scale_by_zoom_linesearch(max_linesearch_steps=10)), by_function_and_batch),
    "backtracking": (searching(backtracking()), by_function_and_batch),
    "backtracking that remembers": (searching(backtracking(store_grad=True)), by_state),
    "sophia": (lambda: optax.contrib.sophia(0.05, update_interval=2), by_objective),
    "sam": (sharpness_aware, by_gradient_function),
}
FIRST = {"w": jnp.zeros(3), "b": jnp.zeros(())}


def trained(optimizer, update, x, y, steps=8):
    """Parameters and state after some steps on one batch."""

    @jax.jit
    def step(params, state):
        updates, state = update(optimizer, lambda each: loss_of(each, x, y), params, state, x, y)
        return optax.apply_updates(params, updates), state

    params, state = FIRST, optimizer.init(FIRST)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


@pytest.mark.parametrize(("make", "update"), STEERED.values(), ids=STEERED)
def test_ranks_train_as_one_process_with_the_global_batch(make, update):
    mine = trained(hvd.DistributedOptimizer(make()), update, X[RANK], Y[RANK])
    alone = trained(make(), update, X.reshape(-1, 3), Y.reshape(-1))
    for one, other in zip(jax.tree.leaves(mine[0]), jax.tree.leaves(alone[0]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    digests = hvd.allgather_object([np.asarray(each).tobytes() for each in jax.tree.leaves(mine)])
    assert all(each == digests[0] for each in digests), "bit-identical, the state too"


@pytest.mark.parametrize("run", [lambda update: update, jax.jit, hvd.jit], ids=["eagerly", "jit", "hvd.jit"])
def test_accumulated_and_with_numbers_of_python(run):
    optimizer = hvd.DistributedOptimizer(scaled_by_loss(), backward_passes_per_step=2)
    state, update = optimizer.init(FIRST), functools.partial(optimizer.update, model=MODEL)
    for passes in (1, 2):
        _, state = run(update)(FIRST, state, FIRST, loss=float(RANK + passes))
    np.testing.assert_allclose(state.optimizer, 2 + (SIZE - 1) / 2, err_msg="of the pass that steps")


def test_a_rank_outside_of_the_process_set_steers_alone():
    if SIZE == 1:
        return
    last = hvd.add_process_set([SIZE - 1])
    optimizer = hvd.DistributedOptimizer(scaled_by_loss(), process_set=last)
    update = jax.jit(functools.partial(optimizer.update, model=MODEL))
    _, loss = update(FIRST, optimizer.init(FIRST), FIRST, loss=RANK + 0.5)
    assert loss == RANK + 0.5
    hvd.remove_process_set(last)


def test_what_would_steer_some_ranks_only_is_refused():
    summing = hvd.DistributedOptimizer(optax.lbfgs(), op=hvd.Sum)
    with pytest.raises(rr.InputError, match=r"update\(…, grad=…\) with op=Sum; grad is averaged .*: leave op out"):
        trained(summing, by_function, X[RANK], Y[RANK])
    hvd.DistributedOptimizer(plateau(), op=hvd.Sum).update(FIRST, plateau().init(FIRST), FIRST, value=1.0)
