"""One gradient on its way through a step, and gradients that travel together. See reducer.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ringreduce.errors import MismatchError
from ringreduce.torch.gradient_transport import Finish, GradientTransport, empty_sparse
from ringreduce.torch.hooks import GradientHooks
from ringreduce.torch.pending import PendingGradient, make_pending, plain

UNKNOWN, DENSE = 0, 1
"""Layouts of a gradient; DENSE + n is sparse, with n indices an element."""


class Gradient:
    """One parameter's gradient on its way through a step."""

    def __init__(self, name: str, parameter: torch.nn.Parameter, reducer: Any) -> None:
        self.name = name
        self.parameter = parameter
        self.bucket = Bucket([self])
        self.is_loose = True  # a bucket may be found for it
        self.position = -1  # in the order in which backward computes gradients
        self.seen = 0  # backward passes since the step's beginning
        self.reduced = False
        self.in_flight: InFlight | None = None
        self.pending: PendingGradient | None = None  # what stands in parameter.grad until it is reduced
        self.is_untouched = False  # `pending` stands for the zeros before the first backward
        self.layout = UNKNOWN  # the one that all ranks agreed on
        self.layout_handle: Any = None  # the handle of that agreement
        self._reducer = weakref.ref(reducer)
        self._self = weakref.ref(self)
        self._last: Callable[[], Any] = _no_gradient  # the object that .grad was after the last backward pass

    @property
    def trains(self) -> bool:
        """False for a frozen parameter, which takes no part."""
        return self.seen > 0 or self.parameter.requires_grad

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        """Equal for gradients that may share a bucket."""
        return self.parameter.dtype, self.parameter.device

    @property
    def local(self) -> torch.Tensor | None:
        """The gradient that this rank computed."""
        return plain(self.parameter.grad)

    def count(self) -> None:
        """Count a backward pass, from 1 again when .grad was set to None since the last."""
        gradient = self.parameter.grad
        if self.seen and self.in_flight is None and self._last() is not gradient:
            self.seen = 0
        self.seen += 1
        self._last = _no_gradient if gradient is None else weakref.ref(gradient)

    def show_zeros(self) -> None:
        """Let .grad be zeros before the first backward, as Horovod's."""
        if self.parameter.requires_grad and self.local is None:
            self.show_placeholder()
            self.is_untouched = True

    def show_placeholder(self) -> None:
        """Put zeros into .grad; for a table of rows, to which autograd may add sparse ones, an empty sparse tensor."""
        parameter = self.parameter.detach()
        is_table = parameter.dim() == 2
        self.attach(empty_sparse(parameter, 1) if is_table else torch.zeros_like(parameter), is_table)

    def attach(self, gradient: torch.Tensor, is_placeholder: bool = False) -> None:
        """Put a PendingGradient into .grad; one that is there already stays, since the user may hold it."""
        pending, self.is_untouched = self.pending, False
        if pending is not None and self.parameter.grad is pending:
            pending.value = gradient
            return
        self.pending = self.parameter.grad = pending = make_pending(gradient, self._self, is_placeholder)
        self._last = weakref.ref(pending)

    def detach_pending(self, gradient: torch.Tensor | None) -> None:
        """Put a gradient into .grad, unless the user has put another there."""
        pending, self.pending, self.is_untouched = self.pending, None, False
        if pending is not None and gradient is not None:
            pending.value = gradient
        if pending is not None and self.parameter.grad is pending:
            self.parameter.grad = gradient

    def begin(self) -> None:
        """It is accessed: begin to reduce it, if that has not begun."""
        reducer = self._reducer()
        if self.is_untouched:
            self.detach_pending(torch.zeros_like(self.parameter.detach()))
        elif reducer is not None:
            reducer.begin(self)

    def wait(self) -> None:
        """Wait until it is reduced."""
        reducer = self._reducer()
        if reducer is not None and self.in_flight is not None:
            reducer.wait(self)


class Bucket:
    """Gradients that are reduced together, all or nothing."""

    def __init__(self, members: list[Gradient], splits: bool = False) -> None:
        self.members = members
        self.splits = splits  # False: one gradient, or a group of the user's, which stays together
        self.missing = 0  # backward passes of this step that were not seen yet, as far as the hooks count

    @property
    def name(self) -> str:
        """The same on all ranks, whatever is frozen."""
        first, more = self.members[0].name, len(self.members) - 1
        return f"{first} and {more} more" if more else first

    @property
    def trained(self) -> list[Gradient]:
        """Its members but for the frozen ones."""
        return [each for each in self.members if each.trains]

    def lacks(self, passes: int) -> bool:
        """True until so many backward passes have computed all of it."""
        return any(each.seen < passes and each.trains for each in self.members)

    def is_fresh(self) -> bool:
        """True when none of it is reduced or in flight."""
        return not any(each.reduced or each.in_flight is not None for each in self.members)


class Reducer:
    """The base of the reducers of gradients and of parameter changes; hooks call `on_gradient`."""

    def __init__(self, passes: int, reduction: GradientTransport) -> None:
        self.passes = passes
        self.paused = False  # in no_sync(): gradients only add up
        self.reduction = reduction
        self._gradients: dict[int, Gradient] = {}  # by id of the parameter: the hash of a tensor takes long
        self._hooks = GradientHooks(self)

    def add(self, named: Iterable[tuple[str, Any]]) -> None:
        """Reduce what belongs to these parameters too."""
        for name, parameter in named:
            gradient = self._gradients[id(parameter)] = Gradient(name, parameter, self)
            self._hooks.watch(gradient)
            gradient.show_zeros()

    @property
    def names(self) -> dict[Any, str]:
        """Those of all parameters."""
        return {each.parameter: each.name for each in self._gradients.values()}


def _no_gradient() -> None:
    return None


class InFlight:
    """A bucket on its way: its dense gradients, and each sparse one."""

    def __init__(self, bucket: Bucket, parts: Sequence[tuple[Sequence[Gradient], Finish]]) -> None:
        self.bucket = bucket
        self._parts = parts

    def finish(self) -> None:
        """Wait, and put the reduced gradients into their places."""
        for members, finish in self._parts:
            for member in members:
                if member.layout_handle is not None:
                    check_layout(member)
            for member, reduced in zip(members, finish(), strict=True):
                member.detach_pending(reduced)
                member.seen, member.reduced, member.in_flight = 0, True, None


def check_layout(gradient: Gradient) -> None:
    """Wait for the agreed layout; raises MismatchError when this rank's gradient has another."""
    if gradient.layout_handle is None:
        return
    mine = layout_of(gradient.local)
    layout_handle, gradient.layout_handle = gradient.layout_handle, None
    gradient.layout = int(layout_handle.wait()[0])
    if mine not in (UNKNOWN, gradient.layout):
        raise MismatchError(
            f"gradient {gradient.name!r}: {'dense' if mine == DENSE else 'sparse'} on this rank, but sparse of another "
            "form on others; it must be alike on all ranks, or pass sparse_as_dense=True"
        )


def layout_of(gradient: torch.Tensor | None) -> int:
    """DENSE, DENSE + the indices of an element, or UNKNOWN without a gradient."""
    if gradient is None:
        return UNKNOWN
    return DENSE + (gradient.sparse_dim() if gradient.is_sparse else 0)
