"""Batch normalisation over the batches of all ranks, as if they were one, as a layer of Keras.

With the sums over the rows of all ranks, n of them:

    μ = Σ x / n         one allreduce of Σ x and n
    σ² = Σ (x - μ)² / n  and one of this

Their gradients are the same allreduces, so each rank's gradients are those of the sum of all ranks' losses by its rows.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import keras

from ringreduce.api.process_sets import global_process_set
from ringreduce.errors import InputError
from ringreduce.keras.ops import adapter
from ringreduce.ops import Sum

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable(package="ringreduce")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalisation whose mean and variance, in training, are those of all ranks' batches together.

    options: of keras.layers.BatchNormalization.  fused: Horovod's; it may be False only.

    Every rank must call it when one does in training; how many rows each has may differ. So the moving averages are
    alike on all ranks.

    Cost:   training: two allreduces a forward pass, of C + 1 and C elements for C channels, and two a backward pass.
    Raises: InputError (a ValueError) for another `fused`, and for synchronized=True, which is for tf.distribute.
    Source: Horovod's SyncBatchNormalization, which weighs all ranks alike, however many rows they have.
    """

    def __init__(self, fused: bool | None = False, **options: Any) -> None:
        if fused is not False:
            raise InputError(f"SyncBatchNormalization: fused={fused}; expected fused=False")
        if options.get("synchronized"):
            raise InputError("SyncBatchNormalization: synchronized=True is for tf.distribute; leave it out")
        super().__init__(**options)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if (global_process_set.size() or 1) == 1:
            return super()._moments(inputs, mask)
        ops, axes = keras.ops, self._reduction_axes
        shape = ops.shape(inputs)
        own = functools.reduce(operator.mul, (shape[axis] for axis in axes))
        weights: Any = 1
        if mask is not None:
            weights = ops.cast(ops.expand_dims(mask, -1), inputs.dtype)
            own = ops.sum(weights)
        count = ops.reshape(ops.cast(own, inputs.dtype), (1,))
        sums = _summed(ops.concatenate([ops.sum(inputs * weights, axes), count]))
        total = ops.maximum(sums[-1], 1)  # there may be no rows at all
        mean = sums[:-1] / total
        like = [1] * len(shape)
        like[self.axis] = -1
        deviation = ops.square(inputs - ops.reshape(mean, like))
        return mean, _summed(ops.sum(deviation * weights, axes)) / total


def _summed(tensor: Any) -> Any:
    return adapter().allreduce(tensor, op=Sum)
