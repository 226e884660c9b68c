"""The synchronous collectives that return new tensors: autograd goes through them.

The in-place and `_async` forms are those of `ringreduce.api`, and unknown to autograd.

A gradient is computed by a collective too, so all ranks must run backward through the same functions. Its scale is
Horovod's: for allgather and broadcast that of a loss averaged over the ranks, and for a reduction the same reduction
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringreduce.api import broadcast as broadcasts
from ringreduce.api import gather, reduce
from ringreduce.api.control import synchronize
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.api.submit import which_op
from ringreduce.api.world import rank
from ringreduce.compression import Compression, Compressor
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.ops import Average, ReduceOp, Sum

__all__ = ["allgather", "allreduce", "alltoall", "alltoall_async", "broadcast", "grouped_allgather"]
__all__ += ["grouped_allreduce", "grouped_reducescatter", "reducescatter"]

Tensors = Sequence[torch.Tensor]
Gradient = Callable[[Tensors], Tensors]  # makes the gradients of the inputs from those of the results


class _Collective(torch.autograd.Function):
    """Connects results to their inputs for autograd. The collective itself has run before, in the caller's line."""

    @staticmethod
    def forward(ctx: Any, gradient: Gradient, results: Tensors, *tensors: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return tuple(each.data for each in results)  # no views of anything, so that callers may change them in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # autograd hands out expanded and conjugated views
        plain = [each.resolve_conj().resolve_neg().contiguous() for each in gradients]
        return None, None, *ctx.gradient(plain)


def _differentiable(tensors: Sequence[Any], results: Sequence[Any], gradient: Gradient) -> list[Any]:
    """The results, known to autograd where they are of a type that has gradients."""
    tied = list(results)
    if not any(_has_gradient(each) and each.requires_grad for each in tensors):
        return tied
    # not only those that require it: ranks may differ in this, and the gradient's collective must not
    numbers = [number for number, each in enumerate(tensors) if _has_gradient(each)]
    outputs = _Collective.apply(  # type: ignore[no-untyped-call]
        gradient, [results[number] for number in numbers], *[tensors[number] for number in numbers]
    )
    for number, output in zip(numbers, outputs, strict=True):
        tied[number] = output
    return tied


def _has_gradient(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _gradients_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` over all ranks; returns a new tensor, the same bits on every rank.

    Gradient: for Average and Sum the same allreduce, compressed too; other ops have none, and running backward
              through them raises InputError.
    Otherwise as `ringreduce.allreduce`; non-contiguous and sparse tensors: InputError (a ValueError).
    Source: Horovod's allreduce.
    """
    scales = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *scales, process_set)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    names: Sequence[str] | None = None,
) -> list[torch.Tensor]:
    """Reduce many tensors, all or none of them; returns new tensors. Otherwise as `allreduce`.

    names: those of the tensors, for error messages.
    """
    scales = float(prescale_factor), float(postscale_factor)
    reduced = reduce.grouped_allreduce(tensors, average, name, compression, op, *scales, process_set, names=names)
    reduction = which_op("allreduce", average, op)

    def gradient(gradients: Tensors) -> Tensors:
        if reduction not in (Average, Sum):
            raise InputError(
                f"allreduce: op={reduction!r} has no gradient; expected Average or Sum, or tensor.detach()"
            )
        return grouped_allreduce(gradients, None, _gradients_name(name), compression, reduction, *scales, process_set)

    return _differentiable(tensors, reduced, gradient)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dim 0, in rank order.

    Gradient: this rank's rows of the result's gradient, averaged over the ranks.
    Otherwise as `ringreduce.allgather`.
    Source: Horovod's allgather.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather many tensors, all or none of them; otherwise as `allgather`."""
    gathered = gather.grouped_allgather(tensors, name, process_set)
    rows = [each.shape[0] for each in tensors if _has_gradient(each)]
    of_gradients = _gradients_name(name)

    def gradient(gradients: Tensors) -> Tensors:
        of_rows = None if of_gradients is None else f"{of_gradients}.rows"
        everyones = gather.allgather_async(torch.tensor([rows]), of_rows, process_set)
        averaged = grouped_allreduce(gradients, name=of_gradients, op=Average, process_set=process_set)
        starts = synchronize(everyones)[: process_set.rank()].sum(0).tolist()
        return [each.narrow(0, start, count) for each, start, count in zip(averaged, starts, rows, strict=True)]

    return _differentiable(tensors, gathered, gradient)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The root's tensor, as a new one on every rank.

    Gradient: on the root the result's, averaged over the ranks; elsewhere zeros. Either all ranks' tensors must require
              it or none: a rank that does not run backward leaves the others waiting.
    Otherwise as `ringreduce.broadcast`.
    Source: Horovod's broadcast.
    """
    received = broadcasts.broadcast(tensor, root_rank, name, process_set)

    def gradient(gradients: Tensors) -> Tensors:
        averaged = allreduce(gradients[0], name=_gradients_name(name), op=Average, process_set=process_set)
        return [averaged if rank() == root_rank else torch.zeros_like(averaged)]

    return _differentiable([tensor], [received], gradient)[0]  # type: ignore[no-any-return]


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank its part of `tensor`'s rows, and return what all ranks sent to this one, in rank order.

    splits:   the rows for each rank: an int32 tensor or a list, (size,), its sum at most dim 0. None: equal parts.
    Returns:  the received rows; with splits (rows, received_splits), the latter an int32 tensor, (size,).
    Gradient: sent back to where the rows came from; zeros for rows that went nowhere.
    Otherwise as `ringreduce.alltoall`.
    Source:   Horovod's alltoall.
    """
    given = _splits(tensor, splits, process_set)
    came, received = gather.alltoall(tensor, given, name, process_set)
    rows_given = tensor.shape[0]

    def gradient(gradients: Tensors) -> Tensors:
        back, _ = alltoall(gradients[0], received, _gradients_name(name), process_set)
        kept = rows_given - back.shape[0]
        return [torch.cat([back, back.new_zeros(kept, *back.shape[1:])]) if kept else back]

    (rows,) = _differentiable([tensor], [came], gradient)
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `alltoall`; `synchronize(handle)` returns (rows, received_splits) even without splits, as in Horovod."""
    return gather.alltoall_async(tensor, _splits(tensor, splits, process_set), name, process_set)


def _splits(tensor: Any, splits: Any, process_set: ProcessSet) -> Any:
    """The splits as an int32 tensor; None where they are wrong and the collective itself raises the error."""
    if splits is None:
        number_of(process_set, "alltoall")
        shape, size = getattr(tensor, "shape", ()), process_set.size()
        if not shape or not size or shape[0] % size:
            return None
        return torch.full((size,), shape[0] // size, dtype=torch.int32)
    if isinstance(splits, torch.Tensor) and splits.dtype != torch.int32:
        raise InputError(f"alltoall: splits of type {splits.dtype}; expected torch.int32, pass splits.int()")
    given = torch.as_tensor(splits)
    return given if given.is_floating_point() else given.to(torch.int32)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce `tensor` over all ranks; returns this rank's part of the rows, as a new tensor.

    Gradient: an allgather of the parts' gradients, times both factors, and for Sum times the number of ranks.
    Otherwise as `ringreduce.reducescatter`.
    Source: Horovod's reducescatter.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter many tensors, all or none of them; otherwise as `reducescatter`."""
    scales = float(prescale_factor), float(postscale_factor)
    reduced = reduce.grouped_reducescatter(tensors, name, compression, op, process_set, *scales)
    factor = scales[0] * scales[1] * ((process_set.size() or 1) if op is Sum else 1)

    def gradient(gradients: Tensors) -> Tensors:
        scaled = [each * factor for each in gradients] if factor != 1 else gradients
        return grouped_allgather(scaled, _gradients_name(name), process_set)

    return _differentiable(tensors, reduced, gradient)
