"""The submissions of a joined rank to the others' reductions: neutral elements, which change no result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import TABLE, ElementType
from ringreduce.arrays.gpu_buffer import ready
from ringreduce.collectives.ops import ReduceOp, Reduction
from ringreduce.execution.signature import Signature, TensorSignature
from ringreduce.execution.submission import Submission

Filled = Callable[[ElementType, int, Callable[[Any], None]], Buffer]


def neutral_submission(signature: Signature, process_set: int, on_gpu: Filled) -> Submission:
    """A submission of neutral elements with this signature, without a handle.  on_gpu: `Gpu.filled`."""
    op = ReduceOp(signature.detail("op"))
    buffers = [_neutral(tensor, op, on_gpu) for tensor in signature.tensors]
    submission = Submission(signature, process_set, buffers, buffers, lambda _: None, None, "join()", False)
    submission.ready = ready(buffers)
    return submission


def _neutral(tensor: TensorSignature, op: ReduceOp, on_gpu: Filled) -> Buffer:
    element = TABLE[tensor.dtype]
    count = math.prod(tensor.shape)
    if tensor.device != "cpu":
        return on_gpu(element, count, Reduction(op, element, 1).neutral)
    flat = np.empty(count, element.storage)
    Reduction(op, element, 1).neutral(flat)
    return Buffer(flat, element, tensor.shape, tensor.device, flat.dtype)
