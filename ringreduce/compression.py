"""Gradients in 16 bits on the wire: half the bytes, at the cost of precision before the sum.

The sum itself is made in float32 and rounded once, so ranks add no error to that of the rounding here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.errors import InputError


class Compressor:
    """What `compression=` takes: two static methods; write your own to send something else."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What is reduced instead of the tensor, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The reduced tensor in the original type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """As it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors as float16; others as they are."""

    _name = "float16"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """In 16 bits, and the type it had."""
        return _cast(tensor, cls._name)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """In the type it had."""
        return _cast_back(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Floating-point tensors as bfloat16 (float32's range, 8 bits of precision); NumPy and CuPy need ml_dtypes."""

    _name = "bfloat16"


class Compression:
    """The choices of `compression=`.

    Source: Horovod's Compression; bf16 is ours.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def compress_all(compression: type[Compressor], tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What is reduced instead of the tensors, and what `decompress_all` needs."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [context for _, context in pairs]


def decompress_all(compression: type[Compressor], tensors: Sequence[Any], contexts: Sequence[Any]) -> list[Any]:
    """The reduced tensors in their original types."""
    return [compression.decompress(tensor, context) for tensor, context in zip(tensors, contexts, strict=True)]


def _is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def _cast(tensor: Any, name: str) -> tuple[Any, Any]:
    if _is_torch(tensor):
        return (
            (tensor.to(getattr(sys.modules["torch"], name)), tensor.dtype)
            if tensor.is_floating_point()
            else (tensor, None)
        )
    array = np.asarray(tensor) if isinstance(tensor, float | np.generic) else tensor
    if getattr(array.dtype, "kind", "") != "f":
        return tensor, None
    return array.astype(_numpy_type(name)), array.dtype


def _numpy_type(name: str) -> Any:
    if name == "float16":
        return np.float16
    try:
        return importlib.import_module("ml_dtypes").bfloat16
    except ImportError as exc:
        raise InputError("Compression.bf16 of NumPy and CuPy arrays needs ml_dtypes: pip install ml_dtypes") from exc


def _cast_back(tensor: Any, dtype: Any) -> Any:
    if dtype is None:
        return tensor
    return tensor.to(dtype) if _is_torch(tensor) else tensor.astype(dtype)
