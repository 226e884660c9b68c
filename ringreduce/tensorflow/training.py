"""DistributedOptimizer, and variables and objects that are alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.api import objects
from ringreduce.api.broadcast import submit_broadcast
from ringreduce.api.process_sets import ProcessSet, global_process_set, placed
from ringreduce.arrays.view import as_buffer, as_buffers
from ringreduce.collectives.ops import Average, ReduceOp
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import InputError
from ringreduce.keras import optimizer as of_keras
from ringreduce.runtime.submit import refused
from ringreduce.tensorflow.host import on_host, unconverted

__all__ = ["DistributedOptimizer", "allgather_object", "broadcast_", "broadcast_object", "broadcast_variables"]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """As `ringreduce.keras.DistributedOptimizer`: TensorFlow 2's optimizers are those of Keras.

    The order of the arguments is that of Horovod's for TensorFlow.  use_locking: Horovod's, without effect.
    """
    return of_keras.DistributedOptimizer(
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


@unconverted
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Give all ranks' variables the root's values, eagerly or inside tf.function.

    variables: tf.Variables or Keras variables, the same on each rank. A layer that computes with what it has made of
               them, such as keras.layers.Normalization, follows at layer.finalize_state().
    inplace:   Horovod's, without effect.
    Cost:      as `broadcast`, of all as a group.
    Source:    Horovod's broadcast_variables.
    """
    broadcast_(variables, root_rank, process_set=process_set)


@unconverted
def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """As `broadcast_variables`; returns the values.

    name: of the operation, for error messages and the timeline.
    Source: Horovod's broadcast_.
    """
    variables = [getattr(each, "value", each) if not isinstance(each, tf.Variable) else each for each in variables]
    names = [f"{number}" for number in range(len(variables))]

    def made(arrays: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        outputs = [np.empty_like(each) for each in arrays]
        try:
            return outputs, as_buffers(arrays), [as_buffer(each, writable=True) for each in outputs]
        except InputError as exc:
            said = [getattr(each, "name", own) for each, own in zip(variables, names, strict=True)]
            raise refused("broadcast_variables", exc, None, None, said, len(said)) from exc.__cause__

    def receive(arrays: list[Any]) -> list[Any]:
        outputs, sources, targets = placed("broadcast_variables", name, process_set, made, arrays)
        submit_broadcast(sources, targets, root_rank, name, names, process_set, waits=True).wait()
        return outputs

    inputs = [tf.convert_to_tensor(each) for each in variables]
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
    received = on_host("broadcast_", receive, inputs, specs) if inputs else []
    for variable, value in zip(variables, received, strict=True):
        variable.assign(value)
    return received


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As `ringreduce.broadcast_object`.  session: Horovod's, without effect."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """As `ringreduce.allgather_object`.  session: Horovod's, without effect."""
    return objects.allgather_object(obj, name, process_set)
