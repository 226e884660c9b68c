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
from ringreduce.api.world import size
from ringreduce.errors import InputError
from ringreduce.optim.exchange import Exchange, check_passes
from ringreduce.optim.parameters import Named


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

    @property
    def _exchange(self) -> Exchange:
        """As of an optimizer of no framework."""
        exchange: Exchange = self._reducer.exchange
        return exchange

    @property
    def _parameter_names(self) -> dict[Any, str]:
        """Horovod's: the name of each parameter."""
        names: dict[Any, str] = self._reducer.names
        return names

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes are summed before they are reduced."""
        passes: int = self._reducer.passes
        return passes

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and begin a new step; raises BackwardError while some are being reduced."""
        self._reducer.clear()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are reduced too; on all ranks.

        They get the names that the group gives, as torch's named optimizers do, or are numbered.
        """
        super().add_param_group(param_group)  # type: ignore[misc]
        self._reducer.add(_name_newest_group(self.param_groups, set(self._reducer.names.values())))


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
    """An object of a subclass of the optimizer's class that shares all its attributes, and has these."""
    kind = type(optimizer)
    _hide_from_dynamo()
    wrapped: Any = object.__new__(type(kind.__name__, (mixin, kind), {}))
    wrapped.__dict__ = vars(optimizer)  # what a scheduler, or load_state_dict, does to one is done to the other
    scheduled = wrapped.__dict__.pop("step", None)
    if hasattr(scheduled, "_wrapped_by_lr_sched"):
        wrapped.__dict__["step"] = _watched_step(wrapped)
    wrapped.__dict__.update(attributes)
    if (reducer := wrapped.__dict__.get("_reducer")) is not None:
        reference = weakref.ref(wrapped)
        reducer.groups = lambda: getattr(reference(), "param_groups", [])
    return wrapped


def _name_newest_group(param_groups: list[dict[str, Any]], taken: set[str]) -> Named:
    """The parameters of the last group with their names; raises InputError when another parameter has the name."""
    number = len(param_groups) - 1
    group = param_groups[number]
    parameters = group["params"]
    names = group.get("param_names") or [f"group.{number}.parameter.{index}" for index in range(len(parameters))]
    doubled = sorted(taken.intersection(names))
    if doubled:
        raise InputError(f"add_param_group: names must differ; other parameters have these: {', '.join(doubled)}")
    return list(zip(names, parameters, strict=True))


@functools.cache
def _hide_from_dynamo() -> None:
    """Let torch.compile leave out this package's code, of which it would warn."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    with contextlib.suppress(Exception):  # its name is torch's own business
        if rules is not None:
            rules.add("ringreduce")


def _watched_step(wrapped: Any) -> Callable[..., Any]:
    """The step of an optimizer whose scheduler was made before it was wrapped, and watches that step() is called."""
    reference = weakref.ref(wrapped)

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        if optimizer is None:
            raise InputError("step(): the DistributedOptimizer around this optimizer is gone; wrap it again")
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


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
