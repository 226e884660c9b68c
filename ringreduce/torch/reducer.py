"""Which gradient is reduced when: each as soon as backward has finished it, what is left at step().

    backward: hook ── begin ──> PendingGradient in .grad ── step(), or somebody looks ──> reduced gradient in .grad

Every rank begins each of its gradients once a step, in any order; the engine finds together what has one name.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ringreduce import runtime
from ringreduce.api.reduce import allreduce_async
from ringreduce.engine.description import calling_line
from ringreduce.ops import Max
from ringreduce.torch.gradient import DENSE, UNKNOWN, Gradient, Shipment, check_layout, layout_of
from ringreduce.torch.hooks import GradientHooks, too_often
from ringreduce.torch.reduction import Finish, Named, Reduction, empty_sparse


class GradientReducer:
    """Reduces the gradients of parameters as hooks report them ready."""

    def __init__(self, passes: int, reduction: Reduction) -> None:
        self.passes = passes
        self.paused = False
        """In no_sync(): gradients only add up."""
        self._reduction = reduction
        self._gradients: dict[int, Gradient] = {}
        """By id of the parameter: the hash of a tensor takes long."""
        self._shipments: dict[Shipment, None] = {}
        self._hooks = GradientHooks(self)
        self._backward = -1
        self._line = ""
        """The one that called backward(): to find it takes long, and all hooks of a pass have the same."""
        self._known_since = (-1, -1)
        self._lock = threading.RLock()  # backward on several GPUs has a thread for each

    def add(self, named: Iterable[tuple[str, Any]]) -> None:
        """Reduce these parameters too."""
        for name, parameter in named:
            self._gradients[id(parameter)] = Gradient(name, parameter, self)
            self._hooks.watch(parameter)

    def join(self, parameters: Sequence[Any]) -> None:
        """Reduce these parameters together."""
        group = [self._gradients[id(parameter)] for parameter in parameters]
        for each in group:
            each.group = group

    @property
    def names(self) -> set[str]:
        """Those of all parameters."""
        return {each.name for each in self._gradients.values()}

    @property
    def pending(self) -> bool:
        """True while a gradient is being reduced that nobody has waited for."""
        return bool(self._shipments)

    def on_gradient(self, parameter: Any) -> None:
        """Begin to reduce it after the last pass of the step; raises AssertionError for one too many."""
        gradient = self._gradients[id(parameter)]
        with self._lock:
            if self.paused and gradient.shipment is None:
                return
            gradient.count()
            if gradient.seen > self.passes or gradient.shipment is not None:
                raise AssertionError(too_often(gradient.name, gradient.seen, self.passes))
            for member in gradient.group:
                member.reduced = False
            if gradient.seen == self.passes:
                self._watch_the_end()
                if self._is_complete(gradient.group):
                    self._begin([gradient.group], self._line)

    def _is_complete(self, group: Sequence[Gradient]) -> bool:
        return len(group) == 1 or all(each.seen == self.passes for each in group if each.trains)

    def _watch_the_end(self) -> None:
        """Have autograd call `_at_the_end` when this backward is done."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        self._line = calling_line()
        self._forget_after_join()
        reducer = weakref.ref(self)

        def at_the_end() -> None:
            alive = reducer()
            if alive is not None:
                alive._at_the_end()

        torch.autograd.Variable._execution_engine.queue_callback(at_the_end)

    def _at_the_end(self) -> None:
        """Gradients that this rank did not compute may come from others: whoever looks at .grad must find them too."""
        self._hooks.refresh()
        for gradient in self._gradients.values():
            shown = gradient.pending is not None and gradient.parameter.grad is gradient.pending
            if gradient.shipment is None and not gradient.reduced and gradient.trains and not shown:
                local = gradient.local
                if local is None and gradient.parameter.dim() == 0:
                    local = torch.zeros_like(gradient.parameter.detach())
                if local is not None:
                    gradient.show(local)
                else:
                    gradient.show(empty_sparse(gradient.parameter.detach(), 1), is_placeholder=True)

    def begin(self, gradient: Gradient) -> None:
        """Begin to reduce a gradient, and those of its group, if nobody has."""
        with self._lock:
            if gradient.shipment is None and not gradient.reduced:
                self._forget_after_join()
                self._begin([gradient.group])

    def wait(self, shipment: Shipment) -> None:
        """Wait until it has arrived; when it cannot, give up the whole step, so that no rank waits for this one."""
        try:
            self._finish(shipment)
        except Exception:
            self.synchronize(quiet=True)
            raise

    def _finish(self, shipment: Shipment) -> None:
        self._shipments.pop(shipment, None)
        shipment.finish()

    def _begin(self, groups: Sequence[list[Gradient]], line: str | None = None) -> None:
        """Begin to reduce groups; waits only for layouts that this rank does not know."""
        taken = [[each for each in group if each.trains] for group in groups]
        for group in taken:
            for gradient in group:
                if gradient.layout == UNKNOWN:
                    self._ask(gradient)
        if len(taken) > 1:
            taken.sort(key=self._must_wait)  # these last
        errors = []
        for group in taken:
            try:
                self._ship(group, line)
            except Exception as exc:  # told when all are on their way
                errors.append(exc)
        _raise_first(errors)

    def _ask(self, gradient: Gradient) -> None:
        """Begin to agree on the layout, once: a rank without a gradient cannot know what the others send."""
        if gradient.question is not None:
            return
        # sparse gradients are those of tables of rows, as an embedding's
        if self._reduction.size == 1 or self._reduction.sparse_as_dense or gradient.parameter.dim() != 2:
            gradient.layout = DENSE
            return
        mine = np.array([layout_of(gradient.local)], np.int8)
        gradient.question = allreduce_async(
            mine, name=f"{gradient.name}.layout", op=Max, process_set=self._reduction.process_set
        )

    def _forget_after_join(self) -> None:
        """A rank that joined early has learned less than the others, and would ask alone: let all ask again."""
        engine = runtime.current("DistributedOptimizer").engine
        now = (engine.world.generation, engine.joins)
        if now != self._known_since:
            self._known_since = now
            self._forget()

    def _forget(self) -> None:
        for gradient in self._gradients.values():
            gradient.layout = UNKNOWN

    def _must_wait(self, group: Sequence[Gradient]) -> bool:
        return any(each.layout == UNKNOWN and each.local is None for each in group)

    def _ship(self, group: Sequence[Gradient], line: str | None) -> None:
        """Send the dense ones together, sparse ones each on its own."""
        loads = [self._load(each) for each in group]
        dense: list[Gradient] = []
        named: list[Named] = []
        parts: list[tuple[Sequence[Gradient], Finish]] = []
        for gradient, (layout, tensor) in zip(group, loads, strict=True):
            gradient.show(tensor)
            if layout == DENSE:
                dense.append(gradient)
                named.append((gradient.name, tensor))
            elif layout == UNKNOWN:
                parts.append(([gradient], _nothing_to_do(tensor)))
            else:
                parts.append(([gradient], self._reduction.begin_sparse(gradient.name, tensor)))
        if dense:
            parts.append((dense, self._reduction.begin_dense(named, line)))
        shipment = Shipment(parts)
        for gradient in group:
            gradient.shipment = shipment
        if parts:
            self._shipments[shipment] = None

    def _load(self, gradient: Gradient) -> tuple[int, torch.Tensor]:
        """This rank's gradient and its layout; where it has none, zeros in the layout that the others have."""
        local = gradient.local
        if local is None:
            return self._nothing(gradient)
        if local.is_sparse and self._reduction.sparse_as_dense:
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

        Raises what went wrong with the first that failed, after it has waited for all. quiet: not even then.
        """
        errors = [_error_of(self._begin_rest)]
        while self._shipments:
            errors.append(_error_of(self._finish_next))
        self._hooks.refresh()
        if any(errors):
            self.reset()
            self._forget()  # what failed was learned by some ranks only
        if not quiet:
            _raise_first(errors)

    def _finish_next(self) -> None:
        self._finish(next(iter(self._shipments)))

    def _begin_rest(self) -> None:
        rest: dict[int, list[Gradient]] = {}
        for gradient in self._gradients.values():
            if gradient.shipment is None and not gradient.reduced and gradient.trains:
                rest[id(gradient.group)] = gradient.group
        self._forget_after_join()
        self._begin(list(rest.values()))

    def reset(self) -> None:
        """Begin a new step."""
        self._hooks.refresh()
        for gradient in self._gradients.values():
            gradient.seen, gradient.reduced, gradient.shipment, gradient.question = 0, False, None, None
            if gradient.pending is not None:
                gradient.hide(gradient.local)


def _nothing_to_do(gradient: torch.Tensor) -> Finish:
    """No rank has a gradient: there is nothing to send."""
    return lambda: [gradient]


def _error_of(act: Callable[..., None], *arguments: Any) -> Exception | None:
    try:
        act(*arguments)
    except Exception as exc:  # told when all is done
        return exc
    return None


def _raise_first(errors: Iterable[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
