"""Sparse tensors: gathered from all ranks instead of summed."""

from __future__ import annotations

from typing import Any

import torch

from ringreduce.api.gather import gather_with
from ringreduce.api.process_sets import ProcessSet, global_process_set, placed
from ringreduce.collectives.ops import Average, ReduceOp, Sum
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.optim.buckets import DENSE
from ringreduce.runtime.submit import which_op


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: ReduceOp | None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Begin to reduce a sparse tensor: the indices and values of all ranks are gathered.

    Shape:   sparse COO, coalesced or not, of equal shape on all ranks; how many values each has may differ.
    op:      Average (the default) divides the values by the number of ranks; Sum.
    Returns: a handle, which may be called as Horovod's, in place of `synchronize(handle)`. Its result is a sparse COO
             tensor, the same on every rank; indices that several ranks have are in it several times, `coalesce()` adds
             them up.
    Cost:    two allgathers, as one group.
    Raises:  InputError (a ValueError) for a dense tensor, other ops, and an Average of integers; and as `allgather`.
    Source:  Horovod's sparse_allreduce_async.
    """
    reduction = placed("sparse_allreduce_async", name, process_set, _checked, tensor, op)
    shape = tensor.shape
    # the rows of what is gathered are its entries
    rows = tensor.detach()._indices().t().contiguous(), tensor.detach()._values().contiguous()

    def reduced(gathered: list[Any]) -> torch.Tensor:
        indices, values = gathered
        if reduction is Average:
            values = values / (process_set.size() or 1)
        return torch.sparse_coo_tensor(indices.t(), values, shape, device=values.device, check_invariants=True)

    return gather_with(rows, name, process_set, (("shape", tuple(shape)),)).mapped(reduced)


def _checked(tensor: torch.Tensor, op: ReduceOp | None) -> ReduceOp:
    """The op by which the tensor can be reduced."""
    reduction = which_op("sparse_allreduce_async", None, op)
    if reduction not in (Average, Sum):
        raise InputError(f"sparse_allreduce_async: op={reduction!r}; expected Average or Sum")
    if tensor.layout is not torch.sparse_coo:
        raise InputError(f"sparse_allreduce_async: a tensor of layout {tensor.layout}; pass tensor.to_sparse()")
    if reduction is Average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise InputError(f"sparse_allreduce_async: {tensor.dtype} values cannot be averaged; pass op=Sum")
    return reduction


def empty_sparse(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """The sparse gradient of a rank that computed none."""
    # not by sparse_coo_tensor: in torch 2.11 it warns, whatever one says, that nobody has said whether to check it
    made = torch.empty((0,), dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
    return made.sparse_resize_and_clear_(parameter.shape, sparse_dim, parameter.dim() - sparse_dim)


def layout_of(gradient: torch.Tensor) -> int:
    """DENSE, or DENSE + the indices of an element."""
    return DENSE + (gradient.sparse_dim() if gradient.is_sparse else 0)
