"""Gradients in fewer bits on the wire, at the cost of precision.

In 16 bits they are rounded before the sum, by this module: that is in float32, and rounded once. In 8 or 4 bits they
are only where they travel: `Quantized` says so to the all-reduce, whose collectives/quantized.py encodes them.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import numpy as np

from ringreduce.arrays.torch_tensor import is_torch
from ringreduce.errors import InputError
from ringreduce.kernels import half, quantized

_WIDE = np.dtype(np.float32), np.dtype(np.float64)


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
        dtype: Any = getattr(tensor, "dtype", None)
        if _is_tensorflow(dtype):
            return (sys.modules["tensorflow"].cast(tensor, cls._name), dtype) if dtype.is_floating else (tensor, None)
        array = np.asarray(tensor) if isinstance(tensor, int | float | complex | np.generic) else tensor
        if getattr(getattr(array, "dtype", None), "kind", "") != "f":  # what is no array is refused with its name
            return tensor, None
        return _converted(array, np.dtype(_numpy_type(cls._name))), array.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor in its original type."""
        if ctx is None:
            return tensor
        if _is_tensorflow(ctx):
            return sys.modules["tensorflow"].cast(tensor, ctx)
        return tensor.to(ctx) if is_torch(tensor) else _converted(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Floating-point tensors as bfloat16 (float32's range, 8 bits of precision); NumPy and CuPy need ml_dtypes."""

    _name = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Quantized(NoneCompressor):
    """Floating-point elements in 8 or 4 bits where an all-reduce sends them from host to host, and only there.

    is_everywhere, is_stochastic: see `everywhere` and `stochastic`.

    Error: of each host's elements, and once more of the sum, half a scale at most, a 127th (4 bits: a 7th) of the
           largest magnitude among 256 neighbours; stochastic: a whole scale.
    """

    bits: int
    is_everywhere: bool = False
    is_stochastic: bool = False

    @property
    def everywhere(self) -> Quantized:
        """The same between all ranks, those of one host too; without it nothing is encoded inside a host."""
        return dataclasses.replace(self, is_everywhere=True)

    @property
    def stochastic(self) -> Quantized:
        """The same, rounded up or down at random, so that the mean error is 0; for 4 bits."""
        if self.bits != 4:
            raise InputError(
                f"{self}.stochastic: only 4 bits are rounded stochastically; use Compression.int4.stochastic"
            )
        return dataclasses.replace(self, is_stochastic=True)

    def blocks(self, count: int) -> Any:
        """Memory for so many elements, encoded: an array whose elements are blocks; see kernels/quantized.py."""
        return np.empty(-(-count // quantized.BLOCK), np.dtype((np.void, quantized.block_bytes(self.bits))))

    def __repr__(self) -> str:
        options = ".everywhere" * self.is_everywhere + ".stochastic" * self.is_stochastic
        return f"Compression.int{self.bits}{options}"


AnyCompressor = type[Compressor] | Quantized
"""What `compression=` takes."""


def check_compression(compression: object, is_one: bool = True) -> None:
    """Raise InputError for what cannot be a `compression=`.  is_one: the caller has found nothing wrong with it."""
    if not is_one or not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise InputError(
            f"compression={compression!r}; expected Compression.none, .fp16, .bf16, .int8, .int4, PowerSGD(…) for an "
            "optimizer, or a class with the static methods compress(tensor) -> (tensor, ctx) and "
            "decompress(tensor, ctx)"
        )


def wire_of(compression: object) -> Quantized | None:
    """The format that an all-reduce shall send its elements in; None for that of the elements."""
    return compression if isinstance(compression, Quantized) else None


class Compression:
    """The choices of `compression=`, as in Horovod; bf16, int8 and int4 are additions."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Quantized(8)
    int4 = Quantized(4)


def _is_tensorflow(dtype: Any) -> bool:
    """Of one of its tensors, which a script's own compressor may hand on: our operations see NumPy's arrays."""
    return isinstance(dtype, getattr(sys.modules.get("tensorflow"), "DType", ()))


def _converted(array: Any, dtype: np.dtype[Any]) -> Any:
    """A copy in another type; `astype` takes many times as long where elements are subnormal float16."""
    narrows = dtype.itemsize == 2
    short, wide = (dtype, array.dtype) if narrows else (array.dtype, dtype)
    if not isinstance(array, np.ndarray) or wide not in _WIDE or isinstance(array, np.ma.MaskedArray):
        with np.errstate(all="ignore"):
            return array.astype(dtype)
    array = np.asarray(array)
    source = array if array.flags.forc else np.ascontiguousarray(array)
    result = np.empty_like(source, dtype, subok=False)
    flat, target = source.ravel("K"), result.ravel("K")  # views
    name, stored = ("float16", np.float16) if short == np.float16 else ("bfloat16", np.uint16)
    if narrows:
        half.narrow(name, flat, target.view(stored))
    else:
        half.widen(name, flat.view(stored), target)
    return result


def _numpy_type(name: str) -> Any:
    if name == "float16":
        return np.float16
    try:
        return importlib.import_module("ml_dtypes").bfloat16
    except ImportError as exc:
        raise InputError("Compression.bf16 of NumPy and CuPy arrays needs ml_dtypes: pip install ml_dtypes") from exc
