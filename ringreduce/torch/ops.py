"""The synchronous collectives that return new tensors: autograd goes through them.

They have the signatures of `ringreduce.api`; the in-place and `_async` forms are those themselves, and unknown to
autograd. What their gradients are says frameworks/collective.py.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ringreduce.api import broadcast as broadcasts
from ringreduce.api import gather, reduce
from ringreduce.api.process_sets import ProcessSet, number_of, placed
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.frameworks.collective import (
    Call,
    Collective,
    Framework,
    Parameters,
    Result,
    Tensors,
    gradients_of,
    with_signature_of,
)
from ringreduce.runtime.submit import refused, taken_apart

__all__ = ["allgather", "allreduce", "alltoall", "alltoall_async", "broadcast", "grouped_allgather"]
__all__ += ["grouped_allreduce", "grouped_reducescatter", "reducescatter"]


_TORCH = Framework(
    sys.modules[__name__],
    torch.cumsum,
    "tensor.detach()",
    number=lambda of_ranks: of_ranks(),
    scaled=lambda tensor, factor: tensor if factor == 1 else tensor * factor,
    kept=lambda condition, tensor: tensor if condition else torch.zeros_like(tensor),
)


class _Collective(torch.autograd.Function):
    """Connects results to their inputs for autograd. The collective itself has run before, in the caller's line."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, received: Any, results: Tensors, *tensors: torch.Tensor) -> Any:
        ctx.collective, ctx.received = collective, received
        ctx.rows = torch.tensor([each.shape[0] for each in tensors], device="cpu") if collective.by_rows else None
        return tuple(each.data for each in results)  # no views of anything, so that callers may change them in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # autograd hands out expanded and conjugated views
        plain = [each.resolve_conj().resolve_neg().contiguous() for each in gradients]
        return None, None, None, *gradients_of(ctx.collective, plain, _TORCH, ctx.rows, ctx.received)


def _tied(tensors: Sequence[Any], results: Sequence[Any], collective: Collective, received: Any = None) -> list[Any]:
    """The results, known to autograd where they are of a type that has gradients."""
    tied = list(results)
    # not only those that require it: ranks may differ in this, and the gradient's collective must not
    numbers = [number for number, each in enumerate(tensors) if _has_gradient(each)]
    outputs = _Collective.apply(  # type: ignore[no-untyped-call]
        collective.only(numbers), received, [results[each] for each in numbers], *[tensors[each] for each in numbers]
    )
    for number, output in zip(numbers, outputs, strict=True):
        tied[number] = output
    return tied


def _has_gradient(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _requires_it(tensors: Sequence[Any]) -> bool:
    """Also in forward mode, where torch then says that it cannot."""
    some = filter(_has_gradient, tensors)
    if forward_ad._current_level >= 0:
        unpack: Any = forward_ad.unpack_dual
        return any(each.requires_grad or unpack(each).tangent is not None for each in some)
    return any(each.requires_grad for each in some)


def _differentiable(
    collective: Callable[Parameters, Result],
) -> Callable[[Callable[[], None]], Callable[Parameters, Result]]:
    """Make autograd go through a collective; decorates what says, in its docstring, what is its gradient."""
    signature, kind = inspect.signature(collective), collective.__name__.removeprefix("grouped_")
    first = next(iter(signature.parameters))
    is_group = first == "tensors"

    def decorate(described: Callable[[], None]) -> Callable[Parameters, Result]:
        @functools.wraps(described)
        def differentiable(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
            if kwargs.get("out") is not None:
                return _into(collective, signature.bind(*args, **kwargs))
            given: Any = args[0] if args else kwargs.get(first)
            if is_group and hasattr(given, "__next__"):  # a generator can be read once
                once = signature.bind(*args, **kwargs).arguments | {first: list(given)}
                return differentiable(**once)  # type: ignore[call-arg]
            result: Any = collective(*args, **kwargs)
            tensors, names, whole = (given, None, list) if is_group else taken_apart(given)
            if not _requires_it(tensors):
                return result
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            called = Collective.of(kind, {"names": names, **bound.arguments})
            return whole(_tied(tensors, result if is_group else taken_apart(result)[0], called))

        differentiable.__signature__ = signature  # type: ignore[attr-defined]
        differentiable.__doc__ = f"{inspect.getdoc(collective)}\n\n{inspect.getdoc(described)}"
        return differentiable

    return decorate


def _into(collective: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    """Call a collective that has `out`, of which autograd must not have to know."""
    call.apply_defaults()
    has = call.arguments
    if torch.is_grad_enabled() and _requires_it([has["tensor"], has["out"]]):
        why = "gradients do not flow through out=; pass tensor.detach(), or call it without out"
        function, number = collective.__name__, number_of(has["process_set"], collective.__name__)
        raise refused(function, InputError(f"{function}: {why}"), number, has["name"])
    return collective(*call.args, **call.kwargs)


@_differentiable(reduce.allreduce)
def allreduce() -> None:
    """Gradient: for Average and Sum the same allreduce, compressed too; other ops have none: InputError in backward.

    A tensor that is not contiguous, or sparse: InputError.
    """


@_differentiable(reduce.grouped_allreduce)
def grouped_allreduce() -> None:
    """Gradient: as that of `allreduce`."""


@_differentiable(gather.allgather)
def allgather() -> None:
    """Gradient: this rank's rows of the result's gradient, averaged over the ranks."""


@_differentiable(gather.grouped_allgather)
def grouped_allgather() -> None:
    """Gradient: as that of `allgather`."""


@_differentiable(broadcasts.broadcast)
def broadcast() -> None:
    """Gradient: on the root the result's, averaged over the ranks; elsewhere zeros.

    Either all ranks' tensors must require it or none: a rank that does not run backward leaves the others waiting.
    """


@_differentiable(reduce.reducescatter)
def reducescatter() -> None:
    """Gradient: an allgather of the parts' gradients, times both factors, and for Sum times the number of ranks."""


@_differentiable(reduce.grouped_reducescatter)
def grouped_reducescatter() -> None:
    """Gradient: as that of `reducescatter`."""


@with_signature_of(gather.alltoall)
def alltoall(call: Call) -> Any:
    """Send each rank its part of `tensor`'s rows, and return what all ranks sent to this one, in rank order.

    splits:   the rows for each rank: an int32 tensor or a list, (size,), whose sum is dim 0. None: equal parts.
    Returns:  the received rows; with splits (rows, received_splits), the latter an int32 tensor, (size,).
    Gradient: sent back to where the rows came from.
    Otherwise as `ringreduce.alltoall`.
    Source:   Horovod's alltoall.
    """
    tensor, given = call.tensor, _given_splits(call)
    rows, received = gather.alltoall(tensor, given, call.name, call.process_set)
    if _requires_it([tensor]):
        (rows,) = _tied([tensor], [rows], Collective.of("alltoall", vars(call)), received)
    return rows if call.splits is None else (rows, received)


@with_signature_of(gather.alltoall_async)
def alltoall_async(call: Call) -> Handle:
    """Begin an `alltoall`; `synchronize(handle)` returns (rows, received_splits) even without splits, as in Horovod."""
    return gather.alltoall_async(call.tensor, _given_splits(call), call.name, call.process_set)


def _given_splits(call: Call) -> Any:
    return placed("alltoall", call.name, call.process_set, _splits, call.tensor, call.splits, call.process_set)


def _splits(tensor: Any, splits: Any, process_set: ProcessSet) -> Any:
    """The splits as an int32 tensor; what is wrong as it is: the collective itself raises the error."""
    if splits is None:
        number_of(process_set, "alltoall")
        size = process_set.size() or 0
        try:
            each, rest = divmod(tensor.shape[0], size)
        except (AttributeError, IndexError, RuntimeError, ZeroDivisionError):  # an odd tensor; not a member
            return None
        return None if rest else torch.full((size,), each, dtype=torch.int32, device="cpu")
    if isinstance(splits, torch.Tensor) and splits.dtype != torch.int32:
        raise InputError(f"alltoall: splits of type {splits.dtype}; expected torch.int32, pass splits.int()")
    if isinstance(splits, torch.Tensor):
        return splits
    try:
        return torch.tensor([operator.index(each) for each in splits], dtype=torch.int32, device="cpu")
    except (TypeError, RuntimeError, OverflowError):  # no list, no integers, or too large ones
        return splits
