"""Kernel modules whose library may be absent, or not work here."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def imported(name: str) -> ModuleType | None:
    """The module of this package, or None where it cannot be imported."""
    try:
        return importlib.import_module(f"ringreduce.kernels.{name}")
    except Exception:  # such as a numba that does not fit this NumPy: other kernels can do it
        return None


def with_numba(name: str) -> ModuleType | None:
    """As `imported`, for a module that needs numba, and whose is_usable() says whether it works here."""
    if importlib.util.find_spec("numba") is None:
        return None
    module = imported(name)
    return module if module is not None and module.is_usable() else None
