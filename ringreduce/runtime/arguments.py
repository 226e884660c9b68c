"""The arguments of a reduction: op, average and scales."""

from __future__ import annotations

import functools
import math
from typing import Any

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import ElementType
from ringreduce.collectives.ops import Average, ReduceOp, Reduction, Sum
from ringreduce.compression import Quantized, wire_of
from ringreduce.errors import InputError
from ringreduce.runtime.submit import which_op
from ringreduce.settings.log import JOB

Details = tuple[tuple[str, Any], ...]


class Arguments:
    """The arguments of a reduction; calls with equal arguments share one object.

    wire: the format in which the elements travel; None: as they are.
    """

    def __init__(
        self,
        function: str,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        wire: Quantized | None = None,
    ) -> None:
        if function == "reducescatter" and op not in (Average, Sum):
            raise InputError(f"reducescatter: op={op!r}; expected Average or Sum")
        if wire is not None and (function != "allreduce" or op not in (Average, Sum)):
            raise InputError(
                f"{function}: op={op!r} with compression={wire}; expected an allreduce with op=Average or Sum, or "
                "another compression, such as Compression.fp16"
            )
        if math.isnan(prescale) or math.isnan(postscale):  # which equals nothing, so that ranks could not agree on it
            raise InputError(f"{function}: prescale_factor={prescale}, postscale_factor={postscale}; expected no NaN")
        self.function, self._op, self._scales, self._wire = function, op, (prescale, postscale), wire
        self.details = details_of(op, prescale, postscale, wire)

    def number(self, tensor: Any) -> Any:
        """A Python int that is averaged becomes a float: the caller has chosen no integer type for it."""
        return float(tensor) if type(tensor) is int and self._op is Average else tensor

    def check(self, tensor: Buffer) -> None:
        """Raise InputError for a tensor that cannot be reduced this way."""
        Reduction(self._op, tensor.element, 1, *self._scales).check()
        check_encoded(tensor.element, self._wire)
        if self._op is Average and tensor.element.kind in "iu":
            _warn_of_truncated_averages()
        if self.function == "reducescatter" and not tensor.shape:
            raise InputError("a 0-d tensor has no rows to scatter; pass one of at least 1 dimension")


_same_arguments = functools.lru_cache(maxsize=256)(Arguments)


def arguments_of(
    function: str,
    average: bool | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    compression: object = None,
) -> Arguments:
    """The arguments of a call, checked as far as possible without the tensors."""
    wire = None if compression is None else wire_of(compression)
    op = which_op(function, average, op)  # now, as what is no op may not be hashable
    try:
        scales = float(prescale), float(postscale)
    except (TypeError, ValueError, OverflowError):
        given = f"prescale_factor={prescale!r} and postscale_factor={postscale!r}"
        raise InputError(f"{function}: {given}; expected two numbers") from None
    return _same_arguments(function, op, *scales, wire)


def details_of(op: ReduceOp, prescale: float, postscale: float, wire: Quantized | None = None) -> Details:
    """The details of a reduction's signature."""
    scales = ("prescale_factor", prescale), ("postscale_factor", postscale)
    return ("op", op.value), *scales, ("compression", wire)


def check_encoded(element: ElementType, wire: Quantized | None) -> None:
    """Raise InputError for elements that cannot travel so."""
    if wire is not None and element.kind != "f":
        raise InputError(
            f"{element.name} elements cannot travel as {wire}; expected floating-point ones: reduce these in a call of "
            "their own, without compression"
        )


@functools.cache
def _warn_of_truncated_averages() -> None:
    JOB.warning(
        "averages of integer arrays are truncated to whole numbers, as in Horovod; pass floats, or op=Sum (shown once)"
    )
