"""ringreduce for PyTorch: the functions of `ringreduce`, and an optimizer whose gradients are reduced during backward.

    import ringreduce.torch as hvd

The functions take and give tensors, on the CPU or a GPU. This file is the list of the API.
"""

from ringreduce.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ImportError as exc:
    raise MissingExtraError("ringreduce.torch needs PyTorch; install it with: pip install 'ringreduce[torch]'") from exc

from ringreduce import (
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_parameters,
    cross_rank,
    cross_size,
    grouped_allreduce,
    grouped_allreduce_,
    init,
    is_homogeneous,
    local_rank,
    local_size,
    rank,
    size,
)
from ringreduce.errors import CollectiveError as HorovodInternalError
from ringreduce.ops import Average, Max, Min, Product, Sum
from ringreduce.runtime import is_initialized, shutdown
from ringreduce.torch.optimizer import DistributedOptimizer

__all__ = [
    "Average",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
