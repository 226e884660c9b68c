"""MPI itself: starting and ending it, and checking that its own launcher started this process."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ringreduce.errors import LauncherMismatchError, StartupError
from ringreduce.transport import joining
from ringreduce.transport.library import import_mpi


def start_mpi() -> Any:
    """Import mpi4py.MPI and start MPI with THREAD_MULTIPLE, unless the caller did; returns the module."""
    check_process(os.environ)
    MPI = import_mpi()  # noqa: N806 - as mpi4py has it
    if is_to_join(os.environ):
        if launcher := started_by_torch(os.environ) or ("torch.distributed" if joining.has_torch_group() else ""):
            joining.check_mpi(launcher, os.environ.get("WORLD_SIZE", "N"))
            joining.join_by_torch(os.environ, launcher)
        else:
            check_world_size(1, os.environ)
    check_launcher(MPI.get_vendor()[0], os.environ)
    claim_rank(os.environ, MPI.get_vendor()[0])
    if MPI.Is_finalized():
        raise StartupError(
            "init(): MPI.Finalize() has been called, and MPI can be started only once per process; call it after the "
            "last init(), or leave it to mpi4py, which does so when the script ends"
        )
    if not MPI.Is_initialized():
        if not may_read_processes():  # MPICH does not check, and fails at the first long message
            os.environ.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")
        os.environ.setdefault("HOME", os.path.expanduser("~"))  # which a service lacks, and Open MPI needs
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _MPI_STARTED_HERE.append(True)
    if mpi_library()[1] != "multiple":
        raise StartupError(
            f"MPI was started with thread level {mpi_library()[1]!r}, but ringreduce's engine calls MPI alongside your "
            'threads; expected "multiple"; call ringreduce.init() before mpi4py starts MPI, or leave '
            'mpi4py.rc.thread_level at "multiple", or install an MPI library that has it'
        )
    if has_launcher(os.environ) or not is_alone():
        os.environ[RANK_VARIABLE] = f"{os.getpid()} {MPI.COMM_WORLD.rank} {_start_of(os.environ)}"
    return MPI


_THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")
_MPI_STARTED_HERE: list[bool] = []
RANK_VARIABLE = "_RINGREDUCE_RANK"
"""For a rank's child processes: the rank's pid, its number, and `_start_of` its environment."""
_OF_ACCELERATE = "ACCELERATE_DYNAMO_USE_FULLGRAPH"  # of those that its launcher sets, one that nothing else does
_START_VARIABLES = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "SLURM_STEP_ID")


def _start_of(environ: Mapping[str, str]) -> str:
    """Identifies one start of a rank: in a job that a rank starts, these variables have other values."""
    return " ".join(environ.get(name, "") for name in (*_START_VARIABLES, "RINGREDUCE_ERROR_FILE"))


def rank_that_started(environ: Mapping[str, str]) -> str | None:
    """Whose child process this is: its number; None for a process that may be a rank itself."""
    pid, rank, start = environ.get(RANK_VARIABLE, "0 0 no rank").split(" ", 2)
    return rank if start == _start_of(environ) and int(pid) != os.getpid() else None


def started_by_torch(environ: Mapping[str, str]) -> str:
    """Which launcher of torch's, or accelerate's, started this process, one of several; empty: none.

    On CPUs `accelerate launch` starts one process, of however many.
    """
    processes: Any = sys.modules.get("multiprocessing.process")
    is_child = processes is not None and processes.parent_process() is not None
    of_accelerate = _OF_ACCELERATE in environ
    if environ.get("TORCHELASTIC_RUN_ID") and environ.get("WORLD_SIZE") != "1":
        is_notebook = is_child and "accelerate" in sys.modules
        return "notebook_launcher" if is_notebook else "accelerate launch" if of_accelerate else "torchrun"
    if of_accelerate and "MASTER_ADDR" in environ and not environ.get("WORLD_SIZE") and not has_launcher(environ):
        return "accelerate launch"
    target = getattr(processes.current_process(), "_target", None) if is_child else None
    return "mp.spawn" if getattr(target, "__module__", "") == "torch.multiprocessing.spawn" else ""


def claim_rank(environ: Mapping[str, str], vendor: str) -> None:
    """Make this process, whose MPI is `vendor`'s, the rank that ringrun has started.

    Raises StartupError where another one is it already, or MPICH cannot reach its launcher.

    MPI would wait for ever for the second one, or fail without a reason; without ringrun there is no place to note it.
    """
    descriptor, pid = environ.get("PMI_FD", ""), str(os.getpid())
    if vendor != "Open MPI" and descriptor.isdecimal() and not os.path.exists(f"/proc/self/fd/{descriptor}"):
        raise StartupError(
            f"init(): descriptor {descriptor}, over which MPICH reaches its launcher, is not open in this process, "
            f"{pid}: a Python that started it has closed it, as subprocess and the start methods spawn and forkserver "
            "do; pass close_fds=False, or let ringrun start this program itself"
        )
    if not (claim := _claim(environ)):
        return
    try:
        os.symlink(pid, claim)  # at once with what it says
    except FileExistsError:
        if (holder := os.readlink(claim)) == pid:
            return
        has_ended = not os.path.exists(f"/proc/{holder}")
        workers = "let ringrun start the workers, not multiprocessing, and call the worker's function in each"
        raise StartupError(
            f"init(): process {pid} cannot be rank {environ.get('RANK')}: process {holder} "
            f"{'was, and has ended' if has_ended else 'is'}, and ringrun allows one process per rank; "
            f"{'start each program with a ringrun of its own, or ' if has_ended else ''}{workers}: ringrun -np N …"
        ) from None
    except OSError:
        return  # ringrun is gone


def _claim(environ: Mapping[str, str]) -> str:
    """Where the process that is this rank is noted; empty without ringrun, or for a process of no launcher's."""
    error_file = environ.get("RINGREDUCE_ERROR_FILE")
    start = hashlib.blake2b(_start_of(environ).encode(), digest_size=8).hexdigest()  # not of a job that a rank starts
    return f"{error_file}.is.{start}" if error_file and has_launcher(environ) else ""


def check_process(environ: Mapping[str, str]) -> None:
    """Raise in a child process of a rank, which MPI would take for that rank.

    LauncherMismatchError where a launcher of torch's has made it one, before the rank itself began MPI.
    """
    if (rank := rank_that_started(environ)) is not None:
        raise StartupError(
            f"init(): this process was started by rank {rank} and is not a rank itself; put init() under "
            "`if __name__ == '__main__':`, or start a job of its own with ringrun"
        )
    launcher = started_by_torch(environ)
    if launcher and not joining.membership() and not is_to_join(environ):
        once = ", which calls the function once" if launcher in ("mp.spawn", "notebook_launcher") else ""
        raise LauncherMismatchError(
            f"init(): {launcher} started this process in a rank, and MPI takes it for that rank; in place of "
            f"{launcher}, start with: ringrun -np {environ.get('WORLD_SIZE', 'N')} python train.py{once}"
        )


def is_to_join(environ: Mapping[str, str]) -> bool:
    """Whether no launcher of MPI has started this process, so that its ranks may join each other by themselves.

    torchrun may be started by srun, once on each host.
    """
    if joining.membership() or environ.get("RINGREDUCE_ERROR_FILE"):
        return False
    return not has_launcher(environ) or bool(environ.get("SLURM_STEP_ID") and started_by_torch(environ))


class _IoVec(ctypes.Structure):
    """struct iovec of uio.h."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def may_read_processes() -> bool:
    """True when the kernel permits process_vm_readv(2), which a container's seccomp filter may forbid."""
    source, target = ctypes.c_char(b"x"), ctypes.c_char()
    local, remote = (ctypes.byref(_IoVec(ctypes.addressof(each), 1)) for each in (target, source))
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    read = ctypes.CDLL(None).process_vm_readv(os.getpid(), local, one, remote, one, no_flags)
    return bool(read == 1 and target.value == b"x")


def mpi_library() -> tuple[str, str]:
    """The MPI library with its version, and its thread level."""
    from mpi4py import MPI

    level = next(each for each in _THREAD_LEVELS if getattr(MPI, f"THREAD_{each.upper()}") == MPI.Query_thread())
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}", level


def is_alone() -> bool:
    """True when this process is the only rank that MPI started."""
    from mpi4py import MPI

    return bool(MPI.COMM_WORLD.size == 1)


def abort(code: int) -> None:
    """End every rank that MPI started, at once."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)


def before_finalize(call: Callable[[], None]) -> None:
    """Have it called when MPI_Finalize begins, by whomever: until then communicators can be used."""
    from mpi4py import MPI

    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: call()), None)


def finalize_mpi() -> None:
    """End MPI if `start_mpi` started it; without, the launcher would report a failure."""
    from mpi4py import MPI

    if _MPI_STARTED_HERE and not MPI.Is_finalized() and not joining.has_lost():
        MPI.Finalize()
        joining.leave()
        if MPI.get_vendor()[0] == "Open MPI" and (claim := _claim(os.environ)):  # lets a shell script's next program in
            with contextlib.suppress(OSError):
                os.unlink(claim)


def launchers_place(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """The rank of this process, and how many there are, as MPI's launcher says before MPI starts; None: it does not."""
    for rank, size in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if environ.get(rank, "").isdecimal() and environ.get(size, "").isdecimal():
            return int(environ[rank]), int(environ[size])
    return None


def check_launcher(vendor: str, environ: Any) -> None:
    """Raise LauncherMismatchError when another MPI's launcher than `vendor`'s started this process.

    Otherwise every rank would be rank 0 of 1, or crash inside MPI_Init.
    """
    started_by, size = _launcher(environ)
    if size <= 1 or started_by is None or (started_by == "Open MPI") == (vendor == "Open MPI"):
        return
    raise LauncherMismatchError(
        f"this process is one of {size} that {started_by}'s launcher started, but mpi4py loads {vendor}, which "
        f"sees each process as rank 0 of 1; start with ringrun, which picks {vendor}'s own launcher, or install only "
        "one MPI"
    )


def has_launcher(environ: Mapping[str, str]) -> bool:
    """True when MPI can count more than this process. Alone, Open MPI leaves a file in /dev/shm for each start."""
    return any(environ.get(name) for name in _START_VARIABLES)


def check_world_size(size: int, environ: Any) -> None:
    """Raise LauncherMismatchError when MPI counts one rank but the launcher's variables say that there are more."""
    for variable, launcher in (("WORLD_SIZE", "ringrun or torchrun"), ("SLURM_STEP_NUM_TASKS", "srun")):
        ranks = environ.get(variable, "")
        if size == 1 and ranks.isdigit() and int(ranks) > 1:
            raise LauncherMismatchError(
                f"{variable}={ranks} says that {launcher} started {ranks} ranks, but MPI counts 1: each would be rank "
                f"0 of 1; start with: ringrun -np {ranks} python train.py, or by mpi4py's mpirun, or unset {variable}"
            )


def _launcher(environ: Any) -> tuple[str | None, int]:
    """The MPI whose launcher started this process, and the number of processes; (None, 1) for an unknown one."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "Open MPI", int(environ["OMPI_COMM_WORLD_SIZE"])
    if "PMI_SIZE" in environ and "PMIX_RANK" not in environ:  # Hydra and Slurm's PMI-2; with PMIx Open MPI can work too
        return "MPICH", int(environ["PMI_SIZE"])
    return None, 1
