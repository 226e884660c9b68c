"""What the families of functions share: checking arguments, and turning results into the caller's kind of array."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from ringreduce.arrays.buffer import Buffer
from ringreduce.errors import InputError
from ringreduce.ops import Average, ReduceOp, Sum

Array = TypeVar("Array")


def like(original: Any, result: Buffer) -> Any:
    """The result as the caller's kind of array; a NumPy number where a number was passed."""
    array = result.array()
    return array[()] if isinstance(original, bool | int | float | complex | np.generic) else array


def which_op(function: str, average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The op meant by `op`, or by Horovod's older `average`; Average by default."""
    if average is not None:
        if op is not None:
            raise InputError(f"{function}: both average={average} and op={op!r} were given; pass op only")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise InputError(f"{function}: op={op!r}; expected Average, Sum, Adasum, Min, Max or Product of ringreduce")
    return op


def whole(value: Any) -> Any:
    """A NumPy integer as Python's, so that ranks which pass one or the other agree."""
    return int(value) if isinstance(value, np.integer) else value
