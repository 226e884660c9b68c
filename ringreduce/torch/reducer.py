"""When each gradient is reduced: as soon as backward has finished it, the rest at step().

    backward: hook ── begin ──> PendingGradient in .grad ── step(), or first access ──> reduced gradient in .grad

Every rank submits each of its gradients once a step, in any order; the engine matches them by name. A rank is free to
choose when. In the first CAUTIOUS_STEPS steps it submits none before step() or the first access. Later it submits them
during backward, if no gradient was computed twice or cleared so far, as a GAN's discriminator's are: gradients that are
not submitted can be added to, or discarded, without the other ranks.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ringreduce import runtime
from ringreduce.api.reduce import allreduce_async
from ringreduce.errors import BackwardError, InputError
from ringreduce.execution.signature import calling_line
from ringreduce.ops import Max
from ringreduce.torch.gradient import DENSE, UNKNOWN, Gradient, InFlight, Reducer, check_layout, layout_of
from ringreduce.torch.gradient_transport import Finish, GradientTransport, Named, empty_sparse
from ringreduce.torch.hooks import too_often

CAUTIOUS_STEPS = 8
_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


class GradientReducer(Reducer):
    """Reduces the gradients of parameters as hooks report them ready."""

    def __init__(self, passes: int, reduction: GradientTransport, wait_in_backward: bool) -> None:
        super().__init__(passes, reduction)
        self._waits = wait_in_backward
        self._in_flight: dict[InFlight, None] = {}
        self._backward = -1
        self._line = ""  # that called backward(): finding it is slow, and it is the same for all hooks of a pass
        self._known_since: tuple[Any, ...] = ()
        self._clean_steps: float = 0  # in which every gradient was computed once; -inf: not all were
        self._lock = threading.RLock()  # backward on several GPUs has a thread for each
        self._look_at_the_world()
        _reducers.add(self)

    def join(self, parameters: Sequence[Any]) -> None:
        """Reduce these parameters together."""
        group = [self._gradients[id(parameter)] for parameter in parameters]
        for each in group:
            each.group = group

    @property
    def pending(self) -> bool:
        """True while a gradient is being reduced that nobody has waited for."""
        return bool(self._in_flight)

    def on_gradient(self, parameter: Any) -> None:
        """Begin to reduce it after the last pass of the step; raises BackwardError when it is being reduced."""
        gradient = self._gradients[id(parameter)]
        with self._lock:
            if gradient.is_untouched:
                gradient.detach_pending(gradient.local)
            if gradient.in_flight is not None:
                raise BackwardError(too_often(gradient.name, gradient.seen + 1, self.passes))
            if self.paused:
                return
            seen = gradient.seen
            gradient.count()
            if seen >= self.passes:  # added to, or cleared
                self._clean_steps = -math.inf
            for member in gradient.group:
                member.reduced = False
            if gradient.seen >= self.passes:
                self._watch_the_end()
                if self._clean_steps >= CAUTIOUS_STEPS and self._is_complete(gradient.group):
                    self._begin([gradient.group])

    def _is_complete(self, group: Sequence[Gradient]) -> bool:
        return len(group) == 1 or all(each.seen >= self.passes for each in group if each.trains)

    def _watch_the_end(self) -> None:
        """Have autograd call `_at_the_end` when this backward is done."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        self._line = calling_line()
        self._look_at_the_world()
        reducer = weakref.ref(self)

        def at_the_end() -> None:
            alive = reducer()
            if alive is not None:
                alive._at_the_end()

        torch.autograd.Variable._execution_engine.queue_callback(at_the_end)

    def _at_the_end(self) -> None:
        """Other ranks may have gradients that this rank did not compute: reading .grad must return them too."""
        self._hooks.refresh()
        if self._waits:
            self.synchronize()
        elif 0 <= self._clean_steps < CAUTIOUS_STEPS:
            self._beware_of_equal_names()
        for gradient in self._gradients.values():
            gradient.is_untouched = False
            attached = gradient.pending is not None and gradient.parameter.grad is gradient.pending
            if gradient.in_flight is None and not gradient.reduced and gradient.trains and not attached:
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
            if any(each.seen and each.name in names for each in other._gradients.values()):
                self._clean_steps = other._clean_steps = -math.inf

    def begin(self, gradient: Gradient) -> None:
        """Begin to reduce a gradient, and those of its group, if nobody has."""
        with self._lock:
            if gradient.in_flight is None and not gradient.reduced:
                self._look_at_the_world()
                self._begin([gradient.group])

    def wait(self, in_flight: InFlight) -> None:
        """Wait until it has arrived; on failure give up the whole step, so that no rank waits for this one."""
        try:
            self._finish(in_flight)
        except Exception:
            self.synchronize(quiet=True)
            raise

    def _finish(self, in_flight: InFlight) -> None:
        self._in_flight.pop(in_flight, None)
        in_flight.finish()

    def _begin(self, groups: Sequence[list[Gradient]]) -> None:
        """Begin to reduce groups; waits only for layouts that this rank does not know."""
        taken = [[each for each in group if each.trains] for group in groups]
        for group in taken:
            for gradient in group:
                if gradient.layout == UNKNOWN:
                    self._ask(gradient)
        if len(taken) > 1:
            # last those whose layout this rank must wait for
            taken.sort(key=lambda group: any(each.layout == UNKNOWN and each.local is None for each in group))
        errors = []
        for group in taken:
            try:
                self._send(group)
            except Exception as exc:  # raised when all are submitted
                errors.append(exc)
        _raise_first(errors)

    def _ask(self, gradient: Gradient) -> None:
        """Begin to agree on the layout, once: a rank without a gradient cannot know what the others send."""
        if gradient.layout_handle is not None:
            return
        # sparse gradients are those of tables of rows, as an embedding's
        if self.reduction.size == 1 or self.reduction.sparse_as_dense or gradient.parameter.dim() != 2:
            gradient.layout = DENSE
            return
        mine = np.array([layout_of(gradient.local)], np.int8)
        gradient.layout_handle = allreduce_async(
            mine, name=f"{gradient.name}.layout", op=Max, process_set=self.reduction.process_set
        )

    def _look_at_the_world(self) -> None:
        """The world may have changed. After a join() all ranks ask again: one that joined early knows less."""
        engine = runtime.current("DistributedOptimizer").engine
        now = (engine.world, engine.negotiation.joins)
        if now != self._known_since:
            self._known_since = now
            self.reduction.settle()
            self._forget()

    def _forget(self) -> None:
        for gradient in self._gradients.values():
            gradient.layout = UNKNOWN

    def _send(self, group: Sequence[Gradient]) -> None:
        """Send the dense ones together, sparse ones each on its own."""
        loads = [self._load(each) for each in group]
        dense: list[Gradient] = []
        named: list[Named] = []
        parts: list[tuple[Sequence[Gradient], Finish]] = []
        for gradient, (layout, tensor) in zip(group, loads, strict=True):
            gradient.attach(tensor)
            if layout == DENSE:
                dense.append(gradient)
                named.append((gradient.name, tensor))
            elif layout == UNKNOWN:
                parts.append(([gradient], _nothing_to_do(tensor)))
            else:
                parts.append(([gradient], self.reduction.begin_sparse(gradient.name, tensor)))
        if dense:
            line = self._line if any(each.seen for each in dense) else None
            parts.append((dense, self._begin_dense(named, line)))
        in_flight = InFlight(parts)
        for gradient in group:
            gradient.in_flight = in_flight
        if parts:
            self._in_flight[in_flight] = None

    def _begin_dense(self, named: Sequence[Named], line: str | None) -> Finish:
        try:
            return self.reduction.begin_dense(named, line)
        except InputError as exc:
            if "pending already" not in str(exc):
                raise
            raise InputError(
                f"{exc}. Has another DistributedOptimizer a parameter of this name? Then prefix the names of one: "
                "named_parameters=[('d.' + name, p) for name, p in model.named_parameters()]"
            ) from exc

    def _load(self, gradient: Gradient) -> tuple[int, torch.Tensor]:
        """This rank's gradient and its layout; where it has none, zeros in the layout that the others have."""
        local = gradient.local
        if local is None:
            return self._nothing(gradient)
        if local.is_sparse and self.reduction.sparse_as_dense:
            return DENSE, local.to_dense()
        return layout_of(local), local

    def _nothing(self, gradient: Gradient) -> tuple[int, torch.Tensor]:
        if gradient.layout == UNKNOWN:
            check_layout(gradient)
        layout, parameter = gradient.layout, gradient.parameter.detach()
        if layout > DENSE:
            return layout, empty_sparse(parameter, layout - DENSE)
        return layout, torch.zeros_like(parameter, memory_format=torch.contiguous_format)

    def synchronize(self, quiet: bool = False) -> None:
        """Reduce what backward left out; on return every gradient is reduced.

        Raises the first error after waiting for all. quiet: raises nothing.
        """
        errors = [_error_of(self._begin_rest)]
        while self._in_flight:
            errors.append(_error_of(self._finish, next(iter(self._in_flight))))
        self._hooks.refresh()
        if any(errors):
            self.reset()
            self._forget()  # only some ranks know about what failed
        if not quiet:
            _raise_first(errors)

    def _begin_rest(self) -> None:
        rest: dict[int, list[Gradient]] = {}
        for gradient in self._gradients.values():
            if gradient.in_flight is None and not gradient.reduced and gradient.trains:
                rest[id(gradient.group)] = gradient.group
        self._look_at_the_world()
        self._begin(list(rest.values()))

    def stepped(self) -> None:
        """Begin a new step after a step."""
        self._clean_steps += 1
        self.reset()

    def clear(self) -> None:
        """Begin a new step without the current gradients; raises BackwardError while some are being reduced."""
        if self._in_flight:
            raise BackwardError(
                "zero_grad() after backward() and before step() would clear gradients that are being reduced; call it "
                "before backward() or after step(); or put a backward() whose gradients are not wanted into `with "
                "optimizer.no_sync():`; or, to give up this step, call synchronize() first, on all ranks"
            )
        if any(each.seen >= self.passes for each in self._gradients.values()):
            self._clean_steps = -math.inf
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        self._hooks.refresh()
        for gradient in self._gradients.values():
            gradient.seen, gradient.reduced, gradient.in_flight, gradient.layout_handle = 0, False, None, None
            if gradient.pending is not None:
                gradient.detach_pending(gradient.local)


def _nothing_to_do(gradient: torch.Tensor) -> Finish:
    """No rank has a gradient: there is nothing to send."""
    return lambda: [gradient]


def _error_of(act: Callable[..., None], *arguments: Any) -> Exception | None:
    try:
        act(*arguments)
    except Exception as exc:  # raised when all is done
        return exc
    return None


def _raise_first(errors: Iterable[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
