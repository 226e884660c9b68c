"""DistributedOptimizer for optax, value_and_grad, and parameters that are alike on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ringreduce.api.objects import broadcast_object
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.collectives.ops import Adasum, Average, ReduceOp
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.frameworks.collective import ending_step
from ringreduce.jax.ops import allreduce, broadcast
from ringreduce.jax.parts import compare_trees
from ringreduce.jax.primitive import REF, in_program
from ringreduce.jax.steering import steering
from ringreduce.optim.exchange import Exchange, check_passes

__all__ = ["DistributedOptimizer", "broadcast_parameters", "value_and_grad"]


class Accumulated(NamedTuple):
    """The state of an optimizer that steps every few backward passes."""

    optimizer: Any  # the wrapped optimizer's state
    gradients: Any  # their sum since the last step
    passes: Any  # how many


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
) -> Any:
    """Wrap a gradient transformation of optax so that it sees the gradients reduced over all ranks.

    Returns an optax.GradientTransformationExtraArgs: chain it, jit its update, or give it to flax's optimizers.

    backward_passes_per_step: gradients of this many updates are summed, not averaged, before they are reduced; for
        their mean divide the loss. Until then updates are zeros. Its state is the optimizer's and such a sum, which has
        32 bits or more.
    op: Average, Sum, or Adasum: every rank computes updates from its own gradients, and the updates are reduced.
    compression, gradient_predivide_factor, process_set: see `ringreduce.DistributedOptimizer`.
    name: of the operation, for error messages and the timeline; by default the line that calls update.

    What decides by numbers belongs inside, where it sees those of all ranks:
    DistributedOptimizer(optax.apply_if_finite(optimizer, 5)). Around it, each rank decides by its own: nothing can see
    that, ranks that skip a step alone meet the others' later ones, and training goes wrong, or waits for ever. So do
    not put this into apply_if_finite, a MultiSteps with a should_skip_update_fn, or conditionally_transform or
    conditionally_mask with forward_extra_args=True, nor into a chain whose update() gets a loss.

    update(gradients, state, params, value=loss): numbers such as the loss, and functions such as value_fn, by which
    an optimizer steers, become the mean over the ranks; so all ranks do the same. Not with Adasum. With op=Sum there
    are numbers only.

    Cost:   one `allreduce` of all gradients, as a group, a step; one more of the numbers, and at each call of such a
            function.
    Raises: InputError (a ValueError) for wrong arguments; TypeError for what is no gradient transformation.
    Source: Horovod's DistributedOptimizer; optax.MultiSteps.
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(
            f"DistributedOptimizer: expected an optax gradient transformation, got a {type(optimizer).__qualname__}; "
            "as in DistributedOptimizer(optax.adam(1e-3))"
        )
    exchange = Exchange(op, compression, gradient_predivide_factor, process_set)
    return _reducing(optimizer, exchange, name, check_passes(backward_passes_per_step))


def _reducing(optimizer: Any, exchange: Exchange, name: str | None, passes: int) -> Any:
    """The transformation that reduces, every so many passes, and then is `optimizer`."""
    import optax

    inner, reduce = optax.with_extra_args_support(optimizer), _reduction(exchange, name)

    def step(gradients: Any, state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        if exchange.process_set.included():  # with Adasum each rank's state is of its own gradients
            compare_trees(step, exchange.process_set, gradients, params, None if exchange.op is Adasum else state)
        if exchange.op is Adasum:
            updates, state = inner.update(gradients, state, params, **extra)
            return reduce(updates), state
        reduced = reduce(gradients)
        extra = steering(extra, gradients, reduced, exchange)
        return inner.update(reduced, state, params, **extra)  # type: ignore[no-any-return]

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if passes == 1:
            return step(gradients, state, params, extra)
        total = jax.tree.map(_plus, state.gradients, gradients)

        def last() -> tuple[Any, Any]:
            updates, of_optimizer = step(jax.tree.map(_of_type, total, gradients), state.optimizer, params, extra)
            return updates, Accumulated(of_optimizer, jax.tree.map(jnp.zeros_like, total), jnp.zeros_like(state.passes))

        def another() -> tuple[Any, Any]:
            return jax.tree.map(_zeros, form[0]), Accumulated(as_the_last(state.optimizer), total, state.passes + 1)

        def as_the_last(of_optimizer: Any) -> Any:
            return jax.tree.map(lambda each, like: jnp.asarray(each, like.dtype), of_optimizer, form[1].optimizer)

        is_last, form = state.passes + 1 == passes, jax.eval_shape(last)
        if isinstance(is_last, jax.core.Tracer):
            return jax.lax.cond(is_last, last, another)  # type: ignore[no-any-return]
        return last() if is_last else another()

    def init(params: Any) -> Any:
        if passes == 1:
            return inner.init(params)
        return Accumulated(inner.init(params), jax.tree.map(_empty_sum, params), jnp.zeros((), jnp.int32))

    return optax.GradientTransformationExtraArgs(init, update)


def _empty_sum(param: Any) -> Any:
    """Zeros for a sum of gradients, which has 32 bits or more, so that short ones add up."""
    dtype = jnp.result_type(param)
    wide = np.promote_types(dtype, np.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
    return jnp.zeros_like(param, wide)


def _plus(total: Any, gradient: Any) -> Any:
    return total if _is_nothing(gradient) else total + jnp.asarray(gradient, total.dtype)


def _of_type(total: Any, gradient: Any) -> Any:
    return gradient if _is_nothing(gradient) else jnp.asarray(total, jnp.result_type(gradient))


def _zeros(update: Any) -> Any:
    return (np if _is_nothing(update) else jnp).zeros(update.shape, update.dtype)


def _is_nothing(gradient: Any) -> bool:
    """What JAX has for the gradient of whole numbers."""
    return bool(getattr(gradient, "dtype", None) == jax.dtypes.float0)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Like jax.value_and_grad, but with gradients reduced over all ranks; the value is this rank's own.

    In place of a `DistributedOptimizer`, not beside one. options: further ones of jax.value_and_grad.
    Source: Horovod's DistributedGradientTape.
    """
    reduce = _reduction(Exchange(op, compression, gradient_predivide_factor, process_set), name)
    of_rank = jax.value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, gradients = of_rank(*args, **kwargs)
        if process_set.included():
            params = args[argnums] if isinstance(argnums, int) else [args[each] for each in argnums]
            compare_trees(reduced, process_set, gradients, params, None)
        return value, reduce(gradients)

    return reduced


def _reduction(exchange: Exchange, name: str | None) -> Callable[[Any], Any]:
    """What reduces a tree of gradients."""

    def reduce(gradients: Any) -> Any:
        if not exchange.takes_part:
            return gradients
        some = jax.tree.map(lambda each: None if _is_nothing(each) else each, gradients)
        with ending_step():
            reduced = allreduce(some, name=name, **exchange.arguments)
        own = lambda each, gradient: gradient if each is None else each  # noqa: E731
        return jax.tree.map(own, reduced, gradients, is_leaf=lambda each: each is None)

    return reduce


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """The root's parameters, or any tree of arrays such as an optimizer's state, on every rank: returns a new tree.

    JAX's arrays cannot be overwritten, so use the result: params = broadcast_parameters(params). Python's numbers are
    the root's, too, and random keys, as those in nnx.state(model). A jax.Ref is written to, and returned. All else
    stays as it is: other leaves, such as the functions in a module of equinox, and what is no leaf, such as the
    optimizer in a TrainState of flax.

    A number that is an array on the root only, or the other way round, such as the step of a TrainState that the root
    alone has restored, becomes what it is there.

    Cost:   as `broadcast`, of all arrays as a group, and `broadcast_object`, of the numbers.
    Source: Horovod's broadcast_parameters.
    """
    paths, form = jax.tree_util.tree_flatten_with_path(params)
    names, leaves = [jax.tree_util.keystr(path) for path, _ in paths], [leaf for _, leaf in paths]
    if not in_program() or any(map(_is_number, leaves)):
        of_root = list(zip(names, map(_as_number, leaves), strict=True))
        for place, (name, number) in enumerate(broadcast_object(of_root, root_rank, None, process_set)):
            if names[place : place + 1] != [name]:
                break  # another tree, as `broadcast` says
            if number is not None and (_is_number(number) or _is_number(leaves[place])):
                leaves[place] = number
    arrays = form.unflatten([leaf if _is_array(leaf) else None for leaf in leaves])  # which keeps the names
    received = iter(jax.tree.leaves(broadcast(arrays, root_rank, None, process_set)))
    return form.unflatten([_filled(leaf, next(received)) if _is_array(leaf) else leaf for leaf in leaves])


def _as_number(leaf: Any) -> Any:
    """A number of Python's; zero of the array's type for an array of no dimensions, which it may be elsewhere."""
    is_single = _is_array(leaf) and not jnp.ndim(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return np.zeros((), leaf.dtype) if is_single else leaf if _is_number(leaf) else None


def _filled(leaf: Any, value: Any) -> Any:
    if not isinstance(leaf, REF):
        return value
    leaf[...] = value
    return leaf


def _is_array(leaf: Any) -> bool:
    """JAX's, its Refs, or NumPy's, whose numbers are arrays without dimensions; np.float64 is Python's float, too."""
    return isinstance(leaf, (REF, jax.Array, np.ndarray, np.generic)) and not isinstance(leaf, str | bytes)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex) and not _is_array(leaf)
