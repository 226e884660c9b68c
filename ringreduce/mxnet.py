"""There is no adapter for MXNet: importing this says why."""

from ringreduce.frameworks.horovod import MXNET

raise ImportError(f"ringreduce.mxnet: {MXNET}")
