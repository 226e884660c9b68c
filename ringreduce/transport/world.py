"""Ranks, hosts and communicators. No other module holds a communicator."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.errors import InputError
from ringreduce.transport.mpi import check_world_size, start_mpi


@dataclasses.dataclass(frozen=True)
class World:
    """`size` ranks on hosts, seen from `rank`; `hosts[r]` is the number of rank r's host.

    In the threaded world of ringreduce.testing there is no MPI, and the communicators are None.
    """

    rank: int
    size: int
    hosts: tuple[int, ...]
    comm: Any = None  # mpi4py communicator for data
    control: Any = None  # mpi4py communicator for control messages
    local: Any = None  # mpi4py communicator of this host's ranks, by local rank
    generation: int = 0  # how many worlds this process had before
    origins: tuple[int, ...] = ()  # in an elastic job: by rank, its rank among all that the launcher started
    number: int = 0  # in an elastic job: of the launcher's list that names these ranks; 0: the world of the start

    @functools.cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """Each rank's index among the ranks of its host."""
        return tuple(local_ranks(self.hosts))

    @property
    def local_rank(self) -> int:
        """This rank's index among the ranks of its host."""
        return self.local_ranks[self.rank]

    @functools.cached_property
    def local_size(self) -> int:
        """Ranks on this host."""
        return self.hosts.count(self.hosts[self.rank])

    @functools.cached_property
    def cross_rank(self) -> int:
        """This host's index among the hosts that have this local rank."""
        return self.local_ranks[: self.rank].count(self.local_rank)

    @functools.cached_property
    def cross_size(self) -> int:
        """How many hosts have this local rank."""
        return self.local_ranks.count(self.local_rank)

    @functools.cached_property
    def is_homogeneous(self) -> bool:
        """True when every host has the same number of ranks."""
        return len(set(Counter(self.hosts).values())) == 1

    def allgather_object(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, pickled by mpi4py; all ranks must call it, while no engine runs."""
        gathered: list[Any] = self.control.allgather(value)
        return gathered

    def meet(self, check: Callable[[float], None]) -> None:
        """Wait until all ranks call it, while no engine runs; `check(seconds waited)` may end the wait by an error."""
        request, began_s = self.control.Ibarrier(), time.monotonic()
        while not request.Test():
            check(time.monotonic() - began_s)
            time.sleep(0.001)

    def gather_on_host(self, value: Any) -> list[Any]:
        """As `allgather_object`, of this host's ranks, by local rank."""
        gathered: list[Any] = self.local.allgather(value)
        return gathered

    def ranks_of(self, comm: Any) -> list[int]:
        """The sorted ranks of this world that are in `comm`; raises InputError when `comm` has others."""
        from mpi4py import MPI

        if comm == MPI.COMM_NULL:
            return []
        theirs, ours = comm.Get_group(), self.comm.Get_group()
        ranks = MPI.Group.Translate_ranks(theirs, list(range(theirs.size)), ours)
        theirs.Free()
        ours.Free()
        if not set(ranks) <= set(self.origins or range(self.size)):
            raise InputError("ProcessSet: the communicator has ranks that are not in the world of init()")
        return sorted(self.origins.index(each) if self.origins else each for each in ranks)

    def in_comm_world(self) -> list[int]:
        """By rank, its rank in MPI_COMM_WORLD."""
        from mpi4py import MPI

        ours, all_ranks = self.comm.Get_group(), MPI.COMM_WORLD.Get_group()
        found: list[int] = MPI.Group.Translate_ranks(ours, list(range(self.size)), all_ranks)
        ours.Free()
        all_ranks.Free()
        return found

    def free(self) -> None:
        """Free the communicators; every rank must call it."""
        self.comm.Free()
        self.control.Free()
        self.local.Free()


def local_ranks(hosts: Sequence[int]) -> list[int]:
    """Each rank's index among the ranks of its host.

    >>> local_ranks([0, 0, 1, 0, 1])
    [0, 1, 0, 2, 1]
    """
    ranks: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
    return [next(ranks[host]) for host in hosts]


def first_ranks(hosts: Sequence[int]) -> list[int]:
    """The first rank of each host, sorted.

    >>> first_ranks([3, 3, 1, 3, 1])
    [0, 2]
    """
    return sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())


def form_world(comm: Any = None, generation: int = 0) -> World:
    """The World of an mpi4py communicator (duplicated), of a list of ranks of COMM_WORLD, or of COMM_WORLD.

    Starts MPI if necessary. Cost: a few MPI collectives; every member must call it.
    Raises: MpiMissingError, LauncherMismatchError; InputError for a list or a communicator without this rank.
    """
    mpi = start_mpi()
    check_world_size(mpi.COMM_WORLD.size, os.environ)
    if isinstance(comm, list | tuple):
        parent = _group_comm(mpi, comm)
    elif comm is None or (isinstance(comm, mpi.Intracomm) and comm):
        parent = comm or mpi.COMM_WORLD
    else:
        got = repr(comm) if comm or not isinstance(comm, mpi.Comm) else "MPI.COMM_NULL"
        raise InputError(f"init(comm={got}): expected a list of ranks, or an mpi4py communicator that has this rank")
    own = parent.Dup()
    if isinstance(comm, list | tuple):
        parent.Free()
    shared = own.Split_type(mpi.COMM_TYPE_SHARED)
    host = shared.bcast(own.rank, root=0)
    hosts = tuple(own.allgather(host))
    return World(own.rank, own.size, hosts, own, own.Dup(), shared, generation)


def _group_comm(mpi: Any, ranks: Sequence[int]) -> Any:
    world = mpi.COMM_WORLD
    if sorted(set(ranks)) != sorted(ranks) or not all(0 <= rank < world.size for rank in ranks):
        raise InputError(f"init(comm={list(ranks)}): expected different ranks from 0 to {world.size - 1}")
    if world.rank not in ranks:
        raise InputError(f"init(comm={list(ranks)}) was called on rank {world.rank}, which is not in the list")
    group = world.Get_group().Incl(list(ranks))
    try:
        return world.Create_group(group)
    finally:
        group.Free()
