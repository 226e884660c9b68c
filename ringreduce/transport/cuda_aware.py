"""May MPI be given the addresses of GPU memory? Asked of MPI first, and then tried, once, in another process.

    every rank                      the first rank of each host           all ranks
    declared(): what MPI says  ->   Trial: a child sends to itself   ->   it is done when every rank says yes

An MPI without CUDA reads such an address as host memory: a segmentation fault, after which there is nobody left to
decide otherwise. So the child finds out. It starts MPI alone, and says nothing about the network between hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce import mpi
from ringreduce.cuda.runtime import cupy
from ringreduce.transport import waiting
from ringreduce.transport.base import Steps

VARIABLE = "RINGREDUCE_CUDA_AWARE_MPI"
TIMEOUT_S = 30.0
SHORT_BYTES = 1024
"""A message that every MPI sends at once ..."""
LONG_BYTES = 8 * 1024 * 1024
"""... and one for which it waits until it is received."""
SUCCESS = "ringreduce: what was sent has arrived"
KILLED_WITHIN_S = 1.0

_OF_A_LAUNCHER = (
    "OMPI_", "ORTE_", "PRTE_", "PMIX_", "PMI_", "PMI2_", "PALS_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIEXEC_", "SLURM_",
    "SLURMD_", "SRUN_", "FLUX_", "JSM_",
)  # fmt: skip
"""How the names of variables begin by which a launcher tells a process that it is one of many."""
_OF_A_USER = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "PMIX_PREFIX", "PRTE_PREFIX")
"""Those among them that say how MPI works and where it is, which the trial is about."""
_CHILD = (
    "import sys; device, timeout_s, *sys.path = sys.argv[1:]; "
    "from ringreduce.transport import cuda_aware; cuda_aware.send_to_myself(int(device), float(timeout_s))"
)


def local_answer(setting: str, device: int, rank: int, *, is_first_of_host: bool) -> Steps[tuple[bool, str]]:
    """Whether this rank is for giving GPU memory to MPI, and a sentence why. All ranks' answers must be exchanged.

    setting:          "0": no; "1": yes, and nobody asks; "auto": when MPI says so, and a child proves it.
    device:           the number of this rank's GPU.
    is_first_of_host: this rank tries it for its host; the others only ask.
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
    """What MPI, which must be started, says about itself, and a sentence of it. It needs no GPU."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # a symbol is looked for in what it is linked with, too: in MPI
    answers = (
        _query_cuda_support(library),
        _gpu_query_support(library),
        _memory_kinds(MPI.COMM_WORLD.Get_info()),
        _cray(MPI.Get_library_version(), os.environ),
    )
    return _verdict(mpi.mpi_library()[0], answers)


def _verdict(name: str, answers: Sequence[bool | None]) -> tuple[bool, str]:
    """Of answers to several questions, None where a question is not known: any yes is one, since it is tried then."""
    if any(answers):
        return True, f"{name} says that it has CUDA"
    if False in answers:
        return False, f"{name} says that it has no CUDA"
    return False, f"{name} does not say whether it has CUDA; set {VARIABLE}=1 if it has"


def _query_cuda_support(library: Any) -> bool | None:
    """Open MPI's question; MPICH and its descendants have it too."""
    try:
        query = library.MPIX_Query_cuda_support
    except AttributeError:
        return None
    return bool(query() == 1)


def _gpu_query_support(library: Any) -> bool | None:
    """MPICH's question."""
    try:
        query = library.MPIX_GPU_query_support
    except AttributeError:
        return None
    cuda, flag = 0, ctypes.c_int()  # MPIX_GPU_SUPPORT_CUDA of its mpi.h
    return bool(query(cuda, ctypes.byref(flag)) == 0 and flag.value == 1)


def _memory_kinds(info: Any) -> bool | None:
    """MPI 4.1's hint, such as "mpi,system,cuda:device"."""
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    return None if kinds is None else any(kind.split(":")[0].strip() == "cuda" for kind in kinds.split(","))


def _cray(version: str, environ: Mapping[str, str]) -> bool | None:
    """Cray's MPI takes GPU memory where this variable is 1, and does not start when it then cannot."""
    return environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1" if "CRAY" in version.upper() else None


class Trial:
    """A child that sends arrays on a GPU to itself: a `Request`, whose `outcome` may be had when it is done.

    The child is a process group of its own without standard input; what it prints is read, not shown. After
    `timeout_s` it is killed, or kills itself when this process is gone.
    """

    def __init__(self, device: int, rank: int, timeout_s: float = TIMEOUT_S) -> None:
        self.peer = rank
        """Nobody else is waited for."""
        self._device, self._timeout_s = device, timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._outcome: tuple[bool, str] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end; unlike a pipe it is never full
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(device), str(timeout_s), *sys.path],
                env=alone(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as exc:
            self._end(f"did not start: {exc}")

    def done(self) -> bool:
        """See `Request.done`."""
        if self._outcome is not None:
            return True
        code = self._child.poll()
        if code is not None:
            self._end(_failure(code, self._printed()))
        elif time.monotonic() > self._deadline_s:
            self._kill()
            self._end(f"did not end within {self._timeout_s:g} s")
        return self._outcome is not None

    def wait(self) -> None:
        """See `Request.wait`."""
        waiting.until(self.done)

    def outcome(self) -> tuple[bool, str]:
        """Whether what it sent has arrived, and a sentence of it; for when it is done."""
        if self._outcome is None:
            raise RuntimeError("the trial is not done")
        return self._outcome

    def stop(self) -> None:
        """End it, when it is not done: nobody asks any more."""
        if not self.done():
            self._kill()
            self._end("was stopped")

    def _kill(self) -> None:
        """Kill the child and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the GPU's driver may hold it for longer
            self._child.wait(KILLED_WITHIN_S)

    def _printed(self) -> list[str]:
        self._output.seek(0)
        return self._output.read().decode(errors="replace").splitlines()

    def _end(self, failure: str) -> None:
        self._output.close()
        array = f"an array on GPU {self._device}"
        if failure:
            self._outcome = False, f"a child process that gave MPI {array} {failure}"
        else:
            self._outcome = True, f"MPI sent {array} in a child process"


def _failure(code: int, lines: Sequence[str]) -> str:
    """What was wrong with how the child ended, given its exit code and what it printed; empty for nothing."""
    if code == 0 and SUCCESS in lines:
        return ""
    if code < 0:
        return f"was ended by {_signal_name(-code)}"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return f"ended with exit code {code}: {last}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an MPI process that is none of a launcher's: rank 0 of 1."""
    return {
        name: environ[name] for name in environ if name.startswith(_OF_A_USER) or not name.startswith(_OF_A_LAUNCHER)
    }


def send_to_myself(device: int, timeout_s: float) -> None:
    """What the child does: a short and a long array on this GPU travel from rank 0 of 1 to itself."""
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # SIGALRM ends this process, also when nobody is left to kill it
    module = cupy()
    with module.cuda.Device(device) as gpu:  # as in init(), before MPI starts
        world_of_one = mpi.start_mpi().COMM_WORLD
        for tag, nbytes in enumerate((SHORT_BYTES, LONG_BYTES)):
            numbers = np.arange(tag, tag + nbytes // 4, dtype=np.uint32) * np.uint32(2654435761)
            memory = module.zeros(2 * len(numbers), np.uint32)
            sent, received = memory[: len(numbers)], memory[len(numbers) :]
            sent[...] = module.asarray(numbers)
            gpu.synchronize()  # MPI does not wait for CuPy's stream
            requests = [world_of_one.Irecv(received, 0, tag), world_of_one.Isend(sent, 0, tag)]
            for request in requests:
                request.Wait()
            if not np.array_equal(received.get(), numbers):
                sys.exit(f"of a message of {nbytes} bytes other bytes arrived")
        mpi.finalize_mpi()
    print(SUCCESS)
