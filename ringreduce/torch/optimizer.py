"""DistributedOptimizer for PyTorch: gradients are reduced in buckets, during backward where that is faster."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.api.reduce import allreduce
from ringreduce.collectives.ops import Adasum, Average, ReduceOp
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import InputError, MissingExtraError
from ringreduce.frameworks.not_there import check_adapter
from ringreduce.optim.exchange import Exchange, check_passes
from ringreduce.optim.parameters import Named, group_parameters, name_parameters
from ringreduce.optim.powersgd import PowerSGD
from ringreduce.runtime.submit import whole_number
from ringreduce.torch.adasum_optimizer import AdasumMixin, DeltaReducer
from ringreduce.torch.groups import Groups
from ringreduce.torch.reducer import GradientReducer
from ringreduce.torch.wrapped import Wrapped, WrappedMixin, passed_on, wrap

PRIVATE = (
    "_C._current_graph_task_id",
    "_C.DisableTorchFunctionSubclass",
    "Tensor._make_subclass",
    "autograd.Variable._execution_engine.queue_callback",
)
"""Names that torch does not promise to keep; without them nobody can wait for gradients."""
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: AnyCompressor | PowerSGD = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    wait_in_backward: bool = False,
) -> Optimizer:
    """Wrap a torch optimizer so that `step()` uses gradients reduced over all ranks.

    Returns an object of a subclass of the optimizer's own class, with its parameter groups and state: schedulers,
    state_dict and isinstance work. Make it after the model is on its device, and use it in place of `optimizer`.

    named_parameters: model.named_parameters(); gradients are matched by these names, so they must be equal on all
        ranks, and differ from those of another optimizer that is used at the same time. Numbered by default.
    backward_passes_per_step: gradients of this many backward passes are summed, not averaged, before they are reduced;
        for their mean divide the loss. step() after fewer passes reduces what there is.
    op: Average, Sum, or Adasum: every rank steps by its own gradients, and the changes of the parameters are reduced
        (a power of two of ranks; the gradients that you see are the rank's own; groups have no effect).
    num_groups: Horovod's older name for a number of groups.
    groups: gradients that are reduced together, all or nothing: a number of equal groups, or lists of parameters (the
        others are on their own), alike on all ranks.
    sparse_as_dense: reduce sparse gradients (torch.nn.Embedding(sparse=True)) as dense ones; by default all ranks' rows
        are gathered, of parameters of two dimensions. Either way .grad is sparse and coalesced afterwards.
    compression, gradient_predivide_factor, process_set: see `ringreduce.DistributedOptimizer`.
    wait_in_backward: for code that reads .grad without going through Python, as C++ and torch.jit.script do: backward()
        waits for all ranks, which call it equally often.

    Between backward() and step() `.grad` stands for the reduced gradient: the first access (clip_grad_norm_, print)
    waits for all ranks; backward() does not, so graphs may differ per rank. A parameter without a gradient on this rank
    contributes zeros. Several losses, GANs, frozen parameters, copies: docs/pytorch.md.

    Cost:   one allreduce for each bucket of some MiB, or group; in the first step one for each gradient, and one of 4
            bytes, by which ranks agree on what is sparse; now and then one of the learning rates, which all ranks
            should have alike.
    Raises: InputError (a ValueError) for wrong arguments; TypeError for what is no optimizer; NotInitializedError.
            backward() and zero_grad(): BackwardError (also AssertionError, RuntimeError) while one is being reduced.
            step(), or the first access: MismatchError when ranks differ; the optimizer stays usable.
    Source: Horovod's DistributedOptimizer.
    """
    check(optimizer, op, process_set)
    exchange = Exchange(op, compression, gradient_predivide_factor, process_set, factors=True)
    passes, (named, others, are_named) = check_passes(backward_passes_per_step), named_of(optimizer, named_parameters)
    in_groups = group_parameters(named, _number_of_groups(num_groups, groups))
    if op is Adasum:
        wrapped = wrap(optimizer, AdasumMixin, _reducer=DeltaReducer(passes, exchange))
    else:
        reducer = GradientReducer(passes, exchange, sparse_as_dense, wait_in_backward)
        wrapped = wrap(optimizer, ReducingMixin, _reducer=reducer)
    wrapped._reducer.begin_with(Groups(wrapped, named, others, are_named), named)
    for group in in_groups if op is not Adasum else ():
        wrapped._reducer.join(group)
    returned: Optimizer = wrapped
    return returned


def check(optimizer: Any, op: ReduceOp, process_set: ProcessSet) -> None:
    """Raise TypeError or InputError for what is no torch optimizer, is wrapped already, or has no Adasum."""
    check_adapter(optimizer)
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"DistributedOptimizer: expected a torch optimizer, got a {type(optimizer).__qualname__}; as in "
            "DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())"
        )
    missing = [name for name in PRIVATE if not _has(name)]
    if missing:
        raise MissingExtraError(
            f"DistributedOptimizer needs torch.{missing[0]}, which torch {torch.__version__} lacks; torch 2.4 to "
            "2.15 have it: pip install 'torch<=2.15'"
        )
    if isinstance(optimizer, Wrapped):
        raise InputError("DistributedOptimizer: the optimizer is already wrapped; pass the original one")
    if op is Adasum and process_set is not global_process_set:
        raise InputError("DistributedOptimizer: op=Adasum works with all ranks only; leave process_set out")


def named_of(optimizer: torch.optim.Optimizer, named_parameters: Any) -> tuple[Named, Named, bool]:
    """The optimizer's parameters with their names: the given ones, those of its groups, or numbers.

    Then other parameters that have names, and whether the names are the user's.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
    if named_parameters is None and names:
        return list(zip(names, itertools.chain.from_iterable(groups), strict=True)), [], True
    return *name_parameters(groups, named_parameters), named_parameters is not None


def _number_of_groups(num_groups: int, groups: Any) -> Any:
    """`groups`, by its older name too."""
    if num_groups := whole_number("num_groups", num_groups, 0):
        warnings.warn("num_groups is deprecated; pass groups", DeprecationWarning, stacklevel=4)
    return groups if groups is not None else num_groups


def _has(name: str) -> bool:
    try:
        return bool(operator.attrgetter(name)(torch))
    except AttributeError:
        return False


class ReducingMixin(WrappedMixin):
    """The methods of an optimizer whose gradients are reduced; precedes the user's class in the MRO."""

    _reducer: GradientReducer
    _should_synchronize = True  # Horovod's name, which scripts use
    _synchronized = False

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Wait for all gradients, then step; gradients are reduced anew every time a closure is called.

        So is the loss that an LBFGS gets from it, by which it decides where to look next. Further arguments
        are those of the user's class.
        Raises: MismatchError, PeerLostError: what went wrong with a gradient; the next step can begin.
        """
        if callable(closure):
            reducing = functools.partial(self._synchronized_closure, closure)
            loss = super().step(reducing, *args, **kwargs)  # type: ignore[misc]
        else:
            self._before_step()
            loss = super().step(*passed_on(closure, args), **kwargs)  # type: ignore[misc]
        self._reducer.stepped()
        self._synchronized = False
        return loss

    step.hooked = True  # type: ignore[attr-defined] # torch puts its step hooks around the user's class only

    def _before_step(self) -> None:
        if self._should_synchronize and self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(), "
                "which has reduced the gradients; put it into `with optimizer.skip_synchronize():`",
                stacklevel=3,
            )
        self._synchronize_for_step()

    def _synchronize_for_step(self) -> bool:
        """Reduce what is not reduced yet; False: nothing is left to do."""
        is_due = self._should_synchronize or self._reducer.pending or self._reducer.owned.have_changed()
        if is_due:
            self._reducer.synchronize()
        return is_due

    def _synchronized_closure(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        if self._synchronize_for_step():
            loss = self._loss_of_all(loss)
        self._reducer.reset()  # it may be called again, and leave out other parameters then
        return loss

    def _loss_of_all(self, loss: Any) -> Any:
        """What the gradients are of: reduced as they are, where it decides how often the closure is called again."""
        exchange, decides = self._reducer.exchange, any("LBFGS" in each.__name__ for each in type(self).__mro__)
        if not decides or exchange.size == 1 or loss is None:
            return loss
        own = loss.detach() if isinstance(loss, torch.Tensor) else loss
        name = f"{next(iter(self._parameter_names.values()))}.loss"
        return allreduce(own, name=name, op=exchange.op, process_set=exchange.process_set)

    def synchronize(self) -> None:
        """Reduce all gradients now, on all ranks; then step inside `skip_synchronize()`."""
        self._reducer.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() does not reduce: `synchronize()` did."""
        before, self._should_synchronize = self._should_synchronize, False
        try:
            yield
        finally:
            self._should_synchronize = before

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and begin a new step; raises BackwardError while some are being reduced."""
        super().zero_grad(*args, **kwargs)
        self._synchronized = False

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the user's class; what was being reduced is given up."""
        if self._reducer.pending:
            self._reducer.synchronize(quiet=True)
        self._reducer.reset()
        super().load_state_dict(*args, **kwargs)
