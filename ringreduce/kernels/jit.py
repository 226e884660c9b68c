"""numba, for the kernels that NumPy lacks. Only kernel modules import this, and they are imported when needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

numba: Any = importlib.import_module("numba")
extending: Any = importlib.import_module("numba.extending")
ir: Any = importlib.import_module("llvmlite.ir")


if numba.core.config.DISABLE_JIT or numba.core.config.CPU_NAME or numba.core.config.CPU_FEATURES:
    raise ImportError("numba is configured not to compile, or to compile for another processor")


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile at the first call with arguments of each type; kept in numba's cache on disk. Does not hold the GIL."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        kernel: Callable[..., None] = numba.njit(function, cache=True, **options)
    except RuntimeError:  # no directory for the cache
        kernel = numba.njit(function, **options)
    return kernel
