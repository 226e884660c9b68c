"""Hooks on parameters that do not keep their owner alive; each parameter has those of one owner, the newest."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

# by id of the parameter, which an owner keeps alive
_owners: weakref.WeakValueDictionary[int, GradientHooks] = weakref.WeakValueDictionary()


class GradientHooks:
    """Calls `on_gradient(gradient)` of a listener, only weakly held, when backward has added to a gradient.

    A model may be wrapped again: then its parameters lose their earlier hooks, whether the owner is gone or not.
    """

    def __init__(self, listener: Any) -> None:
        self._listener = weakref.ref(listener)
        self._waiting: list[Any] = []
        self._removals: dict[int, Callable[[], object]] = {}

    def watch(self, gradient: Any) -> None:
        """Watch a gradient's parameter; a frozen one from when it is unfrozen, see `refresh`."""
        key = id(gradient.parameter)
        older = _owners.get(key)
        if older is not None:
            older.forget(key)
        _owners[key] = self
        self._waiting.append(gradient)
        self.refresh()

    def forget(self, key: int) -> None:
        """Watch the parameter of this id no more."""
        self._waiting = [each for each in self._waiting if id(each.parameter) != key]
        if key in self._removals:
            self._removals.pop(key)()

    def refresh(self) -> None:
        """Put hooks on parameters that are no longer frozen: torch refuses hooks on frozen ones."""
        thawed = self._waiting and [each for each in self._waiting if each.parameter.requires_grad]
        if not thawed:
            return
        self._waiting = [each for each in self._waiting if not each.parameter.requires_grad]
        for gradient in thawed:
            handle = gradient.parameter.register_post_accumulate_grad_hook(_hook(self._listener, gradient))
            removal = self._removals[id(gradient.parameter)] = weakref.finalize(self, handle.remove)
            removal.atexit = False


def _hook(listener: weakref.ReferenceType[Any], gradient: Any) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        alive = listener()
        if alive is not None:
            alive.on_gradient(gradient)

    return hook


def has_other_hooks(parameter: torch.Tensor) -> bool:
    """Whether a script calls functions of its own, too, when backward has added to a parameter's gradient."""
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > 1


def too_often(name: str, seen: int, passes: int) -> str:
    """The message for one backward too many."""
    return (
        f"the gradient of {name!r} was computed {seen} times since the last step(), but backward_passes_per_step is "
        f"{passes}; raise it, call step() in between, or put the backward into `with optimizer.no_sync():`"
    )
