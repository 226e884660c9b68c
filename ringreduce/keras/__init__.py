"""ringreduce for Keras 3: what `horovod.keras` has, by the same names, with Keras' torch, jax and tensorflow backends.

    import ringreduce.keras as hvd

ops        allreduce, allgather, … on the tensors of Keras' backend; broadcast_variables
optimizer  DistributedOptimizer; own: variables it does not reduce
loading    load_model; saved: the options of an optimizer in a saved model
callbacks  for model.fit; local: those with local steps; together: when all ranks end it
either     Keras 3, and Keras 2, which is tf_keras
parts      what check=divergence compares
sync_batch_norm  SyncBatchNormalization
elastic    KerasState, and callbacks that commit it; committed: models and optimizers in it
"""
# ruff: noqa: F403

from ringreduce.errors import MissingExtraError as _MissingExtraError

try:
    import keras as _keras
except ImportError as exc:
    raise _MissingExtraError.of("ringreduce.keras needs Keras 3", "keras", exc) from exc
if _keras.__version__.startswith(("1.", "2.")):
    raise _MissingExtraError(
        f"ringreduce.keras needs Keras 3, but Keras {_keras.__version__} is installed; pip install --upgrade keras"
    )

from ringreduce.frameworks.common import *
from ringreduce.frameworks.horovod import end_of as _end_of
from ringreduce.keras import callbacks as callbacks
from ringreduce.keras import elastic as elastic
from ringreduce.keras.loading import *
from ringreduce.keras.ops import *
from ringreduce.keras.optimizer import *
from ringreduce.keras.sync_batch_norm import *

__all__, __getattr__ = _end_of(globals())
