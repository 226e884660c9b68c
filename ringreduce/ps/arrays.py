"""NumPy arrays of any library's, and back."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ringreduce.arrays.gpu_buffer import is_cupy, uploaded
from ringreduce.arrays.torch_tensor import is_torch
from ringreduce.errors import UnsupportedArrayError


def to_numpy(array: Any) -> Any:
    """The array's values; in its own memory where that is possible. NumPy cannot compute with bfloat16: as float32."""
    if is_torch(array):
        array = array.detach().cpu()
        return (array.float() if _is_bfloat16(array) else array).numpy()
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedArrayError("a masked array would lose its mask; pass array.filled(value)")
    array = array.get() if is_cupy(array) else np.asarray(array)
    return array.astype(np.float32) if _is_bfloat16(array) else array


def as_kind(original: Any, values: Any) -> Any:
    """The values as an array of the original's kind and type, on its device."""
    if is_torch(original):
        return sys.modules["torch"].as_tensor(values, dtype=original.dtype, device=original.device)
    if is_cupy(original):
        return uploaded(values, original.device.id)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(original, jax.Array):
        return jax.device_put(values.astype(original.dtype), original.sharding if original.committed else None)
    return values.astype(original.dtype, copy=False) if _is_bfloat16(original) else values


def _is_bfloat16(array: Any) -> bool:
    return str(getattr(array, "dtype", "")).removeprefix("torch.") == "bfloat16"
