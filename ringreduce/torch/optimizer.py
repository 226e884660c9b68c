"""DistributedOptimizer for PyTorch: gradients are reduced while backward still runs.

Parameters are put into buckets, last ones first, since backward makes their gradients first. A hook on each parameter
notes that its gradient is ready; when all of a bucket are, the bucket is reduced. Buckets are reduced in one order on
every rank, whatever the order of the hooks; what backward left out is reduced by `synchronize()`, with zeros for
parameters that got no gradient, so graphs that differ per rank do not hang.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ringreduce import runtime
from ringreduce.api.reduce import grouped_allreduce_
from ringreduce.errors import InputError
from ringreduce.ops import Average, ReduceOp

Named = list[tuple[str, torch.nn.Parameter]]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
) -> Any:
    """Wrap a torch optimizer so that `step()` uses gradients reduced over all ranks.

    Returns an object of a subclass of the optimizer's own class, with its parameter groups and state: schedulers,
    state_dict and isinstance work. Make it after the model is on its device, and use it in place of `optimizer`.

    named_parameters:         model.named_parameters(); names make errors readable. By default they are numbered.
    backward_passes_per_step: gradients of so many backward passes are summed before they are reduced.
    op:                       how the gradients of all ranks become one.

    Cost:   as `grouped_allreduce`, bucket by bucket; a bucket holds at least `fusion_slot_bytes`.
    Raises: InputError (a ValueError) for duplicate names, unnamed parameters, items that are no (name, parameter)
            pairs, backward_passes_per_step < 1; NotInitializedError.
    Source: Horovod's DistributedOptimizer.
    """
    if backward_passes_per_step < 1:
        raise InputError(f"backward_passes_per_step={backward_passes_per_step}; expected 1 or more")
    settings = runtime.current("DistributedOptimizer").settings
    named = name_parameters(optimizer, named_parameters)
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (ReducingMixin, kind), {}))
    # a scheduler made before may have put its own `step` on the instance, which would bypass ours
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    wrapped._reducer = GradientReducer(trained, backward_passes_per_step, op, settings.fusion_slot_bytes)
    wrapped._synchronizes = True
    return wrapped


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> Named:
    """The optimizer's parameters with their names; raises InputError when a name is missing or given twice."""
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [(f"parameter.{number}", parameter) for number, parameter in enumerate(owned)]
    named = list(named_parameters)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in named):
        raise InputError("named_parameters: expected (name, parameter) pairs, such as model.named_parameters()")
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InputError(f"named_parameters: names must differ; given more than once: {', '.join(duplicates)}")
    named_ids = {id(parameter) for _, parameter in named}
    unnamed = sum(id(parameter) not in named_ids for parameter in owned)
    if unnamed:
        raise InputError(f"named_parameters: {unnamed} of the optimizer's {len(owned)} parameters have no name in it")
    owned_ids = {id(parameter) for parameter in owned}
    return [(name, parameter) for name, parameter in named if id(parameter) in owned_ids]


class GradientReducer:
    """Reduces the gradients of parameters, in buckets, as hooks report them ready."""

    def __init__(self, named: Named, passes: int, op: ReduceOp, bucket_bytes: int) -> None:
        self._buckets = make_buckets(named, bucket_bytes)
        self._names = {parameter: name for name, parameter in named}
        self._passes = passes
        self._op = op
        self._seen = dict.fromkeys(self._names, 0)
        self._next_bucket = 0
        self._alone = runtime.current("DistributedOptimizer").world.size == 1
        for _, parameter in named:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    @property
    def pending(self) -> bool:
        """True when gradients of this step were reduced already, and `synchronize` has not come yet."""
        return self._next_bucket > 0

    def _on_gradient(self, parameter: Any) -> None:
        self._seen[parameter] += 1
        if self._seen[parameter] > self._passes:
            raise AssertionError(
                f"the gradient of {self._names[parameter]!r} was computed {self._seen[parameter]} times since the last "
                f"step(), but backward_passes_per_step is {self._passes}; raise it, or call step() in between"
            )
        while self._next_bucket < len(self._buckets) and self._is_ready(self._buckets[self._next_bucket]):
            self._reduce_next()

    def _is_ready(self, bucket: Named) -> bool:
        return all(self._seen[parameter] == self._passes for _, parameter in bucket)

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next_bucket]
        self._next_bucket += 1
        if self._alone:
            return
        gradients = [_contiguous_gradient(parameter) for _, parameter in bucket]
        try:
            grouped_allreduce_(gradients, names=[name for name, _ in bucket], op=self._op)
        except Exception:
            self.reset()  # whoever catches it can begin the step anew
            raise

    def synchronize(self) -> None:
        """Reduce what backward left out; on return every gradient is reduced."""
        while self._next_bucket < len(self._buckets):
            self._reduce_next()
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        self._next_bucket = 0
        self._seen = dict.fromkeys(self._seen, 0)


def make_buckets(named: Named, bucket_bytes: int) -> list[Named]:
    """Cut the parameters, last ones first, into buckets of at least `bucket_bytes`, the last bucket excepted."""
    buckets: list[Named] = [[]]
    filled = 0
    for name, parameter in reversed(named):
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append((name, parameter))
        filled += parameter.numel() * parameter.element_size()
    return buckets if buckets[0] else []


def _contiguous_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif not parameter.grad.is_contiguous() and parameter.grad.layout is torch.strided:
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad


class ReducingMixin:
    """What a wrapped optimizer does differently; stands before the user's class in the inheritance."""

    _reducer: GradientReducer
    _synchronizes: bool
    _synchronized = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for all gradients, then step; gradients are reduced anew every time a closure is called."""
        if closure is not None:
            return super().step(lambda: self._synchronized_closure(closure))  # type: ignore[misc]
        if self._synchronizes:
            if self._synchronized:
                warnings.warn(
                    "step() after synchronize() reduces the gradients a second time; put it into "
                    "`with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step()  # type: ignore[misc]

    def _synchronized_closure(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        self._synchronized = False
        return loss

    def synchronize(self) -> None:
        """Reduce all gradients now: before clipping them, say; then step inside `skip_synchronize()`."""
        self._reducer.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() does not reduce: `synchronize()` did."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; raises AssertionError between backward() and step(), when some are reduced already."""
        if self._reducer.pending:
            raise AssertionError(
                "zero_grad() after backward() and before step() or synchronize() would clear gradients that other "
                "ranks have received; call it before backward() or after step()"
            )
        self._reducer.reset()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]
