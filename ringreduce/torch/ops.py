"""The synchronous collectives that return new tensors: autograd goes through them.

They have the signatures of `ringreduce.api`; the in-place and `_async` forms are those themselves, and unknown to
autograd.

A gradient is computed by a collective too, so all ranks must run backward through the same functions. Its scale is
Horovod's: for allgather and broadcast that of a loss averaged over the ranks, and for a reduction the same reduction
again.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from ringreduce.api import broadcast as broadcasts
from ringreduce.api import gather, reduce
from ringreduce.api.control import synchronize
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.api.submit import which_op
from ringreduce.api.world import rank
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.ops import Average, Sum

__all__ = ["allgather", "allreduce", "alltoall", "alltoall_async", "broadcast", "grouped_allgather"]
__all__ += ["grouped_allreduce", "grouped_reducescatter", "reducescatter"]

Tensors = Sequence[torch.Tensor]
Gradient = Callable[[Tensors], Tensors]  # makes the gradients of the inputs from those of the results
Call = types.SimpleNamespace  # its arguments, by name
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


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


def _tied(tensors: Sequence[Any], results: Sequence[Any], gradient: Gradient) -> list[Any]:
    """The results, known to autograd where they are of a type that has gradients."""
    tied = list(results)
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


def _requires_it(tensors: Sequence[Any]) -> bool:
    return any(_has_gradient(each) and each.requires_grad for each in tensors)


def _differentiable(
    collective: Callable[Parameters, Result],
) -> Callable[[Callable[[Call], Gradient]], Callable[Parameters, Result]]:
    """Make autograd go through a collective; decorates what makes, from a call's arguments, its gradient."""
    signature = inspect.signature(collective)
    first = next(iter(signature.parameters))

    def decorate(gradient_of: Callable[[Call], Gradient]) -> Callable[Parameters, Result]:
        @functools.wraps(gradient_of)
        def differentiable(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
            result: Any = collective(*args, **kwargs)
            given: Any = args[0] if args else kwargs[first]
            tensors, results = ([given], [result]) if first == "tensor" else (given, result)
            if not _requires_it(tensors):
                return result
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            tied = _tied(tensors, results, gradient_of(Call(**{**bound.arguments, "tensors": tensors})))
            return tied[0] if first == "tensor" else tied

        differentiable.__signature__ = signature  # type: ignore[attr-defined]
        differentiable.__doc__ = f"{inspect.getdoc(collective)}\n\n{inspect.getdoc(gradient_of)}"
        return differentiable

    return decorate


def _gradients_name(call: Call) -> str | None:
    return None if call.name is None else f"{call.name}.gradient"


def _of_allreduce(call: Call) -> Gradient:
    op = which_op("allreduce", call.average, call.op)
    scales, name = (call.prescale_factor, call.postscale_factor), _gradients_name(call)

    def gradient(gradients: Tensors) -> Tensors:
        if op not in (Average, Sum):
            raise InputError(f"allreduce: op={op!r} has no gradient; expected Average or Sum, or tensor.detach()")
        return grouped_allreduce(gradients, None, name, call.compression, op, *scales, call.process_set)

    return gradient


@_differentiable(reduce.allreduce)
def allreduce(call: Call) -> Gradient:
    """Gradient: for Average and Sum the same allreduce, compressed too; other ops have none: InputError in backward.

    A tensor that is not contiguous, or sparse: InputError.
    """
    return _of_allreduce(call)


@_differentiable(reduce.grouped_allreduce)
def grouped_allreduce(call: Call) -> Gradient:
    """Gradient: as that of `allreduce`."""
    return _of_allreduce(call)


def _of_allgather(call: Call) -> Gradient:
    rows = [each.shape[0] for each in call.tensors if _has_gradient(each)]
    name = _gradients_name(call)

    def gradient(gradients: Tensors) -> Tensors:
        of_rows = None if name is None else f"{name}.rows"
        everyones = gather.allgather_async(torch.tensor([rows]), of_rows, call.process_set)
        averaged = grouped_allreduce(gradients, name=name, op=Average, process_set=call.process_set)
        starts = synchronize(everyones)[: call.process_set.rank()].sum(0).tolist()
        return [each.narrow(0, start, count) for each, start, count in zip(averaged, starts, rows, strict=True)]

    return gradient


@_differentiable(gather.allgather)
def allgather(call: Call) -> Gradient:
    """Gradient: this rank's rows of the result's gradient, averaged over the ranks."""
    return _of_allgather(call)


@_differentiable(gather.grouped_allgather)
def grouped_allgather(call: Call) -> Gradient:
    """Gradient: as that of `allgather`."""
    return _of_allgather(call)


@_differentiable(broadcasts.broadcast)
def broadcast(call: Call) -> Gradient:
    """Gradient: on the root the result's, averaged over the ranks; elsewhere zeros.

    Either all ranks' tensors must require it or none: a rank that does not run backward leaves the others waiting.
    """

    def gradient(gradients: Tensors) -> Tensors:
        averaged = allreduce(gradients[0], name=_gradients_name(call), op=Average, process_set=call.process_set)
        return [averaged if rank() == call.root_rank else torch.zeros_like(averaged)]

    return gradient


def _of_reducescatter(call: Call) -> Gradient:
    factor = float(call.prescale_factor) * float(call.postscale_factor)
    factor *= (call.process_set.size() or 1) if call.op is Sum else 1

    def gradient(gradients: Tensors) -> Tensors:
        scaled = [each * factor for each in gradients] if factor != 1 else gradients
        return grouped_allgather(scaled, _gradients_name(call), call.process_set)

    return gradient


@_differentiable(reduce.reducescatter)
def reducescatter(call: Call) -> Gradient:
    """Gradient: an allgather of the parts' gradients, times both factors, and for Sum times the number of ranks."""
    return _of_reducescatter(call)


@_differentiable(reduce.grouped_reducescatter)
def grouped_reducescatter(call: Call) -> Gradient:
    """Gradient: as that of `reducescatter`."""
    return _of_reducescatter(call)


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
    rows, received = gather.alltoall(tensor, given, name, process_set)
    rows_given, of_gradients = tensor.shape[0], None if name is None else f"{name}.gradient"

    def gradient(gradients: Tensors) -> Tensors:
        back, _ = alltoall(gradients[0], received, of_gradients, process_set)
        kept = rows_given - back.shape[0]
        return [torch.cat([back, back.new_zeros(kept, *back.shape[1:])]) if kept else back]

    if _requires_it([tensor]):
        (rows,) = _tied([tensor], [rows], gradient)
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
