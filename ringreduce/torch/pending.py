"""A gradient that is being reduced: the first access waits for it.

Between backward() and step() `parameter.grad` is a `PendingGradient`. Gradient clipping, GradScaler.unscale_() or a
print() sees the reduced gradient without a call of synchronize(). backward() itself does not wait: it could wait for a
rank that has other work to do first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ringreduce.arrays import trees

# What every rank knows without waiting.
METADATA: set[Any] = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
}


class PendingGradient(torch.Tensor):
    """Stands for a gradient until it is reduced; every function of torch waits, then gets the reduced tensor instead.

    Made by `torch.Tensor._make_subclass(PendingGradient, gradient)`, dense or sparse, in the gradient's memory; then it
    gets its `value` and `owner`. No function does so, as one is made for each gradient of each step.
    Source: torch's own AsyncCollectiveTensor, which does so for functional collectives.
    """

    value: torch.Tensor  # the gradient itself: this rank's, later the reduced one
    is_placeholder = False  # True: this rank computed none (and autograd has added nothing to it yet)
    owner: weakref.ReferenceType[Any]
    """Has begin() and wait(), and `pending` while this stands for it; wait() sets `value` to the reduced gradient."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` with the reduced gradients in place of pending ones."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        waited: list[PendingGradient] = []
        _map_pending((args, kwargs), waited.append)
        owners = [owner for each in waited if (owner := each.owner()) is not None and owner.pending is each]
        for owner in owners:
            owner.begin()  # all before the first wait: other ranks may be waiting for any of them
        for owner in owners:
            owner.wait()
        args, kwargs = _map_pending((args, kwargs or {}), lambda pending: pending.value)
        return func(*args, **kwargs)


def plain(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's gradient as autograd left it, without waiting; None where it is a placeholder."""
    if not isinstance(gradient, PendingGradient):
        return gradient
    with torch._C.DisableTorchFunctionSubclass():
        if gradient.is_placeholder and gradient._nnz() == 0:
            return None
        return gradient.detach()


def _map_pending(tree: Any, function: Callable[[PendingGradient], Any]) -> Any:
    return trees.map_leaves(tree, lambda _, leaf: function(leaf) if isinstance(leaf, PendingGradient) else leaf)
