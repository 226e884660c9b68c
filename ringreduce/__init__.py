"""Data-parallel training for any array library, over a ring all-reduce on MPI.

    import ringreduce as rr

    rr.init()
    optimizer = rr.DistributedOptimizer(optimizer)
    rr.broadcast_parameters(params, root_rank=0)

Importing this package starts nothing: `init()` starts MPI. It loads little, too: a module of the API is imported when a
name of it is first used, so a process that never calls `init()`, such as a data loader's worker, does not pay for it.
"""
# ruff: noqa: F403

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from ringreduce._version import __version__ as __version__
from ringreduce.frameworks.not_there import no_attribute as _no_attribute

if _TYPE_CHECKING:
    from ringreduce import elastic as elastic
    from ringreduce import ps as ps
    from ringreduce import sweeps as sweeps
    from ringreduce.api.broadcast import *
    from ringreduce.api.control import *
    from ringreduce.api.gather import *
    from ringreduce.api.info import Info as Info
    from ringreduce.api.ordered import *
    from ringreduce.api.reduce import *
    from ringreduce.checks.switch import check as check
    from ringreduce.execution.submission import Handle as Handle
    from ringreduce.frameworks.common import *
    from ringreduce.numpy.local import DiLoCo as DiLoCo
    from ringreduce.numpy.local import LocalSGD as LocalSGD
    from ringreduce.numpy.optimizer import DistributedOptimizer as DistributedOptimizer
    from ringreduce.numpy.sharded import ShardedOptimizer as ShardedOptimizer
    from ringreduce.optim.local.options import Nesterov as Nesterov
    from ringreduce.optim.powersgd import PowerSGD as PowerSGD
    from ringreduce.sweeps import sweep as sweep

# where each name of the API stands
_API = {
    "api.broadcast": "broadcast broadcast_ broadcast_async broadcast_async_ broadcast_parameters",
    "api.control": "barrier init join poll start_timeline stop_timeline synchronize",
    "api.gather": "allgather allgather_async alltoall alltoall_async grouped_allgather grouped_allgather_async",
    "api.info": "Info info",
    "api.objects": "allgather_object broadcast_object",
    "api.ordered": "Ordered ordered",
    "api.process_sets": (
        "ProcessSet add_process_set get_process_set_ids_and_ranks global_process_set host_process_set "
        "remove_process_set"
    ),
    "api.reduce": (
        "allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_ "
        "grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async "
        "reducescatter reducescatter_async"
    ),
    "api.steps": "mark_step stats",
    "api.world": (
        "ccl_built cross_rank cross_size cuda_built ddl_built gloo_built gloo_enabled is_homogeneous local_rank "
        "local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank rocm_built size"
    ),
    "checks.switch": "check",
    "compression": "Compression",
    "errors": (
        "CollectiveError HorovodInternalError HostsUpdatedInterrupt InputError JobFailedError "
        "LauncherMismatchError MismatchError MissingExtraError MpiMissingError NanError NotInitializedError "
        "PeerLostError RingreduceError SettingsError StalledError StartupError UnsupportedArrayError"
    ),
    "execution.submission": "Handle",
    "runtime.lifecycle": "shutdown",
    "ops": "Adasum Average Max Min Product ReduceOp Sum",
    "numpy.local": "DiLoCo LocalSGD",
    "optim.local.options": "Nesterov",
    "optim.powersgd": "PowerSGD",
    "numpy.optimizer": "DistributedOptimizer",
    "api.launch": "run",
    "runtime": "is_initialized",
    "api.sampler": "DistributedSampler",
    "numpy.sharded": "ShardedOptimizer",
    "sweeps": "sweep",
}
_PACKAGES = ("elastic", "ps", "sweeps")
_module_of = {name: module for module, names in _API.items() for name in names.split()}
__all__ = ["__version__", *_module_of]

if not _TYPE_CHECKING:  # a type checker knows all names, and reports others

    def __getattr__(name: str) -> object:
        """Import what stands behind a name of the API; from then on the name is an attribute like any other."""
        if name in _module_of:
            value = getattr(_import_module(f"{__name__}.{_module_of[name]}"), name)
        elif name in _PACKAGES:
            value = _import_module(f"{__name__}.{name}")
        else:
            raise _no_attribute(__name__, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
