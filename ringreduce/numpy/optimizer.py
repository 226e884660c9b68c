"""The framework-neutral DistributedOptimizer: gradients are averaged over all ranks before the optimizer sees them.

Wrapping is composition. An optimizer of a framework with an adapter is passed to that adapter; anything else that takes
gradients is wrapped here. Arrays may be NumPy or CuPy (or whatever `ringreduce.allreduce` takes).
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, global_process_set, placed
from ringreduce.arrays import trees
from ringreduce.checks import divergence
from ringreduce.collectives.ops import Average, ReduceOp
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import InputError
from ringreduce.frameworks.not_there import check_adapter
from ringreduce.frameworks.registry import adapter, adapter_of
from ringreduce.optim.exchange import Exchange, check_passes
from ringreduce.optim.powersgd import PowerSGD
from ringreduce.runtime.submit import taken_apart

FORMS = """\
  - a torch.optim.Optimizer
  - a gradient transformation of optax
  - an optimizer of Keras 3
  - an object with step(grads), update(params, grads) or apply_gradients(pairs of (gradient, parameter))
  - a callable on gradients"""
CHECKED_STEPS = 3
METHODS = ("step", "update", "apply_gradients")
_GRADIENT_NAMES = ("grads", "gradients", "grad", "gradient", "updates")
"""Names of an argument that holds gradients; optax calls it updates."""
Optimizer = TypeVar("Optimizer")


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: Any = None,
    *,
    compression: AnyCompressor | PowerSGD = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    gradients: int | str | None = None,
    name: str | None = None,
    wait_in_backward: bool = False,
) -> Optimizer:
    """Wrap `optimizer` so that it sees the gradients reduced over all ranks.

    optimizer: one of
      - a torch.optim.Optimizer: see `ringreduce.torch.DistributedOptimizer`;
      - a gradient transformation of optax: see `ringreduce.jax.DistributedOptimizer`;
      - an optimizer of Keras 3: see `ringreduce.keras.DistributedOptimizer`;
      - an object with step(grads), update(params, grads) or apply_gradients(pairs of (gradient, parameter));
      - a callable on gradients.
    compression: `Compression.fp16` or `.bf16` send gradients in 16 bits, `.int8` or `.int4` in fewer between
        hosts; or your own `Compressor`; or a `PowerSGD`, for torch and for what is wrapped here.
    backward_passes_per_step: gradients of this many passes are summed before they are reduced. Until the last one the
        optimizer is not called: a call returns its first argument besides the gradients, such as params, or None.
    op: how the gradients of all ranks become one.
    gradient_predivide_factor: f: Average divides by f before the sum and by size / f after it.
    average_aggregated_gradients: divide the sum by backward_passes_per_step; not for torch and optax: divide the loss.
    process_set: the ranks that take part; on the others the optimizer works as before.
    gradients: the argument that holds them, by index (from 0) or name; needed if there are several and none is named
        grads or gradients.
    name: of the operation, for error messages and the timeline; of adapters that have it.
    named_parameters, num_groups, groups, sparse_as_dense, wait_in_backward: as of those adapters that have them.

    The gradients are any nesting of dicts, lists, tuples and arrays, equal in form and shapes on all ranks; None stays
    None. The caller's arrays are not changed: the optimizer gets new ones. All other attributes, and further arguments
    of those methods, are the wrapped optimizer's own. A copy, or one that was pickled, reduces as this one. An elastic
    state commits and restores the wrapped optimizer's state_dict() or, where it has none, its attributes, in place;
    what was summed since the last step is no part of it.

    Cost:   as `grouped_allreduce`, at every step.
    Raises: TypeError for an object of no such form, InputError where it is not clear which argument holds the
            gradients, and for an option that this optimizer's adapter lacks, and whatever `grouped_allreduce` raises.
    Source: Horovod's DistributedOptimizer, for frameworks that it never supported (horovod#1380).
    """
    made: Optimizer = _adapted(**locals())
    return made


def _adapted(optimizer: Any, **options: Any) -> Any:
    """What the optimizer's adapter makes of it, with the options that are given."""
    make = _maker(optimizer)
    defaults = {each.name: each.default for each in inspect.signature(DistributedOptimizer).parameters.values()}
    given = {name: value for name, value in options.items() if value is not defaults[name]}
    known = inspect.signature(make).parameters
    if unknown := [name for name, value in given.items() if name not in known and value != defaults[name]]:
        kind = type(optimizer).__qualname__
        raise InputError(f"DistributedOptimizer: with {kind} these options have no effect: {', '.join(unknown)}")
    return make(optimizer, **{name: value for name, value in given.items() if name in known})


def _maker(optimizer: Any) -> Callable[..., Any]:
    """The framework's DistributedOptimizer, or the one for what is of none; TypeError for what does not fit."""
    name = adapter_of(optimizer)
    made: Callable[..., Any] = adapter(name).DistributedOptimizer if name else _wrapped
    return made


def _wrapped(
    optimizer: Any,
    compression: AnyCompressor | PowerSGD = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    gradients: int | str | None = None,
) -> ReducingOptimizer:
    check_adapter(optimizer)
    if isinstance(optimizer, WrappingOptimizer):
        raise InputError("DistributedOptimizer: the optimizer is already wrapped; pass the original one")
    methods = [name for name in METHODS if callable(getattr(optimizer, name, None))]
    if not (methods or callable(optimizer)):
        raise TypeError(f"DistributedOptimizer: got a {type(optimizer).__qualname__}; expected one of\n{FORMS}")
    if not methods:
        _place_of_gradients(optimizer, gradients)
    exchange = Exchange(op, compression, gradient_predivide_factor, process_set, any_op=True, factors=True)
    accumulation = Accumulation(backward_passes_per_step, average_aggregated_gradients)
    return ReducingOptimizer(optimizer, exchange, gradients, accumulation)


class Accumulation:
    """The sums of the gradients of several passes."""

    def __init__(self, passes: int, averages: bool) -> None:
        self._passes, self._averages = check_passes(passes), averages
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        self._seen = 0
        self._sums: dict[str, Any] = {}

    def add(self, grads: Any) -> bool:
        """Add the gradients of a pass; True for the last one before a step, whose gradients `take` adds.

        Begins a new step where it raises.
        """
        self._seen += 1
        if self._seen >= self._passes:
            return True
        try:
            self._add(grads)
        except Exception:
            self.reset()
            raise
        return False

    def _add(self, grads: Any) -> None:
        with np.errstate(all="ignore"):  # overflows belong to the data, as in the sum over the ranks
            for name, array in trees.named_leaves(grads):
                if name not in self._sums:
                    self._sums[name] = array * 1  # a copy
                    continue
                total = self._sums[name]
                if np.shape(array) != np.shape(total):
                    raise InputError(
                        f"DistributedOptimizer: pass {self._seen} of {self._passes} has a gradient {name!r} of shape "
                        f"{np.shape(array)}; expected {np.shape(total)}, as in the pass before"
                    )
                if getattr(array, "dtype", None) == getattr(total, "dtype", None):
                    self._sums[name] += array
                else:  # where a type has no room for the other, a wider one has
                    self._sums[name] = total + array

    def take(self, grads: Any) -> Any:
        """The sums, or means, in the form of the last pass' gradients; begins a new step, also where it raises."""
        if self._passes == 1:
            self.reset()
            return grads
        sums = self._sums
        try:
            self._add(grads)
        finally:
            self.reset()
        taken = trees.map_leaves(grads, lambda name, _: sums.pop(name))
        if sums:
            raise InputError(f"DistributedOptimizer: the last of {self._passes} passes has no gradient {min(sums)!r}")
        with np.errstate(all="ignore"):
            return trees.map_leaves(taken, lambda _, total: total / self._passes) if self._averages else taken


class WrappingOptimizer:
    """An optimizer around another one, whose attributes are its own; a subclass says what its methods do besides.

    OWN: the names of attributes that are not the wrapped optimizer's.
    """

    OWN: tuple[str, ...] = ("_optimizer",)
    _optimizer: Any

    def __getattr__(self, name: str) -> Any:
        if name in self.OWN or name.startswith("__"):  # asked for by pickle and copy, before there is an _optimizer too
            raise AttributeError(f"{type(self).__name__} has no {name}", name=name, obj=self)
        attribute = getattr(self._optimizer, name)
        if name not in METHODS or not callable(attribute):
            return attribute
        return self._method(name, attribute)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)  # optimizer.lr = 0.1 reaches the wrapped one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped callable."""
        return self._call(self._optimizer, *args, **kwargs)

    def _method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for a method that takes gradients."""
        return functools.partial(self._call, method)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What becomes of a call of such a method, or of the wrapped callable."""
        raise NotImplementedError

    def state_dict(self) -> Any:
        """The wrapped optimizer's, or where it has none its attributes: an elastic state commits them."""
        return self._optimizer.state_dict() if has_state_dict(self._optimizer) else dict(self._attributes)

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go back to what `state_dict` returned."""
        if has_state_dict(self._optimizer):
            return self._optimizer.load_state_dict(state_dict)
        self._attributes.clear()
        self._attributes.update(state_dict)
        return None

    @property
    def has_state_dict(self) -> bool:
        """True where the wrapped optimizer has one of its own."""
        wrapped = self._optimizer
        return wrapped.has_state_dict if isinstance(wrapped, WrappingOptimizer) else has_state_dict(wrapped)

    @property
    def _attributes(self) -> dict[str, Any]:
        if not hasattr(self._optimizer, "__dict__"):
            what = type(self._optimizer).__qualname__
            raise InputError(f"DistributedOptimizer: a {what} has no __dict__; give it state_dict and load_state_dict")
        attributes: dict[str, Any] = vars(self._optimizer)
        return attributes


class InPlace:
    """Sees in its first steps that an optimizer changes arrays in place: new ones that it makes would be nobody's.

    function: which the user has called.  arrays: the parameters, by name.
    """

    def __init__(self, function: str, optimizer: Any, arrays: dict[str, Any]) -> None:
        self._function, self._arrays, self._unchecked = function, arrays, CHECKED_STEPS
        while isinstance(optimizer, WrappingOptimizer):
            optimizer = optimizer._optimizer
        self._optimizer = optimizer
        self._held = self._attributes() & {id(each) for each in arrays.values()}

    def _attributes(self) -> set[int]:
        return {id(leaf) for _, leaf in trees.leaves(getattr(self._optimizer, "__dict__", {}))}

    def check(self, returned: Any) -> None:
        """Raise InputError where a step has returned new arrays, or put new ones into the optimizer's attributes."""
        if not self._unchecked:
            return
        self._unchecked -= 1
        found = dict(trees.leaves(returned)) if isinstance(returned, dict | list | tuple) or "" in self._arrays else {}
        shapes = [{name: getattr(each, "shape", None) for name, each in tree.items()} for tree in (found, self._arrays)]
        gone = self._held - self._attributes()
        for name, array in self._arrays.items():
            if id(array) in gone or (shapes[0] == shapes[1] and found[name] is not array):
                raise InputError(
                    f"{self._function}: the optimizer returned, or keeps, a new array for {name!r}; expected it to "
                    "change its own array in place, as w -= … and w[...] = … do, and to return no other"
                )


class ReducingOptimizer(WrappingOptimizer):
    """Reduces gradients, then calls the wrapped optimizer with them; made by `DistributedOptimizer`."""

    OWN = ("_optimizer", "_exchange", "_gradients", "_accumulation")

    def __init__(
        self, optimizer: Any, exchange: Exchange, gradients: int | str | None, accumulation: Accumulation
    ) -> None:
        self._optimizer = optimizer
        self._accumulation = accumulation
        self._exchange = exchange
        self._gradients = gradients
        runtime.current("DistributedOptimizer")

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducingOptimizer:
        """A copy of the wrapped optimizer, whose gradients are reduced in the same way."""
        exchange = copy.copy(self._exchange)
        own = self._optimizer, self._accumulation, exchange.compression  # PowerSGD's has a state
        copied, accumulation, exchange.compression = copy.deepcopy(own, memo)
        return type(self)(copied, exchange, self._gradients, accumulation)

    def elastic_begin(self) -> None:
        """Forget the gradients that were summed since the last step."""
        self._accumulation.reset()

    def elastic_parts(self, own: bool) -> dict[str, Any]:
        """See `Exchange.elastic_parts`."""
        return self._exchange.elastic_parts(own)

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go back to what `state_dict` returned, which is where a step begins."""
        self.elastic_begin()
        return super().load_state_dict(state_dict)

    def _method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._apply_gradients if name == "apply_gradients" else self._call, method)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place, name = _place_of_gradients(function, self._gradients)
        if name not in kwargs and place >= len(args):
            raise TypeError(f"DistributedOptimizer: no gradients were passed; expected them as {name}")
        grads = kwargs[name] if name in kwargs else args[place]
        if not self._accumulation.add(grads):
            return next(iter(_passed(function, args, kwargs, place, name).values()), None)
        reduced = self._reduce(grads, lambda: _passed(function, args, kwargs, place, name))
        if name in kwargs:
            return self._step(function, *args, **{**kwargs, name: reduced})
        return self._step(function, *args[:place], reduced, *args[place + 1 :], **kwargs)

    def _apply_gradients(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise TypeError("DistributedOptimizer: apply_gradients expects the (gradient, parameter) pairs first")
        pairs = list(args[0])
        grads = [grad for grad, _ in pairs]
        if not self._accumulation.add(grads):
            return None
        reduced = self._reduce(grads, lambda: {"params": [param for _, param in pairs]})
        pairs = [(grad, param) for grad, (_, param) in zip(reduced, pairs, strict=True)]
        return self._step(function, pairs, *args[1:], **kwargs)

    def _step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        runtime.stepped(id(self))
        return result

    def _reduce(self, grads: Any, passed: Callable[[], dict[str, Any]]) -> Any:
        """A tree of the form of `grads` with every array reduced over all ranks, in few messages.

        passed: returns what is passed besides, such as the parameters, by name.
        """
        if self._exchange.size > 1:
            owner = getattr(self._optimizer, "__self__", self._optimizer)  # of a method
            divergence.compare(self, self._exchange.process_set, lambda: {**getattr(owner, "__dict__", {}), **passed()})
        take, taking_part = self._accumulation.take, self._exchange.process_set
        arrays, names, whole = placed("allreduce", None, taking_part, lambda: taken_apart(take(grads)))
        return whole(self._exchange.reduce(arrays, names=names))

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r}, op={self._exchange.op!r})"


def has_state_dict(optimizer: Any) -> bool:
    """True for one that can say what its state is, and take it back."""
    return hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict")


def _passed(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], place: int, gradients: str
) -> dict[str, Any]:
    """The arguments of a call by name, but for the gradients, which are at that place or have that name."""
    names = [each.name for each in _parameters_of(function) if each.kind <= each.POSITIONAL_OR_KEYWORD]
    named = itertools.zip_longest(names[: len(args)], args)
    by_place = {name or f"argument {at}": each for at, (name, each) in enumerate(named)}
    others = [pair for at, pair in enumerate(by_place.items()) if gradients in kwargs or at != place]
    return dict(others) | {name: each for name, each in kwargs.items() if name != gradients}


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of C
        return []


def _place_of_gradients(function: Callable[..., Any], chosen: int | str | None) -> tuple[int, str]:
    """The place and the name of the argument that holds the gradients; InputError where that is not clear."""
    parameters = _parameters_of(function)
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
