"""The framework-neutral DistributedOptimizer: gradients are averaged over all ranks before the optimizer sees them.

Wrapping is composition. An optimizer of a framework that has an adapter goes to that adapter; anything else that takes
gradients is wrapped here. Arrays may be NumPy or CuPy (or whatever `ringreduce.allreduce` takes).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from ringreduce import runtime, trees
from ringreduce.api.reduce import grouped_allreduce
from ringreduce.errors import InputError
from ringreduce.ops import Average, ReduceOp

FORMS = """\
  - a torch.optim.Optimizer
  - an object with step(grads), update(params, grads) or apply_gradients(pairs of (gradient, parameter))
  - a callable on gradients"""


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, named_parameters: Any = None, *, op: ReduceOp = Average, **options: Any
) -> Any:
    """Wrap `optimizer` so that it sees the gradients reduced over all ranks.

    optimizer: one of
      - a torch.optim.Optimizer: see `ringreduce.torch.DistributedOptimizer`, which also tells its options;
      - an object with step(grads), update(params, grads) or apply_gradients(pairs of (gradient, parameter));
      - a callable on gradients.
    op:        how the gradients of all ranks become one.

    The gradients are any nesting of dicts, lists, tuples and arrays, equal in form and shapes on all ranks; None stays
    None. The caller's arrays are not changed: the optimizer gets new ones. All other attributes, and further arguments
    of those methods, are the wrapped optimizer's own.

    Cost:   as `grouped_allreduce`, at every call.
    Raises: TypeError for an object of no such form, and what `grouped_allreduce` raises.
    Source: Horovod's DistributedOptimizer, for frameworks that it never served (horovod#1380).
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        from ringreduce.torch import DistributedOptimizer as TorchOptimizer

        return TorchOptimizer(optimizer, named_parameters, op=op, **options)
    if named_parameters is not None:
        options["named_parameters"] = named_parameters
    if options:
        raise InputError(f"DistributedOptimizer: {', '.join(options)} are options for torch optimizers only")
    if _is_optax(optimizer) or not (_methods(optimizer) or callable(optimizer)):
        raise TypeError(f"DistributedOptimizer: a {type(optimizer).__qualname__}; expected one of\n{FORMS}")
    return ReducingOptimizer(optimizer, op)


class ReducingOptimizer:
    """Reduces gradients, then calls the wrapped optimizer with them; made by `DistributedOptimizer`."""

    def __init__(self, optimizer: Any, op: ReduceOp) -> None:
        self._optimizer = optimizer
        self._op = op
        runtime.current("DistributedOptimizer")

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._optimizer, name)
        reducing = _REDUCING.get(name)
        if reducing is None or not callable(attribute):
            return attribute
        return lambda *args, **kwargs: reducing(attribute, self._op, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_optimizer", "_op"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)  # optimizer.lr = 0.1 reaches the wrapped one

    def __call__(self, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped callable with the reduced gradients."""
        return self._optimizer(reduce_gradients(grads, self._op), *args, **kwargs)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r}, op={self._op!r})"


def reduce_gradients(grads: Any, op: ReduceOp = Average) -> Any:
    """A tree of the form of `grads` with every array reduced over all ranks, in few messages."""
    named = trees.named_leaves(grads)
    reduced = grouped_allreduce([leaf for _, leaf in named], names=[name for name, _ in named], op=op)
    by_name = dict(zip((name for name, _ in named), reduced, strict=True))
    return trees.replace_leaves(grads, by_name.__getitem__)


def _step(method: Callable[..., Any], op: ReduceOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return method(reduce_gradients(args[0], op), *args[1:], **kwargs)
    return method(**_reduce_keyword(kwargs, op))


def _update(method: Callable[..., Any], op: ReduceOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1:
        return method(args[0], reduce_gradients(args[1], op), *args[2:], **kwargs)
    return method(*args, **_reduce_keyword(kwargs, op))


def _reduce_keyword(kwargs: dict[str, Any], op: ReduceOp) -> dict[str, Any]:
    for name in ("grads", "gradients"):
        if name in kwargs:
            return {**kwargs, name: reduce_gradients(kwargs[name], op)}
    raise TypeError("DistributedOptimizer: no gradients were passed; expected them as grads")


def _apply_gradients(method: Callable[..., Any], op: ReduceOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args:
        raise TypeError("DistributedOptimizer: apply_gradients expects the (gradient, parameter) pairs first")
    pairs: Iterable[tuple[Any, Any]] = list(args[0])
    grads = reduce_gradients([grad for grad, _ in pairs], op)
    return method([(grad, param) for grad, (_, param) in zip(grads, pairs, strict=True)], *args[1:], **kwargs)


_REDUCING = {"step": _step, "update": _update, "apply_gradients": _apply_gradients}


def _methods(optimizer: Any) -> list[str]:
    return [name for name in _REDUCING if callable(getattr(optimizer, name, None))]


def _is_optax(optimizer: Any) -> bool:
    """An optax GradientTransformation has an `update`, but of another form: update(grads, state, params)."""
    return isinstance(optimizer, tuple) and hasattr(optimizer, "init") and hasattr(optimizer, "update")
