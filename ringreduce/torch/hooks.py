"""Hooks on parameters that do not keep their owner alive, of which the newest alone is heard."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_owners: weakref.WeakValueDictionary[int, GradientHooks] = weakref.WeakValueDictionary()
"""By id of the parameter, which an owner keeps alive."""


class GradientHooks:
    """Calls `on_gradient(parameter)` when backward has added to a parameter's gradient.

    A model may be wrapped again: its earlier hooks are silent from then on, whether their owner is gone or not.
    """

    def __init__(self, on_gradient: Callable[[Any], None]) -> None:
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._waiting: list[Any] = []
        self._watched: list[Any] = []  # held, so that no other parameter gets the id

    def watch(self, parameter: Any) -> None:
        """Hear of a parameter; one that is frozen now from when it is not any more, see `refresh`."""
        _owners[id(parameter)] = self
        self._waiting.append(parameter)
        self.refresh()

    def refresh(self) -> None:
        """Put hooks on parameters that were frozen, and are not any more: torch refuses them before."""
        thawed = [each for each in self._waiting if each.requires_grad]
        if not thawed:
            return
        self._waiting = [each for each in self._waiting if not each.requires_grad]
        for parameter in thawed:
            handle = parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self)))
            self._watched.append(parameter)
            weakref.finalize(self, handle.remove).atexit = False

    def hear(self, parameter: Any) -> None:
        """Called by autograd."""
        on_gradient = self._on_gradient()
        if on_gradient is not None and _owners.get(id(parameter)) is self:
            on_gradient(parameter)


def _hook(owner: weakref.ReferenceType[GradientHooks]) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        hooks = owner()
        if hooks is not None:
            hooks.hear(parameter)

    return hook


def too_often(name: str, seen: int, passes: int) -> str:
    """The message when backward came once more than it may."""
    return (
        f"the gradient of {name!r} was computed {seen} times since the last step(), but backward_passes_per_step is "
        f"{passes}; raise it, call step() in between, or put the backward into `with optimizer.no_sync():`"
    )
