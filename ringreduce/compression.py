"""Gradients in 16 bits on the wire: half the bytes, at the cost of precision before the sum.

The sum itself is in float32 and rounded once, so the only other error is this module's rounding.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from ringreduce.arrays.torch_tensor import is_torch
from ringreduce.errors import InputError


class Compressor:
    """The interface of `compression=`: two static methods; write your own to send something else."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to reduce instead, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The reduced tensor in the original type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors as float16; others unchanged."""

    _name = "float16"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor in 16 bits, and its original type."""
        if is_torch(tensor):
            in_16_bits = getattr(sys.modules["torch"], cls._name)
            return (tensor.to(in_16_bits), tensor.dtype) if tensor.is_floating_point() else (tensor, None)
        array = np.asarray(tensor) if isinstance(tensor, int | float | complex | np.generic) else tensor
        if getattr(array.dtype, "kind", "") != "f":
            return tensor, None
        return array.astype(_numpy_type(cls._name)), array.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor in its original type."""
        if ctx is None:
            return tensor
        return tensor.to(ctx) if is_torch(tensor) else tensor.astype(ctx)


class BF16Compressor(FP16Compressor):
    """Floating-point tensors as bfloat16 (float32's range, 8 bits of precision); NumPy and CuPy need ml_dtypes."""

    _name = "bfloat16"


class Compression:
    """The choices of `compression=`, as in Horovod; bf16 is an addition."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _numpy_type(name: str) -> Any:
    if name == "float16":
        return np.float16
    try:
        return importlib.import_module("ml_dtypes").bfloat16
    except ImportError as exc:
        raise InputError("Compression.bf16 of NumPy and CuPy arrays needs ml_dtypes: pip install ml_dtypes") from exc
