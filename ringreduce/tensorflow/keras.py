"""What `import horovod.tensorflow.keras as hvd` gives: TensorFlow's Keras is Keras 3."""
# ruff: noqa: F403

from ringreduce.keras import *
from ringreduce.keras import callbacks as callbacks
