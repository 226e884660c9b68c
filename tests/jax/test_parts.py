"""check=divergence in JAX: parameters and what an optimizer keeps, eagerly and inside jit; nothing when it is off."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringreduce as rr
import ringreduce.jax as hvd

RANK, SIZE = hvd.rank(), hvd.size()
LAST = SIZE - 1


def first_params():
    return {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3) / 7, "bias": jnp.ones(3, jnp.bfloat16)}, "scale": 0.5}


def loss_of(params, x):
    hidden = x @ params["dense"]["kernel"] + params["dense"]["bias"].astype(jnp.float32)
    return jnp.square(hidden * params["scale"] - 1).mean()


def batch(step):
    return jnp.arange(8.0).reshape(4, 2) / 10 + step / 5 + RANK


def stepping(optimizer):
    def step(params, state, x):
        gradients = jax.grad(loss_of)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def train(optimizer, run, change=lambda number, params, state: (params, state), steps=7):
    """`change` interferes before each step."""
    step, params = run(stepping(optimizer)), jax.tree.map(jnp.asarray, first_params())
    state = optimizer.init(params)
    for number in range(steps):
        params, state = change(number, params, state)
        params, state = step(params, state, batch(number))
    jax.effects_barrier()
    return params


def other_seed(number, params, state):
    if number == 0 and RANK == LAST:
        params = jax.tree.map(lambda each: each + 1, params)
    return params, state


def flips(number, params, state):
    if number == 3 and RANK == LAST:
        params = params | {"dense": params["dense"] | {"bias": params["dense"]["bias"].at[1].add(0.5)}}
    return params, state


def own_rate(number, params, state):
    if number == 3 and RANK == LAST:
        state.hyperparams["learning_rate"] = jnp.asarray(0.25)
    return params, state


def own_momentum(number, params, state):
    if number == 3 and RANK == LAST:
        trace = state[0].trace
        trace = trace | {"scale": trace["scale"] + 1}
        state = (state[0]._replace(trace=trace), *state[1:])
    return params, state


def sgd(**options):
    return optax.inject_hyperparams(optax.sgd)(0.125, **options)


CASES = {
    "equal": (optax.adam(0.1), lambda number, params, state: (params, state), None),
    "seed": (
        optax.adam(0.1),
        other_seed,
        r"after 0 steps \(not .*\) parameter 'dense.bias' differs: .*never found equal",
    ),
    "a change": (optax.adam(0.1), flips, r"after 4 steps \(equal after 2\) parameter 'dense.bias' differs: "),
    "a learning rate": (
        sgd(),
        own_rate,
        rf"after 4 steps \(equal after 2\) value 'state.hyperparams.learning_rate' differs: .*rank {LAST} has 0.25",
    ),
    "momentum": (optax.sgd(0.1, 0.9), own_momentum, r"after 4 steps \(equal after 2\) parameter 'scale' differs: "),
}


@pytest.mark.quick
@pytest.mark.parametrize(("optimizer", "change", "expected"), CASES.values(), ids=CASES)
def test_who_differs_is_named(found, run, optimizer, change, expected):
    train(hvd.DistributedOptimizer(optimizer), run, change)
    found(expected)


@pytest.mark.parametrize(
    "options", [{"backward_passes_per_step": 2}, {"op": hvd.Adasum}, {"gradient_predivide_factor": 2.0}], ids=str
)
def test_what_is_each_ranks_own_is_left_out(found, run, options):
    """Sums of passes; and with Adasum the optimizer's state."""
    if "op" in options and SIZE == 3:
        pytest.skip("takes a power of two")
    optimizer = hvd.DistributedOptimizer(optax.adam(0.1), **options)
    train(optimizer, run)
    found(None)
    train(optimizer, run, flips, steps=12)
    found("parameter 'dense.bias' differs")


def test_value_and_grad(found, run):
    loss_and_gradients = hvd.value_and_grad(lambda x, params: loss_of(params, x), argnums=1)

    def step(params, x):
        _, gradients = loss_and_gradients(x, params)
        return jax.tree.map(lambda each, gradient: each - gradient / 8, params, gradients)

    step, params = run(step), jax.tree.map(jnp.asarray, first_params())
    for number in range(7):
        params, _ = flips(number, params, None)
        params = step(params, batch(number))
    jax.effects_barrier()
    found(r"after 4 steps \(equal after 2\) parameter 'dense.bias' differs: ")


def test_local_steps(found, run):
    """The averages are compared, not what is between them."""
    optimizer = hvd.diloco(optax.sgd(0.1), sync_every=3)
    train(optimizer, run)
    found(None)


def test_inside_of_loops_vmap_and_gradients(found):
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    step, params = stepping(optimizer), jax.tree.map(jnp.asarray, first_params())
    state = optimizer.init(params)

    @jax.jit
    def several(params, state, xs):
        return jax.lax.scan(lambda both, x: (step(*both, x), None), (params, state), xs)[0]

    params, state = several(params, state, jnp.stack([batch(number) for number in range(4)]))
    params, state = flips(3, params, state)
    several(params, state, jnp.stack([batch(number) for number in range(4)]))
    jax.effects_barrier()
    found(r"after 4 steps \(equal after 2\) parameter 'dense.bias' differs: ")

    pairs = jax.tree.map(lambda each: jnp.stack([each, each + 1]), jax.tree.map(jnp.asarray, first_params()))
    jax.vmap(step, in_axes=(0, None, None))(pairs, optimizer.init(first_params()), batch(0))
    found(None)

    def after_a_step(params):
        return loss_of(step(params, state, batch(0))[0], batch(1))

    gradients = jax.grad(after_a_step)(jax.tree.map(jnp.asarray, first_params()))
    assert np.isfinite(gradients["dense"]["kernel"]).all()


def test_numbers_of_any_type_are_compared_and_nothing_else_fails(found, run):
    state = {
        "whole": jnp.arange(3),
        "key": jax.random.key(7),
        "small": jnp.ones(3, jnp.int4),
        "float8": jnp.ones(3, jnp.float8_e4m3fn),
        "is": jnp.array([True, False]),
        "nothing": None,
        "number": 0.5,
        "empty": jnp.zeros((0, 3)),
    }
    keeping = optax.GradientTransformation(lambda _: state, lambda gradients, state, params=None: (gradients, state))
    optimizer = hvd.DistributedOptimizer(optax.chain(keeping, optax.sgd(0.1)))

    def other_key(number, params, state):
        if number == 3 and RANK == LAST:
            state = ({**state[0], "key": jax.random.key(8)}, *state[1:])
        return params, state

    train(optimizer, run, other_key)
    found(r"after 4 steps \(equal after 2\) parameter 'state.0.key' differs")


@pytest.mark.parametrize("run", [lambda function: function, jax.jit], ids=["eagerly", "jit"])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("small", jnp.full(3, -2, jnp.int2)),
        ("number", 0.25),
        ("bool", np.array([True, False, False])),
        ("complex", np.complex64(2j)),
    ],
)
def test_what_a_program_has_as_a_constant_is_compared_if_jax_can_hold_it(found, run, name, own):
    """And no job fails for the rest."""
    state = {
        "small": jnp.ones(3, jnp.int2),
        "number": 0.5,
        "bool": np.array([True, False, True]),
        "complex": np.complex64(1j),
        "huge": 2**70,
        "swapped": np.arange(3, dtype=">f4"),
        "text": np.array(["a"]),
        "date": np.datetime64("2026-01-01"),
        "record": np.zeros(2, [("a", int)]),
    }
    state |= {name: own} if RANK == LAST else {}
    keeping = optax.stateless(lambda gradients, params: gradients)
    keeping = keeping._replace(update=lambda gradients, state, params=None: (gradients, state))
    optimizer, params = hvd.DistributedOptimizer(keeping), {"w": jnp.ones(3)}
    update = run(lambda gradients: optimizer.update(gradients, state, params)[0])
    for _ in range(3):
        update(params)
    jax.effects_barrier()
    found(rf"(value|parameter) 'state.{name}' differs")


@pytest.mark.quick
def test_a_program_that_is_compiled_before_does_not_change():
    """Not when it is compiled again, either, as a rank does alone whose batch is smaller."""
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    step, params = jax.jit(stepping(optimizer)), jax.tree.map(jnp.asarray, first_params())
    state = optimizer.init(params)
    assert str(jax.make_jaxpr(step)(params, state, batch(0))).count("ringreduce[") == 1
    rr.check("divergence:1")
    params, state = step(params, state, batch(1)[: 3 if RANK == LAST else 4])
    assert str(jax.make_jaxpr(step)(params, state, batch(0))).count("ringreduce[") == 1
    other = stepping(hvd.DistributedOptimizer(optax.sgd(0.1)))
    assert str(jax.make_jaxpr(other)(params, state, batch(0))).count("ringreduce[") == 2
    rr.check("")
