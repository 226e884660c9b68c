"""What `horovod.tensorflow.keras.elastic` has: the elastic module of ringreduce.keras."""
# ruff: noqa: F403

from ringreduce.keras.elastic import *
from ringreduce.keras.elastic import __all__ as __all__
