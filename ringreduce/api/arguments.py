"""The arguments of a reduction: op, average and scales."""

from __future__ import annotations

import functools
from typing import Any

from ringreduce.api.submit import which_op
from ringreduce.arrays.buffer import Buffer
from ringreduce.errors import InputError
from ringreduce.log import LOGGER
from ringreduce.ops import Average, ReduceOp, Reduction, Sum


class Arguments:
    """The arguments of a reduction; calls with equal arguments share one object."""

    def __init__(
        self, function: str, average: bool | None, op: ReduceOp | None, prescale: float, postscale: float
    ) -> None:
        op = which_op(function, average, op)
        if function == "reducescatter" and op not in (Average, Sum):
            raise InputError(f"reducescatter: op={op!r}; expected Average or Sum")
        self.function, self._op, self._scales = function, op, (prescale, postscale)
        self.details = (("op", op.value), ("prescale_factor", prescale), ("postscale_factor", postscale))

    def number(self, tensor: Any) -> Any:
        """A Python int that is averaged becomes a float: the caller has chosen no integer type for it."""
        return float(tensor) if type(tensor) is int and self._op is Average else tensor

    def check(self, tensor: Buffer) -> None:
        """Raise InputError for a tensor that cannot be reduced this way."""
        Reduction(self._op, tensor.element, 1, *self._scales).check()
        if self._op is Average and tensor.element.kind in "iu":
            _warn_of_truncated_averages()
        if self.function == "reducescatter" and not tensor.shape:
            raise InputError("reducescatter: a 0-d tensor has no rows to scatter; pass one of at least 1 dimension")


_same_arguments = functools.lru_cache(maxsize=256)(Arguments)


def arguments_of(
    function: str, average: bool | None, op: ReduceOp | None, prescale: float, postscale: float
) -> Arguments:
    """The arguments of a call, checked as far as possible without the tensors."""
    return _same_arguments(function, average, op, float(prescale), float(postscale))


@functools.cache
def _warn_of_truncated_averages() -> None:
    LOGGER.warning(
        "averages of integer arrays are truncated to whole numbers, as in Horovod; pass floats, or op=Sum (shown once)"
    )
