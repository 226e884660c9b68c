"""One gradient on its way through a step. See reducer.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ringreduce.errors import MismatchError
from ringreduce.torch.buckets import Bucket
from ringreduce.torch.gradient_transport import DENSE, UNKNOWN, GradientTransport, empty_sparse, layout_of
from ringreduce.torch.hooks import GradientHooks
from ringreduce.torch.pending import PendingGradient, make_pending, plain


class Gradient:
    """One parameter's gradient on its way through a step."""

    def __init__(self, name: str, parameter: torch.nn.Parameter, reducer: Any) -> None:
        self.name = name
        self.parameter = parameter
        self.bucket = Bucket([self])
        self.is_loose = True  # a bucket may be found for it
        self.position = -1  # in the order in which backward computes gradients
        self.seen = 0  # backward passes since the step's beginning, or since it was reduced
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
    def local(self) -> torch.Tensor | None:
        """The gradient that this rank computed."""
        return plain(self.parameter.grad)

    def count(self) -> None:
        """Count a backward pass, from 1 again when .grad was set to None since the last."""
        gradient = self.parameter.grad
        if self.seen and self._last() is not gradient:
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

    def leave_bucket(self) -> None:
        """Be reduced by its own name, also in later steps."""
        begun = self.bucket.begun
        self.bucket, self.is_loose = Bucket([self]), False
        self.bucket.begun = begun

    def ask_layout(self, transport: GradientTransport) -> None:
        """Begin to agree on the layout, once: a rank without a gradient cannot know what the others send."""
        if self.layout_handle is not None:
            return
        # sparse gradients are those of tables of rows, as an embedding's
        if transport.size == 1 or transport.sparse_as_dense or self.parameter.dim() != 2:
            self.layout = DENSE
        else:
            self.layout_handle = transport.begin_maximum(f"{self.name}.layout", [layout_of(self.local)])

    def load(self, transport: GradientTransport) -> tuple[int, torch.Tensor]:
        """This rank's gradient and its layout; where it has none, zeros in the layout that the others have."""
        local = self.local
        if local is not None:
            if local.is_sparse and transport.sparse_as_dense:
                local = local.to_dense()
            return layout_of(local), local
        if self.layout == UNKNOWN:
            self.check_layout()
        parameter = self.parameter.detach()
        if self.layout > DENSE:
            return self.layout, empty_sparse(parameter, self.layout - DENSE)
        return self.layout, torch.zeros_like(parameter, memory_format=torch.contiguous_format)

    def check_layout(self) -> None:
        """Wait for the agreed layout, if ranks agree on it; raises MismatchError when this rank's is another."""
        if self.layout_handle is None:
            return
        mine = layout_of(self.local)
        layout_handle, self.layout_handle = self.layout_handle, None
        self.layout = int(layout_handle.wait()[0])
        if mine not in (UNKNOWN, self.layout):
            raise MismatchError(
                f"gradient {self.name!r}: {'dense' if mine == DENSE else 'sparse'} on this rank, but sparse of another "
                "form on others; it must be alike on all ranks, or pass sparse_as_dense=True"
            )

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
        if reducer is not None and self.bucket.parts:
            reducer.wait(self)


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
