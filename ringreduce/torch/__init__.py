"""ringreduce for PyTorch: what `horovod.torch` has, by the same names, for tensors on the CPU or a GPU.

    import ringreduce.torch as hvd

The collectives that return new tensors are known to autograd (ops.py); the others are those of `ringreduce`. This file
is the list of the API.
"""

from ringreduce.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ImportError as exc:
    raise MissingExtraError("ringreduce.torch needs PyTorch; install it with: pip install 'ringreduce[torch]'") from exc

from ringreduce.api.broadcast import broadcast_, broadcast_async, broadcast_async_, broadcast_parameters
from ringreduce.api.control import (
    barrier,
    init,
    join,
    poll,
    start_timeline,
    stop_timeline,
    synchronize,
)
from ringreduce.api.gather import allgather_async, grouped_allgather_async
from ringreduce.api.info import info
from ringreduce.api.objects import allgather_object, broadcast_object
from ringreduce.api.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)
from ringreduce.api.reduce import (
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
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
from ringreduce.errors import CollectiveError as HorovodInternalError
from ringreduce.not_there import no_attribute as _no_attribute
from ringreduce.ops import Adasum, Average, Max, Min, Product, Sum
from ringreduce.runtime import is_initialized, shutdown
from ringreduce.torch.functions import broadcast_optimizer_state
from ringreduce.torch.ops import (
    allgather,
    allreduce,
    alltoall,
    alltoall_async,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from ringreduce.torch.optimizer import DistributedOptimizer
from ringreduce.torch.sparse import sparse_allreduce_async
from ringreduce.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
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
    "broadcast_optimizer_state",
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
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> object:
    raise _no_attribute(__name__, name)
