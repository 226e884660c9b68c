"""Hooks on parameters that do not keep their owner alive; each parameter has those of one owner, the newest."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

# by id of the parameter, which an owner keeps alive
_owners: weakref.WeakValueDictionary[int, GradientHooks] = weakref.WeakValueDictionary()


class GradientHooks:
    """Calls `on_gradient(parameter)` of a listener, only weakly held, when backward has added to a gradient.

    A model may be wrapped again: then its parameters lose their earlier hooks, whether the owner is gone or not.
    """

    def __init__(self, listener: Any) -> None:
        self._listener = weakref.ref(listener)
        self._waiting: list[Any] = []
        self._watched: list[Any] = []  # held, so that no other parameter gets the id
        self._handles: dict[int, Any] = {}

    def watch(self, parameter: Any) -> None:
        """Watch a parameter; a frozen one from when it is unfrozen, see `refresh`."""
        older = _owners.get(id(parameter))
        if older is not None:
            older._forget(parameter)
        _owners[id(parameter)] = self
        self._waiting.append(parameter)
        self.refresh()

    def _forget(self, parameter: Any) -> None:
        self._waiting = [each for each in self._waiting if each is not parameter]
        if id(parameter) in self._handles:
            self._handles.pop(id(parameter)).remove()

    def refresh(self) -> None:
        """Put hooks on parameters that are no longer frozen: torch refuses hooks on frozen ones."""
        thawed = [each for each in self._waiting if each.requires_grad]
        if not thawed:
            return
        self._waiting = [each for each in self._waiting if not each.requires_grad]
        for parameter in thawed:
            handle = parameter.register_post_accumulate_grad_hook(_hook(self._listener))
            self._watched.append(parameter)
            self._handles[id(parameter)] = handle
            weakref.finalize(self, handle.remove).atexit = False


def _hook(listener: weakref.ReferenceType[Any]) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        alive = listener()
        if alive is not None:
            alive.on_gradient(parameter)

    return hook


def too_often(name: str, seen: int, passes: int) -> str:
    """The message for one backward too many."""
    return (
        f"the gradient of {name!r} was computed {seen} times since the last step(), but backward_passes_per_step is "
        f"{passes}; raise it, call step() in between, or put the backward into `with optimizer.no_sync():`"
    )
