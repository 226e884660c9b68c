"""The JAX primitive of all collectives: one `Collective`, and any number of arrays.

Eagerly its arrays are NumPy views of JAX's memory, without a copy, and JAX takes over the memory of the results. Inside
jit XLA calls the host, which sees views, too; XLA copies the results. Those calls have JAX's effect "ordered I/O": they
run one after the other, in the order of the program, in a thread of XLA's, which has nothing else to do meanwhile. The
host's function uses no JAX: with as many threads as cores, JAX could wait there for that very thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringreduce.errors import InputError
from ringreduce.jax.collectives import Collective

Values = Sequence[Any]  # arrays, or what stands for them while JAX traces

collective_p = Primitive("ringreduce")
collective_p.multiple_results = True
(ORDERED,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects


def bind(collective: Collective, values: Values) -> list[Any]:
    """Run it now, or put it into the program that is being traced."""
    return list(collective_p.bind(*values, collective=collective))


def _run_now(*arrays: Any, collective: Collective) -> list[Any]:
    results = collective.run([np.asarray(each) for each in arrays], collective.name)
    return [_to_jax(result, array) for result, array in zip(results, arrays, strict=True)]


def _to_jax(result: np.ndarray[Any, Any], array: Any) -> Any:
    """The result as an array of JAX's, where `array` is."""
    return jax.device_put(result, array.sharding if getattr(array, "committed", False) else None)


def _trace(*values: Any, collective: Collective) -> Any:
    shapes = collective.shapes([each.shape for each in values])
    return [jax.core.ShapedArray(shape, each.dtype) for shape, each in zip(shapes, values, strict=True)], {ORDERED}


def _lower(ctx: Any, *operands: Any, collective: Collective) -> Any:
    shapes = [each.shape for each in ctx.avals_out]
    name = f"jit.{collective.place}" if collective.name is None else collective.name

    def host(*arrays: np.ndarray[Any, Any]) -> Sequence[Any]:
        results = collective.run(arrays, name)
        for result, shape in zip(results, shapes, strict=True):
            if result.shape != shape:
                raise InputError(
                    f"{collective.kind} ({collective.place}): the result has shape {result.shape}, "
                    f"but {shape} was compiled; inside jax.jit all ranks must pass equally many rows, and what was "
                    "compiled before another init() must be compiled again: jax.clear_caches()"
                )
        return results

    results, token, _ = mlir.emit_python_callback(
        ctx, host, ctx.tokens_in.get(ORDERED), list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ORDERED: token})))
    return results


def _jvp(values: Values, tangents: Values, *, collective: Collective) -> tuple[Values, Values]:
    """All floating-point values have a tangent, zero or not: ranks may differ in which are zero."""
    results = bind(collective, values)
    collective.transposed([jnp.shape(each) for each in values])  # raises where there is no gradient
    moved: list[Any] = [np.zeros(jnp.shape(each), jax.dtypes.float0) for each in results]
    floating = [number for number, each in enumerate(values) if jnp.issubdtype(each.dtype, jnp.inexact)]
    own = collective.only(floating)
    for number, tangent in zip(
        floating, bind(own, [ad.instantiate_zeros(tangents[each]) for each in floating]), strict=True
    ):
        moved[number] = tangent
    return results, moved


def _transpose(gradients: Values, *values: Any, collective: Collective) -> Values:
    backwards = collective.transposed([each.aval.shape for each in values])
    return bind(backwards, list(map(ad.instantiate_zeros, gradients)))


def _batch(values: Values, dims: Sequence[Any], *, collective: Collective) -> tuple[Values, Sequence[Any]]:
    """The same collective with one more dimension, behind the rows where they have a meaning."""
    if collective.by_rows:
        pairs = zip(values, dims, strict=True)
        values = [each if dim is None else jnp.moveaxis(each, dim, 1) for each, dim in pairs]
        dims = [dim if dim is None else 1 for dim in dims]
    return bind(collective, values), dims


collective_p.def_impl(_run_now)
collective_p.def_effectful_abstract_eval(_trace)
mlir.register_lowering(collective_p, _lower, cacheable=False)
ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose
batching.primitive_batchers[collective_p] = _batch
