"""What `horovod.tensorflow.keras.callbacks` has: the callbacks of ringreduce.keras."""
# ruff: noqa: F403

from ringreduce.keras.callbacks import *
from ringreduce.keras.callbacks import __all__ as __all__
