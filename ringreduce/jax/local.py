"""diloco: a gradient transformation of optax with local steps; see `ringreduce.optim.local`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ringreduce import runtime
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import InputError
from ringreduce.jax.ops import allreduce
from ringreduce.jax.parts import compare_trees
from ringreduce.optim.exchange import Exchange
from ringreduce.optim.local.options import Options, Outer, fragments_of, mean
from ringreduce.runtime.submit import submit_and_wait

__all__ = ["diloco"]

Leaves = list[Any]


class LocalState(NamedTuple):
    """The state of `diloco`; all but the optimizer's is the same on all ranks."""

    optimizer: Any  # the wrapped optimizer's state
    steps: Any  # how many
    anchors: Any  # the parameters after the last average, with 32 bits or more
    outer: Any  # the outer optimizer's state for each parameter, in a list


def diloco(
    optimizer: Any,
    *,
    sync_every: int,
    outer: Outer | None = None,
    fragments: int = 1,
    compression: AnyCompressor = Compression.none,
    warmup_steps: int = 0,
) -> Any:
    """Wrap a gradient transformation of optax so that every rank steps on its own, and parameters are averaged in turn.

    Returns an optax.GradientTransformationExtraArgs, whose update needs params: jit it, with `jax.jit` or
    `ringreduce.jax.jit`. The options are those of `ringreduce.DiLoCo`. There is no delay, since a program of XLA waits
    for its all-reduces. The state of `outer` begins as zeros.

    `ringreduce.jax.allreduce(params)` is the mean of all ranks' parameters, to evaluate and save. In an elastic job the
    training function begins with params = opt_state.anchors, so that all ranks begin alike. What skips
    steps belongs inside, as of a `DistributedOptimizer`: diloco(optax.apply_if_finite(optimizer, 5), sync_every=8).

    Cost:   in a step after which a fragment is averaged one `allreduce` of it, as a group.
    Raises: InputError (a ValueError) for wrong arguments; TypeError for what is no gradient transformation;
            MismatchError from the first update, where ranks have other options and the job is not elastic.
    Source: see `ringreduce.optim.local`.
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(
            f"diloco: expected an optax gradient transformation, got a {type(optimizer).__qualname__}; as in "
            "diloco(optax.adam(1e-3), sync_every=8)"
        )
    options = Options("diloco", sync_every, warmup_steps, fragments, 0, outer, compression)
    return wrapped(optimizer, None, options)


def wrapped(optimizer: Any, parameters: Any, options: Options) -> Any:
    """The gradient transformation with these options; its parameters come with each update."""
    import optax

    inner, exchange = optax.with_extra_args_support(optimizer), Exchange(compression=options.compression)
    agreed: list[bool] = []
    if options.delay:
        raise InputError(
            f"{options.function}: delay={options.delay}; expected 0, since an XLA program waits for its all-reduces"
        )

    def init(params: Any) -> LocalState:
        anchors = jax.tree.map(_wide, params)
        outer = [_zeros(options.outer or mean, each) for each in jax.tree.leaves(anchors)]
        return LocalState(inner.init(params), jnp.zeros((), jnp.int32), anchors, outer)

    def update(gradients: Any, state: LocalState, params: Any = None, **extra: Any) -> tuple[Any, LocalState]:
        if params is None:
            raise InputError(f"{options.function}: update without params; pass them: update(gradients, state, params)")
        if not agreed and not runtime.current(options.function).is_elastic:  # a spare would be alone here
            submit_and_wait("barrier", "options of local steps", details=options.details())
            agreed.append(True)
        compare_trees(update, exchange.process_set, (), state.anchors, state.outer)
        updates, of_optimizer = inner.update(gradients, state.optimizer, params, **extra)
        values = [_wide(each) + step for each, step in zip(*map(jax.tree.leaves, (params, updates)), strict=True)]
        anchors, form = jax.tree.flatten(state.anchors)
        steps = state.steps + 1
        index, branches = _branches(options, exchange, steps, [each.nbytes for each in anchors])
        if isinstance(index, jax.core.Tracer):
            values, anchors, outer = jax.lax.switch(index, branches, values, anchors, state.outer)
        else:
            values, anchors, outer = branches[int(index)](values, anchors, state.outer)
        changes = [value - each for value, each in zip(values, jax.tree.leaves(params), strict=True)]
        return form.unflatten(changes), LocalState(of_optimizer, steps, form.unflatten(anchors), outer)

    return optax.GradientTransformationExtraArgs(init, update)


def _branches(options: Options, exchange: Exchange, steps: Any, sizes: Sequence[int]) -> tuple[Any, list[Any]]:
    """What is done after a step, and which of it: nothing, a fragment's average, or that of all in the warm-up."""

    def averaging(members: Sequence[int], outer: Outer) -> Callable[..., tuple[Leaves, Leaves, Leaves]]:
        def average(values: Leaves, anchors: Leaves, states: Leaves) -> tuple[Leaves, Leaves, Leaves]:
            values, anchors, states = list(values), list(anchors), list(states)
            sent = [anchors[each] - values[each] for each in members]
            for each, gradient in zip(members, allreduce(sent, **exchange.arguments) if sent else (), strict=True):
                anchors[each], states[each] = outer(anchors[each], gradient, states[each])
                values[each] = anchors[each]
            return values, anchors, states

        return average

    fragments = fragments_of(sizes, options.fragments, options.function)
    branches = [averaging((), mean), *(averaging(each, options.outer or mean) for each in fragments)]
    turn, rest = jnp.divmod(steps - options.warmup_steps, options.interval)
    fragment = jnp.where((rest == 0) & (turn >= 1), 1 + (turn - 1) % options.fragments, 0)
    index = jnp.where(steps <= options.warmup_steps, len(branches), fragment)
    return index, [*branches, averaging(range(len(sizes)), mean)]


def _wide(array: Any) -> Any:
    """The values with 32 bits or more."""
    return jnp.asarray(array, jnp.promote_types(array.dtype, jnp.float32))


def _zeros(outer: Outer, anchor: Any) -> Any:
    """The state that an outer optimizer begins with: zeros in the form of what it returns."""
    states = jax.eval_shape(lambda each: outer(each, each, None)[1], anchor)
    return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), states)
