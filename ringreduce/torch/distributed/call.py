"""One call of a group: its tensors as buffers, and the operation that is begun on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringreduce.api.own_channel import OwnChannel
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.torch_tensor import torch_buffer
from ringreduce.execution.submission import Handle
from ringreduce.torch.distributed.tensors import plain, seconds
from ringreduce.torch.distributed.work import BACKWARD, Work


class Call:
    """Tensors that are not contiguous are copied, and those that are written to copied back; on a GPU refused.

    opts: torch's, with a timeout, or None;  result: the value of the work's future.
    """

    def __init__(self, channel: OwnChannel, opts: Any, result: Any) -> None:
        self._channel, self._opts, self._work = channel, opts, Work(result)
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
            self._work.devices = [tensor.device]
        return torch_buffer(tensor, writable, resizable=True)

    def begin(self, operation: Callable[..., Handle], *arguments: Any, **options: Any) -> Work:
        """Begin an operation of the channel."""
        options["timeout_s"] = seconds(getattr(self._opts, "timeout", None), self._channel.timeout_s)
        options["waits"] = BACKWARD.runs() and not self._channel.engine.host.overlaps
        self._work.handle = operation(*arguments, then=self._end, **options)
        return self._work

    def _end(self, error: Exception | None) -> None:
        if error is None and self._copies:
            with torch.no_grad():
                for tensor, copy in self._copies:
                    tensor.copy_(copy)
        self._work.end(error)
