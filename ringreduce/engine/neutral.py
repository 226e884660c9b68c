"""What a rank that has joined gives to the others' reductions: elements that change no result."""

from __future__ import annotations

import math

import numpy as np

from ringreduce.buffers import Buffer, ready
from ringreduce.dtypes import TABLE
from ringreduce.engine.signature import Signature, TensorSignature
from ringreduce.engine.submission import Submission
from ringreduce.gpu.stream import Gpu
from ringreduce.ops import ReduceOp, Reduction


def neutral_submission(signature: Signature, process_set: int, gpu: Gpu) -> Submission:
    """A submission for what the other ranks have given, without a handle; `gpu` is this rank's, should it be needed."""
    op = ReduceOp(signature.detail("op"))
    buffers = [_neutral(tensor, op, gpu) for tensor in signature.tensors]
    return Submission(
        signature,
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


def _neutral(tensor: TensorSignature, op: ReduceOp, gpu: Gpu) -> Buffer:
    element = TABLE[tensor.dtype]
    count = math.prod(tensor.shape)
    if tensor.device != "cpu":
        return gpu.filled(element, count, Reduction(op, element, 1).neutral)
    flat = np.empty(count, element.storage)
    Reduction(op, element, 1).neutral(flat)
    return Buffer(flat, element, tensor.shape, tensor.device, flat.dtype)
