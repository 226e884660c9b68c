"""DistributedGradientTape, DistributedOptimizer, and variables that are alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.api.broadcast import submit_broadcast
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.arrays.view import as_buffer
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.frameworks.collective import ending_step
from ringreduce.ops import Average, ReduceOp
from ringreduce.optim.exchange import Exchange
from ringreduce.tensorflow.host import on_host, unconverted
from ringreduce.tensorflow.ops import allreduce
from ringreduce.tensorflow.parts import compare_sources

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "broadcast_variables"]


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
) -> Any:
    """Make a tf.GradientTape reduce over all ranks what its `gradient()` returns; returns the tape.

    sparse_as_dense: gradients that are IndexedSlices are made dense; otherwise all ranks' rows are gathered.
    op: Average, Sum or Adasum.
    compression, gradient_predivide_factor, process_set: see `ringreduce.DistributedOptimizer`; on ranks
        outside of the set gradients stay their own.
    name: of the operation, for error messages and the timeline.

    Cost:   one `allreduce` of all gradients, as a group, a call.
    Source: Horovod's DistributedGradientTape.
    """
    exchange = Exchange(op, compression, gradient_predivide_factor, process_set)
    of_rank = gradtape.gradient

    @unconverted
    def gradient(target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        gradients = of_rank(target, sources, *args, **options)
        if not process_set.included():
            return gradients
        compare_sources(process_set, tf.nest.flatten(sources))
        flat = tf.nest.flatten(gradients)
        if sparse_as_dense:
            flat = [each if each is None else tf.convert_to_tensor(each) for each in flat]
        with ending_step():
            reduced = allreduce(flat, name=name, **exchange.arguments)
        return tf.nest.pack_sequence_as(gradients, reduced)

    gradtape.gradient = gradient
    return gradtape


def DistributedOptimizer(optimizer: Any, *args: Any, **options: Any) -> Any:  # noqa: N802 - Horovod's name
    """As `ringreduce.keras.DistributedOptimizer`: TensorFlow 2's optimizers are those of Keras."""
    from ringreduce.keras import DistributedOptimizer as KerasOptimizer

    return KerasOptimizer(optimizer, *args, **options)


@unconverted
def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give all ranks' variables the root's values, eagerly or inside tf.function.

    variables: tf.Variables or Keras variables, the same on each rank.
    Cost:      as `broadcast`, of all as a group.
    Source:    Horovod's broadcast_variables.
    """
    variables = [getattr(each, "value", each) if not isinstance(each, tf.Variable) else each for each in variables]

    def receive(arrays: list[Any]) -> list[Any]:
        outputs = [np.empty_like(each) for each in arrays]
        names = [f"{number}" for number in range(len(arrays))]
        buffers = [as_buffer(each) for each in arrays], [as_buffer(each, writable=True) for each in outputs]
        submit_broadcast(*buffers, root_rank, None, names, process_set, waits=True).wait()
        return outputs

    inputs = [tf.convert_to_tensor(each) for each in variables]
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
    received = on_host("broadcast_variables", receive, inputs, specs) if inputs else []
    for variable, value in zip(variables, received, strict=True):
        variable.assign(value)
