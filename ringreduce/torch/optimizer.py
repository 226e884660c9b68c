"""DistributedOptimizer for PyTorch: gradients are reduced while backward still runs."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.api.submit import which_op
from ringreduce.compression import Compression, Compressor
from ringreduce.errors import InputError
from ringreduce.ops import Adasum, Average, ReduceOp, Sum
from ringreduce.torch.adasum_optimizer import AdasumMixin, DeltaReducer
from ringreduce.torch.parameters import group_parameters, name_newest_group, name_parameters, number_of_groups
from ringreduce.torch.reducer import GradientReducer
from ringreduce.torch.reduction import Reduction


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap a torch optimizer so that `step()` uses gradients reduced over all ranks.

    Returns an object of a subclass of the optimizer's own class, with its parameter groups and state: schedulers,
    state_dict and isinstance work. Make it after the model is on its device, and use it in place of `optimizer`.

    named_parameters: model.named_parameters(); by these names ranks find each other's gradients, so they must be alike
        on all ranks, and differ from those of another optimizer that is used at the same time. Numbered by default.
    compression: `Compression.fp16` or `.bf16` send gradients in 16 bits; or your own `Compressor`.
    backward_passes_per_step: gradients of so many backward passes are summed (never divided) before they are reduced.
        step() after fewer reduces what there is.
    op: Average, Sum, or Adasum: every rank steps by its own gradients, and the changes of the parameters are reduced
        (a power of two of ranks; the gradients that you see are the rank's own; groups have no effect).
    gradient_predivide_factor: f: Average divides by f before the sum and by size / f after it.
    num_groups: Horovod's older name for a number of groups.
    groups: gradients that are reduced together, all or nothing: a number of equal groups, or lists of parameters (the
        others are on their own), alike on all ranks.
    sparse_as_dense: reduce sparse gradients (torch.nn.Embedding(sparse=True)) as dense ones; by default all ranks' rows
        are gathered, and .grad is sparse and coalesced.
    process_set: the ranks that take part; on the others the optimizer is as it was.

    Between backward() and step() a gradient is looked at as in a script of one process: `.grad` stands for the reduced
    gradient, and whoever looks first (clip_grad_norm_, GradScaler, print) waits until every rank has computed this one
    or looks at it too. backward() itself waits for nothing, so graphs may differ per rank, losses may have a backward
    each, and other collectives may come before step(). Hence: look on all ranks or on none where graphs differ; and to
    clip after fewer backward passes than declared, call synchronize() first. A backward() after a look adds to the
    reduced gradient and is reduced again, which is right for Average.

    A parameter without a gradient on this rank gives zeros; one with a gradient on no rank gets zeros, as in Horovod. A
    frozen one (requires_grad=False) takes no part, from when it is frozen until it is not; alike on all ranks.

    Cost:   one allreduce for each gradient or group, fused by the engine; in the first step one more of a byte each, by
            which ranks agree on what is sparse (not with sparse_as_dense).
    Raises: InputError (a ValueError) for wrong arguments; NotInitializedError. backward() raises AssertionError for a
            pass too many; step(), or the first look, MismatchError when ranks differ: the optimizer can be used on.
    Source: Horovod's DistributedOptimizer.
    """
    _check(optimizer, compression, backward_passes_per_step, op, gradient_predivide_factor, process_set)
    size = _ranks(process_set, op)
    named = name_parameters(optimizer, named_parameters)
    in_groups = group_parameters(named, number_of_groups(num_groups, groups))
    reduction = Reduction(op, compression, 1.0, 1.0, sparse_as_dense, process_set, size)
    wrapped: Any
    if op is Adasum and size > 1:
        wrapped = _wrap(optimizer, AdasumMixin)
        wrapped._reducer = DeltaReducer(backward_passes_per_step, reduction)
        wrapped._reducer.add(named)
        return wrapped
    if gradient_predivide_factor != 1.0:
        scales = 1.0 / gradient_predivide_factor, gradient_predivide_factor / size
        reduction = Reduction(Sum, compression, *scales, sparse_as_dense, process_set, size)
    wrapped = _wrap(optimizer, ReducingMixin)
    wrapped._reducer = GradientReducer(backward_passes_per_step, reduction)
    wrapped._reducer.add(named)
    for group in in_groups:
        wrapped._reducer.join(group)
    wrapped._synchronizes, wrapped._synchronized = True, False
    return wrapped


def _check(
    optimizer: Any, compression: Any, passes: int, op: ReduceOp, predivide: float, process_set: ProcessSet
) -> None:
    """Raise InputError for what is wrong in itself."""
    if isinstance(optimizer, ReducingMixin | AdasumMixin):
        raise InputError("DistributedOptimizer: the optimizer is wrapped already; pass the one that it was made from")
    if passes < 1:
        raise InputError(f"backward_passes_per_step={passes}; expected 1 or more")
    if which_op("DistributedOptimizer", None, op) not in (Average, Sum, Adasum):
        raise InputError(f"DistributedOptimizer: op={op!r}; expected Average, Sum or Adasum")
    if predivide != 1.0 and op is not Average:
        raise InputError(f"gradient_predivide_factor={predivide} with op={op!r}; it works with op=Average only")
    if not predivide > 0:
        raise InputError(f"gradient_predivide_factor={predivide}; expected a number above 0")
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise InputError(
            f"compression={compression!r}; expected Compression.none, .fp16, .bf16, or a class with the static methods "
            "compress(tensor) -> (tensor, ctx) and decompress(tensor, ctx)"
        )
    if op is Adasum and process_set is not global_process_set:
        raise InputError("DistributedOptimizer: op=Adasum works with all ranks only; leave process_set out")


def _ranks(process_set: ProcessSet, op: ReduceOp) -> int:
    """How many ranks reduce together; 1 on a rank that is not among them."""
    runtime.current("DistributedOptimizer")
    number_of(process_set, "DistributedOptimizer")
    size = (process_set.size() or 1) if process_set.included() else 1
    if op is Adasum and size & (size - 1):
        raise InputError(f"op=Adasum: {size} ranks; expected a power of two, such as 2, 4 or 8")
    return size


def _wrap(optimizer: torch.optim.Optimizer, mixin: type) -> Any:
    """An object of a subclass of the optimizer's class that shares all its attributes."""
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (mixin, kind), {"__reduce_ex__": _reduce}))
    wrapped.__dict__ = vars(optimizer)  # what a scheduler, or load_state_dict, does to one is done to the other
    scheduled = wrapped.__dict__.pop("step", None)
    if hasattr(scheduled, "_wrapped_by_lr_sched"):
        wrapped.__dict__["step"] = _watched_step(wrapped)
    return wrapped


def _watched_step(wrapped: Any) -> Callable[..., Any]:
    """The step of an optimizer whose scheduler was made before it was wrapped, and watches that step() is called."""
    reference = weakref.ref(wrapped)

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        if optimizer is None:
            raise InputError("step(): the DistributedOptimizer around this optimizer is gone; wrap it again")
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickled or copied, it is the user's optimizer again: hooks belong to one process."""
    return _unwrapped, (type(self).__mro__[2], self.__getstate__())


def _unwrapped(kind: type, state: dict[str, Any]) -> Any:
    optimizer: Any = object.__new__(kind)
    optimizer.__setstate__(state)
    return optimizer


class ReducingMixin:
    """What a wrapped optimizer does differently; stands before the user's class in the inheritance."""

    param_groups: list[dict[str, Any]]
    _reducer: GradientReducer
    _synchronizes: bool
    _synchronized: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for all gradients, then step; gradients are reduced anew every time a closure is called.

        Raises: MismatchError, PeerLostError: what went wrong with a gradient; the next step can begin.
        """
        if closure is not None:
            loss = super().step(lambda: self._synchronized_closure(closure))  # type: ignore[misc]
        else:
            self._before_step()
            loss = super().step()  # type: ignore[misc]
        self._reducer.reset()
        self._synchronized = False
        return loss

    step.hooked = True  # type: ignore[attr-defined] # torch puts its step hooks around the user's class only

    def _before_step(self) -> None:
        if self._synchronizes and self._synchronized:
            warnings.warn(
                "step() after synchronize(), which has reduced the gradients; put it into "
                "`with optimizer.skip_synchronize():`",
                stacklevel=3,
            )
        if self._synchronizes or self._reducer.pending:
            self._reducer.synchronize()

    def _synchronized_closure(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        if self._synchronizes or self._reducer.pending:
            self._reducer.synchronize()
        self._reducer.reset()  # it may be called again, and leave out other parameters then
        return loss

    def synchronize(self) -> None:
        """Reduce all gradients now, on all ranks; then step inside `skip_synchronize()`."""
        self._reducer.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() does not reduce: `synchronize()` did."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to the gradients; the next one outside, or step(), reduces the sum.

        Source: torch's DistributedDataParallel.no_sync.
        """
        before, self._reducer.paused = self._reducer.paused, True
        try:
            yield
        finally:
            self._reducer.paused = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and begin a new step; raises AssertionError while some are being reduced."""
        if self._reducer.pending:
            raise AssertionError(
                "zero_grad() after backward() and before step() would clear gradients that are being reduced; call it "
                "before backward() or after step(), or, to give up this step, call synchronize() first, on all ranks"
            )
        self._reducer.reset()
        self._synchronized = False
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are reduced too; on all ranks.

        They get the names that the group gives, as torch's named optimizers do, or are numbered.
        """
        super().add_param_group(param_group)  # type: ignore[misc]
        self._reducer.add(name_newest_group(self.param_groups, self._reducer.names))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the user's class; what was being reduced is given up."""
        if self._reducer.pending:
            self._reducer.synchronize(quiet=True)
        self._reducer.reset()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are summed before they are reduced."""
        if passes < 1:
            raise InputError(f"backward_passes_per_step={passes}; expected 1 or more")
        self._reducer.passes = passes
