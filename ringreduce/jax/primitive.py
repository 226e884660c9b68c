"""The JAX primitive of all collectives: one `HostCollective`, and any number of arrays.

Eagerly its arrays are NumPy views of JAX's memory, without a copy, and JAX takes over the memory of the results. Inside
jit XLA calls the host, which on the CPU writes the results into XLA's memory (xla.py). Those calls have JAX's effect
"ordered I/O": they run one after the other, in the order of the program, in a thread of XLA's, which has nothing else
to do meanwhile. The host's function uses no JAX: with as many threads as cores, JAX could wait for that very thread.

Where `chained` evaluates a program, they have no effect: each takes a byte that the one before it returned.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringreduce.collectives.ops import Adasum
from ringreduce.errors import InputError, MissingExtraError
from ringreduce.jax import xla
from ringreduce.jax.host import HostCollective

PRIVATE = (
    "_src.core.trace_state_clean",
    "_src.dispatch.runtime_tokens.clear",
    "core.eval_jaxpr",
    "extend.core.Primitive",
    "ffi.ffi_lowering",
    "interpreters.ad.instantiate_zeros",
    "interpreters.ad.primitive_jvps",
    "interpreters.ad.primitive_transposes",
    "interpreters.batching.primitive_batchers",
    "interpreters.mlir.TokenSet",
    "interpreters.mlir.emit_python_callback",
    "interpreters.mlir.register_lowering",
    "interpreters.mlir.LoweringParameters.for_export",
    "interpreters.mlir.LoweringRuleContext.set_tokens_out",
    "interpreters.mlir.ModuleContext.add_host_callback",
)
"""Names that JAX does not promise to keep; without them programs cannot call the host in order."""


def check_names() -> None:
    """Raise MissingExtraError where JAX lacks one of these names."""
    for name in PRIVATE:
        try:
            operator.attrgetter(name)(jax)
        except AttributeError as exc:
            raise MissingExtraError(
                f"ringreduce.jax needs jax.{name}, which JAX {jax.__version__} lacks; JAX 0.7.2 to 0.10 have it: "
                "pip install 'jax<0.11'"
            ) from exc


check_names()
Values = Sequence[Any]  # arrays, or what stands for them while JAX traces
PACKED = re.compile(r"u?int[124]|float[46]_.*")  # types of which XLA has several elements in a byte, inside a program


class Collective(Primitive):  # type: ignore[misc]
    """Is bound with JAX's effect, or inside `chained` with a byte more that ties it to the one before."""

    multiple_results = True

    def bind(self, *values: Any, collective: HostCollective) -> Any:
        """Its results."""
        chain = _chain.get()
        if chain is None:
            return super().bind(*values, collective=collective)
        *results, chain[-1] = chained_p.bind(*values, chain[-1], collective=collective)
        return results


collective_p, chained_p = Collective("ringreduce"), Primitive("ringreduce_chained")
chained_p.multiple_results = True
_chain: ContextVar[list[Any] | None] = ContextVar("chain", default=None)
(ORDERED,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects


def in_program() -> bool:
    """Whether JAX traces."""
    return not jax._src.core.trace_state_clean()


def bind(collective: HostCollective, values: Values) -> list[Any]:
    """Run it now, or put it into the program that is being traced."""
    if not in_program():
        return list(collective_p.bind(*values, collective=collective))
    types = [getattr(each, "dtype", None) for each in values]  # a gradient may be a number of Python's
    packed = [number for number, dtype in enumerate(types) if PACKED.fullmatch(str(dtype))]
    passed = [each.astype(jnp.float32) if number in packed else each for number, each in enumerate(values)]
    results = collective_p.bind(*passed, collective=collective)
    return [each.astype(types[number]) if number in packed else each for number, each in enumerate(results)]


@contextlib.contextmanager
def chained(link: Any) -> Iterator[list[Any]]:
    """Until it ends, collectives that are bound take this byte, and leave another in the list."""
    chain = [link]
    before = _chain.set(chain)
    try:
        yield chain
    finally:
        _chain.reset(before)


def forget_failures() -> None:
    """Let programs run although one before them failed: its token, which they would wait for, has failed, too."""
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        jax._src.dispatch.runtime_tokens.clear()


def _run_now(*arrays: Any, collective: HostCollective) -> list[Any]:
    results = collective.run([np.asarray(each) for each in arrays], collective.name)
    return list(map(placed, results, arrays))


REF: Any = getattr(jax, "Ref", getattr(jax, "ArrayRef", ()))  # an array that can be changed; JAX 0.7 has the other name


def held(leaf: Any) -> Any:
    """The array that a Ref holds; any other leaf is itself."""
    return leaf[...] if isinstance(leaf, REF) else leaf


def placed(result: Any, like: Any) -> Any:
    """The result as JAX's array, where this one is; on all of its devices where it cannot be divided as that one."""
    place = like.sharding if getattr(like, "committed", False) else None
    try:
        return jax.device_put(result, place)
    except ValueError:
        if not isinstance(place, jax.sharding.NamedSharding):
            raise
        return jax.device_put(result, jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec()))


def _trace(*values: Any, collective: HostCollective) -> list[Any]:
    shapes = collective.shapes([each.shape for each in values])  # none of what has no results
    return [each.update(shape=shape, weak_type=False) for shape, each in zip(shapes, values, strict=False)]


def _lower(
    ctx: Any, *operands: Any, collective: HostCollective, call: Callable[..., tuple[Sequence[Any], Any]]
) -> Sequence[Any]:
    _refuse_several_devices(ctx.module_context.axis_context, collective)
    if ctx.module_context.lowering_parameters.for_export:
        raise InputError(
            f"{collective.kind} ({collective.place}): jax.export of a function with collectives, which call "
            "this process; export the part without them, and call that between: hvd.allreduce(exported.call(x))"
        )
    name = collective.name
    if name is None:
        name = _named_by_place(ctx.module_context.module, collective.place)
    ordered = ctx.primitive is collective_p
    own = slice(None if ordered else -1)  # without the byte

    def host(arrays: Sequence[Any], results: Sequence[Any]) -> None:
        collective.run_into(arrays[own], results[own], name)

    results, token = call(ctx, host, operands, ctx.tokens_in.get(ORDERED) if ordered else None)
    if ordered:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ORDERED: token})))
    return results


_of_programs: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def _named_by_place(program: Any, place: str) -> str:
    """The name of one that has none: the jitted function, its line, and a number if it is not the line's first.

    The same on all ranks that lower this program, whatever each has traced, lowered or run before. Shapes are no part
    of it, as ranks that pass different ones must find that out.
    """
    known = _of_programs.setdefault(program, Counter())
    number = known[place]
    known[place] += 1
    name = f"{program.operation.attributes['sym_name'].value}.{place}"
    return f"{name}.{number}" if number else name


def _refuse_several_devices(context: Any, collective: HostCollective) -> None:
    """Raise InputError for a program of several devices, each of which would call the host."""
    count = context.mesh.size if hasattr(context, "mesh") else context.num_devices
    if count > 1:
        raise InputError(
            f"{collective.kind} ({collective.place}): this program runs on {count} devices of this rank; inside jit a "
            "rank has one. Jit the gradients, and call the collective between jitted functions, where it takes sharded "
            "arrays; or start one rank per device: ringrun --mask-gpus"
        )


def _callback(ctx: Any, host: xla.Host, operands: Sequence[Any], token: Any) -> tuple[Sequence[Any], Any]:
    """As `xla.lowered`, by JAX's own callback, which copies from and to a GPU."""

    def made(*arrays: np.ndarray[Any, Any]) -> Sequence[Any]:
        results = [np.empty(each.shape, each.dtype) for each in ctx.avals_out]
        host(arrays, results)
        return results

    arguments = made, token, list(operands), ctx.avals_in, ctx.avals_out
    results, token, _ = mlir.emit_python_callback(ctx, *arguments, has_side_effect=True)
    return results, token


def _jvp(values: Values, tangents: Values, *, collective: HostCollective) -> tuple[Values, Values]:
    """All floating-point values have a tangent, zero or not: ranks may differ in which are zero."""
    results = bind(collective, values)
    collective.gradient([jnp.shape(each) for each in values])  # raises where there is no gradient
    moved: list[Any] = [np.zeros(jnp.shape(each), jax.dtypes.float0) for each in results]
    floating = [number for number, each in enumerate(values) if jnp.issubdtype(jnp.result_type(each), jnp.inexact)]
    own = collective.only(floating)
    for number, tangent in zip(
        floating, bind(own, [ad.instantiate_zeros(tangents[each]) for each in floating]), strict=True
    ):
        moved[number] = tangent
    return results, moved


def _transpose(gradients: Values, *values: Any, collective: HostCollective) -> Values:
    backwards = collective.gradient([each.aval.shape for each in values])
    return bind(backwards, list(map(ad.instantiate_zeros, gradients)))


def _batch(values: Values, dims: Sequence[Any], *, collective: HostCollective) -> tuple[Values, Sequence[Any]]:
    """The same collective with one more dimension, behind the rows where they have a meaning."""
    if collective.kind == "allreduce" and collective.op is Adasum:  # which looks at an array as a whole
        raise InputError(
            f"allreduce ({collective.place}): op=Adasum under jax.vmap would mix the members of the batch; "
            "call it for each member"
        )
    if collective.by_rows:
        pairs = zip(values, dims, strict=True)
        values = [each if dim is None else jnp.moveaxis(each, dim, 1) for each, dim in pairs]
        dims = [dim if dim is None else 1 for dim in dims]
    results = bind(collective, values)
    return results, dims[: len(results)]


collective_p.def_impl(_run_now)
collective_p.def_effectful_abstract_eval(
    lambda *values, collective: (_trace(*values, collective=collective), {ORDERED})
)
chained_p.def_abstract_eval(lambda *values, collective: [*_trace(*values[:-1], collective=collective), values[-1]])
for _primitive in (collective_p, chained_p):
    mlir.register_lowering(_primitive, functools.partial(_lower, call=_callback), cacheable=False)
    mlir.register_lowering(_primitive, functools.partial(_lower, call=xla.lowered), platform="cpu", cacheable=False)
ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose
batching.primitive_batchers[collective_p] = _batch
