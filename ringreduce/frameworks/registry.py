"""Whose an optimizer is: the frameworks that have an adapter here, which is imported when an optimizer needs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def _of_torch(optimizer: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(optimizer, torch.optim.Optimizer)


def _of_optax(optimizer: Any) -> bool:
    """True for a gradient transformation: a pair of functions, of no class of its own."""
    return isinstance(optimizer, tuple) and hasattr(optimizer, "init") and hasattr(optimizer, "update")


def _of_keras(optimizer: Any) -> bool:
    libraries = [sys.modules[each].optimizers for each in ("keras", "tf_keras") if sys.modules.get(each) is not None]
    legacy = [each.legacy for each in libraries if hasattr(each, "legacy")]  # of tf_keras
    return isinstance(optimizer, tuple(each.Optimizer for each in libraries + legacy if hasattr(each, "Optimizer")))


ADAPTERS: dict[str, Callable[[Any], bool]] = {"torch": _of_torch, "jax": _of_optax, "keras": _of_keras}
"""By the name of the adapter: whether an optimizer is its framework's."""


def adapter_of(optimizer: Any) -> str:
    """The name of the adapter that works with an optimizer; empty for one of no framework."""
    return next((name for name, owns in ADAPTERS.items() if owns(optimizer)), "")


def adapter(name: str) -> Any:
    """The module of an adapter, such as torch, or of a part of one, such as torch.local."""
    return importlib.import_module(f"ringreduce.{name}")
