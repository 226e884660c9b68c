"""Extra arguments of an optimizer's update, such as the loss, by which all ranks steer alike.

numbers, such as value           their mean over the ranks
functions, such as value_fn      the mean of what they return, and of their gradients
grad                             the reduced gradients
others                           each rank's own, as is what such a function takes: a batch, say
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringreduce.collectives.ops import Average
from ringreduce.errors import InputError
from ringreduce.execution.signature import calling_line
from ringreduce.jax.host import HostCollective
from ringreduce.jax.ops import allreduce
from ringreduce.jax.primitive import Values, bind
from ringreduce.optim.exchange import Exchange

GRADIENTS = "grad"


def _names_of(extra: dict[str, Any]) -> list[str]:
    """Those of the arguments that are made alike."""
    functions = {name for name, value in extra.items() if _is_function(name, value)}
    taken = {each for name in functions for each in _arguments(extra[name])} - {"value", GRADIENTS}
    numbers = {name for name, value in extra.items() if _is_number(value)} - taken
    return [name for name in extra if name in functions | numbers | {GRADIENTS}]


def steering(extra: dict[str, Any], gradients: Any, reduced: Any, exchange: Exchange) -> dict[str, Any]:
    """The arguments, alike on all ranks.  gradients, reduced: those that the optimizer gets.

    Raises: InputError for functions and gradients with an op that is not the mean, which these would not fit.
    """
    names = _names_of(extra) if exchange.process_set.included() else []
    numbers = {name: extra[name] for name in names if _is_number(extra[name])}
    functions = {name: extra[name] for name in names if _is_function(name, extra[name])}
    if exchange.op is not Average and len(numbers) < len(names):
        name = next(name for name in names if name not in numbers)
        raise InputError(
            f"DistributedOptimizer: update(…, {name}=…) with op={exchange.op!r}; {name} is averaged over all ranks, "
            "and so must be the gradients: leave op out"
        )
    found = allreduce(numbers, op=Average, process_set=exchange.process_set)
    found |= {name: _averaged(each, exchange) for name, each in functions.items()}
    if GRADIENTS in names:
        pairs = jax.tree.leaves(extra[GRADIENTS]), jax.tree.leaves(gradients)
        is_same = len(pairs[0]) == len(pairs[1]) and all(map(lambda one, other: one is other, *pairs))
        found[GRADIENTS] = reduced if is_same else allreduce(extra[GRADIENTS], **exchange.arguments)
    return extra | found


def _averaged(function: Callable[..., Any], exchange: Exchange) -> Callable[..., Any]:
    """The mean over all ranks of what a function of the parameters returns, with the mean of the gradients."""

    @functools.wraps(function)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        back = HostCollective("allreduce", calling_line(), process_set=exchange.process_set)
        result = function(*(_with_shared_gradient(each, back) for each in args[:1]), *args[1:], **kwargs)
        leaves, form = jax.tree.flatten(result)
        at = [number for number, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
        means = allreduce([leaves[number] for number in at], op=Average, process_set=exchange.process_set)
        for number, mean in zip(at, means, strict=True):
            leaves[number] = mean
        return form.unflatten(leaves)

    return averaged


def _with_shared_gradient(tree: Any, collective: HostCollective) -> Any:
    """The same tree, whose gradients are what this collective makes of those of all ranks."""
    leaves, form = jax.tree.flatten(tree)
    floating = [number for number, each in enumerate(leaves) if jnp.issubdtype(jnp.result_type(each), jnp.inexact)]
    same = _same_p.bind(*(leaves[number] for number in floating), collective=collective)
    for number, each in zip(floating, same, strict=True):
        leaves[number] = each
    return form.unflatten(leaves)


def _jvp(values: Values, tangents: Values, *, collective: HostCollective) -> tuple[Values, Values]:
    changes = map(ad.instantiate_zeros, tangents)
    return _same_p.bind(*values, collective=collective), _same_p.bind(*changes, collective=collective)


def _transpose(gradients: Values, *_: Any, collective: HostCollective) -> Values:
    return bind(collective, list(map(ad.instantiate_zeros, gradients)))


_same_p = Primitive("ringreduce_same")
_same_p.multiple_results = True
_same_p.def_impl(lambda *values, collective: values)
_same_p.def_abstract_eval(lambda *values, collective: values)
mlir.register_lowering(_same_p, lambda ctx, *operands, collective: operands)
ad.primitive_jvps[_same_p] = _jvp
ad.primitive_transposes[_same_p] = _transpose
batching.primitive_batchers[_same_p] = lambda values, dims, **params: (_same_p.bind(*values, **params), dims)


def _arguments(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a builtin, or of a library that is not Python's
        return []


def _is_function(name: str, value: Any) -> bool:
    """Not a model, or a type, which can be called, too."""
    is_one = inspect.isroutine(value) or isinstance(value, functools.partial | jax.stages.Wrapped)
    return is_one or (name.endswith("_fn") and callable(value))


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, float | np.floating | np.ndarray | jax.Array) and jnp.ndim(value) == 0
    return is_one and bool(jnp.issubdtype(jnp.result_type(value), jnp.inexact))
