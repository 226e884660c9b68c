"""Data-parallel training for any array library, over a ring all-reduce on MPI.

    import ringreduce as rr

    rr.init()
    optimizer = rr.DistributedOptimizer(optimizer)
    rr.broadcast_parameters(params, root_rank=0)

Importing this package starts nothing: `init()` starts MPI. This file is the list of the public API.
"""

from ringreduce._version import __version__
from ringreduce.api import (
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
    is_homogeneous,
    local_rank,
    local_size,
    rank,
    size,
)
from ringreduce.errors import (
    CollectiveError,
    InputError,
    LauncherMismatchError,
    MismatchError,
    MissingExtraError,
    MpiMissingError,
    NotInitializedError,
    PeerLostError,
    RingreduceError,
    SettingsError,
    StartupError,
    UnsupportedArrayError,
)
from ringreduce.ops import Average, Max, Min, Product, ReduceOp, Sum
from ringreduce.optimizer import DistributedOptimizer
from ringreduce.runtime import init, is_initialized, shutdown

HorovodInternalError = CollectiveError

__all__ = [
    "Average",
    "CollectiveError",
    "DistributedOptimizer",
    "HorovodInternalError",
    "InputError",
    "LauncherMismatchError",
    "Max",
    "Min",
    "MismatchError",
    "MissingExtraError",
    "MpiMissingError",
    "NotInitializedError",
    "PeerLostError",
    "Product",
    "ReduceOp",
    "RingreduceError",
    "SettingsError",
    "StartupError",
    "Sum",
    "UnsupportedArrayError",
    "__version__",
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
