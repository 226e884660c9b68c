"""How gradients are reduced: compressed, scaled, dense or sparse. reducer.py decides when."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ringreduce.api.process_sets import ProcessSet, number_of
from ringreduce.api.reduce import allreduce_async, arguments_of, submit
from ringreduce.compression import Compressor
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.ops import Adasum, Max, ReduceOp, Sum
from ringreduce.torch.sparse import sparse_allreduce_async

UNKNOWN, DENSE = 0, 1
"""Layouts of a gradient; DENSE + n is sparse, with n indices an element."""
Finish = Callable[[], list[torch.Tensor]]  # waits, and returns the reduced tensors


class GradientTransport:
    """What is done to every gradient."""

    def __init__(
        self,
        op: ReduceOp,
        compression: type[Compressor],
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.size = 1  # ranks that take part; 1: there is nothing to do
        self._op, self._compression, self._predivide = op, compression, predivide
        self.settle()

    def settle(self) -> None:
        """Adopt the current world: another init() may have changed its size."""
        number_of(self.process_set, "DistributedOptimizer")
        self.size = (self.process_set.size() or 1) if self.process_set.included() else 1
        if self._op is Adasum and self.size & (self.size - 1):
            raise InputError(f"op=Adasum: {self.size} ranks; expected a power of two, such as 2, 4 or 8")
        op, scales = self._op, (1.0, 1.0)
        if self._predivide != 1.0:
            op, scales = Sum, (1.0 / self._predivide, self._predivide / self.size)
        self._arguments = arguments_of("allreduce", None, op, *scales, self.process_set)
        self._sparse = op, scales[0] * scales[1]

    def begin_dense(
        self, name: str, gradients: Sequence[torch.Tensor], names: Sequence[str] | None = None, line: str | None = None
    ) -> Finish:
        """Begin to reduce dense gradients in place; those of a group, which have `names`, all or nothing.

        line: the line of the user's script, where the caller knows it.
        """
        tensors = [gradient.detach() if gradient.requires_grad else gradient for gradient in gradients]
        if self.size == 1:
            return lambda: tensors
        compressed = [self._compression.compress(each.contiguous()) for each in tensors]
        sent = [tensor for tensor, _ in compressed]
        handle = submit(sent, name, names, self._arguments, in_place=True, line=line)
        return functools.partial(self._arrive, tensors, compressed, handle)

    def refuse(self, name: str) -> None:
        """Let the group of this name fail on all ranks with MismatchError; nobody waits for this submission itself."""
        if self.size > 1:
            submit([np.empty(0, np.float32)], name, ["nothing"], self._arguments, in_place=True)

    def begin_maximum(self, name: str, numbers: Sequence[int]) -> Handle:
        """Begin to find each number's largest value on any rank."""
        return allreduce_async(np.array(numbers, np.int32), name=name, op=Max, process_set=self.process_set)

    def _arrive(self, tensors: list[torch.Tensor], compressed: list[Any], handle: Handle) -> list[torch.Tensor]:
        """Wait, and put the result into the tensors' own memory."""
        for tensor, reduced, (_, ctx) in zip(tensors, handle.wait(), compressed, strict=True):
            result = self._compression.decompress(reduced, ctx)
            if result is not tensor:  # it was compressed, or of another memory format
                tensor.copy_(result)
        return tensors

    def begin_sparse(self, name: str, gradient: torch.Tensor) -> Finish:
        """Begin to reduce a sparse gradient: every rank gets the rows of all, coalesced.

        Cost: as `allgather` of its indices and values; they are not compressed.
        """
        gradient = gradient.detach().coalesce()
        if self.size == 1:
            return lambda: [gradient]
        op, scale = self._sparse
        wait = sparse_allreduce_async(gradient, name, op, self.process_set)
        return lambda: [wait().coalesce() * scale]


def empty_sparse(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """The sparse gradient of a rank that computed none."""
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[sparse_dim:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def layout_of(gradient: torch.Tensor | None) -> int:
    """DENSE, DENSE + the indices of an element, or UNKNOWN without a gradient."""
    if gradient is None:
        return UNKNOWN
    return DENSE + (gradient.sparse_dim() if gradient.is_sparse else 0)
