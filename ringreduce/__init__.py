"""Data-parallel training for any array library, over a ring all-reduce on MPI.

    import ringreduce as rr

    rr.init()
    optimizer = rr.DistributedOptimizer(optimizer)
    rr.broadcast_parameters(params, root_rank=0)

Importing this package starts nothing: `init()` starts MPI. This file is the list of the public API.
"""

from ringreduce._version import __version__
from ringreduce.api.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_, broadcast_parameters
from ringreduce.api.control import barrier, init, join, poll, start_timeline, stop_timeline, synchronize
from ringreduce.api.gather import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
)
from ringreduce.api.info import Info, info
from ringreduce.api.objects import allgather_object, broadcast_object
from ringreduce.api.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)
from ringreduce.api.reduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from ringreduce.api.world import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
)
from ringreduce.compression import Compression
from ringreduce.engine.submission import Handle
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
    StalledError,
    StartupError,
    UnsupportedArrayError,
)
from ringreduce.not_there import no_attribute as _no_attribute
from ringreduce.ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from ringreduce.optimizer import DistributedOptimizer
from ringreduce.runtime import is_initialized, shutdown
from ringreduce.sampler import DistributedSampler

HorovodInternalError = CollectiveError

__all__ = [
    "Adasum",
    "Average",
    "CollectiveError",
    "Compression",
    "DistributedOptimizer",
    "DistributedSampler",
    "Handle",
    "HorovodInternalError",
    "Info",
    "InputError",
    "LauncherMismatchError",
    "Max",
    "Min",
    "MismatchError",
    "MissingExtraError",
    "MpiMissingError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "RingreduceError",
    "SettingsError",
    "StalledError",
    "StartupError",
    "Sum",
    "UnsupportedArrayError",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "info",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> object:
    raise _no_attribute(__name__, name)
