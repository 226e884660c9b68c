"""What `import horovod.tensorflow.keras as hvd` gives: TensorFlow's Keras is Keras 3, so this is ringreduce.keras."""
# ruff: noqa: F403

from ringreduce.frameworks.horovod import end_of as _end_of
from ringreduce.keras import *
from ringreduce.tensorflow.keras import callbacks as callbacks
from ringreduce.tensorflow.keras import elastic as elastic

__all__, __getattr__ = _end_of(globals())
