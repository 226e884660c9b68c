"""The collectives on the tensors of Keras' backend: each is passed to that framework's adapter."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from ringreduce import runtime
from ringreduce.api.broadcast import broadcast_parameters
from ringreduce.api.control import barrier
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.arrays import trees
from ringreduce.checks.divergence import numbered
from ringreduce.collectives.ops import Average, ReduceOp
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import InputError
from ringreduce.frameworks.collective import ending_step
from ringreduce.keras.either import path_of

__all__ = ["allgather", "allreduce", "barrier", "broadcast", "broadcast_variables", "reducescatter"]


def adapter() -> Any:
    """The adapter of Keras' backend, such as ringreduce.jax."""
    backend = keras.backend.backend()
    if backend not in ("torch", "jax", "tensorflow"):
        raise InputError(f"Keras' backend {backend!r} does not train; expected KERAS_BACKEND=torch, jax or tensorflow")
    return importlib.import_module(f"ringreduce.{backend}")


def grouped_allreduce(
    tensors: Sequence[Any], names: Sequence[str], name: str, ends_step: bool = False, **options: Any
) -> list[Any]:
    """The tensors, reduced over all ranks as a group called `name`.  ends_step: of training."""
    with ending_step() if ends_step else contextlib.nullcontext():
        reduced = adapter().allreduce(dict(zip(names, tensors, strict=True)), name=name, **options)
    if ends_step and keras.backend.backend() == "torch":  # the others may run this in compiled code
        runtime.stepped(name)
    return [reduced[each] for each in names]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: AnyCompressor = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor of Keras' backend, a Keras variable, or a dict of them, over all ranks; returns tensors.

    Otherwise as the `allreduce` of ringreduce.torch, .jax or .tensorflow, but for the order of its arguments, which is
    that of Horovod's for Keras: pass them by name.
    """
    own = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    tensors = trees.map_leaves(value, lambda _, leaf: _tensor(leaf)) if isinstance(value, dict) else _tensor(value)
    return adapter().allreduce(
        tensors, average=average, name=name, compression=compression, process_set=process_set, **own
    )


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the tensors of all ranks along dim 0; otherwise as the adapter's."""
    return adapter().allgather(_tensor(value), name, process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The root's tensor on every rank; otherwise as the adapter's."""
    return adapter().broadcast(_tensor(value), root_rank, name, process_set=process_set)


def reducescatter(
    value: Any, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Reduce a tensor over all ranks; returns this rank's part of the rows. Otherwise as the adapter's."""
    return adapter().reducescatter(_tensor(value), name=name, op=op, process_set=process_set)


def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give all ranks' Keras variables the root's values, through the host's memory.

    variables: such as model.weights + model.optimizer.variables, on each rank as many of the same shapes, in the same
               order; in their names the numbers of layers, as in dense_3, may differ. A layer that computes with
               what it has made of them, such as keras.layers.Normalization, follows at layer.finalize_state().
    Cost:      as `ringreduce.broadcast_parameters`.
    """
    variables = list(variables)
    values = [np.array(keras.ops.convert_to_numpy(each)) for each in variables]
    names = [numbered(number, path_of(each)) for number, each in enumerate(variables)]
    broadcast_parameters(dict(zip(names, values, strict=True)), root_rank, process_set)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _tensor(value: Any) -> Any:
    return value if keras.utils.is_keras_tensor(value) else keras.ops.convert_to_tensor(value)
