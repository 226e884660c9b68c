"""Batch normalization over the batches of all ranks as a layer of Keras 2, tf_keras; see keras/sync_batch_norm.py.

Nothing imports it unless TF_USE_LEGACY_KERAS=1.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from ringreduce.api.process_sets import global_process_set
from ringreduce.errors import InputError
from ringreduce.keras.sync_batch_norm import check, moments
from ringreduce.tensorflow.ops import allreduce

__all__ = ["SyncBatchNormalization"]

_OPS = types.SimpleNamespace(
    cast=tf.cast,
    concatenate=lambda tensors: tf.concat(tensors, 0),
    expand_dims=tf.expand_dims,
    maximum=tf.maximum,
    reshape=tf.reshape,
    shape=tf.shape,
    square=tf.square,
    sum=tf.reduce_sum,
)
"""TensorFlow's, by their names in keras.ops."""


@tf_keras.utils.register_keras_serializable(package="ringreduce")
class SyncBatchNormalization(tf_keras.layers.BatchNormalization):  # type: ignore[misc]
    """As `ringreduce.keras.SyncBatchNormalization`, for models of Keras 2.

    Raises: also InputError for virtual_batch_size, which is for batches smaller than a rank's.
    """

    def __init__(self, fused: bool | None = False, **options: Any) -> None:
        check(options, fused)
        if options.get("virtual_batch_size") is not None:
            raise InputError("SyncBatchNormalization: virtual_batch_size is for less than a rank's batch; leave it out")
        super().__init__(fused=False, **options)

    def _moments(self, inputs: Any, reduction_axes: Sequence[int], keep_dims: bool, mask: Any = None) -> Any:
        if (global_process_set.size() or 1) == 1:
            return super()._moments(inputs, reduction_axes, keep_dims, mask)
        found = moments(_OPS, allreduce, inputs, reduction_axes, mask)
        like = [1 if axis in reduction_axes else length for axis, length in enumerate(inputs.shape)]
        return [tf.reshape(each, like) for each in found] if keep_dims else found
