"""hvd.jit: what jax.jit gives, in its order, also beside it and inside other transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringreduce.jax as hvd
from ringreduce.jax import primitive

RANK, SIZE = hvd.rank(), hvd.size()
MEAN = (SIZE - 1) / 2


@jax.jit
def late(x):
    """The same array, from a program that will still run when this returns."""
    w = jnp.full((500, 500), x[0])
    return x + 0 * jax.lax.fori_loop(0, 20, lambda _, each: jnp.tanh(each @ w), w)[0, 0]


def summed(x):
    """Collectives that do not depend on each other; on the first and the last nothing depends."""
    hvd.allreduce(x + 1)
    results = {"sum": hvd.allreduce(x, op=hvd.Sum), "mean": [hvd.allreduce(2 * x), None]}
    hvd.allreduce(x - 1)
    return results


def own(number):
    return jnp.float32([number, RANK, number * RANK])


def check(results, number):
    ranks = np.arange(SIZE)
    everyones = np.stack([[number, rank, number * rank] for rank in ranks])
    np.testing.assert_allclose(results["sum"], everyones.sum(0), rtol=1e-6)
    np.testing.assert_allclose(results["mean"][0], 2 * everyones.mean(0), rtol=1e-6)


@pytest.mark.quick
def test_programs_do_not_overtake_one_another():
    """Of both kinds, from the same line; rank by rank another one has to wait for its argument."""
    programs = [hvd.jit(summed), jax.jit(summed), hvd.jit(summed)]
    jax.block_until_ready([late(own(0)), *(program(own(0)) for program in programs)])  # compiled
    for order in ([0, 1, 2], [1, 0, 2], [0, 2, 1]):
        arguments = [late(own(each)) if place % SIZE == RANK else own(each) for place, each in enumerate(order)]
        results = [programs[each](argument) for each, argument in zip(order, arguments, strict=True)]
        for each, result in zip(order, results, strict=True):
            check(result, each)


@pytest.mark.quick
def test_it_has_no_effect_and_every_collective_runs(monkeypatch):
    calls = []
    monkeypatch.setattr(primitive.HostCollective, "run_into", lambda self, *_: calls.append(self.place))
    x = own(1)
    jax.block_until_ready(hvd.jit(summed)(x))
    assert len(calls) == 4
    with pytest.MonkeyPatch.context() as patch:  # the compiled dispatch asks nobody
        compiled = hvd.jit(summed)
        jax.block_until_ready(compiled(x))
        patch.setattr(jax._src.interpreters.pxla.ExecuteReplicated, "__call__", None)
        jax.block_until_ready(compiled(x))


def test_beside_a_loop_with_collectives_all_of_them_have_jax_s_order(monkeypatch):
    monkeypatch.setattr(primitive, "chained_p", None)

    def mixed(x):
        return hvd.allreduce(x) + jax.lax.scan(lambda carry, _: (hvd.allreduce(carry), None), x, None, length=2)[0]

    np.testing.assert_allclose(hvd.jit(mixed)(own(3)), [6, 2 * MEAN, 6 * MEAN], rtol=1e-6)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(lambda x: f(f(x))),
        lambda f: jax.vmap(lambda each: f(f(each))),
        lambda f: jax.grad(lambda x: (f(f(x)) ** 2).sum() / 2),
        lambda f: lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, None, length=2)[0],
        lambda f: hvd.jit(lambda x: f(f(x))),
    ],
    ids=["jit", "vmap", "grad", "scan", "hvd.jit"],
)
def test_inside_another_transformation_it_is_jax_jit(transform):
    inner = hvd.jit(hvd.allreduce)
    np.testing.assert_allclose(inner(own(3)), [3, MEAN, 3 * MEAN], rtol=1e-6)
    np.testing.assert_allclose(transform(inner)(own(3)), [3, MEAN, 3 * MEAN], rtol=1e-6)


def test_without_jit_a_function_sees_its_values():
    """So that one can print them, or look at them in a debugger, for which JAX has disable_jit."""
    seen = []

    def program(x):
        seen.append(x.tolist())
        return summed(x)

    compiled = hvd.jit(program)
    with jax.disable_jit():
        check(compiled(own(3)), 3)
    assert seen == [own(3).tolist()]
    check(hvd.jit(summed)(own(4)), 4)


def test_options_and_arguments_of_jax_jit():
    def step(x, power, *, scale):
        return scale * hvd.allreduce(x) ** power

    x = own(2)
    compiled = hvd.jit(step, donate_argnums=0, static_argnames="power")
    np.testing.assert_allclose(compiled(x, 2, scale=3.0), 3 * np.square([2, MEAN, 2 * MEAN]), rtol=1e-6)
    assert x.is_deleted()
    assert compiled.__name__ == "step"
    np.testing.assert_allclose(hvd.jit(step, static_argnums=1)(own(2), 1, scale=1), [2, MEAN, 2 * MEAN], rtol=1e-6)


def test_it_can_be_looked_at_as_what_jax_jit_returns():
    """Also as a decorator with options; rank 0 alone looks."""

    @hvd.jit(static_argnames="power", keep_unused=True)
    def step(x, unused, power):
        return {"mean": hvd.allreduce(x) ** power}

    assert isinstance(step, jax.stages.Wrapped)
    x, squares = own(2), np.square([2, MEAN, 2 * MEAN])
    if RANK == 0:
        assert step.eval_shape(x[:2], x, power=2) == {"mean": jax.ShapeDtypeStruct((2,), jnp.float32)}
        assert "ringreduce" in str(step.trace(x[:1], x, power=3).jaxpr)
        assert step.lower(x, x, power=4).compile().cost_analysis() is not None
    compiled = step.lower(x, x, power=2).compile()
    for program in (lambda: compiled(x, x), lambda: step(x, x, power=2), step.clear_cache, lambda: step(x, x, power=2)):
        if result := program():
            np.testing.assert_allclose(result["mean"], squares, rtol=1e-6)
    placed = hvd.jit(hvd.allreduce, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    np.testing.assert_allclose(placed(x), [2, MEAN, 2 * MEAN], rtol=1e-6)


@pytest.mark.skipif(SIZE == 1, reason="ranks must differ")
@pytest.mark.parametrize("first", [late, lambda x: x], ids=["later", "at once"])
def test_a_failure_is_its_own_programs_alone(jit, first):
    """Once a state was restored: of jax.jit, all later programs would wait for one whose argument came late."""
    program, state = jit(lambda x: hvd.allreduce(x, name="w")), hvd.elastic.JaxState(step=0)
    for width in (2, 3):
        jax.block_until_ready(program(late(jnp.ones(width))))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"MismatchError: rank 1 of \d, allreduce 'w'"):
        jax.block_until_ready(program(first(jnp.ones(2 + (RANK > 0)))))
    if jit is jax.jit:
        state.restore()
    np.testing.assert_allclose(program(jnp.full(3, float(RANK))), [MEAN] * 3)
