"""DistributedOptimizer with op=Adasum: every rank steps on its own, and the changes of the parameters are reduced.

Adasum adds what is orthogonal in two vectors and averages what is parallel. It is applied to the change of the
parameters, not to the gradients, so that what an optimizer such as Adam makes of a gradient is kept.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringreduce import runtime
from ringreduce.errors import BackwardError
from ringreduce.optim.buckets import GradientBucket
from ringreduce.torch.gradient import Gradient, TorchReducer
from ringreduce.torch.hooks import too_often
from ringreduce.torch.wrapped import UnscalingMixin, WrappedMixin, passed_on


class DeltaReducer(TorchReducer):
    """Counts backward passes, and reduces what a step changed."""

    def on_gradient(self, gradient: Gradient) -> None:
        """Count a backward pass; raises BackwardError for one too many."""
        if gradient.is_untouched:
            gradient.detach_pending(gradient.local)
        if self.paused:
            return
        gradient.count()
        if gradient.seen > self.passes:
            raise BackwardError(too_often(gradient.name, gradient.seen, self.passes))

    def clear(self) -> None:
        """Begin a new step."""
        self._hooks.refresh()
        for gradient in self._gradients.values():
            gradient.seen = 0
            gradient.detach_pending(gradient.local)

    abandon = clear

    def _next_bucket(self) -> GradientBucket:
        """See `optim.reducer`; the group that a step sends has the name of the first, whether that is frozen or not."""
        return min(self._buckets, key=operator.attrgetter("name"), default=None) or super()._next_bucket()

    def _go_along(self, bucket: GradientBucket) -> None:
        """See `optim.reducer`: all that a step sends is one group, so there is nothing beside it."""

    @property
    def no_overlap(self) -> str:
        """See `optim.reducer`."""
        return "op=Adasum reduces what a step changed"

    def starts(self) -> list[tuple[Gradient, torch.Tensor]]:
        """The trained parameters, by name, and a copy of each; none where there is nobody to reduce with."""
        self._look_at_the_world()
        if self.follow():
            self.regroup()
        trained = [each for each in self._gradients.values() if each.parameter.requires_grad]
        trained.sort(key=operator.attrgetter("name"))  # ranks may have them in another order
        return [(each, each.parameter.detach().clone()) for each in trained] if self.exchange.size > 1 else []

    @torch.no_grad()
    def reduce(self, starts: Sequence[tuple[Gradient, torch.Tensor]]) -> None:
        """Add the Adasum of all ranks' changes, which are a group, to where each parameter started."""
        changes, names = [each.parameter - start for each, start in starts], [each.name for each, _ in starts]
        try:
            reduced = self.exchange.begin(self._next_bucket().name, changes, names).wait() if starts else ()
            for (gradient, start), change in zip(starts, reduced, strict=True):
                gradient.parameter.copy_(start + change)
        finally:
            self.clear()
        if self._comparison is not None:
            self._comparison.in_order()
        runtime.stepped(id(self))


class AdasumMixin(UnscalingMixin, WrappedMixin):
    """What a wrapped optimizer does differently with op=Adasum; precedes the user's class in the MRO."""

    _reducer: DeltaReducer

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step with this rank's gradients, then reduce over all ranks what that changed.

        Where GradScaler finds gradients of this rank that are not finite, this rank's change is none.

        Cost:   a copy of the parameters; as `grouped_allreduce` with op=Adasum.
        Raises: MismatchError, PeerLostError.
        """
        starts, loss = self._reducer.starts(), None
        if self._is_unscaled():
            loss = super().step(*passed_on(closure, args), **kwargs)  # type: ignore[misc]
        self._reducer.reduce(starts)
        return loss

    step.hooked = True  # type: ignore[attr-defined] # torch puts its step hooks around the user's class only

    def synchronize(self) -> None:
        """Nothing: gradients stay this rank's own; step() reduces what it changed."""

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Raises AssertionError where there are others to reduce with: a step is always reduced."""
        if self._reducer.exchange.size == 1:
            return contextlib.nullcontext()
        raise AssertionError("skip_synchronize() with op=Adasum: gradients stay the rank's own; call step() without it")
