"""Kernel modules whose library may be absent, or not work here."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def imported(name: str) -> ModuleType | None:
    """The module of this package, or None where it cannot be imported."""
    try:
        return importlib.import_module(f"ringreduce.kernels.{name}")
    except Exception:  # such as a numba that does not fit this NumPy: other kernels can do it
        return None
