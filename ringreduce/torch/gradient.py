"""A parameter's gradient: what is in `.grad` on its way through a step. See optim/reducer.py."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ringreduce.checks.divergence import Part
from ringreduce.compression import wire_of
from ringreduce.errors import InputError, MismatchError
from ringreduce.execution.submission import Ended, Handle
from ringreduce.optim import buckets
from ringreduce.optim.buckets import DENSE, UNKNOWN
from ringreduce.optim.exchange import CHANGE, Exchange
from ringreduce.optim.reducer import Reducer
from ringreduce.settings.log import JOB
from ringreduce.torch.groups import Change, Groups
from ringreduce.torch.hooks import GradientHooks
from ringreduce.torch.parts import Parts
from ringreduce.torch.pending import PendingGradient, plain
from ringreduce.torch.sparse import empty_sparse, layout_of, sparse_allreduce_async


class Gradient(buckets.Gradient):
    """One parameter's gradient, in `parameter.grad`."""

    def __init__(self, name: str, parameter: torch.nn.Parameter, reducer: TorchReducer) -> None:
        super().__init__(name)
        self.parameter = parameter
        self.may_be_sparse = parameter.dim() == 2  # a table of rows, as an embedding
        # ranks agree on what is sparse for tables only; others, which torch.gather(sparse_grad=True) makes, go as dense
        self.sparse_as_dense = reducer.sparse_as_dense or not self.may_be_sparse
        self._stream: Any = None  # the GPU's, on which backward has added to it
        self._form = DENSE  # the layout in which the optimizer gets it
        self.pending: PendingGradient | None = None  # in parameter.grad
        self.is_untouched = False  # `pending` stands for the zeros before the first backward
        self.is_placeholder = False  # `pending` stood for zeros when it was put into .grad
        self._reducer = weakref.ref(reducer)
        self._self = weakref.ref(self)
        self._last: Callable[[], Any] = _no_gradient  # the object that .grad was after the last backward pass

    @property
    def trains(self) -> bool:
        """False for a frozen parameter, which takes no part."""
        return self.seen > 0 or self.parameter.requires_grad

    @property
    def size_and_kind(self) -> tuple[int, object]:
        """Those of the parameter."""
        return self.parameter.nbytes, (self.parameter.dtype, self.parameter.device)

    @property
    def local(self) -> torch.Tensor | None:
        """The gradient that this rank computed."""
        return plain(self.parameter.grad)

    @property
    def local_layout(self) -> int:
        """That of `local`."""
        local = self.local
        return UNKNOWN if local is None else layout_of(local)

    def count(self) -> None:
        """Count a backward pass, from 1 again when .grad was set to None since the last."""
        gradient = self.parameter.grad
        if self.seen and self._last() is not gradient:
            self.seen = 0
        self.seen += 1
        self._last = _no_gradient if gradient is None else weakref.ref(gradient)

    def note_stream(self) -> None:
        """Called in a hook: backward computes on the streams of forward, which may differ within a bucket."""
        if self.parameter.is_cuda:
            self._stream = torch.cuda.current_stream(self.parameter.device)

    def _follow_stream(self) -> None:
        """Let what this thread queues from now on see what backward has added."""
        stream, self._stream = self._stream, None
        if stream is not None and stream != (current := torch.cuda.current_stream(self.parameter.device)):
            current.wait_stream(stream)

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
        self.is_placeholder = True

    def attach(self, array: torch.Tensor, is_placeholder: bool = False) -> None:
        """Put a PendingGradient into .grad; one that is there already stays, since the user may hold it."""
        pending, self.is_untouched, self.is_placeholder = self.pending, False, False
        if pending is not None and self.parameter.grad is pending:
            pending.value = array
            return
        made: PendingGradient = torch.Tensor._make_subclass(PendingGradient, array)
        made.value, made.owner = array, self._self
        if is_placeholder:
            made.is_placeholder = True
        self.pending = self.parameter.grad = made
        self._last = weakref.ref(made)

    def lack(self) -> None:
        """No rank has one in this step."""
        self.detach_pending(None)

    def detach_pending(self, gradient: torch.Tensor | None) -> None:
        """Put a gradient into .grad, unless the user has put another there."""
        pending, self.pending, self.is_untouched = self.pending, None, False
        if pending is not None and gradient is not None:
            pending.value = gradient
        if pending is not None and self.parameter.grad is pending:
            self.parameter.grad = gradient

    def load(self) -> tuple[int, torch.Tensor]:
        """Its layout, and what this rank sends; zeros in the layout of the others where it computed none."""
        local = self.parameter.grad
        if type(local) is torch.Tensor and not (local.is_sparse or local.requires_grad) and self._stream is None:
            self._form = DENSE  # as nearly always
            return DENSE, local
        self._follow_stream()
        local = self.local
        if local is None and self.layout == UNKNOWN:
            self.check_layout()
        self._form = self.layout if local is None else layout_of(local)
        if self._form > DENSE and self.sparse_as_dense:
            return DENSE, self._zeros() if local is None else local.detach().to_dense()
        if local is not None and local.requires_grad:
            _warn_of_graph()
            local = local.detach()
        if local is not None:
            return self._form, local
        if self._form > DENSE:
            return self._form, empty_sparse(self.parameter.detach(), self._form - DENSE)
        return self._form, self._zeros()

    def _zeros(self) -> torch.Tensor:
        return torch.zeros_like(self.parameter.detach(), memory_format=torch.contiguous_format)

    def begin_sparse(self, exchange: Exchange, array: torch.Tensor) -> Handle[list[Any]]:
        """Begin to reduce a sparse gradient: every rank gets the rows of all, coalesced."""
        gradient = array.detach().coalesce()
        if exchange.size == 1:
            return Ended([gradient])
        if (wire := wire_of(exchange.compression)) is not None:
            raise InputError(
                f"gradient {self.name!r}: sparse, with compression={wire}; expected a dense one: pass "
                "sparse_as_dense=True, or another compression"
            )
        handle = sparse_allreduce_async(gradient, self.name, exchange.op, exchange.process_set)
        return handle.mapped(lambda reduced: [reduced.coalesce()])

    def arrive(self, reduced: torch.Tensor) -> None:
        """Put the reduced gradient into .grad, a dense one in the memory that this rank's had, if it was dense."""
        pending = self.pending
        own = pending.value if pending is not None else reduced
        if own is reduced and self._form == DENSE and self.parameter.grad is pending is not None:  # as nearly always
            self.pending, self.parameter.grad, self.is_untouched = None, reduced, False
            return
        if own is not reduced and not reduced.is_sparse:  # it was compressed
            reduced = own.copy_(reduced)
        if self._form > DENSE and not reduced.is_sparse:
            reduced = reduced.to_sparse(self._form - DENSE)
        self.detach_pending(reduced)

    def give_up(self) -> None:
        """Forget that it was to be reduced, and leave this rank's in .grad."""
        super().give_up()
        if self.pending is not None:
            self.detach_pending(self.local)

    def begin(self) -> None:
        """It is accessed: begin to reduce it, if that has not begun."""
        reducer = self._reducer()
        if self.is_untouched:  # but autograd may have added to it, where a hook of the script's comes before ours
            local = self.local
            self.detach_pending(torch.zeros_like(self.parameter.detach()) if local is None else local)
        elif reducer is not None:
            reducer.begin(self)

    def wait(self) -> None:
        """Wait until it is reduced."""
        reducer = self._reducer()
        if reducer is not None and self.bucket.parts:
            reducer.wait(self)


@functools.cache
def _warn_of_graph() -> None:
    JOB.warning(
        "gradients come from backward(create_graph=True); reduced, they have no graph, so a penalty on .grad changes "
        "nothing. Compute them with torch.autograd.grad(loss, parameters, create_graph=True), and add the penalty to "
        "the loss before backward() (shown once)"
    )


class TorchReducer(Reducer):
    """The base of the reducers of gradients and of parameter changes; hooks call `on_gradient`."""

    owned: Groups

    def __init__(self, passes: int, exchange: Exchange, sparse_as_dense: bool = False) -> None:
        super().__init__(passes, exchange)
        self.sparse_as_dense = sparse_as_dense
        self._hooks = GradientHooks(self)
        self._parts = Parts()
        self._gone: list[Gradient] = []  # by the last change

    def begin_with(self, groups: Groups, named: Iterable[tuple[str, Any]]) -> None:
        """Reduce what belongs to the parameters that the groups have, and what they will have."""
        self.owned = groups
        self.add(named)

    def add(self, named: Iterable[tuple[str, Any]]) -> None:
        """Reduce what belongs to these parameters too."""
        for name, parameter in named:
            self._watch(Gradient(name, parameter, self)).show_zeros()

    def _watch(self, gradient: Gradient) -> Gradient:
        self._gradients[id(gradient.parameter)] = gradient
        self._hooks.watch(gradient)
        return gradient

    def follow(self) -> Change | None:
        """Reduce what the groups have now; None: what they have had. No gradient of this rank is on its way.

        Raises: MismatchError on all ranks unless the groups of all have changed alike; InputError: see `refusal`.
        """
        change = self._change()
        if change is None:
            return None
        refusal = self.refusal(change)
        try:
            self.say(CHANGE, refusal or str(change))
            if refusal:
                raise InputError(refusal)
        except MismatchError as error:
            raise MismatchError(f"{error}. Change them on all ranks alike, between the same two steps") from error
        self.take(change)
        if self.exchange.process_set.rank() == 0:
            self.owned.tell(change, "gradients of ", "reduced")
        return change

    def follow_told(self) -> None:
        """As `follow`, where all ranks have been given the same groups, as by a commit: nothing is communicated."""
        if (change := self._change()) is not None:
            self.take(change)
            self.regroup()

    def _change(self) -> Change | None:
        """What the groups have got or lost since they were followed; None: nothing."""
        if not self.owned.have_changed():
            return None
        change = self.owned.change()
        if change.new or change.gone:
            return change
        self.owned.take(change)  # it stands in another place
        return None

    def refusal(self, change: Change) -> str:
        """Why this rank cannot follow a change; empty: it can."""
        return ""

    def take(self, change: Change) -> None:
        """Let the gradients of parameters that are gone go, and have those of new ones."""
        self._gone = [self._gradients.pop(id(parameter)) for _, parameter in change.gone]
        for gradient in self._gone:
            self._hooks.forget(id(gradient.parameter))
            gradient.detach_pending(gradient.local)
        self.exchange.forget(each.name for each in self._gone)
        positions = {each.name: each.position for each in self._gone}
        for name, parameter in change.new:
            self._watch(self._made(name, parameter)).position = positions.get(name, -1)
        self._parts = Parts()
        self.owned.take(change)

    def regroup(self) -> None:
        """After a change, and what was reduced for it: let new gradients share buckets."""
        gone, self._gone = self._gone, []
        self._regroup(gone)

    def _made(self, name: str, parameter: torch.nn.Parameter) -> Gradient:
        return Gradient(name, parameter, self)

    def parts(self) -> list[Part]:
        """See `optim.reducer`."""
        return self._parts.of(self.names, self.owned.groups)

    def learning_rates(self) -> list[Any]:
        """See `optim.reducer`; 0 for one that a GPU has, as the host would have to wait for it."""
        rates = [each.get("lr", 0) for each in self.owned.groups]
        return [0 if getattr(each, "is_cuda", False) else each for each in rates]

    @property
    def names(self) -> dict[Any, str]:
        """Those of all parameters."""
        return {each.parameter: each.name for each in self._gradients.values()}

    def reset(self) -> None:
        """Begin a new step, also for parameters that are no longer frozen."""
        self._hooks.refresh()
        super().reset()


def _no_gradient() -> None:
    return None
