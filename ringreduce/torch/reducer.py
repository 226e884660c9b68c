"""When each gradient is reduced: during backward where that is faster. optim/reducer.py has what is reduced together.

    backward: hook ── begin ──> PendingGradient in .grad ── step(), or first access ──> reduced gradient in .grad

In the first CAUTIOUS_STEPS steps a rank submits no gradient before step() or the first access; nor in RECOVERY_STEPS
steps after one in which a gradient was computed twice or cleared, as a GAN's discriminator's are: gradients that are
not submitted can be added to, or discarded, without the other ranks. Else it submits them during backward. Where the
ranks use all cores of the only host, moving data would take them from backward, and takes longer than after it: then
they are submitted at its end.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType

import torch

from ringreduce.errors import BackwardError
from ringreduce.execution.signature import calling_line, is_of_library
from ringreduce.optim.exchange import Exchange
from ringreduce.torch.gradient import Gradient, TorchReducer
from ringreduce.torch.hooks import too_often

_backward_number = torch._C._current_graph_task_id
_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


class GradientReducer(TorchReducer):
    """Reduces the gradients of parameters as hooks report them ready."""

    def __init__(self, passes: int, exchange: Exchange, sparse_as_dense: bool, wait_in_backward: bool) -> None:
        super().__init__(passes, exchange, sparse_as_dense)
        self._waits = wait_in_backward
        self._backward = -1
        self._eager = False  # submit buckets as they fill
        _reducers.add(self)

    def on_gradient(self, gradient: Gradient) -> None:
        """Note that backward has added to it; raises BackwardError when it is being reduced."""
        if gradient.bucket.parts:
            raise BackwardError(too_often(gradient.name, gradient.seen + 1, self.passes))
        if gradient.is_untouched:
            gradient.detach_pending(gradient.local)
        gradient.note_stream()
        if self.paused:
            return
        if self._backward != _backward_number():
            self._watch_the_end()
        self._computed.append(gradient)
        if self._eager:
            bucket = gradient.bucket
            bucket.missing -= 1  # only a hint: threads of several GPUs may miscount
            if bucket.missing <= 0:
                with self._lock:
                    self._count()
                    self._begin_complete([bucket])

    def _watch_the_end(self) -> None:
        """A backward begins: have autograd call `_at_the_end` when it is done."""
        self._count()
        self._backward = _backward_number()
        self._line = line_of_backward()
        self._look_at_the_world()
        self._eager = self.trusts and self.overlaps
        if self._eager:
            for bucket in self._buckets:
                bucket.missing = sum(max(0, self.passes - each.seen) for each in bucket.trained)
        reducer = weakref.ref(self)

        def at_the_end() -> None:
            alive = reducer()
            if alive is not None:
                alive._at_the_end()

        torch.autograd.Variable._execution_engine.queue_callback(at_the_end)

    @property
    def overlaps(self) -> bool:
        """See `optim.reducer`; on a GPU it is always faster: cores have nothing to do."""
        return super().overlaps or any(each.parameter.is_cuda for each in self._gradients.values())

    def _at_the_end(self) -> None:
        """Other ranks may have gradients that this rank did not compute: reading .grad must return them too."""
        self._count()
        gradients = self._gradients.values()
        if not any(each.seen >= self.passes for each in gradients):
            return
        self._hooks.refresh()
        if self._waits:
            self.synchronize()
        elif self.trusts:
            self._begin_complete(self._buckets)
        else:
            self._beware_of_equal_names()
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
        if self._in_flight:
            raise BackwardError(
                "zero_grad() after backward() and before step() would clear gradients that are being reduced; call it "
                "before backward() or after step(); or put a backward() whose gradients are not wanted into `with "
                "optimizer.no_sync():`; or, to give up this step, call synchronize() first, on all ranks"
            )
        self._count()
        cleared = next((each.name for each in self._gradients.values() if each.seen >= self.passes), None)
        if cleared is not None:
            self._distrust(f"the gradient of {cleared!r} was cleared without a step() ({calling_line()})")
        self.reset()


def line_of_backward() -> str:
    """The user's line that called backward(). For GPUs hooks run in threads of autograd's, without any frame of his."""
    own: FrameType | None = sys._getframe()
    while own is not None and is_of_library(own.f_code.co_filename):
        own = own.f_back
    if own is None:
        for innermost in sys._current_frames().values():
            frame: FrameType | None = innermost
            while frame is not None and frame.f_code.co_name != "_engine_run_backward":  # of torch.autograd.graph
                frame = frame.f_back
            if frame is not None:  # that thread waits for this one
                return calling_line(frame=frame)
    return calling_line(2)
