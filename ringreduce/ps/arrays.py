"""NumPy arrays of any library's, and back."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ringreduce.arrays.gpu_buffer import is_cupy
from ringreduce.arrays.torch_tensor import is_torch
from ringreduce.gpu.runtime import cupy


def to_numpy(array: Any) -> Any:
    """The array's values; in its own memory where that is possible."""
    if is_torch(array):
        return array.detach().cpu().numpy()
    return array.get() if is_cupy(array) else np.asarray(array)


def as_kind(original: Any, values: Any) -> Any:
    """The values as an array of the original's kind, on its device."""
    if is_torch(original):
        return sys.modules["torch"].as_tensor(values, device=original.device)
    return cupy().asarray(values) if is_cupy(original) else values
