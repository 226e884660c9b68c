"""DistributedOptimizer for Keras' optimizers.

The optimizer stays the object that it is, of its own class and with its own configuration: what it saves, Keras loads
without this package. Gradients are reduced where Keras calls the optimizer's `_clip_gradients`: after they were
accumulated and unscaled, before they are clipped and applied, in every way to train. Those of Keras 2 are in
tensorflow/keras_2.py.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from ringreduce.api.process_sets import ProcessSet, global_process_set, takes_part
from ringreduce.collectives.ops import Average, Min, ReduceOp
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import InputError, MissingExtraError
from ringreduce.keras import parts, saved
from ringreduce.keras.either import inner_of, is_of_keras_2, is_optimizer, reduction_of
from ringreduce.keras.ops import adapter, grouped_allreduce
from ringreduce.keras.own import OwnVariables, local_variables
from ringreduce.keras.together import decide_together
from ringreduce.optim.exchange import Exchange, check_passes

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]

PRIVATE = "_clip_gradients", "_trainable_variables", "_iterations"
"""Names of an optimizer that Keras does not promise to keep, as is check_finite of its LossScaleOptimizer."""


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer reduce the gradients over all ranks before it uses them; returns the optimizer.

    optimizer: a keras.optimizers.Optimizer, or one of tf_keras, Keras 2, a `legacy` one too; of a LossScaleOptimizer
        the inner one reduces. With mixed_float16, `model.compile` may wrap the result in one.
    name: of the operation, for error messages and the timeline; by default made of the variables' number and size.
    sparse_as_dense: with TensorFlow, gradients that are IndexedSlices are made dense; else their rows are gathered.
    op: Average, Sum or Adasum, of the gradients.
    backward_passes_per_step: gradients of so many passes are summed before they are reduced, or averaged with
        average_aggregated_gradients: it sets the optimizer's own gradient_accumulation_steps, which averages, and whose
        accumulated gradients are reduced once a step, too.
    compression, gradient_predivide_factor, process_set: see `ringreduce.DistributedOptimizer`.
    device_dense, device_sparse, num_groups, groups: Horovod's, without effect: all gradients of a step are one group,
        and are reduced where they are.
    scale_local_gradients: divide the gradients of variables that `register_local_var` was called with by the number of
        ranks, whatever `op` is: they are then those of the loss that is averaged over the ranks.

    The optimizer's `register_local_var(variable)` lets a variable be this rank's own: its gradient is not reduced.
    From then on ranks end a `model.fit` together, whoever sets model.stop_training; see docs/keras.md.

    Cost:   one `grouped_allreduce` of all gradients a step, and a small one an epoch of `model.fit`; one more a batch,
            for which nobody waits, where a callback of one's own, or TerminateOnNaN, is called in batches.
    Raises: InputError (a ValueError) for wrong arguments, one that is wrapped already, and at the first step where
            TensorFlow compiles it by XLA, or Keras has not called what reduces; TypeError for what is no optimizer of
            Keras; MissingExtraError for a Keras that lacks what is relied on.
    Source: Horovod's DistributedOptimizer for Keras.
    """
    inner = _checked(optimizer)
    exchange = Exchange(op, compression, gradient_predivide_factor, process_set)
    exchange.check_world()
    variables = OwnVariables(process_set, scale_local_gradients)
    passes = check_passes(backward_passes_per_step), average_aggregated_gradients
    own = {
        "name": name,
        "compression": compression,
        "sparse_as_dense": bool(sparse_as_dense),
        "gradient_predivide_factor": float(gradient_predivide_factor),
        "op": op,
        "backward_passes_per_step": int(backward_passes_per_step),
        "average_aggregated_gradients": bool(average_aggregated_gradients),
        "process_set": process_set,
        "scale_local_gradients": bool(scale_local_gradients),
    }
    kept = saved.kept(own)
    if is_of_keras_2(inner):
        reduce_in = importlib.import_module("ringreduce.tensorflow.keras_2").reduce_in
        reduce_in(inner, exchange, variables, sparse_as_dense, name, *passes, kept)
    else:
        of_passes = _accumulate(inner, *passes)
        options = exchange.arguments | {"postscale_factor": exchange.scales[1] * of_passes}
        reduction = _Reduction(inner, name, sparse_as_dense, options, variables, of_passes)
        # not by setattr: Keras and TensorFlow would keep track of it
        writing = functools.partial(reduction.save, kept)
        vars(inner).update(_clip_gradients=reduction, apply=reduction.apply, save_assets=writing)
        _agree_on_finite_gradients()
    for each in (inner, optimizer):
        vars(each)["register_local_var"] = variables.add
    decide_together()
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Like `DistributedOptimizer`, but some layers are this rank's own: their gradients are not reduced.

    local_layers: layers, or one of them, which are built; other ranks may have others. Pass their variables to
        BroadcastGlobalVariablesCallback, too: local_variables=layer.trainable_variables.

    Raises: also InputError (a ValueError) for what is no layer, or is not built.
    Source: Horovod's PartialDistributedOptimizer.
    """
    own = local_variables("PartialDistributedOptimizer", local_layers)
    wrapped = DistributedOptimizer(
        optimizer,
        name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in own:
        wrapped.register_local_var(variable)
    return wrapped


def _checked(optimizer: Any) -> Any:
    """The optimizer that is to reduce; raises what `DistributedOptimizer` does for one that it cannot wrap."""
    if not is_optimizer(optimizer):
        kind = type(optimizer)
        raise TypeError(
            f"DistributedOptimizer: expected a Keras optimizer, got a {kind.__module__}.{kind.__qualname__}; "
            "as in DistributedOptimizer(keras.optimizers.Adam(1e-3))"
        )
    inner = inner_of(optimizer)
    if reduction_of(inner) is not None:
        raise InputError("DistributedOptimizer: this optimizer is already wrapped; wrap it once")
    if not is_of_keras_2(inner):
        adapter()
        _check_names(inner)
    return inner


def _check_names(optimizer: Any) -> None:
    """Raise MissingExtraError where Keras lacks what is relied on: ranks would train alone, or wait for ever."""
    missing = [f"{type(optimizer).__name__}.{each}" for each in PRIVATE if not hasattr(optimizer, each)]
    if not hasattr(keras.optimizers.LossScaleOptimizer, "check_finite"):
        missing.append("LossScaleOptimizer.check_finite")
    if missing:
        raise MissingExtraError(
            f"DistributedOptimizer needs {missing[0]}, which Keras {keras.__version__} lacks; Keras 3.5 to 3.15 "
            "have it: pip install 'keras<3.16'"
        )


def _accumulate(optimizer: Any, passes: int, average: bool) -> int:
    """Let Keras accumulate gradients; returns what makes a sum of its mean."""
    if passes == 1:
        return 1
    if optimizer.gradient_accumulation_steps != passes and (optimizer.built or optimizer.gradient_accumulation_steps):
        raise InputError(
            f"backward_passes_per_step={passes}: this optimizer has already been built, or already accumulates; "
            f"create it with gradient_accumulation_steps={passes}"
        )
    optimizer.gradient_accumulation_steps = passes
    return 1 if average else passes


def operation_name(variables: Iterable[Any]) -> str:
    """By default of what is reduced: how many optimizers a rank has made, for evaluation say, is its own affair."""
    sizes = [math.prod(each.shape) for each in variables]
    return f"DistributedOptimizer of {len(sizes)} variables, {sum(sizes)} elements"


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which torch.compile leaves alone: model.compile(jit_compile=True) compiles the rest.

    Not by torch.compiler.is_compiling(), which is False where a frame that cannot be compiled goes on in another.
    """
    if keras.backend.backend() == "torch" and "torch._dynamo" in sys.modules:  # the import takes seconds
        import torch

        return torch.compiler.disable(function)  # type: ignore[no-any-return,no-untyped-call]
    return function


class _Reduction:
    """Stands for the `_clip_gradients` of one optimizer."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        sparse_as_dense: bool,
        options: dict[str, Any],
        own: OwnVariables,
        passes: float,
    ) -> None:
        self._optimizer, self._given_name, self._options = optimizer, name, options
        self._sparse_as_dense, self.own, self._passes = sparse_as_dense, own, passes
        self._applied, self._called = 0, False
        self._variables: list[Any] = []  # of the gradients that are applied now

    def apply(self, grads: Any, trainable_variables: Any = None, **kwargs: Any) -> None:
        """The optimizer's `apply`; raises InputError where that has not reduced: ranks would train alone."""
        optimizer = self._optimizer
        given = [] if trainable_variables is None else [list(trainable_variables)]
        known = given[0] if given else getattr(optimizer, "_trainable_variables", ())
        self._variables = [each for each, gradient in zip(known, grads, strict=False) if gradient is not None]
        type(optimizer).apply(optimizer, grads, *given, **kwargs)
        if not grads:  # of a model that trains nothing, where JAX's `fit` calls it, too
            return
        self._applied += 1
        if not self._called and self._applied >= (self._optimizer.gradient_accumulation_steps or 1):
            raise InputError(
                f"DistributedOptimizer: the first step of this {type(self._optimizer).__name__} has not reduced its "
                f"gradients: Keras {keras.__version__} or this class does not call _clip_gradients() in a step"
            )

    def __call__(self, gradients: Sequence[Any]) -> Any:
        """The gradients, reduced and clipped."""
        optimizer, self._called = self._optimizer, True
        if takes_part(self.process_set, "DistributedOptimizer"):
            steps = optimizer.gradient_accumulation_steps
            if steps and keras.backend.backend() == "jax":  # there Keras computes every pass as if it were a step
                is_step = (optimizer._iterations + 1) % steps == 0
                own = list(gradients)
                gradients = keras.ops.cond(is_step, lambda: self._reduced(own), lambda: own)
            else:
                gradients = self._reduced(gradients)
        return type(optimizer)._clip_gradients(optimizer, gradients)

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train together."""
        return self._options["process_set"]  # type: ignore[no-any-return]

    def save(self, kept: dict[str, Any], folder: str) -> None:
        """Keep the options there, and which variables are a rank's own, by their places."""
        variables = self._optimizer._trainable_variables if self._optimizer.built else ()
        saved.write(kept, folder, [number for number, each in enumerate(variables) if each in self.own])

    @property
    def _name(self) -> str:
        return self._given_name or operation_name(
            each for each in self._optimizer._trainable_variables if each not in self.own
        )

    def everywhere(self, finite: Any) -> Any:
        """True where it is true on all ranks."""
        if not self.process_set.included():
            return finite
        flag = keras.ops.cast(finite, "int32")
        options = {"op": Min, "process_set": self.process_set}
        (least,) = _uncompiled(grouped_allreduce)([flag], ["finite"], f"{self._name}.finite", **options)
        return keras.ops.cast(least, "bool")

    def _reduced(self, gradients: Sequence[Any]) -> list[Any]:
        variables = self._variables
        if len(variables) != len(gradients):
            if self.own:
                raise InputError(
                    f"DistributedOptimizer: {len(gradients)} gradients of {len(variables)} variables, some of them "
                    "a rank's own; call optimizer.apply(gradients, variables) with one for each"
                )
            variables = [None] * len(gradients)
        return _uncompiled(self._exchange)(gradients, variables)  # type: ignore[no-any-return]

    def _exchange(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        shared = [number for number, each in enumerate(variables) if each not in self.own]
        names = [f"{at}.{getattr(variables[number], 'name', '')}" for at, number in enumerate(shared)]
        parts.compare(self._optimizer, self.process_set, names, self.own)
        dense = keras.ops.convert_to_tensor if self._sparse_as_dense else lambda each: each
        own = [dense(gradients[number]) for number in shared]
        reduced = dict(zip(shared, grouped_allreduce(own, names, self._name, True, **self._options), strict=True))
        return [
            reduced[number] if number in reduced else self.own.gradient(each, self._passes)
            for number, each in enumerate(gradients)
        ]


def _agree_on_finite_gradients() -> None:
    """Let ranks find together whether a LossScaleOptimizer skips a step: one that did alone would not reduce.

    It looks at this rank's gradients before its inner optimizer, which reduces, sees them. `model.compile` makes such
    optimizers itself, so it is the class that changes; what wraps no optimizer of ours works as before.
    """
    kind = keras.optimizers.LossScaleOptimizer
    of_rank = kind.check_finite
    if hasattr(of_rank, "agrees"):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite = of_rank(self, grads)
        reduction = vars(self.inner_optimizer).get("_clip_gradients")
        if not isinstance(reduction, _Reduction):
            return finite
        return reduction.everywhere(finite)

    check_finite.agrees = True  # type: ignore[attr-defined]
    kind.check_finite = check_finite
