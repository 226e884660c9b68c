"""What ringrun can start ranks with, one a file: the launchers of MPI implementations, and Slurm's.

MPIS is the list of the implementations; detect.py finds out which one a job needs. ENGINES also has srun.
"""

from .base import Across, Engine, Launcher, Library
from .mpich import MPICH
from .openmpi import OpenMPI
from .slurm import Srun

MPIS: tuple[Engine, ...] = (OpenMPI(), MPICH())
"""Every MPI implementation."""

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (*MPIS, Srun())}
"""Every engine, by name."""

DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
"""The programs that start ranks on other hosts, as /proc/PID/comm calls them."""

STARTERS = (*DAEMONS, *(name[:15] for engine in MPIS for name in engine.launcher_names))
"""Those, and the programs that start ranks on their own host."""

__all__ = [
    "DAEMONS",
    "ENGINES",
    "MPICH",
    "MPIS",
    "STARTERS",
    "Across",
    "Engine",
    "Launcher",
    "Library",
    "OpenMPI",
    "Srun",
]
