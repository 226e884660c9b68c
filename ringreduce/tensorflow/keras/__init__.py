"""What `import horovod.tensorflow.keras as hvd` gives: ringreduce.keras, with models and optimizers of `tf.keras`.

That is Keras 3, or Keras 2 where TF_USE_LEGACY_KERAS=1 and tf_keras is installed; ringreduce.keras takes those of both.
"""
# ruff: noqa: F403

from collections.abc import Sequence as _Sequence
from typing import Any as _Any

import tensorflow as _tensorflow

from ringreduce.frameworks.horovod import end_of as _end_of
from ringreduce.keras import *
from ringreduce.keras.loading import loaded as _loaded
from ringreduce.tensorflow import SyncBatchNormalization as SyncBatchNormalization
from ringreduce.tensorflow.keras import callbacks as callbacks
from ringreduce.tensorflow.keras import elastic as elastic


def load_model(
    filepath: _Any,
    custom_optimizers: _Sequence[type] | None = None,
    custom_objects: dict[str, _Any] | None = None,
    compression: _Any = None,
    legacy_opts: bool = False,
    **options: _Any,
) -> _Any:
    """As `ringreduce.keras.load_model`, by `tf.keras`."""
    load = _tensorflow.keras.models.load_model
    return _loaded(load, filepath, custom_optimizers, custom_objects, compression, options)


__all__, __getattr__ = _end_of(globals())
