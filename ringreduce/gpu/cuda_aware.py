"""Does MPI accept addresses of GPU memory? MPI is asked first; then it is tried, once, in another process.

    every rank                      the first rank of each host           all ranks
    declared(): what MPI says  ->   Trial: a child sends to itself   ->   used when every rank says yes

An MPI without CUDA reads such an address as host memory and crashes, so a child process finds out. It starts MPI on its
own, and does not test the network between hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringreduce.arrays.cuda import cupy
from ringreduce.transport import mpi
from ringreduce.transport.base import Steps, Work

VARIABLE = "RINGREDUCE_CUDA_AWARE_MPI"
TIMEOUT_S = 30.0
COUNTS = 256, 2 << 20  # elements of a message that every MPI sends eagerly, and of one that none does
ARRIVED = 42  # the child's exit code; a crash or MPI's abort has another
_OF_A_LAUNCHER = (
    "OMPI_", "ORTE_", "PRTE_", "PMIX_", "PMI_", "PMI2_", "PALS_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIEXEC_", "SLURM_",
    "SLURMD_", "SRUN_", "FLUX_", "JSM_", "WORLD_SIZE",
)  # fmt: skip
"""Prefixes of the variables by which a launcher makes a process one of many, or says that it is."""
_OF_A_USER = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "PMIX_PREFIX", "PRTE_PREFIX")
"""Those among them that configure or locate MPI, which the trial needs."""
_CHILD = """
import signal, sys
signal.alarm(int(sys.argv[2]))  # ends it even when its parent is gone
sys.path[:] = sys.argv[3:]
from ringreduce.gpu import cuda_aware
cuda_aware.send_to_myself(int(sys.argv[1]))
"""


def local_answer(setting: str, device: int, rank: int, *, is_first_of_host: bool) -> Steps[tuple[bool, str]]:
    """Whether this rank may pass GPU memory to MPI, and a sentence why. All ranks' answers must be exchanged.

    setting:          "0": no; "1": yes, untested; "auto": if MPI says so, and a child confirms it.
    device:           the index of this rank's GPU.
    is_first_of_host: this rank tries it for its host; the others only ask MPI.
    Cost: for "auto", where MPI says yes: a child process of some seconds, and its CUDA context on the GPU meanwhile.
    """
    if setting != "auto":
        return setting == "1", f"{VARIABLE}={setting}"
    says_yes, sentence = declared()
    if not (says_yes and is_first_of_host):
        return says_yes, sentence
    trial = Trial(device, rank)
    try:
        yield trial
        return trial.outcome()
    finally:
        trial.stop()


def declared() -> tuple[bool, str]:
    """Whether MPI, which must be started, says that it accepts GPU memory, and a sentence why. Needs no GPU."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # finds symbols in the libraries that it is linked with, too: in MPI
    name = mpi.mpi_library()[0]
    answer = says(library)
    if answer is None:
        return False, f"{name} does not say whether it has CUDA; set {VARIABLE}=1 if it has"
    return answer, f"{name} says that it has {'' if answer else 'no '}CUDA"


def says(library: Any) -> bool | None:
    """A loaded MPI's answer to Open MPI's query, or to that of MPICH and its descendants; None: it has neither."""
    if hasattr(library, "MPIX_GPU_query_support"):
        cuda, flag = 0, ctypes.c_int()  # MPIX_GPU_SUPPORT_CUDA of its mpi.h
        return bool(library.MPIX_GPU_query_support(cuda, ctypes.byref(flag)) == 0 and flag.value == 1)
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support() == 1)
    return None


class Trial(Work):
    """A child, in its own process group, that sends GPU arrays to itself: done when it has ended."""

    def __init__(self, device: int, rank: int, timeout_s: float = TIMEOUT_S) -> None:
        self.peer = rank
        self._what = f"a child process that gave MPI an array on GPU {device}"
        self._timeout_s, self._until_s = timeout_s, time.monotonic() + timeout_s
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(device), str(int(timeout_s) + 1), *sys.path],
            env=alone(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def done(self) -> bool:
        """See `Work.done`."""
        return self._child.poll() is not None or time.monotonic() > self._until_s

    def outcome(self) -> tuple[bool, str]:
        """Whether the arrays have arrived, and a sentence why; call it when done."""
        code = self._child.poll()
        if code is None:
            return False, f"{self._what} did not end within {self._timeout_s:g} s"
        if code == ARRIVED:
            return True, f"{self._what} got it back"
        return False, f"{self._what} ended with exit code {code}"

    def stop(self) -> None:
        """Kill the child, and what it has started, if they still run."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the GPU's driver may hold it for longer
            self._child.wait(1.0)


def alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an MPI process without a launcher: rank 0 of 1."""
    return {
        name: environ[name] for name in environ if name.startswith(_OF_A_USER) or not name.startswith(_OF_A_LAUNCHER)
    }


def send_to_myself(device: int) -> None:
    """The child: send a short and a long array on this GPU from rank 0 of 1 to itself."""
    module = cupy()
    with module.cuda.Device(device) as gpu:  # as in init(), before MPI starts
        world_of_one = mpi.start_mpi().COMM_WORLD
        arrived = True
        for tag, count in enumerate(COUNTS):
            numbers = np.arange(tag, tag + count, dtype=np.uint32) * np.uint32(2654435761)
            memory = module.zeros(2 * count, np.uint32)
            sent, received = memory[:count], memory[count:]
            sent[...] = module.asarray(numbers)
            gpu.synchronize()  # MPI does not wait for CuPy's stream
            for request in [world_of_one.Irecv(received, 0, tag), world_of_one.Isend(sent, 0, tag)]:
                request.Wait()
            arrived &= np.array_equal(received.get(), numbers)
        mpi.finalize_mpi()
    os._exit(ARRIVED if arrived else 1)
