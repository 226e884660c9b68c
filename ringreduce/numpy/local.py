"""LocalSGD and DiLoCo: each rank's optimizer works by itself, and parameters are averaged every few steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ringreduce import runtime
from ringreduce.arrays import trees
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import InputError
from ringreduce.frameworks.registry import adapter, adapter_of
from ringreduce.numpy.optimizer import METHODS, InPlace, WrappingOptimizer
from ringreduce.optim.local.options import Options, Outer
from ringreduce.optim.local.steps import HasLocalSteps, LocalSteps, Parameters


def LocalSGD(  # noqa: N802 - torch's and torchft's name
    optimizer: Any,
    parameters: Any = None,
    *,
    sync_every: int,
    warmup_steps: int = 0,
    compression: AnyCompressor = Compression.none,
) -> Any:
    """Wrap `optimizer` so that every rank steps on its own, and the parameters are averaged every `sync_every` steps.

    As `DiLoCo` with all parameters at once, the plain mean, and no delay.
    """
    options = Options("LocalSGD", sync_every, warmup_steps, compression=compression)
    return _wrapped(optimizer, parameters, options)


def DiLoCo(  # noqa: N802 - the paper's name
    optimizer: Any,
    parameters: Any = None,
    *,
    sync_every: int,
    outer: Outer | None = None,
    fragments: int = 1,
    delay: int = 0,
    compression: AnyCompressor = Compression.none,
    warmup_steps: int = 0,
) -> Any:
    """Wrap `optimizer` so that every rank steps on its own; parameters are averaged in turn while training continues.

    optimizer: a torch.optim.Optimizer: then an object of a subclass of its class, for schedulers and GradScaler; a
        gradient transformation of optax: see `ringreduce.jax.diloco`; or what `DistributedOptimizer` takes, for arrays
        of NumPy and CuPy that are changed in place. For Keras see `ringreduce.keras.callbacks.DiLoCoCallback`. A
        DistributedOptimizer with process_set=host_process_set averages gradients inside a host at every step: then
        parameters differ, and are averaged, between hosts.
    parameters: of torch, model.named_parameters(), by default numbered; of NumPy the tree of arrays, which is needed.
    sync_every: each parameter is averaged once in so many steps. The first step counts as 1; a step that GradScaler
        skips on a rank counts, too, so that all ranks average after the same call of step().
    outer: what becomes of the average: None, the plain mean of the parameters; `Nesterov(lr, momentum)`, or a function
        such as that one. Momentum of 0.9, the papers', makes the loss of short jobs worse.
    fragments: the parameters are divided into so many groups of about equal bytes; one is averaged every
        sync_every / fragments steps.
    delay: the average is waited for, and applied, so many steps after it was begun: sync_every / fragments at most.
        What a rank has learned in between is added to it.
    compression: of what is averaged, which is how far parameters have moved since the last average.
    warmup_steps: at the beginning the parameters are averaged after each of so many steps, by the plain mean.

    All ranks begin with the same parameters (`broadcast_parameters`), and call step() equally often. Clip gradients as
    you like: they are this rank's own. `with optimizer.averaged():` has the mean of all ranks' parameters, to evaluate
    and save; call it on all ranks, also before an early `shutdown`, as with a delay something may be on its way.
    state_dict() has the anchors, the parameters after the last average, and the state of `outer`, both alike on all
    ranks, beside the optimizer's own. With load_state_dict(), and in an elastic job after a loss or when ranks come,
    all ranks begin from the anchors. So commit after a multiple of sync_every steps.

    Memory: one more copy of the parameters, with 32 bits or more; another of a fragment while it is averaged.
    Cost:   one `grouped_allreduce` of a fragment every sync_every / fragments steps; one agreement at the first step.
    Raises: InputError (a ValueError) for wrong arguments; TypeError for what is no optimizer. step(): MismatchError on
            all ranks where one has other options, another number of steps or, in the first step, other parameters.
    Source: see `ringreduce.optim.local`.
    """
    options = Options("DiLoCo", sync_every, warmup_steps, fragments, delay, outer, compression)
    return _wrapped(optimizer, parameters, options)


def _wrapped(optimizer: Any, parameters: Any, options: Options) -> Any:
    """What is made of the optimizer, by its framework."""
    if isinstance(optimizer, HasLocalSteps):
        raise InputError(f"{options.function}: the optimizer already takes local steps; pass the original one")
    if name := adapter_of(optimizer):
        return adapter(f"{name}.local").wrapped(optimizer, parameters, options)
    if not (callable(optimizer) or any(callable(getattr(optimizer, name, None)) for name in METHODS)):
        raise TypeError(f"{options.function}: got a {type(optimizer).__qualname__}; expected an optimizer")
    return LocalOptimizer(optimizer, parameters, options)


class LocalOptimizer(HasLocalSteps, WrappingOptimizer):
    """Calls the wrapped optimizer, then averages parameters when it is time; made by `LocalSGD` and `DiLoCo`."""

    OWN = ("_optimizer", "_local", "_state", "_options", "_parameters", "_in_place")

    def __init__(self, optimizer: Any, parameters: Any, options: Options) -> None:
        self._optimizer, self._parameters, self._options = optimizer, parameters, options
        self._state: dict[str, Any] = {}
        found = _named(parameters, options.function)
        self._local = LocalSteps(options, lambda: found, lambda: self._state)
        tree = parameters if isinstance(parameters, dict | list | tuple) else {"": parameters}
        self._in_place = InPlace(options.function, optimizer, dict(trees.named_leaves(tree)))
        runtime.current(options.function)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalOptimizer:
        """A copy of the wrapped optimizer and of its arrays, which are averaged in the same way."""
        optimizer, parameters, state = copy.deepcopy((self._optimizer, self._parameters, self._state), memo)
        copied = type(self)(optimizer, parameters, self._options)
        copied._state = state
        return copied

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._local.begin()
        result = function(*args, **kwargs)
        self._in_place.check(result)
        self._local.end()
        return result

    def state_dict(self) -> Any:
        """The wrapped optimizer's, and what all ranks have alike."""
        return {"optimizer": super().state_dict(), "local": self._state}

    def load_state_dict(self, state_dict: Any) -> None:
        """Go back to what `state_dict` returned; parameters become the anchors."""
        super().load_state_dict(state_dict["optimizer"])
        self._state = state_dict["local"]
        self.begin_from_anchors()

    def __repr__(self) -> str:
        return f"{self._options.function}({self._optimizer!r}, sync_every={self._options.sync_every})"


def _named(parameters: Any, function: str) -> Parameters:
    """The arrays of a tree by name; of a number's the view with one element, as arithmetic makes no array of it."""
    if parameters is None:
        raise InputError(
            f"{function}: which arrays are averaged? Pass them: {function}(optimizer, params, sync_every=…)"
        )
    named = trees.named_leaves(parameters if isinstance(parameters, dict | list | tuple) else [parameters])
    for name, array in named:
        dtype = getattr(array, "dtype", None)
        is_floating = getattr(dtype, "kind", "") in ("f", "c") or str(dtype) == "bfloat16"  # whose kind is V
        if not (is_floating and getattr(array.flags, "writeable", True)):
            raise InputError(
                f"{function}: parameter {name!r} is {dtype or type(array).__name__}; expected arrays "
                "of floating-point numbers that can be changed in place"
            )
    if not named:
        raise InputError(f"{function}: there are no parameters; expected a tree of arrays")
    return {name: array if array.shape else array.reshape(1) for name, array in named}
