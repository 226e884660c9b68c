"""LocalSGD and DiLoCo for PyTorch: an optimizer of a subclass of the user's class; see `ringreduce.optim.local`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringreduce import runtime
from ringreduce.arrays import trees
from ringreduce.errors import InputError
from ringreduce.optim.local.options import Options
from ringreduce.optim.local.steps import HasLocalSteps, LocalSteps, Parameters
from ringreduce.torch.groups import Groups, in_order_of
from ringreduce.torch.optimizer import named_of
from ringreduce.torch.sharded import ShardedMixin
from ringreduce.torch.wrapped import UnscalingMixin, passed_on, wrap

STATE = "local steps"
"""The key in the optimizer's state, which torch saves, and an elastic state commits, as any that is no parameter's."""


def wrapped(optimizer: Any, named_parameters: Any, options: Options) -> Any:
    """The optimizer with local steps.  Raises: InputError for wrong names, and what is sharded."""
    runtime.current(options.function)
    if isinstance(optimizer, ShardedMixin):
        why = "each rank has only its part of a ShardedOptimizer, which all ranks step together"
        raise InputError(f"{options.function}: {why}; pass the original one")
    places = [
        (f"group.{number}.parameter.{index}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    ]
    owned, others, are_named = named_of(optimizer, named_parameters)
    made: Any = wrap(optimizer, LocalMixin)
    groups = made._local_groups = Groups(made, owned if are_named else places, others, are_named)

    def parameters() -> Parameters:
        if groups.have_changed():
            change = groups.change()
            groups.take(change)
            if runtime.current(options.function).world.rank == 0:
                groups.tell(change, "", "averaged")
        return {
            groups.names[id(parameter)]: parameter
            for group in made.param_groups
            for parameter in group["params"]
            if parameter.is_floating_point() or parameter.is_complex()
        }

    made._local = LocalSteps(options, parameters, lambda: made.state.setdefault(STATE, {}))
    return made


class LocalMixin(HasLocalSteps, UnscalingMixin):
    """The methods of an optimizer with local steps; precedes the user's class in the MRO."""

    state: dict[Any, Any]

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step with this rank's gradients, where GradScaler has found them finite; then average, if it is time."""
        self._local.begin()
        loss = None
        if self._is_unscaled():
            loss = super().step(*passed_on(closure, args), **kwargs)  # type: ignore[misc]
        self._local.end()
        return loss

    step.hooked = True  # type: ignore[attr-defined] # torch puts its step hooks around the user's class only

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the user's class; then the parameters become the anchors in it, so load the model's state first."""
        super().load_state_dict(in_order_of(self, state_dict), *args, **kwargs)  # type: ignore[misc,arg-type]
        found = self._local.parameters()
        self.state[STATE] = {  # a new dict, its tensors beside their parameters: torch does so with no other state
            key: {name: _beside(found.get(name), each) for name, each in value.items()} if key != "steps" else value
            for key, value in self.state.get(STATE, {}).items()
        }
        self.begin_from_anchors()


def _beside(parameter: Any, value: Any) -> Any:
    """The state of a parameter, its tensors on the same device."""
    if parameter is None:
        return value
    return trees.map_leaves(value, lambda _, leaf: leaf.to(parameter.device) if torch.is_tensor(leaf) else leaf)
