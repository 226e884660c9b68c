"""The table of element types: each one's name, storage type, and the type of its sums.

16-bit floats are summed in float32 and rounded once. NumPy has no bfloat16, so its elements are stored as uint16;
ml_dtypes is not needed, but arrays of its bfloat16 are accepted.

Elements of any other type of a fixed size are moved, as bytes, and not reduced.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ringreduce.errors import UnsupportedArrayError
from ringreduce.kernels import half


class ElementType(NamedTuple):
    """One row of the table."""

    name: str
    storage: np.dtype[Any]  # NumPy's type of the elements in memory; uint16 for bfloat16
    kind: str  # b: bool, i: signed, u: unsigned, f: float, c: complex, V: bytes, which are only moved
    sum_type: np.dtype[Any]  # the type of sums; wider than `storage` for 16-bit floats

    @property
    def itemsize(self) -> int:
        """Bytes of an element in memory, and in a message of finished values."""
        return self.storage.itemsize

    @property
    def is_half(self) -> bool:
        """True for float16 and bfloat16."""
        return self.storage != self.sum_type

    def widen(self, flat: Any) -> Any:
        """A copy of `flat` (NumPy, `storage` elements) in `sum_type`."""
        if not self.is_half:
            return flat.astype(self.sum_type)
        wide = np.empty(flat.shape, np.float32)
        half.widen(self.name, flat, wide)
        return wide

    def narrow(self, values: Any) -> Any:
        """Round `values` (NumPy or CuPy, `sum_type` elements) to `storage`, to nearest, ties to even; NaN stays NaN."""
        if self.is_half and isinstance(values, np.ndarray):
            rounded = np.empty(values.shape, self.storage)
            half.narrow(self.name, values, rounded)
            return rounded
        if self.name == "bfloat16":
            return _bfloat16_bits(values)
        with np.errstate(all="ignore"):  # rounds past the largest float16 to infinity, as every framework does
            return values.astype(self.storage)


def _bfloat16_bits(values: Any) -> Any:
    """On a GPU: the upper halves of float32 values, rounded to nearest even (a carry may rightly reach infinity)."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)  # rounding could carry a NaN's payload into infinity
    is_nan = values != values
    return (rounded * ~is_nan + quiet_nan * is_nan).astype(np.uint16)


def _row(name: str) -> ElementType:
    if name in ("float16", "bfloat16"):
        return ElementType(name, np.dtype("float16" if name == "float16" else "uint16"), "f", np.dtype("float32"))
    return ElementType(name, np.dtype(name), np.dtype(name).kind, np.dtype(name))


_INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
TABLE = {name: _row(name) for name in ("bool", *_INTEGERS, *_FLOATS)}


@functools.lru_cache(maxsize=256)
def element_type(dtype: Any) -> ElementType:
    """The row of a dtype of NumPy, CuPy, ml_dtypes or torch, by its name, or one of bytes.

    Raises: UnsupportedArrayError for elements that refer to memory elsewhere, as Python's objects do.
    """
    name = str(dtype).removeprefix("torch.")
    if name in TABLE:
        return TABLE[name]
    refers = getattr(dtype, "hasobject", False) or getattr(dtype, "kind", "") == "T"
    if refers or not dtype.itemsize:
        cure = "pass numbers, such as numpy.array(..., float), or use broadcast_object or allgather_object"
        raise UnsupportedArrayError(f"elements of type {name} have no fixed size; {cure}")
    nbytes = dtype.itemsize
    storage = np.dtype(f"u{nbytes}" if nbytes in (1, 2, 4, 8) else f"V{nbytes}")
    return ElementType(name, storage, "V", storage)


def check_reducible(element: ElementType, where: str = "") -> None:
    """Raise UnsupportedArrayError for elements that are only moved.  where: begins the message."""
    if element.kind == "V":
        raise UnsupportedArrayError(
            f"{where}elements of type {element.name} can be moved, but not reduced: {_instead_of(element)}"
        )


def _instead_of(element: ElementType) -> str:
    if element.name[0] in "<>" and element.name[1] in "biufc":
        return "they are in the byte order of other machines: pass array.astype(array.dtype.newbyteorder('='))"
    if element.name.startswith(("datetime", "timedelta")):
        return "pass array.view('int64')"
    if element.name.startswith(("float", "complex", "int", "uint")):
        wider = "complex64" if element.name == "complex32" else "float64" if element.itemsize > 2 else "float32"
        return f"convert them, such as array.astype('{wider}') or tensor.to(torch.{wider})"
    return "they can be broadcast, gathered and exchanged only"
