"""Kernel modules whose library may be absent, or not work here."""

from __future__ import annotations

import functools
import importlib
import threading
from types import ModuleType


@functools.cache
def imported(name: str) -> ModuleType | None:
    """The module of this package, or None where it cannot be imported."""
    try:
        return importlib.import_module(f"ringreduce.kernels.{name}")
    except Exception:  # such as a numba that does not fit this NumPy: other kernels can do it
        return None


def compiled_meanwhile(name: str, *case: int) -> ModuleType | None:
    """The module, when a thread has imported it and compiled its kernels for this case; None before, or if that failed.

    Meanwhile other kernels can do it: if this thread imported numba, the other ranks would wait for seconds.
    """
    return None if _compiling(name, *case).is_alive() else _compiled(name, *case)


@functools.cache
def _compiling(name: str, *case: int) -> threading.Thread:
    """No daemon: LLVM must be done before the process unloads it."""
    thread = threading.Thread(target=_compiled, args=(name, *case), name="ringreduce compiles")
    thread.start()
    return thread


@functools.cache
def _compiled(name: str, *case: int) -> ModuleType | None:
    """The module with its kernels compiled; None where it cannot be imported, or they do not work."""
    module = imported(name)
    try:
        if module is not None:
            module.compile_kernels(*case)
    except Exception:  # a numba that does not fit this NumPy
        return None
    return module
