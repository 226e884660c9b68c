"""Wrapping a torch optimizer in a subclass of its own class, and what all wrapped optimizers share."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet
from ringreduce.api.world import size
from ringreduce.collectives.ops import ReduceOp
from ringreduce.errors import InputError
from ringreduce.optim.exchange import check_passes
from ringreduce.torch.groups import in_order_of

METHODS = ("step", "zero_grad", "add_param_group", "load_state_dict", "state_dict")
"""Of an optimizer: somebody may have assigned one to the user's object, and may assign one to the wrapped optimizer."""


class Wrapped:
    """The base of all mixins, which stand before the user's class in the inheritance."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled or copied, it is the user's optimizer again: hooks and handles belong to one process."""
        own = [each for each in type(self).__mro__ if issubclass(each, torch.optim.Optimizer)]
        users = next(each for each in own if not issubclass(each, Wrapped))
        return _unwrapped, (users, self.__getstate__())  # type: ignore[attr-defined]


class WrappedMixin(Wrapped):
    """What every optimizer whose gradients are reduced does."""

    param_groups: list[dict[str, Any]]
    _reducer: Any

    def elastic_parts(self, own: bool) -> dict[str, Any]:
        """See `Exchange.elastic_parts`."""
        parts: dict[str, Any] = self._reducer.exchange.elastic_parts(own)
        return parts

    @property
    def _parameter_names(self) -> dict[Any, str]:
        """Horovod's: the name of each parameter."""
        names: dict[Any, str] = self._reducer.names
        return names | {parameter: name for name, parameter in self._reducer.owned.change().new}

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes are summed before they are reduced."""
        passes: int = self._reducer.passes
        return passes

    @property
    def op(self) -> ReduceOp:
        """By what the gradients are reduced."""
        op: ReduceOp = self._reducer.exchange.op
        return op

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce them."""
        process_set: ProcessSet = self._reducer.exchange.process_set
        return process_set

    @property
    def gradient_predivide_factor(self) -> float:
        """What they are divided by before they are added up, of the whole division by the number of ranks."""
        factor: float = self._reducer.exchange.scales[1]
        return factor

    @property
    def sparse_as_dense(self) -> bool:
        """True where sparse gradients are reduced as dense ones."""
        return bool(self._reducer.sparse_as_dense)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are summed before they are reduced."""
        self._reducer.passes = check_passes(passes)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to the gradients; the next one outside, or step(), reduces the sum.

        Source: torch's DistributedDataParallel.no_sync.
        """
        before, self._reducer.paused = self._reducer.paused, True
        try:
            yield
        finally:
            self._reducer.paused = before

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and begin a new step; raises BackwardError while some are being reduced."""
        self._reducer.clear()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def add_param_group(self, *args: Any, **kwargs: Any) -> None:
        """Add parameters, which are reduced too; on all ranks.

        They get the names that `named_parameters` or the group gives, as torch's named optimizers do, or are numbered.
        """
        super().add_param_group(*args, **kwargs)  # type: ignore[misc]
        groups, newest = self._reducer.owned, self.param_groups[-1]
        doubled = groups.doubled(newest["params"], newest.get("param_names", ()))
        if doubled:
            del self.param_groups[-1]
            raise InputError(f"add_param_group: names must differ; other parameters have these: {', '.join(doubled)}")
        groups.add(newest["params"])

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the user's class; where both have the names that torch gives, by these."""
        super().load_state_dict(in_order_of(self, state_dict), *args, **kwargs)  # type: ignore[misc,arg-type]


class UnscalingMixin(Wrapped):
    """A step that all ranks must take together: GradScaler calls it also where this rank's gradients are infinite."""

    found_inf: Any
    grad_scale: Any
    param_groups: list[dict[str, Any]]

    _step_supports_amp_scaling = True

    def _is_unscaled(self) -> bool:
        """Do what GradScaler leaves to this step: unscale the gradients; False where they are not finite."""
        given, name = vars(self), "_step_supports_amp_scaling"
        does_it_itself = name in given or getattr(super(), name, False)  # as fused ones, or all of the user's class
        if does_it_itself or given.get("found_inf") is None:
            return True
        found_inf, scale = self.found_inf, self.grad_scale
        self.found_inf = self.grad_scale = None  # the user's optimizer would refuse them; GradScaler deletes them
        if found_inf.item():
            return False
        for group in self.param_groups if scale is not None else ():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / scale.item())
        return True


def wrap(optimizer: torch.optim.Optimizer, mixin: Any, **attributes: Any) -> Any:
    """An object of a subclass of the optimizer's class that shares all its attributes, and has these.

    Methods that somebody has assigned to the user's object, such as a scheduler, come before those of its class.
    """
    kind = type(optimizer)
    _hide_from_dynamo()
    ours = {name: _Method(getattr(mixin, name)) for name in METHODS if any(name in vars(each) for each in _ours(mixin))}
    assigned = {name: staticmethod(vars(optimizer)[name]) for name in ours if name in vars(optimizer)}
    bases = (mixin, type("Assigned", (Wrapped,), assigned), kind)
    # torch's schedulers refer to the user's object weakly; Lightning cannot imitate a class that has a slot for it
    wrapped: Any = object.__new__(type(kind.__name__, bases, {**ours, "_users_object": optimizer}))
    weakref.finalize(wrapped, _let_go, weakref.ref(type(wrapped)))
    wrapped.__dict__ = vars(optimizer)  # what a scheduler, or load_state_dict, does to one is done to the other
    wrapped.__dict__.update(attributes)
    return wrapped


def _let_go(wrapped: Callable[[], Any]) -> None:
    """Of the user's object, with the wrapped one, whose class lives until garbage is collected."""
    if (kind := wrapped()) is not None:
        kind._users_object = None


class _Method:
    """A method of a mixin, before what the `__dict__` that it shares with the user's object has by this name.

    What is assigned after wrapping, as torch's schedulers do with step, is this object's alone.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._assigned: list[Callable[..., Any]] = []

    def __get__(self, optimizer: Any, kind: Any = None) -> Any:
        if optimizer is None:
            return self._function
        return self._assigned[0] if self._assigned else self._function.__get__(optimizer)

    def __set__(self, optimizer: Any, function: Callable[..., Any]) -> None:
        self._assigned = [function]

    def __delete__(self, optimizer: Any) -> None:
        self._assigned = []


def passed_on(closure: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the user's step() gets of what was passed to ours: no closure if there is none, as it may take none."""
    return () if closure is None and not args else (closure, *args)


def _ours(mixin: type) -> list[type]:
    return [each for each in mixin.__mro__ if issubclass(each, Wrapped)]


@functools.cache
def _hide_from_dynamo() -> None:
    """Let torch.compile leave out this package's code, of which it would warn."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    with contextlib.suppress(Exception):  # its name is torch's own business
        if rules is not None:
            rules.add("ringreduce")


def _unwrapped(kind: type, state: dict[str, Any]) -> Any:
    optimizer: Any = object.__new__(kind)
    optimizer.__setstate__(state)
    optimizer.register_step_pre_hook(_warn_of_copy)
    _warn_of_copy(optimizer)
    return optimizer


def _warn_of_copy(optimizer: Any, *_: Any) -> None:
    """When it is made, and at its steps: the world may be there later. Python shows a warning of one line once."""
    if not isinstance(optimizer, Wrapped) and runtime.is_initialized() and size() > 1:
        warnings.warn(
            f"this {type(optimizer).__name__} is a copy of a DistributedOptimizer. The copy does not reduce gradients; "
            "wrap it again: hvd.DistributedOptimizer(copy, model.named_parameters())",
            stacklevel=2,
        )
