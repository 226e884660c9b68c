"""Batch normalization over the batches of all ranks, as if they were one, as a layer of Keras.

With the sums over the rows of all ranks, n of them:

    μ = Σ x / n         one allreduce of Σ x and n
    σ² = Σ (x - μ)² / n  and one of this

Their gradients are the same allreduces, so each rank's gradients are those of the sum of all ranks' losses by its rows.
The layer of Keras 2 is in tensorflow/sync_batch_norm.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from ringreduce.api.process_sets import global_process_set
from ringreduce.collectives.ops import Sum
from ringreduce.errors import InputError
from ringreduce.keras.ops import adapter

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable(package="ringreduce")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization whose mean and variance, in training, are those of all ranks' batches together.

    options: of keras.layers.BatchNormalization.  fused: Horovod's; it may be False only.

    Every rank must call it when one does in training; the number of rows may differ. So the moving averages are
    alike on all ranks.

    Cost:   training: two allreduces a forward pass, of C + 1 and C elements for C channels, and two a backward pass.
    Raises: InputError (a ValueError) for another `fused`, and for synchronized=True, which is for tf.distribute.
    Source: Horovod's SyncBatchNormalization, which weighs all ranks alike, however many rows they have.
    """

    def __init__(self, fused: bool | None = False, **options: Any) -> None:
        check(options, fused)
        super().__init__(**options)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        finds_shapes = getattr(getattr(inputs, "device", None), "type", "") == "meta"  # torch's; perhaps on one rank
        if finds_shapes or (global_process_set.size() or 1) == 1:
            return super()._moments(inputs, mask)
        return moments(keras.ops, adapter().allreduce, inputs, self._reduction_axes, mask)


def check(options: Mapping[str, Any], fused: Any) -> None:
    """Raise InputError for options of a layer that make no sense on several ranks."""
    if fused is not False:
        raise InputError(f"SyncBatchNormalization: fused={fused}; expected fused=False")
    if options.get("synchronized"):
        raise InputError("SyncBatchNormalization: synchronized=True is for tf.distribute; leave it out")


def moments(ops: Any, allreduce: Callable[..., Any], inputs: Any, axes: Sequence[int], mask: Any) -> tuple[Any, Any]:
    """The mean and the variance over some axes of all ranks' inputs, each (C,) for C channels.

    ops:  keras.ops, or what has functions of these names.
    mask: of the rows that count, or None: all do.
    """
    shape, axes = ops.shape(inputs), [each % len(inputs.shape) for each in axes]
    own = functools.reduce(operator.mul, (shape[axis] for axis in axes))
    weights: Any = 1
    if mask is not None:
        weights = ops.cast(ops.expand_dims(mask, -1), inputs.dtype)
        own = ops.sum(weights)
    like = [1 if axis in axes else length for axis, length in enumerate(inputs.shape)]

    def total(tensor: Any) -> Any:
        return ops.reshape(ops.sum(tensor * weights, axes), (-1,))

    count = ops.reshape(ops.cast(own, inputs.dtype), (1,))
    sums = allreduce(ops.concatenate([total(inputs), count]), op=Sum)
    rows = ops.maximum(sums[-1], 1)  # there may be none at all
    mean = sums[:-1] / rows
    deviation = ops.square(inputs - ops.reshape(mean, like))
    return mean, allreduce(total(deviation), op=Sum) / rows
