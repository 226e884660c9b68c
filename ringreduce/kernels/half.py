"""16-bit floats to float32 and back, by the fastest kernels available. All produce the same bits.

numba   where it is installed: a thread imports it and compiles its kernels from the first reduction of 16-bit floats
        on; until then, one of the others. Ranks need not change at once, since the bits are the same
torch   where the user has imported it
NumPy   otherwise
"""

from __future__ import annotations

import sys
from types import ModuleType

from ringreduce.kernels import half_numpy
from ringreduce.kernels.half_numpy import Kernels
from ringreduce.kernels.optional import compiled_meanwhile, imported


def kernels(name: str) -> Kernels:
    """The kernels of "float16" or "bfloat16"."""
    found: Kernels = _module().KERNELS[name]
    return found


def kernel_name() -> str:
    """The library whose kernels are used now: "numba", "torch" or "numpy"."""
    return _module().__name__.rpartition("_")[2]


def _module() -> ModuleType:
    return (
        compiled_meanwhile("half_numba") or (imported("half_torch") if "torch" in sys.modules else None) or half_numpy
    )
