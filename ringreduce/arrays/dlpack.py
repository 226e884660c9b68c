"""Arrays of other libraries, such as JAX, through DLPack."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ringreduce.arrays.buffer import Buffer, numpy_buffer
from ringreduce.arrays.cuda import cupy
from ringreduce.arrays.gpu_buffer import cupy_buffer
from ringreduce.errors import UnsupportedArrayError

DLPACK_CPU, DLPACK_CUDA = 1, 2  # DLPack's device types


def is_traced(array: Any) -> bool:
    """True for a value inside jax.jit, which has no elements yet."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


def is_on_gpu(array: Any) -> bool:
    """True for memory of a CUDA GPU."""
    return hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] == DLPACK_CUDA


def foreign_gpu_buffer(array: Any, writable: bool) -> Buffer:
    """JAX and others: DLPack orders CuPy's current stream after their work. Results are CuPy arrays."""
    if writable:
        raise UnsupportedArrayError(_cannot_change(array))
    return cupy_buffer(cupy().from_dlpack(array), writable)


def dlpack_buffer(array: Any, writable: bool) -> Buffer:
    """The buffer of host memory."""
    device_type, _ = array.__dlpack_device__()
    if device_type != DLPACK_CPU:
        raise UnsupportedArrayError(
            f"{a_kind_of(array)} on DLPack device {device_type}; move it to the CPU or a CUDA GPU"
        )
    try:
        view = np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as exc:
        if not hasattr(array, "__array__"):
            raise UnsupportedArrayError(f"{a_kind_of(array)} that NumPy cannot view through DLPack: {exc}") from exc
        view = np.asarray(array)  # JAX's bfloat16: DLPack has it, NumPy only through ml_dtypes
        view.flags.writeable = False
    if writable and not view.flags.writeable:
        raise UnsupportedArrayError(_cannot_change(array))
    return numpy_buffer(view, writable)


def _cannot_change(array: Any) -> str:
    return (
        f"{a_kind_of(array)} cannot be changed in place; use the function without the underscore, or broadcast_object "
        "instead of broadcast_parameters"
    )


def a_kind_of(array: Any) -> str:
    """The name of an object's type with its article, for error messages; None itself."""
    if array is None:
        return "None"
    kind = type(array)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
