"""Ranks and hosts, which a forked child of a rank may ask for too, and what is built in."""

from __future__ import annotations

import importlib.util
import warnings

from ringreduce import runtime
from ringreduce.transport import mpi

__all__ = ["ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled"]
__all__ += ["is_homogeneous", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported"]
__all__ += ["nccl_built", "rank", "rocm_built", "size"]


def rank() -> int:
    """This process's number, 0 to size() - 1; raises NotInitializedError before init()."""
    return runtime.current_world("rank").rank


def size() -> int:
    """The number of ranks; raises NotInitializedError before init()."""
    return runtime.current_world("size").size


def local_rank() -> int:
    """This rank's number on its host; raises NotInitializedError before init()."""
    return runtime.current_world("local_rank").local_rank


def local_size() -> int:
    """The number of ranks on this host; raises NotInitializedError before init()."""
    return runtime.current_world("local_size").local_size


def cross_rank() -> int:
    """This host's number among the hosts that have this local rank; raises NotInitializedError before init()."""
    return runtime.current_world("cross_rank").cross_rank


def cross_size() -> int:
    """The number of hosts that have this local rank; raises NotInitializedError before init()."""
    return runtime.current_world("cross_size").cross_size


def is_homogeneous() -> bool:
    """True when every host has the same number of ranks; raises NotInitializedError before init()."""
    return runtime.current_world("is_homogeneous").is_homogeneous


def mpi_threads_supported() -> bool:
    """True when MPI lets any thread call it, so that a script may use mpi4py beside ringreduce; needs init()."""
    runtime.current("mpi_threads_supported")
    return mpi.mpi_library()[1] == "multiple"


def mpi_enabled() -> bool:
    """True: MPI carries everything."""
    return True


def gloo_enabled() -> bool:
    """False: ringreduce has no gloo."""
    return False


def mpi_built(verbose: bool = False) -> bool:
    """True: MPI carries everything.  verbose: Horovod's, without effect, as of the others."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """False: ringreduce has no gloo, oneCCL or IBM DDL, and was never tried on AMD's GPUs."""
    return False


ccl_built = ddl_built = rocm_built = gloo_built


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version, such as 22703, when RINGREDUCE_ALGORITHM=nccl can be used: CuPy is installed and finds it; or 0.

    Imports CuPy to find out.
    """
    if not cuda_built():
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns that NCCL is not there, which is what is asked
        try:
            nccl = importlib.import_module("cupy.cuda.nccl")
        except ImportError:
            return 0
    return int(nccl.get_version()) if nccl.available else 0


def cuda_built() -> bool:
    """True when GPU arrays can be passed: CuPy is installed."""
    return importlib.util.find_spec("cupy") is not None
