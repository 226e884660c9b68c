"""When each gradient is reduced: during backward where that is faster. optim/reducer.py has what is reduced together.

    backward: hook ── begin ──> PendingGradient in .grad ── step(), or first access ──> reduced gradient in .grad

In the first CAUTIOUS_STEPS steps a rank submits no gradient before step() or the first access; nor for some steps after
one in which a gradient was computed twice or cleared, as a GAN's discriminator's are: gradients that are not submitted
can be added to, or discarded, without the other ranks. Else it submits them during backward. Where the ranks use all
cores of the only host, moving data would take them from backward, and takes longer than after it: then they are
submitted at its end.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from ringreduce.errors import BackwardError
from ringreduce.execution.frames import current_frames
from ringreduce.execution.living import Living
from ringreduce.execution.signature import calling_line, is_of_library
from ringreduce.optim.buckets import UNKNOWN, GradientBucket
from ringreduce.optim.exchange import CLEARED, Exchange
from ringreduce.torch.gradient import Gradient, TorchReducer
from ringreduce.torch.hooks import has_other_hooks, too_often

_backward_number = torch._C._current_graph_task_id
_reducers: Living[GradientReducer] = Living()


class GradientReducer(TorchReducer):
    """Reduces the gradients of parameters as hooks report them ready."""

    def __init__(self, passes: int, exchange: Exchange, sparse_as_dense: bool, wait_in_backward: bool) -> None:
        super().__init__(passes, exchange, sparse_as_dense)
        self._waits = wait_in_backward
        self._backward = -1
        self._eager = False  # submit buckets as they fill
        self._filled: GradientBucket | None = None  # to be submitted with the next gradient
        self._found: dict[int, Gradient] = {}  # by id of parameters that came by themselves, until all ranks agree
        self._looked = self._follows_first = False  # in this step; see `_look`
        _reducers.add(self)

    def on_gradient(self, gradient: Gradient) -> None:
        """Note that backward has added to it; raises BackwardError when it is being reduced."""
        if gradient.bucket.parts:
            raise BackwardError(too_often(gradient.name, gradient.seen + 1, self.passes))
        if gradient.is_untouched:
            gradient.detach_pending(gradient.local)
        if gradient.parameter.is_cuda:
            gradient.note_stream()
        if self.paused:
            return
        if self._backward != _backward_number():
            self._watch_the_end()
        if id(gradient.parameter) in self._found:
            gradient.is_placeholder = False
            return
        self._computed.append(gradient)
        if self._eager:
            filled, self._filled = self._filled, None
            if filled is not None:
                self._begin_filled(filled)
            bucket = gradient.bucket
            bucket.missing -= 1  # only a hint: threads of several GPUs may miscount
            if bucket.missing <= 0:
                if has_other_hooks(gradient.parameter):  # which may be behind ours, and change this rank's gradient
                    self._filled = bucket
                else:
                    self._begin_filled(bucket)

    def _begin_filled(self, bucket: GradientBucket) -> None:
        with self._lock:
            self._count()
            self._begin_complete([bucket])
            if bucket.splits and self._has_wires:
                for _, handle in bucket.parts:  # a batch by itself: the engine is not to wait for the next one
                    handle.poll()

    def _watch_the_end(self) -> None:
        """A backward begins: have autograd call `_at_the_end` when it is done."""
        self._count()
        self._backward = _backward_number()
        self._line = line_of_backward()
        self._look_at_the_world()
        if not self._looked:
            self._looked = True
            self._look()
        self._eager, self._filled = self.trusts and self.overlaps and not self._follows_first, None
        if self._eager:
            for bucket in self._buckets:
                members: Sequence[Any] = bucket.members
                bucket.missing = sum(
                    [max(0, self.passes - each.seen) for each in members if each.parameter.requires_grad]
                )
        reducer = weakref.ref(self)

        def at_the_end() -> None:
            alive = reducer()
            if alive is not None:
                alive._at_the_end()

        torch.autograd.Variable._execution_engine.queue_callback(at_the_end)

    @property
    def overlaps(self) -> bool:
        """See `optim.reducer`; on a GPU it is always faster: cores have nothing to do."""
        return super().overlaps or True in [each.parameter.is_cuda for each in self._gradients.values()]

    def _at_the_end(self) -> None:
        """Other ranks may have gradients that this rank did not compute: reading .grad must return them too."""
        self._count()
        gradients = self._gradients.values()
        if not (self._found or [each for each in gradients if each.seen >= self.passes]):
            return
        self._hooks.refresh()
        _attach(self._found.values())
        if self._waits:
            self.synchronize()
        elif not self.trusts:
            self._beware_of_equal_names()
        elif not self._follows_first:
            self._begin_complete(self._buckets)
        _attach(gradients)

    def _look(self) -> None:
        """Before the first backward pass of a step: whether the groups have changed, which is followed first then.

        A change that comes later is followed when the step's gradients have arrived: some ranks may have sent them.
        """
        if self.owned.have_changed():
            self._follows_first = True
            self._find()

    def _find(self) -> None:
        """Have what the groups have got by themselves wait, too: who read this rank's alone, to clip, would differ."""
        for name, parameter in self.owned.change().new:
            if id(parameter) not in self._found:
                gradient = self._found[id(parameter)] = Gradient(name, parameter, self)
                self._hooks.watch(gradient)

    def begin(self, gradient: Any) -> None:
        """See `optim.reducer`; all, where the ranks must agree on other parameters first."""
        if self._follows_first:
            self.synchronize()
        else:
            super().begin(gradient)

    def synchronize(self, quiet: bool = False) -> None:
        """See `optim.reducer`; also what the groups have got by themselves."""
        follows_first, self._follows_first = self._follows_first, False
        if quiet or not follows_first:
            super().synchronize(quiet)
        if quiet:
            return
        if self.owned.have_changed() and (change := self.follow()) is not None:
            try:
                self._reduce_new(sorted(name for name, _ in change.new))
            finally:
                self.regroup()
        elif follows_first:  # it has changed back
            super().synchronize()

    def _reduce_new(self, names: Sequence[str]) -> None:
        """Where no rank has a gradient, as of a parameter that was replaced after backward, there is none after it."""
        if not names:
            super().synchronize()
            return
        named = {each.name: each for each in self._gradients.values()}
        new = [named[name] for name in names]
        local = [UNKNOWN if each.is_placeholder else each.local_layout for each in new]
        agreed = self.exchange.begin_maximum(f"{names[0]}.layouts", local).wait() if self.exchange.size > 1 else local
        for gradient, mine, layout in zip(new, local, agreed, strict=True):
            gradient.take_layout(mine, int(layout))
        lacking = {each for each in new if each.layout == UNKNOWN}
        for bucket in {each.bucket for each in lacking}:
            bucket.begun = lacking.issuperset(bucket.members)
        super().synchronize()
        for each in lacking:
            each.lack()

    def _made(self, name: str, parameter: torch.nn.Parameter) -> Gradient:
        gradient = self._found.pop(id(parameter), None) or super()._made(name, parameter)
        gradient.name = name
        return gradient

    def reset(self) -> None:
        """Begin a new step."""
        for key, gradient in self._found.items():
            self._hooks.forget(key)
            gradient.detach_pending(gradient.local)
        self._found.clear()
        self._looked = self._follows_first = False
        super().reset()

    def _beware_of_equal_names(self) -> None:
        """Gradients of two optimizers that have one name can only be reduced one after the other, at step()."""
        names = {each.name for each in self._gradients.values() if each.seen}
        for other in _reducers:
            if other is self or other._known_since != self._known_since:
                continue
            name = next((each.name for each in other._gradients.values() if each.seen and each.name in names), None)
            if name is not None:
                why = f"{name!r} is a parameter of another optimizer, too, so a backward() computed both ({self._line})"
                self._distrust(why)
                other._distrust(why)

    def clear(self) -> None:
        """Begin a new step without the current gradients; raises BackwardError while some are being reduced."""
        self._count()
        cleared = [each.name for each in self._gradients.values() if each.seen >= self.passes]
        if self._in_flight:
            self._clear_in_flight()
        if cleared:
            self._distrust(f"the gradient of {cleared[0]!r} was cleared without a step() ({calling_line()})", True)
        self.reset()
        self._look()

    def _clear_in_flight(self) -> None:
        """Where the script has cleared gradients before: let them arrive, and see that all ranks clear them.

        A rank that steps instead is ahead by a step: its next gradients meet what this one says here.
        Raises: BackwardError where the script has not; MismatchError on all ranks where another one steps.
        """
        if not self._clears:
            raise BackwardError(
                "zero_grad() after backward() and before step() would clear gradients that are being reduced; call it "
                "before backward() or after step(); or put a backward() whose gradients are not wanted into `with "
                "optimizer.no_sync():`; or, to give up this step, call synchronize() first, on all ranks"
            )
        super().synchronize()
        self.say(CLEARED, "by zero_grad()")


def _attach(gradients: Iterable[Gradient]) -> None:
    """Let who reads .grad wait, whether this rank has computed it or not."""
    for gradient in gradients:
        gradient.is_untouched = False
        if gradient.bucket.begun:
            continue
        attached = gradient.pending is not None and gradient.parameter.grad is gradient.pending
        if not attached and gradient.trains:
            local = gradient.local
            if local is not None:
                gradient.attach(local)
            else:
                gradient.show_placeholder()


def line_of_backward() -> str:
    """The user's line that called backward(). On GPUs hooks run in autograd's threads, without a frame of it."""
    own: FrameType | None = sys._getframe()
    while own is not None and is_of_library(own.f_code.co_filename):
        own = own.f_back
    if own is None:
        for innermost in current_frames().values():
            frame: FrameType | None = innermost
            while frame is not None and frame.f_code.co_name != "_engine_run_backward":  # of torch.autograd.graph
                frame = frame.f_back
            if frame is not None:  # that thread waits for this one
                return calling_line(frame=frame)
    return calling_line(2)
