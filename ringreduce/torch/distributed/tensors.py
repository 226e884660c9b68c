"""torch's tensors, reductions and timeouts, as ringreduce has them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringreduce.collectives.ops import Average, Max, Min, Product, ReduceOp, Sum
from ringreduce.errors import InputError, UnsupportedArrayError

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


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous copy without pending conjugation."""
    if tensor.layout is not torch.strided:
        raise UnsupportedArrayError(f"a tensor of layout {tensor.layout}; expected a dense one: pass tensor.to_dense()")
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def device_of(values: Iterable[Any]) -> str:
    """The type of the device of the first tensor among these, and in lists of them; empty for none."""
    for each in values:
        if isinstance(each, torch.Tensor):
            return each.device.type
        if isinstance(each, list | tuple) and (found := device_of(each)):
            return found
    return ""


def op_and_factor(opts: Any) -> tuple[ReduceOp, float]:
    """The reduction that torch's options ask for, by default a sum, and by what its inputs are multiplied."""
    op: Any = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    kind = getattr(op, "op", op)
    if kind not in OPS:
        raise InputError(f"reduce op {kind}: expected one of {', '.join(str(each) for each in OPS)}")
    return OPS[kind], float(op.__getstate__()[1]) if kind == dist.ReduceOp.PREMUL_SUM else 1.0


def seconds(timeout: timedelta | None, default_s: float) -> float:
    """A timeout in seconds; none, or one that is not positive, is the default."""
    given_s = timeout.total_seconds() if timeout is not None else 0.0
    return given_s if given_s > 0 else default_s or math.inf
