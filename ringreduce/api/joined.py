"""Ranks in processes of Dask, Spark or Ray, which tell each of them where to meet the others; see transport/joining."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringreduce.api.control import init
from ringreduce.errors import JobFailedError, StartupError, described
from ringreduce.runtime.lifecycle import leave, shutdown
from ringreduce.transport import joining
from ringreduce.transport.mpi import RANK_VARIABLE


class Membership(NamedTuple):
    """Which rank a process is, in which world; one that has lost a rank is of no use any more."""

    world: str
    rank: int
    size: int
    lost: str


def membership() -> Membership | None:
    """Where this process stands; None: nowhere yet."""
    before = joining.membership()
    return Membership(before.name, before.rank, before.size, before.lost) if before else None


def ranks_again(memberships: Sequence[Membership | None], anew: str) -> list[int] | None:
    """Return which ranks these processes, in their order, are in the world that they have had before; None: in none.

    anew:   how to have new processes of the engine.
    Raises: StartupError where they are not all of one world, since MPI can be started only once per process.
    """
    if not any(memberships):
        return None
    ranks = [each.rank for each in memberships if each is not None and not each.lost and each.size == len(memberships)]
    worlds = {each.world for each in memberships if each is not None}
    if len(ranks) == len(memberships) and len(worlds) == 1:
        return ranks
    old = sum(each is not None for each in memberships)
    lost = next((f", which has lost others ({each.lost})" for each in memberships if each and each.lost), "")
    raise StartupError(
        f"{old} of these {len(memberships)} processes have been ranks before, in {len(worlds)} world"
        f"{'s' * (len(worlds) > 1)} of other processes{lost}; MPI can be started only once per process: {anew}"
    )


@contextlib.contextmanager
def without_exit() -> Iterator[None]:
    """Raise JobFailedError for sys.exit(), which would end a process of the engine's, or what serves it there."""
    try:
        yield
    except SystemExit as error:
        what = f"a rank's function has called sys.exit({error.code!r})"
        raise JobFailedError(f"{what}; its process is the engine's: return instead, or raise an exception") from error


@contextlib.contextmanager
def rank_of(address: str, rank: int, size: int, engine: str) -> Iterator[None]:
    """Be rank `rank` of `size` meanwhile; those that wait for this one get PeerLostError at its end.

    address: of joining.start(size), the same on all of them; empty in a process that has been this rank before.
    """
    if address:
        joining.check_mpi(engine, str(size))
        joining.join(address, rank, size)
    variables = joining.membership().variables
    try:
        os.environ.update(variables)
        init()
        try:
            with without_exit():
                yield
        except BaseException as error:
            leave(described(error), lambda: False)
            raise
        shutdown()
    finally:
        for name in (*variables, RANK_VARIABLE):  # the process may start others, no children of a rank
            os.environ.pop(name, None)
