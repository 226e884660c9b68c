"""torch's tensors, reductions and timeouts, as ringreduce has them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringreduce.arrays.buffer import Buffer
from ringreduce.errors import InputError, UnsupportedArrayError
from ringreduce.ops import Average, Max, Min, Product, ReduceOp, Reduction, Sum

OPS = {
    dist.ReduceOp.SUM: Sum,
    dist.ReduceOp.AVG: Average,
    dist.ReduceOp.PRODUCT: Product,
    dist.ReduceOp.MIN: Min,
    dist.ReduceOp.MAX: Max,
    dist.ReduceOp.BAND: ReduceOp.BITWISE_AND,
    dist.ReduceOp.BOR: ReduceOp.BITWISE_OR,
    dist.ReduceOp.BXOR: ReduceOp.BITWISE_XOR,
    dist.ReduceOp.PREMUL_SUM: Sum,
}
Details = tuple[tuple[str, Any], ...]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous copy without pending conjugation."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    if tensor.layout is not torch.strided:
        raise UnsupportedArrayError(f"a tensor of layout {tensor.layout}; expected a dense one: pass tensor.to_dense()")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat(buffer: Buffer) -> Buffer:
    """The same elements in one dimension."""
    return buffer.part(0, buffer.count)


def slices(buffer: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """A buffer cut into parts of so many elements each."""
    lows = itertools.accumulate(counts, initial=0)
    return [buffer.part(low, count) for low, count in zip(lows, counts, strict=False)]


def equal_slices(kind: str, buffer: Buffer, size: int) -> list[Buffer]:
    """A buffer cut into one part for each of `size` ranks."""
    if buffer.count % size:
        raise InputError(f"{kind}: {buffer.count} elements cannot be split equally among {size} ranks")
    return slices(buffer, [buffer.count // size] * size)


def reduction(op: Any, tensors: Sequence[Buffer], size: int) -> Details:
    """The details of a signature (execution/signature.py); raises InputError where elements do not have this op."""
    kind = getattr(op, "op", op)
    if kind not in OPS:
        raise InputError(f"reduce op {kind}: expected one of {', '.join(str(each) for each in OPS)}")
    factor = float(op.__getstate__()[1]) if kind == dist.ReduceOp.PREMUL_SUM else 1.0
    for element in {each.element for each in tensors}:
        Reduction(OPS[kind], element, size, factor).check()
    return (("op", OPS[kind].value), ("prescale_factor", factor), ("postscale_factor", 1.0))


def seconds(timeout: timedelta | None, default_s: float) -> float:
    """A timeout in seconds; none, or one that is not positive, is the default."""
    given_s = timeout.total_seconds() if timeout is not None else 0.0
    return given_s if given_s > 0 else default_s or math.inf


def check_equal(kind: str, mine: Buffer, others: Sequence[Buffer]) -> None:
    """Raise InputError where others differ in type or number of elements."""
    for each in others:
        if (each.element, each.count) != (mine.element, mine.count):
            raise InputError(
                f"{kind}: {each.element.name} of {each.count} elements beside {mine.element.name} of {mine.count}; "
                "expected equal types and sizes"
            )


def split(array: Buffer, rows: Sequence[int], size: int) -> list[Buffer]:
    """The parts of an all-to-all, of so many rows each, or equal ones."""
    if not rows:
        return equal_slices("all_to_all", array, size)
    if len(rows) != size or sum(rows) != array.shape[0]:
        raise InputError(
            f"all_to_all: splits {list(rows)} of {array.shape[0]} rows; expected {size} that add up to that"
        )
    length = array.count // max(array.shape[0], 1)
    return slices(array, [each * length for each in rows])
