"""Does MPI accept addresses of GPU memory? The user says so; what MPI says of itself is for the advice.

An MPI without CUDA reads such an address as host memory and crashes, and some that say they have it do, too.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ringreduce.transport import mpi

VARIABLE = "RINGREDUCE_CUDA_AWARE_MPI"


def answer(is_set: bool) -> tuple[bool, str]:
    """Whether this rank may pass GPU memory to MPI, and a sentence why.  is_set: the setting."""
    if is_set:
        return True, f"{VARIABLE}=1"
    says_yes, sentence = declared()
    return False, f"{sentence}; {VARIABLE}=1 passes GPU memory to it" if says_yes else sentence


def declared() -> tuple[bool, str]:
    """Whether MPI, which must be started, says that it accepts GPU memory, and a sentence why. Needs no GPU."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # finds symbols in the libraries that it is linked with, too: in MPI
    name = mpi.mpi_library()[0]
    answer = says(library)
    if answer is None:
        return False, f"{name} does not say whether it is CUDA-aware; set {VARIABLE}=1 if it is"
    return answer, f"{name} says that it is {'' if answer else 'not '}CUDA-aware"


def says(library: Any) -> bool | None:
    """A loaded MPI's answer to Open MPI's query, or to that of MPICH and its descendants; None: it has neither."""
    if hasattr(library, "MPIX_GPU_query_support"):
        cuda, flag = 0, ctypes.c_int()  # MPIX_GPU_SUPPORT_CUDA of its mpi.h
        return bool(library.MPIX_GPU_query_support(cuda, ctypes.byref(flag)) == 0 and flag.value == 1)
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support() == 1)
    return None
