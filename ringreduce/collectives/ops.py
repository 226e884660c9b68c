"""The reductions: what is done to elements before, while and after they travel. Arithmetic only, no messages.

    widen, prescale   ->   combine, size - 1 times   ->   divide (Average), postscale, round

All steps run in `sum_type`; the last one writes the finished elements.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce.arrays.dtypes import ElementType, check_reducible
from ringreduce.compression import Quantized
from ringreduce.errors import InputError
from ringreduce.kernels import half, native

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum"]


class ReduceOp(enum.Enum):
    """How the elements of all ranks become one."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"
    BITWISE_AND, BITWISE_OR = "BitwiseAnd", "BitwiseOr"  # these and the next: torch.distributed's, in host memory
    BITWISE_XOR = "BitwiseXor"

    __hash__ = object.__hash__  # an enum's own is slow, and each call looks its op up

    def __repr__(self) -> str:
        return self.value


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
_BITWISE = {
    ReduceOp.BITWISE_AND: np.bitwise_and,
    ReduceOp.BITWISE_OR: np.bitwise_or,
    ReduceOp.BITWISE_XOR: np.bitwise_xor,
}

NEUTRAL_UNSCALED = Min, Max, Product, ReduceOp.BITWISE_AND
"""Their neutral elements are not 0, so a prescale factor would change them."""

# they serve CuPy arrays too: CuPy implements NumPy's ufunc protocol
_UFUNC = {Average: np.add, Sum: np.add, Min: np.minimum, Max: np.maximum, Product: np.multiply, **_BITWISE}


# in the order of kernels/native.c
_INTEGERS = [f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in ("uint", "int")]
_COMPILED_TYPES = ["float32", "float64", "float16", "bfloat16", *_INTEGERS]
_COMPILED_OPS = {Sum: 0, Average: 0, Min: 1, Max: 2, Product: 3}

BLOCK_BYTES = 128 * 1024  # of partial results at a time: two blocks stay in a core's second-level cache


PAIR = np.dtype([("high", np.int64), ("low", np.int64)])
"""A sum of 64-bit integers x: that of x >> 32, and that of x & 0xFFFFFFFF. Neither overflows below 2**31 ranks, and the
words of two partial results are added each on its own."""


class _Fields(NamedTuple):
    op: ReduceOp
    element: ElementType
    size: int  # divisor of an Average
    prescale: float = 1.0
    postscale: float = 1.0
    is_part: bool = False  # see `part`
    is_rounded: bool = False  # see `on_wire`
    wire: Quantized | None = None  # the format of elements that collectives/quantized.py sends
    seed: tuple[int, ...] = ()  # of its stochastic rounding, equal on all ranks


class Reduction(_Fields):
    """One reduction over `size` ranks: the op, its scale factors, and the element type.

    bool:     Sum and Max are "or", Min and Product are "and"; Average and scale factors are errors.
    integers: Average is exact, and truncated toward zero: it sums integers of up to 32 bits in int64, longer ones in
              two words (see PAIR). Other sums that are too large wrap around, as NumPy's. Scale factors multiply in
              float64 and truncate, before and after the sum, as in Horovod.
    complex:  Min and Max are errors.
    Adasum:   floating-point elements only; see collectives/adasum.py.
    """

    def check(self) -> None:
        """Raise InputError for an op or a scale factor that the element type does not support."""
        name, kind = self.element.name, self.element.kind
        check_reducible(self.element)
        if self.op is Adasum and kind not in "fc":
            raise InputError(f"Adasum is not defined for {name} elements; pass floating-point ones, or another op")
        if kind == "b" and (self.op is Average or self.prescale != 1.0 or self.postscale != 1.0):
            raise InputError("bool elements cannot be averaged or scaled; use op=Sum or Max (or), Min or Product (and)")
        if self.op in _BITWISE and kind not in "biu":
            raise InputError(f"{name} elements have no bits to combine: op={self.op!r} is for integers and bool")
        if kind == "c" and self.op in (Min, Max):
            raise InputError(f"{name} elements have no order: op={self.op!r} is not defined for them")

    @functools.cached_property
    def sum_type(self) -> np.dtype[Any]:
        """The type of the partial results that travel."""
        if self.op is Average and self.element.kind in "iu":
            return PAIR if self.is_paired else np.dtype(np.int64)
        if self.is_rounded:
            return self.element.storage
        return self.element.sum_type if self.wire is None else np.dtype(np.float32)

    @functools.cached_property
    def is_paired(self) -> bool:
        """True where partial results have two words: the sum of 64-bit integers may need more than 64 bits."""
        return self.op is Average and self.element.kind in "iu" and self.element.itemsize == 8 and self.size > 1

    @functools.cached_property
    def in_place(self) -> bool:
        """True when sums have the elements' own type, so that the caller's memory can hold them."""
        return self.sum_type == self.element.storage

    @property
    def divisor(self) -> int:
        """What the sum is divided by."""
        return self.size if self.op is Average else 1

    def part(self) -> Reduction:
        """That of some of the ranks, whose results have `sum_type`: not divided, postscaled or rounded."""
        if self.in_place:
            return self._replace(op=Sum if self.op is Average else self.op, postscale=1.0, is_rounded=False)
        return self._replace(is_part=True)

    def on_wire(self) -> Reduction:
        """That of several hosts: partial results of 16-bit floats travel as 16 bits, rounded after each sum.

        Where the sum of float16 is divided or scaled down at the end, a power of two of that comes first, so that no
        partial result overflows whose finished one does not. Of partial results that are subnormal then, below 6e-5, it
        costs as many bits.
        """
        if not self.element.is_half or self.is_rounded or self.wire is not None:
            return self
        first, factor = 1.0, abs(self.postscale) / (self.size if self.op is Average else 1)
        if self.element.name == "float16" and self.op in (Sum, Average) and 0 < factor < 1:
            first = 2.0 ** (math.frexp(factor)[1] - 1)
        return self._replace(prescale=self.prescale * first, postscale=self.postscale / first, is_rounded=True)

    def of_bucket(self, number: int) -> Reduction:
        """The same for one of the buckets: in each, stochastic rounding draws other numbers."""
        return self._replace(seed=(*self.seed, number)) if self.seed else self

    def _of_rounded(self, *parts: Any, **changes: Any) -> None:
        """Reduce 16-bit parts into the first one; in float32, rounded once."""
        raw = Reduction(Sum if self.op is Average else self.op, self.element, self.size)
        raw._replace(**changes).reduce_parts(parts, parts[0])

    def reduce_parts(self, parts: Sequence[Any], out: Any) -> None:
        """Reduce the elements of several ranks into `out`: prescale each, combine in this order, divide, round once.

        Shape:  1-D arrays of `element.storage`, equal lengths, not prescaled. `out` may be one of them, but must not
                overlap one otherwise; the other parts are not changed.
        Result: the bits of each element depend on that element of the parts alone, not on how an array was cut.
        Cost:   each part is read once, `out` written once. Memory: two blocks of BLOCK_BYTES; by the compiled module
                8 KiB.
        """
        if self._is_compiled(*parts, out):
            native.module.reduce([*parts], out, None, *self.compiled)  # type: ignore[misc]
        else:
            with np.errstate(all="ignore"):  # whatever the calling thread has set
                self._reduce_arrays(parts, out)

    def reduce_to_two(self, parts: Sequence[Any], out: Any, copy: Any) -> None:
        """As `reduce_parts`, into `out` and `copy`, which overlaps no part.

        Cost: as `reduce_parts`; `copy` written once, and by NumPy's passes `out` is read once more for it.
        """
        if self._is_compiled(*parts, out, copy):
            native.module.reduce([*parts], out, copy, *self.compiled)  # type: ignore[misc]
        else:
            self.reduce_parts(parts, out)
            copy[...] = out

    @functools.cached_property
    def compiled(self) -> tuple[int, int, float, float, float] | None:
        """The compiled module's type and op, prescale factor, divisor, postscale factor; None: it has none."""
        is_raw = self.op is not Average and not self._is_scaled
        if self.is_part or self.element.name not in _COMPILED_TYPES or self.op not in _COMPILED_OPS:
            return None
        if self.element.kind != "f" and not is_raw:
            return None
        numbers = _COMPILED_TYPES.index(self.element.name), _COMPILED_OPS[self.op]
        return *numbers, self.prescale, float(self.divisor), self.postscale

    def _is_compiled(self, *arrays: Any) -> bool:
        """True where the compiled module reduces these arrays."""
        if native.module is None or self.compiled is None or len(arrays) > native.MOST_PARTS:
            return False
        for each in arrays:  # noqa: SIM110, a generator takes a call for each
            if not each.flags.c_contiguous:
                return False
        return True

    @functools.cached_property
    def _is_scaled(self) -> bool:
        return self.prescale != 1.0 or self.postscale != 1.0

    @functools.cached_property
    def _is_plain(self) -> bool:
        """True when the sum of the raw elements is the result."""
        return self.in_place and not self._is_scaled and (self.op is not Average or self.size == 1)

    def _reduce_arrays(self, parts: Sequence[Any], out: Any) -> None:
        if len(parts) == 2 and self.in_place and self.prescale == 1.0:
            _UFUNC[self.op](parts[0], parts[1], out=out)  # needs no scratch, so no blocks
            if not self._is_plain:
                self.finish(out, out)
            return
        step = BLOCK_BYTES // self.sum_type.itemsize
        total, other = (np.empty(min(step, len(out)), self.sum_type) for _ in range(2))
        reduce_block = self._reduce_in_place if self.in_place and self.prescale == 1.0 else self._reduce_wider
        for low in range(0, len(out), step):
            here, length = slice(low, low + step), min(step, len(out) - low)
            reduce_block([part[here] for part in parts], out[here], total[:length], other[:length])

    def _reduce_in_place(self, parts: Sequence[Any], out: Any, total: Any, _: Any) -> None:
        """One block; only the last step writes `out`, which may be a part that was not read yet."""
        ufunc = _UFUNC[self.op]
        partial = parts[0]
        for part in parts[1:-1]:
            partial = ufunc(partial, part, out=total)
        if len(parts) > 1:
            ufunc(partial, parts[-1], out=out)
        else:
            np.copyto(out, partial)
        if not self._is_plain:
            self.finish(out, out)

    def _reduce_wider(self, parts: Sequence[Any], out: Any, total: Any, other: Any) -> None:
        """One block, in `sum_type`."""
        self._load(parts[0], total)
        for part in parts[1:]:
            self._load(part, other)
            self._add(total, other)
        self.finish(total, out)
        if self.in_place:
            np.copyto(out, total)

    def _load(self, part: Any, target: Any) -> None:
        if self.element.is_half:
            half.widen(self.element.name, part, target)
        elif self.is_paired:
            split(part, target)
        else:
            np.copyto(target, part)
        self._scale_partial(target, self.prescale)

    def _add(self, target: Any, source: Any) -> None:
        if self.is_paired:
            target, source = target.view(np.int64), source.view(np.int64)
        _UFUNC[self.op](target, source, out=target)

    def _scale_partial(self, partial: Any, factor: float) -> None:
        """Multiply what is not combined yet."""
        if self.is_paired and factor != 1.0:
            values = joined(partial).view(self.element.storage)
            scale(values, factor)
            split(values, partial)
        else:
            scale(partial, factor)

    def start(self, flat: Any) -> Any:
        """The prescaled elements in `sum_type`: `flat` itself, changed in place, or a wider copy."""
        partial = flat if self.in_place else self.widen(flat)
        self.prescaled(partial)
        return partial

    def widen(self, flat: Any) -> Any:
        """A copy in `sum_type`."""
        if self.element.is_half:
            return self.element.widen(flat)
        if self.is_paired:
            pairs = np.empty(flat.shape, PAIR)
            split(flat, pairs)
            return pairs
        with np.errstate(all="ignore"):  # of float64 elements, where they travel as a `wire` says
            return flat.astype(self.sum_type)

    def prescaled(self, partial: Any) -> None:
        """Multiply by the prescale factor, in place."""
        if not self.is_rounded:
            with np.errstate(all="ignore"):
                self._scale_partial(partial, self.prescale)
        elif self.prescale != 1.0:
            self._of_rounded(partial, prescale=self.prescale)

    def neutral(self, flat: Any) -> None:
        """Fill `flat` (`element.storage`) with the neutral element, which a rank that has joined contributes.

        It is scaled as other ranks' elements are, which zero survives; see NEUTRAL_UNSCALED.
        """
        element, value = self.element, 0.0  # False is 0 in every type
        if self.op is ReduceOp.BITWISE_AND:
            flat[...] = ~np.zeros(1, element.storage)[0]
            return
        if self.op is Product or (element.kind == "b" and self.op is Min):
            value = 1.0
        elif self.op in (Min, Max) and element.kind == "f":
            value = np.inf if self.op is Min else -np.inf
        elif self.op in (Min, Max) and element.kind in "iu":
            limits = np.iinfo(element.storage)
            flat[...] = limits.max if self.op is Min else limits.min  # which float64 may not hold
            return
        flat[...] = element.narrow(np.full(1, value, element.sum_type))[0]

    def combine(self, target: Any, *sources: Any) -> None:
        """Reduce `sources` into `target`, in place, one after the other; all of equal length, in `sum_type`."""
        if self.is_rounded:
            self._of_rounded(target, *sources)
            return
        with np.errstate(all="ignore"):  # such as inf - inf, which is NaN on every rank
            for source in sources:
                self._add(target, source)

    def finish(self, partial: Any, out: Any) -> None:
        """Divide, postscale and round the reduced `partial` into `out`, the same memory when `in_place`."""
        if self.is_part:
            out[...] = partial
            return
        if self.is_rounded:
            if self.op is Average or self.postscale != 1.0:
                self._of_rounded(partial, op=self.op, postscale=self.postscale)
            return
        with np.errstate(all="ignore"):
            self._finish(partial, out)

    def _finish(self, partial: Any, out: Any) -> None:
        if self.is_paired:
            out[...] = mean(partial, self.size, self.element.kind == "i").view(self.element.storage)
            scale(out, self.postscale)
            return
        if self.op is Average:
            divide(partial, self.size)
        scale(partial, self.postscale)
        if self.in_place:
            return
        if self.element.is_half and isinstance(out, np.ndarray):
            half.narrow(self.element.name, partial, out)
        else:
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
    elif flat.dtype.kind == "f" and divisor & (divisor - 1) == 0:
        flat *= flat.dtype.type(1 / divisor)  # exact for a power of two: the same bits, faster
    else:
        flat /= flat.dtype.type(divisor)


def split(values: Any, pairs: Any) -> None:
    """Write 64-bit integers as PAIRs."""
    pairs["high"] = values >> values.dtype.type(32)
    pairs["low"] = values & values.dtype.type(0xFFFFFFFF)


def joined(pairs: Any) -> Any:
    """The integers, as int64, whose bits are those of uint64, too; of sums the lower 64 bits."""
    return (pairs["high"] << 32) + pairs["low"]


def mean(pairs: Any, size: int, signed: bool) -> Any:
    """The sums divided by `size`, exactly, as int64; truncated toward zero."""
    quotient, rest = np.divmod(pairs["high"], size)  # rounded down: the rest is not negative
    lower, rest = np.divmod((rest << 32) + pairs["low"], size)
    floor = (quotient << 32) + lower
    return floor + ((floor < 0) & (rest != 0)) if signed else floor
