"""One call of a group: its tensors as buffers, and how its operation is begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.torch_tensor import torch_buffer
from ringreduce.errors import CollectiveError
from ringreduce.torch.distributed.tensors import Details, flat, plain, seconds
from ringreduce.torch.distributed.work import BACKWARD, Work


class Caller(Protocol):
    """A group, as its calls see it."""

    engine: Any
    channel: int | None  # None when it was destroyed
    timeout_s: float

    def check_gpu(self) -> None:
        """Raise InputError where its tensors on GPUs are another backend's."""


class Call:
    """Tensors that are not contiguous are copied, and those that are written to copied back; on a GPU refused."""

    def __init__(self, group: Caller, kind: str, opts: Any, result: Any) -> None:
        """opts: torch's, with a timeout, or None;  result: the value of the work's future."""
        if group.channel is None:
            raise CollectiveError(f"{kind}: this process group was destroyed")
        self._group, self._kind, self._opts, self._work = group, kind, opts, Work(result)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Buffer]:
        """Buffers of tensors that are only read."""
        return [self._buffer(plain(each), writable=False) for each in tensors]

    def write(self, tensors: Sequence[torch.Tensor]) -> list[Buffer]:
        """Buffers of tensors that are written to, and perhaps read. As with other backends, autograd sees no change."""
        contiguous = [each if each.is_cuda else plain(each) for each in tensors]
        self._copies += [(old, new) for old, new in zip(tensors, contiguous, strict=True) if new is not old]
        return [self._buffer(each, writable=True) for each in contiguous]

    def _buffer(self, tensor: torch.Tensor, writable: bool) -> Buffer:
        if tensor.is_cuda:
            self._group.check_gpu()
            self._work.devices = [tensor.device]
        return torch_buffer(tensor, writable, resizable=True)

    def begin(
        self,
        inputs: Sequence[Buffer] = (),
        outputs: Sequence[Buffer] = (),
        details: Details = (),
        signed: Sequence[Buffer] | None = None,
        counted: bool = False,
        **options: Any,
    ) -> Work:
        """Submit the operation.

        signed:  the arrays whose types and shapes, or (counted) numbers of elements, must be equal on all ranks; by
                 default the inputs.
        options: of the engine's submit().
        """
        arrays = inputs if signed is None else signed
        arrays = [flat(each) for each in arrays] if counted else arrays
        engine, kind, work = self._group.engine, self._kind, self._work
        work.handle = engine.submit(
            kind,
            None,
            self._group.channel,
            details=details,
            signed=arrays,
            inputs=inputs,
            outputs=outputs,
            waits=BACKWARD.runs() and not engine.host.overlaps,
            then=self._end,
            timeout_s=seconds(getattr(self._opts, "timeout", None), self._group.timeout_s),
            **options,
        )
        return work

    def _end(self, error: Exception | None) -> None:
        if error is None and self._copies:
            with torch.no_grad():
                for tensor, copy in self._copies:
                    tensor.copy_(copy)
        self._work.end(error)
