"""Groups of programs that name another backend, under `ringrun --torch-backend ring`: "gloo" and "mpi" mean "ring".

launcher/torch_backend.py has torch call this. get_backend() returns what the program named, since programs decide by it
what they do next; get_backend_config() says "ring".
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Backend, distributed_c10d
from torch.distributed.rendezvous import rendezvous

import ringreduce as rr
from ringreduce.log import LOGGER
from ringreduce.mpi import rank_that_started

MEANT = ("gloo", "mpi")


def new_group(
    make: Callable[..., Any],
    size: int,
    rank: int,
    ranks: Sequence[int],
    backend: str,
    store: Any,
    *rest: Any,
    **more: Any,
) -> Any:
    """torch's group of a backend, and its store, made by torch's own function `make`."""
    meant = renamed(backend)
    if meant == backend or rank_that_started(os.environ) is not None:  # a process of the rank's may use gloo
        return make(size, rank, ranks, backend, store, *rest, **more)
    if rank == -1:  # of "mpi": torch would ask MPI
        store, rank, size = next(rendezvous("env://"))
    group, store = make(size, rank, ranks, meant, store, *rest, **more)
    if group is not distributed_c10d.GroupMember.NON_GROUP_MEMBER:
        distributed_c10d._world.pg_map[group] = (backend, store)
        _say_once()
    return group, store


def renamed(backend: str) -> str:
    """The backend that is meant by this, torch's name of one or a map: `cpu:gloo,cuda:nccl`.

    >>> renamed("gloo"), renamed("cpu:gloo,cuda:nccl"), renamed("nccl")
    ('ring', 'cpu:ring,cuda:nccl', 'nccl')
    """
    if backend in MEANT:
        return "ring"
    if backend != Backend.UNDEFINED and ":" not in backend:
        return backend
    devices = distributed_c10d.BackendConfig(Backend(backend)).get_device_backend_map()
    if devices.get("cpu") not in MEANT:
        return backend
    return ",".join(f"{device}:{'ring' if device == 'cpu' else each}" for device, each in devices.items())


@functools.cache
def _say_once() -> None:
    if rr.rank() == 0:
        LOGGER.info('torch.distributed: "gloo", "mpi" or no backend means "ring" in this job, by torch_backend')
