"""The MPI implementations that ringrun can start ranks with, one a file.

ENGINES is the list. Which one a job needs is found out in detect.py.
"""

from .base import Engine, Launcher, Library
from .mpich import MPICH
from .openmpi import OpenMPI

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (OpenMPI(), MPICH())}
"""Every engine, by name."""

__all__ = ["ENGINES", "MPICH", "Engine", "Launcher", "Library", "OpenMPI"]
