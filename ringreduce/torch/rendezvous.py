"""Which rank this is, by the launcher's variables: torch asks for RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

ringrun sets them. Under mpirun and srun the ranks agree on them by MPI, when init_process_group() first asks.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
from collections.abc import Mapping
from typing import Any

import ringreduce as rr
from ringreduce.transport import joining
from ringreduce.transport.mpi import check_process, started_by_torch

ASKED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # of Open MPI, MPICH and srun


def teach_env() -> None:
    """Let torch's env:// set what it asks for, where an MPI launcher has started this process."""
    handlers: dict[str, Any] = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handler = handlers["env"]

    @functools.wraps(handler)
    def env(url: str, **options: Any) -> Any:
        if needs_variables(os.environ):
            for name, value in variables().items():
                os.environ.setdefault(name, value)
        if "RANK" not in os.environ:  # before torch complains, and names no cure
            check_process(os.environ)
            if launcher := started_by_torch(os.environ):
                raise joining.without_rank("init_process_group()", launcher)
        return handler(url, **options)

    if not hasattr(handler, "__wrapped__"):
        handlers["env"] = env


def needs_variables(environ: Mapping[str, str]) -> bool:
    """True where an MPI launcher has started this process, and has not set what torch asks for."""
    return not all(environ.get(name) for name in ASKED) and any(environ.get(name) for name in SIZES)


def variables() -> dict[str, str]:
    """What torch asks for; every rank must call it. Starts MPI."""
    rr.init()
    with socket.socket() as free:
        free.bind(("", 0))
        here = socket.gethostname() if rr.cross_size() > 1 else "127.0.0.1"
        address, port = rr.broadcast_object((here, free.getsockname()[1]), 0)
    numbers = {"RANK": rr.rank(), "WORLD_SIZE": rr.size(), "LOCAL_RANK": rr.local_rank()}
    values = {**numbers, "LOCAL_WORLD_SIZE": rr.local_size(), "MASTER_ADDR": address, "MASTER_PORT": port}
    return {name: str(value) for name, value in values.items()}
