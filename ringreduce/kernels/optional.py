"""Modules of kernels whose library may be absent, or not work here."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def imported(name: str) -> ModuleType | None:
    """The module of this package, or None where it cannot be imported."""
    try:
        return importlib.import_module(f"ringreduce.kernels.{name}")
    except Exception:  # a numba that does not fit this NumPy, a torch that was half removed: others can do it
        return None


def with_numba(name: str) -> ModuleType | None:
    """The same of a module that needs numba, and tells by is_usable() whether that serves it."""
    if importlib.util.find_spec("numba") is None:
        return None
    module = imported(name)
    return module if module is not None and module.is_usable() else None
