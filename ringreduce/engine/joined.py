"""What a rank that has joined gives to the others' reductions: elements that change no result."""

from __future__ import annotations

import math

import numpy as np

from ringreduce.buffers import Buffer, ready
from ringreduce.dtypes import TABLE
from ringreduce.engine.description import Description, TensorDescription
from ringreduce.engine.submission import Submission
from ringreduce.gpu.stream import Gpu
from ringreduce.ops import ReduceOp, Reduction


def stand_in(description: Description, process_set: int, gpu: Gpu) -> Submission:
    """A submission for what the other ranks have given, without a handle; `gpu` is this rank's, should it be needed."""
    op = ReduceOp(description.detail("op"))
    buffers = [_neutral(tensor, op, gpu) for tensor in description.tensors]
    return Submission(
        description,
        process_set,
        inputs=buffers,
        outputs=buffers,
        finish=lambda _: None,
        payload=None,
        line="join()",
        handle=None,
        waits=False,
        ready=ready(buffers),
    )


def _neutral(tensor: TensorDescription, op: ReduceOp, gpu: Gpu) -> Buffer:
    element = TABLE[tensor.dtype]
    count = math.prod(tensor.shape)
    if tensor.device != "cpu":
        return gpu.filled(element, count, Reduction(op, element, 1).neutral)
    flat = np.empty(count, element.storage)
    Reduction(op, element, 1).neutral(flat)
    return Buffer(flat, element, tensor.shape, tensor.device, flat.dtype)
