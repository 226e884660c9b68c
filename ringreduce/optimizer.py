"""The framework-neutral DistributedOptimizer: gradients are averaged over all ranks before the optimizer sees them.

Wrapping is composition. An optimizer of a framework with an adapter is passed to that adapter; anything else that takes
gradients is wrapped here. Arrays may be NumPy or CuPy (or whatever `ringreduce.allreduce` takes).
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

from ringreduce import runtime
from ringreduce.api.submit import taken_apart
from ringreduce.errors import InputError
from ringreduce.not_there import check_adapter
from ringreduce.ops import Average, ReduceOp
from ringreduce.optim.exchange import Exchange

FORMS = """\
  - a torch.optim.Optimizer
  - a gradient transformation of optax
  - an optimizer of Keras 3
  - an object with step(grads), update(params, grads) or apply_gradients(pairs of (gradient, parameter))
  - a callable on gradients"""
OPTIONS = {"compression", "gradient_predivide_factor", "process_set"}
_METHODS = ("step", "update", "apply_gradients")
_OWN = ("_optimizer", "_exchange", "_gradients")
_GRADIENT_NAMES = ("grads", "gradients", "grad", "gradient", "updates")
"""Names of an argument that holds gradients; optax calls it updates."""


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    named_parameters: Any = None,
    *,
    op: ReduceOp = Average,
    gradients: int | str | None = None,
    **options: Any,
) -> Any:
    """Wrap `optimizer` so that it sees the gradients reduced over all ranks.

    optimizer: one of
      - a torch.optim.Optimizer: see `ringreduce.torch.DistributedOptimizer`, also for its options;
      - a gradient transformation of optax: see `ringreduce.jax.DistributedOptimizer`, likewise;
      - an optimizer of Keras 3: see `ringreduce.keras.DistributedOptimizer`, likewise;
      - an object with step(grads), update(params, grads) or apply_gradients(pairs of (gradient, parameter));
      - a callable on gradients.
    op:        how the gradients of all ranks become one.
    gradients: the argument that holds them, by index (from 0) or name; needed if there are several and none is named
               grads or gradients.
    options:   compression, gradient_predivide_factor and process_set, as `ringreduce.torch.DistributedOptimizer`; and
               for torch and optax all of theirs.

    The gradients are any nesting of dicts, lists, tuples and arrays, equal in form and shapes on all ranks; None stays
    None. The caller's arrays are not changed: the optimizer gets new ones. All other attributes, and further arguments
    of those methods, are the wrapped optimizer's own. A copy, or one that was pickled, reduces as this one. An elastic
    state commits and restores the wrapped optimizer's state_dict() or, where it has none, its attributes, in place.

    Cost:   as `grouped_allreduce`, at every call.
    Raises: TypeError for an object of no such form, InputError where it is not clear which argument holds the
            gradients, and whatever `grouped_allreduce` raises.
    Source: Horovod's DistributedOptimizer, for frameworks that it never supported (horovod#1380).
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        from ringreduce.torch import DistributedOptimizer as TorchOptimizer

        return TorchOptimizer(optimizer, named_parameters, op=op, **options)
    if named_parameters is not None:
        options["named_parameters"] = named_parameters
    if isinstance(optimizer, tuple) and hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        from ringreduce.jax import DistributedOptimizer as OptaxOptimizer  # it wraps pairs of functions

        return OptaxOptimizer(optimizer, op=op, **options)
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(optimizer, getattr(keras.optimizers, "Optimizer", ())):
        from ringreduce.keras import DistributedOptimizer as KerasOptimizer

        return KerasOptimizer(optimizer, op=op, **options)
    check_adapter(optimizer)
    unknown = ", ".join(options.keys() - OPTIONS)
    if unknown:
        raise InputError(f"DistributedOptimizer: {unknown} are options for torch, optax and Keras optimizers only")
    methods = [name for name in _METHODS if callable(getattr(optimizer, name, None))]
    if not (methods or callable(optimizer)):
        raise TypeError(f"DistributedOptimizer: got a {type(optimizer).__qualname__}; expected one of\n{FORMS}")
    if not methods:
        _place_of_gradients(optimizer, gradients)
    return ReducingOptimizer(optimizer, Exchange(op, any_op=True, **options), gradients)


class ReducingOptimizer:
    """Reduces gradients, then calls the wrapped optimizer with them; made by `DistributedOptimizer`."""

    def __init__(self, optimizer: Any, exchange: Exchange, gradients: int | str | None = None) -> None:
        self._optimizer = optimizer
        self._exchange = exchange
        self._gradients = gradients
        runtime.current("DistributedOptimizer")

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):  # asked for by pickle and copy, before there is an _optimizer too
            raise AttributeError(f"{type(self).__name__} has no {name}", name=name, obj=self)
        attribute = getattr(self._optimizer, name)
        if name not in _METHODS or not callable(attribute):
            return attribute
        reducing = self._apply_gradients if name == "apply_gradients" else self._call
        return lambda *args, **kwargs: reducing(attribute, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)  # optimizer.lr = 0.1 reaches the wrapped one

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducingOptimizer:
        """A copy of the wrapped optimizer, whose gradients are reduced in the same way."""
        return type(self)(copy.deepcopy(self._optimizer, memo), self._exchange, self._gradients)

    def state_dict(self) -> Any:
        """The wrapped optimizer's, or where it has none its attributes: an elastic state commits them."""
        return self._optimizer.state_dict() if self.has_state_dict else dict(self._attributes)

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go back to what `state_dict` returned."""
        if self.has_state_dict:
            return self._optimizer.load_state_dict(state_dict)
        self._attributes.clear()
        self._attributes.update(state_dict)
        return None

    @property
    def has_state_dict(self) -> bool:
        """True where the wrapped optimizer has one of its own."""
        return hasattr(self._optimizer, "state_dict") and hasattr(self._optimizer, "load_state_dict")

    @property
    def _attributes(self) -> dict[str, Any]:
        if not hasattr(self._optimizer, "__dict__"):
            what = type(self._optimizer).__qualname__
            raise InputError(f"DistributedOptimizer: a {what} has no __dict__; give it state_dict and load_state_dict")
        attributes: dict[str, Any] = vars(self._optimizer)
        return attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped callable with the reduced gradients."""
        return self._call(self._optimizer, *args, **kwargs)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place, name = _place_of_gradients(function, self._gradients)
        if name in kwargs:
            kwargs[name] = self._reduce(kwargs[name])
        elif place < len(args):
            args = (*args[:place], self._reduce(args[place]), *args[place + 1 :])
        else:
            raise TypeError(f"DistributedOptimizer: no gradients were passed; expected them as {name}")
        return function(*args, **kwargs)

    def _apply_gradients(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise TypeError("DistributedOptimizer: apply_gradients expects the (gradient, parameter) pairs first")
        pairs = list(args[0])
        grads = self._reduce([grad for grad, _ in pairs])
        return function([(grad, param) for grad, (_, param) in zip(grads, pairs, strict=True)], *args[1:], **kwargs)

    def _reduce(self, grads: Any) -> Any:
        """A tree of the form of `grads` with every array reduced over all ranks, in few messages."""
        arrays, names, whole = taken_apart(grads)
        return whole(self._exchange.reduce(arrays, names=names))

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r}, op={self._exchange.op!r})"


def _place_of_gradients(function: Callable[..., Any], chosen: int | str | None) -> tuple[int, str]:
    """The place and the name of the argument that holds the gradients; InputError where that is not clear."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C
        parameters = []
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    places = {each.name: sys.maxsize if each.kind is each.KEYWORD_ONLY else at for at, each in enumerate(named)}
    if isinstance(chosen, int):
        return chosen, named[chosen].name if chosen < len(named) else f"argument {chosen}"
    if isinstance(chosen, str):
        return places.get(chosen, sys.maxsize), chosen
    required = [each.name for each in named if each.default is each.empty]
    likely = [name for name in places if name in _GRADIENT_NAMES] or required
    if len(likely) != 1:
        what = getattr(function, "__name__", type(function).__name__)
        raise InputError(
            f"DistributedOptimizer: {what}({', '.join(map(str, parameters))}): which argument holds the gradients? "
            "Name one of them grads, or pass its index or name: DistributedOptimizer(optimizer, gradients=1)"
        )
    return places[likely[0]], likely[0]
