"""The reductions: what is done to elements before, while and after they travel. Arithmetic only, no messages.

    widen, prescale   ->   combine, size - 1 times   ->   divide (Average), postscale, round

All steps run in `sum_type`; the last one writes the finished elements.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np

from ringreduce.dtypes import ElementType
from ringreduce.errors import InputError


class ReduceOp(enum.Enum):
    """How the elements of all ranks become one."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"

    def __repr__(self) -> str:
        return self.value


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

# the same objects serve NumPy and CuPy arrays: CuPy implements NumPy's ufunc protocol
_UFUNC = {Average: np.add, Sum: np.add, Min: np.minimum, Max: np.maximum, Product: np.multiply}


class Reduction(NamedTuple):
    """One reduction over `size` ranks: the op, its scale factors, and the element type.

    bool:     Sum and Max are "or", Min and Product are "and"; Average and scale factors are errors.
    integers: Average divides exactly and truncates toward zero; it sums integers of up to 32 bits in int64.
              Scale factors multiply in float64 and truncate, before and after the sum, as in Horovod.
    complex:  Min and Max are errors.
    Adasum:   floating-point elements only; see collectives/adasum.py.
    """

    op: ReduceOp
    element: ElementType
    size: int
    """What an Average is divided by."""
    prescale: float = 1.0
    postscale: float = 1.0

    def check(self) -> None:
        """Raise InputError for an op or a scale factor that the element type does not have."""
        name, kind = self.element.name, self.element.kind
        if self.op is Adasum and kind not in "fc":
            raise InputError(f"{name} elements have no Adasum; pass floating-point ones, or another op")
        if kind == "b" and (self.op is Average or self.prescale != 1.0 or self.postscale != 1.0):
            raise InputError("bool elements cannot be averaged or scaled; use op=Sum or Max (or), Min or Product (and)")
        if kind == "c" and self.op in (Min, Max):
            raise InputError(f"{name} elements have no order: op={self.op!r} is not defined for them")

    @property
    def sum_type(self) -> np.dtype[Any]:
        """The type of the partial results that travel."""
        if self.op is Average and self.element.kind in "iu" and self.element.itemsize < 8:
            return np.dtype(np.int64)
        return self.element.sum_type

    @property
    def in_place(self) -> bool:
        """True when sums are made in the elements' own type, so that the caller's memory can hold them."""
        return self.sum_type == self.element.storage

    def start(self, flat: Any) -> Any:
        """The prescaled elements in `sum_type`: `flat` itself, changed in place, or a wider copy."""
        partial = flat if self.in_place else self.widen(flat)
        self.prescaled(partial)
        return partial

    def widen(self, flat: Any) -> Any:
        """A copy in `sum_type`."""
        return self.element.widen(flat) if self.element.kind == "f" else flat.astype(self.sum_type)

    def prescaled(self, partial: Any) -> None:
        """Multiply by the prescale factor, in place."""
        scale(partial, self.prescale)

    def neutral(self, flat: Any) -> None:
        """Fill `flat` (`element.storage`) with what changes no result: a rank that has joined gives it."""
        flat[...] = self._neutral()

    def _neutral(self) -> Any:
        element = self.element
        if self.op is Product:
            return element.narrow(np.ones(1, element.sum_type))[0]
        if self.op in (Min, Max) and element.kind in "iu":
            limits = np.iinfo(element.storage)
            return limits.max if self.op is Min else limits.min
        if self.op in (Min, Max) and element.kind == "f":
            infinity = np.full(1, np.inf if self.op is Min else -np.inf, element.sum_type)
            return element.narrow(infinity)[0]
        return element.kind == "b" and self.op is Min  # False is 0 in every type

    def combine(self, target: Any, source: Any) -> None:
        """Reduce `source` into `target`, in place; both of equal length, in `sum_type`."""
        with np.errstate(over="ignore", invalid="ignore"):  # inf - inf is NaN on every rank: the data's affair
            _UFUNC[self.op](target, source, out=target)

    def finish(self, partial: Any, out: Any) -> None:
        """Divide, postscale and round the reduced `partial` into `out`, the same memory when `in_place`."""
        if self.op is Average:
            divide(partial, self.size)
        scale(partial, self.postscale)
        if not self.in_place:
            out[...] = self.element.narrow(partial)


def scale(flat: Any, factor: float) -> None:
    """Multiply in place; integers in float64, truncated toward zero."""
    if factor == 1.0:
        return
    if flat.dtype.kind in "iu":
        flat[...] = np.trunc(flat * np.float64(factor)).astype(flat.dtype)
    else:
        flat *= flat.dtype.type(factor)


def divide(flat: Any, divisor: int) -> None:
    """Divide in place; integers exactly, truncated toward zero as in C."""
    if divisor == 1:
        return
    if flat.dtype.kind in "iu":
        floor = flat // flat.dtype.type(divisor)
        flat[...] = floor + ((flat < 0) & (floor * divisor != flat))
    else:
        flat /= flat.dtype.type(divisor)
