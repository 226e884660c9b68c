"""MPI in a process that torchrun, mp.spawn, Ray or Dask has started: its ranks find each other without MPI's launcher.

ringrun.pmi does it, for MPICH and MPIs made of it, and for Open MPI on one host; here stands who tells the ranks where
to meet.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from ringreduce.errors import LauncherMismatchError, StartupError
from ringreduce.settings.log import JOB
from ringreduce.transport import library

KEY = "ringreduce/world"
"""Where rank 0 says in a store what the others need. A store may be older than these ranks, and what it says, too."""
TIMEOUT_S = 600.0
OLD_S = 30.0
"""How long rank 0 may take to replace a word of no use; where that told of processes that are gone, TIMEOUT_S."""
_PAUSE_S = 0.2
_LATE_S = 10.0
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

    until_s = time.monotonic() + (timeout_s or TIMEOUT_S)
    before = membership()
    try:
        if before and (before.rank, before.size) != (rank, size):
            raise client.NotJoinedError(_already(before, f"cannot become rank {rank} of {size}"))
        if before and before.lost:
            raise client.NotJoinedError(_already(before, f"has lost others: {before.lost}"))
        if rank == 0:
            store.set(KEY, json.dumps({"name": before.name} if before else {"address": client.start(size)}))
        try:
            word = store.get(KEY)
        except RuntimeError as error:  # torch's, of its own time limit
            raise client.NotJoinedError(f"rank 0 has not said where to meet: {error}") from None
        while True:
            try:
                return _follow(json.loads(word), rank, size, until_s - time.monotonic())
            except client.NotJoinedError as error:
                old_s = TIMEOUT_S if isinstance(error, client.NobodyThereError) else OLD_S
                newer = word if rank == 0 else _newer(store, word, min(until_s, time.monotonic() + old_s), str(error))
                if newer == word:
                    raise
                word = newer
    except client.NotJoinedError as error:
        raise StartupError(f"init() of rank {rank} of {size}: {error}") from None


def start(size: int) -> str:
    """Start what `size` ranks join by; returns the address for `join`. Raises StartupError."""
    from ringrun.pmi import client

    try:
        return str(client.start(size))
    except client.NotJoinedError as error:
        raise StartupError(f"init() of {size} ranks: {error}") from None


def join(address: str, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> None:
    """Let MPI, once it starts, be rank `rank` of `size`; each of them must call it. Raises StartupError."""
    from ringrun.pmi import client

    try:
        if before := membership():
            raise client.NotJoinedError(_already(before, "cannot join other processes"))
        _memberships.append(client.join(address, rank, size, timeout_s, JOB.warning, library.pmix()))
    except client.NotJoinedError as error:
        raise StartupError(f"init() of rank {rank} of {size}: {error}") from None


def _follow(word: Mapping[str, str], rank: int, size: int, timeout_s: float) -> None:
    """Join those that rank 0 tells of, unless this process has."""
    from ringrun.pmi import client

    address, before = word.get("address", ""), membership()
    if before is None and not address:
        raise client.NotJoinedError(
            "rank 0 has started MPI already, with other processes; MPI can be started only once per process: "
            "start new processes"
        )
    if before is None:
        _memberships.append(client.join(address, rank, size, timeout_s, JOB.warning, library.pmix()))
    elif address == before.address:
        raise client.NobodyThereError("rank 0 has not joined again")
    elif word.get("name") != before.name:
        raise client.NotJoinedError(_already(before, "cannot join other processes"))


def _newer(store: Store, word: bytes, until_s: float, why: str) -> bytes:
    """Return what rank 0 says in place of `word`, which is of no use, if it does so in time."""
    told_s, newer = time.monotonic(), word
    with contextlib.suppress(RuntimeError):  # the store is gone, and rank 0 with it
        while (newer := store.get(KEY)) == word and time.monotonic() < until_s:
            if time.monotonic() > told_s + _LATE_S:
                told_s = time.monotonic()
                JOB.warning(f"waiting for a new address from rank 0, since the last one does not work: {why}")
            time.sleep(_PAUSE_S)
    return newer


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


def check_mpi(launcher: str, size: str) -> None:
    """Raise LauncherMismatchError for an MPI whose ranks only its own launcher can start, before it begins."""
    name, version = library.import_mpi().get_vendor()
    if name == "Open MPI" and version[0] < 5:
        raise LauncherMismatchError(
            f"init(): {launcher} started this process, which only MPICH or Open MPI 5 can make a rank, but mpi4py "
            f"loads {name} {'.'.join(map(str, version))}; pip install mpich, or start with: "
            f"ringrun -np {size} python train.py"
        )


def has_lost() -> bool:
    """Whether a rank ended without a message, so that MPI cannot be ended by all."""
    return bool((found := membership()) and found.lost)


def leave() -> None:
    """MPI has ended: the end of this process is no loss to the others."""
    if found := membership():
        found.leave()


def _already(before: Any, what: str) -> str:
    return (
        f"this process is rank {before.rank} of {before.size} already, in the MPI that it has started, and "
        f"{what} (pid {os.getpid()}): MPI can be started only once per process; start new ones"
    )
