"""DistributedOptimizer with op=Adasum: every rank makes its own step, and the steps are reduced.

Adasum adds what is orthogonal in two vectors and averages what is parallel. It is applied to the change of the
parameters, not to the gradients, so that what an optimizer such as Adam makes of a gradient is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ringreduce.torch.hooks import GradientHooks, too_often
from ringreduce.torch.parameters import name_newest_group
from ringreduce.torch.reduction import Reduction


class DeltaReducer:
    """Counts backward passes, and reduces what a step changed."""

    def __init__(self, passes: int, reduction: Reduction) -> None:
        self.passes = passes
        self.paused = False
        self._reduction = reduction
        self._names: dict[Any, str] = {}
        self._seen: dict[Any, int] = {}
        self._hooks = GradientHooks(self)

    def add(self, named: Iterable[tuple[str, Any]]) -> None:
        """Reduce these parameters' changes too."""
        for name, parameter in named:
            self._names[parameter] = name
            self._hooks.watch(parameter)

    @property
    def names(self) -> set[str]:
        """Those of all parameters."""
        return set(self._names.values())

    def on_gradient(self, parameter: Any) -> None:
        """Count a backward pass; raises AssertionError for one too many."""
        if self.paused:
            return
        seen = self._seen[parameter] = self._seen.get(parameter, 0) + 1
        if seen > self.passes:
            raise AssertionError(too_often(self._names[parameter], seen, self.passes))

    def reset(self) -> None:
        """Begin a new step."""
        self._hooks.refresh()
        self._seen.clear()

    def starts(self) -> list[tuple[Any, torch.Tensor]]:
        """The trained parameters, and a copy of each."""
        return [(each, each.detach().clone()) for each in self._names if each.requires_grad]

    @torch.no_grad()
    def reduce(self, starts: Sequence[tuple[Any, torch.Tensor]]) -> None:
        """Go from where each parameter stood by what Adasum makes of all ranks' changes."""
        under_way = []
        for parameter, start in starts:
            delta = parameter.detach() - start
            under_way.append((parameter, start, self._reduction.begin_dense([(self._names[parameter], delta)])))
        for parameter, start, finish in under_way:
            (delta,) = finish()
            parameter.copy_(start + delta)
        self.reset()


class AdasumMixin:
    """What a wrapped optimizer does differently with op=Adasum; stands before the user's class in the inheritance."""

    param_groups: list[dict[str, Any]]
    _reducer: DeltaReducer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's gradients, then reduce over all ranks what that changed.

        Cost:   a copy of the parameters; as `allreduce` with op=Adasum of each.
        Raises: MismatchError, PeerLostError.
        """
        starts = self._reducer.starts()
        loss = super().step(closure) if closure is not None else super().step()  # type: ignore[misc]
        self._reducer.reduce(starts)
        return loss

    step.hooked = True  # type: ignore[attr-defined] # torch puts its step hooks around the user's class only

    def synchronize(self) -> None:
        """Nothing: gradients stay this rank's own; step() reduces what it changed."""

    def skip_synchronize(self) -> None:
        """Raises AssertionError: a step is always reduced."""
        raise AssertionError("skip_synchronize() with op=Adasum: gradients stay the rank's own; call step() without it")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside are not counted."""
        paused, self._reducer.paused = self._reducer.paused, True
        try:
            yield
        finally:
            self._reducer.paused = paused

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and begin a new step."""
        self._reducer.reset()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose changes are reduced too; on all ranks."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._reducer.add(name_newest_group(self.param_groups, self._reducer.names))
