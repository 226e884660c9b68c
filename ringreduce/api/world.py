"""Who is where, which a forked child of a rank may ask too, and what is built in."""

from __future__ import annotations

from ringreduce import mpi, runtime


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
    """True when every host has equally many ranks; raises NotInitializedError before init()."""
    return runtime.current_world("is_homogeneous").is_homogeneous


def mpi_threads_supported() -> bool:
    """True when MPI lets any thread call it, so that a script may use mpi4py beside ringreduce; after init() only."""
    runtime.current("mpi_threads_supported")
    return mpi.threads_supported()


def mpi_enabled() -> bool:
    """True: MPI carries everything."""
    return True


def mpi_built() -> bool:
    """True: MPI carries everything."""
    return True


def gloo_enabled() -> bool:
    """False: ringreduce has no gloo."""
    return False


def gloo_built() -> bool:
    """False: ringreduce has no gloo."""
    return False


def nccl_built() -> bool:
    """True when RINGREDUCE_ALGORITHM=nccl can be asked for: CuPy is installed, and finds NCCL. It imports CuPy then."""
    import importlib
    import warnings

    if not cuda_built():
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns that NCCL is not there, which is what is asked
        try:
            return bool(importlib.import_module("cupy.cuda.nccl").available)
        except ImportError:
            return False


def cuda_built() -> bool:
    """True when GPU arrays can be passed: CuPy is installed."""
    import importlib.util

    return importlib.util.find_spec("cupy") is not None


def rocm_built() -> bool:
    """False: AMD's GPUs were never tried."""
    return False


def ccl_built() -> bool:
    """False: ringreduce has no oneCCL."""
    return False


def ddl_built() -> bool:
    """False: ringreduce has no IBM DDL."""
    return False
