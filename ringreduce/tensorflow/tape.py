"""DistributedGradientTape, and PartialDistributedGradientTape for layers that are one rank's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringreduce.api.process_sets import ProcessSet, global_process_set, takes_part
from ringreduce.collectives.ops import Average, ReduceOp
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.frameworks.collective import ending_step
from ringreduce.keras.own import OwnVariables, local_variables
from ringreduce.optim.exchange import Exchange
from ringreduce.tensorflow.host import unconverted
from ringreduce.tensorflow.ops import allreduce
from ringreduce.tensorflow.parts import compare_sources

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


@unconverted
def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    name: str | None = None,
) -> Any:
    """Make a tf.GradientTape reduce over all ranks what its `gradient()` returns; returns the tape.

    Its `register_local_source(variable)` lets the gradient of a variable stay this rank's own.

    sparse_as_dense: gradients that are IndexedSlices are made dense; otherwise all ranks' rows are gathered.
    op: Average, Sum or Adasum.
    compression, gradient_predivide_factor, process_set: see `ringreduce.DistributedOptimizer`; on ranks
        outside of the set gradients stay their own.
    scale_local_gradients: divide the gradients that stay a rank's own by the number of ranks, whatever `op` is: they
        are then those of the loss that is averaged over the ranks.
    device_dense, device_sparse, num_groups, groups: Horovod's, without effect: all gradients are one group.
    name: of the operation, for error messages and the timeline.

    Cost:   one `allreduce` of all gradients, as a group, a call.
    Source: Horovod's DistributedGradientTape.
    """
    exchange = Exchange(op, compression, gradient_predivide_factor, process_set)
    own = OwnVariables(process_set, scale_local_gradients)
    of_rank, reduction = gradtape.gradient, Reduction(exchange, own, sparse_as_dense)

    def gradient(target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        gradients = of_rank(target, sources, *args, **options)
        flat = reduction(tf.nest.flatten(gradients), tf.nest.flatten(sources), name)
        return tf.nest.pack_sequence_as(gradients, flat)

    gradtape.gradient = unconverted(gradient)
    gradtape.register_local_source = unconverted(own.add)
    return gradtape


@unconverted
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    *,
    name: str | None = None,
) -> Any:
    """Like `DistributedGradientTape`, but the gradients of some layers stay this rank's own.

    local_layers: layers of Keras, or one of them, which are built; other ranks may have others.

    Raises: InputError (a ValueError) for what is no layer, or is not built.
    Source: Horovod's PartialDistributedGradientTape.
    """
    options = compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups, process_set
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, *options, scale_local_gradients=scale_local_gradients, name=name
    )
    for variable in local_variables("PartialDistributedGradientTape", local_layers):
        tape.register_local_source(variable)
    return tape


class Reduction:
    """Of the gradients of one tape, or of one optimizer."""

    def __init__(self, exchange: Exchange, own: OwnVariables, sparse_as_dense: bool) -> None:
        self.process_set, self._options = exchange.process_set, exchange.arguments
        self.own, self._sparse_as_dense = own, sparse_as_dense

    @unconverted
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any], name: str | None) -> list[Any]:
        """These, of these variables, reduced over the ranks, but for those of variables that are this rank's own.

        name: of the operation.
        """
        if not takes_part(self.process_set, "DistributedOptimizer"):
            return list(gradients)
        shared = [number for number, each in enumerate(variables) if each not in self.own]
        compare_sources(self.process_set, [variables[number] for number in shared])
        reduced = dict(zip(shared, self._reduced([gradients[number] for number in shared], name), strict=True))
        own = self.own.gradient
        return [reduced[number] if number in reduced else own(each) for number, each in enumerate(gradients)]

    def _reduced(self, gradients: Sequence[Any], name: str | None) -> Any:
        if self._sparse_as_dense:
            gradients = [each if each is None else tf.convert_to_tensor(each) for each in gradients]
        with ending_step():
            return allreduce(gradients, name=name, **self._options)
