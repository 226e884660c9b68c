"""ringreduce for TensorFlow 2: what `horovod.tensorflow` has, by the same names; eagerly and inside tf.function.

    import ringreduce.tensorflow as hvd

host       runs a function of NumPy arrays on tensors: at once, or as an operation of the graph
ops        the collectives, with their gradients; sparse gradients (IndexedSlices)
world      size_op and the like: numbers of ranks when a graph runs
tape       DistributedGradientTape, PartialDistributedGradientTape
training   DistributedOptimizer, broadcast_variables, broadcast_object
keras_2    how the optimizers of Keras 2, of tf_keras, reduce; sync_batch_norm: its SyncBatchNormalization
elastic    states of a Keras model, and of variables
keras      `horovod.tensorflow.keras`, replaced by ringreduce.keras
"""
# ruff: noqa: F403

from ringreduce.errors import MissingExtraError as _MissingExtraError

try:
    import tensorflow as _tensorflow
except ImportError as exc:
    raise _MissingExtraError.of("ringreduce.tensorflow needs TensorFlow 2", "tensorflow", exc) from exc

from ringreduce.frameworks.common import *
from ringreduce.frameworks.horovod import end_of as _end_of
from ringreduce.keras.either import is_keras_3 as _is_keras_3
from ringreduce.tensorflow import elastic as elastic
from ringreduce.tensorflow.ops import *
from ringreduce.tensorflow.tape import *
from ringreduce.tensorflow.training import *  # type: ignore[assignment]  # objects, with Horovod's session
from ringreduce.tensorflow.world import *

if _is_keras_3(_tensorflow.keras):
    from ringreduce.keras.sync_batch_norm import *
else:  # as TF_USE_LEGACY_KERAS=1 asks
    from ringreduce.tensorflow.sync_batch_norm import *

__all__, __getattr__ = _end_of(globals())
