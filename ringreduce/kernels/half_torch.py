"""16-bit floats to float32 and back with torch's kernels. Imported by half.py, where the user has imported torch.

Torch splits operations on 32 Ki elements and more among threads that the training uses; so blocks are no longer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.kernels.half_numpy import Kernels, blocks, sum_by, writable

torch: Any = importlib.import_module("torch")


def _bfloat16(array: Any) -> Any:
    return torch.from_numpy(writable(array).view(np.int16)).view(torch.bfloat16)


def _tensor(array: Any) -> Any:
    return torch.from_numpy(writable(array))


def _kernels(tensor: Callable[[Any], Any]) -> Kernels:
    def widen(source: Any, target: Any) -> None:
        for few, wide in blocks(source, target):
            _tensor(wide).copy_(tensor(few))

    def narrow(values: Any, target: Any) -> None:
        for wide, few in blocks(values, target):
            tensor(few).copy_(_tensor(wide))

    sum_widened = sum_by(widen, narrow)

    def sum_parts(parts: Sequence[Any], out: Any, divisor: Any, reciprocal: Any) -> None:
        if len(parts) == 2 and reciprocal == 1:
            for few in blocks(*parts, out):
                first, second, target = map(tensor, few)
                torch.add(first, second, out=target)  # adds in float32 and rounds once
        else:
            sum_widened(parts, out, divisor, reciprocal)

    return Kernels(widen, narrow, sum_parts)


KERNELS = {"float16": _kernels(_tensor), "bfloat16": _kernels(_bfloat16)}
