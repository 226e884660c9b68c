"""The worlds of an elastic job, one after the other: how a rank enters them, and hears that one has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ringreduce.errors import CollectiveError, PeerLostError, StartupError
from ringreduce.execution.host import Host
from ringreduce.execution.signature import ranks_text
from ringreduce.membership import Members, Membership
from ringreduce.monitor.launcher_link import StatusServer, report_reformed
from ringreduce.settings import Settings
from ringreduce.startup import death_notice
from ringreduce.startup.daemon import outlive_daemon
from ringreduce.startup.survivors import Origin, regroup
from ringreduce.transport.message import MessageTransport
from ringreduce.world import World

A_PLACE = "the place of a rank that is lost: it is a spare"
NO_COMMITS = -1  # of a rank that has no state yet

ProcessSets = Sequence[Sequence[int] | str]
"""The members of all process sets but the first, in the order of their numbers; or why a set has ended."""


class Reformed(NamedTuple):
    """How a world began after another one."""

    number: int  # of the launcher's list
    root: int  # the rank with the most commits, the lowest of them
    is_equal: bool  # all ranks have as many
    lost: tuple[int, ...]  # ranks of the world before that are not in this one


class Entered(NamedTuple):
    """A world, on one of its ranks, before there is an engine."""

    world: World
    transport: MessageTransport
    host: Host
    clock_offsets_us: Sequence[float]
    process_sets: ProcessSets


class Elastic:
    """What an elastic job has beside its world, from its start to its end."""

    def __init__(self, origin: Origin, members: Members, server: StatusServer) -> None:
        self.origin, self.members, self.server = origin, members, server
        self.latest: Reformed | None = None  # how the world began; None: with the job
        self.has_state = True  # False on a spare until it has taken that of the others
        self.has_failed = False  # this rank: it ends without leaving its world
        self.times_s: dict[
            str, float
        ] = {}  # of the last re-forming, by what had just ended; this host's monotonic clock

    def enter(self, last: World, before: MessageTransport, commits: int, sets: ProcessSets | None) -> Entered:
        """Meet the ranks of the newest list, see `regroup`; the sets are those of the rank with the most commits.

        Raises: CollectiveError where only spares meet that have no state yet.
        """
        if sets is not None:
            sets = [each if isinstance(each, str) else [last.origins[rank] for rank in each] for each in sets]
        found = regroup(self.origin, self.members, last, before, (commits if self.has_state else NO_COMMITS, sets))
        world, transport = found.world, found.transport
        everyones = [each for each, _ in found.values]
        root = everyones.index(max(everyones))
        if everyones[root] == NO_COMMITS:
            raise CollectiveError(
                f"only spares are left, {ranks_text(world.origins)}, which have no state to go on with"
            )
        lost = [rank for rank, each in enumerate(last.origins) if each not in world.origins]
        self.latest = Reformed(world.number, root, len(set(everyones)) == 1, tuple(lost))
        sets = living_sets(found.values[root][1], world, found.membership.dead)
        return Entered(world, transport, self.origin.host_of(world, transport), self.origin.offsets_of(world), sets)

    def watch(self, world: World, give_up: Callable[[Exception], object]) -> None:
        """Give up this world as soon as a newer list is known."""

        def hear(membership: Membership) -> None:
            give_up(lost_error(world, membership))

        self.members.on_news = hear
        if self.members.newer_than(world.number):
            hear(self.members.newest)


def check(settings: Settings, comm: Any, worlds: int) -> None:
    """Raise StartupError where an elastic job cannot begin.  worlds: how many this process had before."""
    if not settings.error_file:
        raise StartupError(
            "RINGREDUCE_ELASTIC=1, but ringrun has not started this rank: only its agents see how a rank ends, which "
            "mpirun and srun do not tell; start with `ringrun --elastic`"
        )
    if comm is not None:
        raise StartupError("init(comm=…): an elastic job has all ranks that ringrun started; pass no comm")
    if worlds:
        raise StartupError("init() after shutdown(): an elastic job calls init() once; lost ranks are elastic.run's")


def begin(start: Entered) -> tuple[Elastic, Entered]:
    """The world that this rank begins in; on a spare that of the first list that names it. All ranks must call it."""
    outlive_daemon()
    death_notice.give(start.host.settings.error_file)
    whole, host = start.world, start.host
    members, origin = Members(whole.rank), Origin(whole, host, start.clock_offsets_us)
    elastic = Elastic(origin, members, StatusServer(host.settings.error_file, lambda: A_PLACE, members))
    trainers = whole.size - host.settings.spares
    if whole.rank >= trainers:
        members.wait(lambda each: whole.rank in each.ranks)
        elastic.has_state = False
        entered = elastic.enter(whole, start.transport, NO_COMMITS, None)
        report_reformed(host.settings.error_file, entered.world.number)
        return elastic, entered
    if trainers < whole.size:
        world = origin.world_of(Membership(0, whole.origins[:trainers], {}))
        transport = MessageTransport(world)
        start = Entered(
            world, transport, origin.host_of(world, transport), origin.offsets_of(world), start.process_sets
        )
    return elastic, start


def lost_error(world: World, membership: Membership) -> PeerLostError:
    """What the operations of a world raise that a list has ended."""
    lost = [rank for rank, each in enumerate(world.origins) if each not in membership.ranks]
    if not lost:
        return PeerLostError(f"ranks have joined: there are {len(membership.ranks)} now, and the world is formed anew")
    how = [f"rank {each} of {world.size} {membership.dead.get(world.origins[each], 'has left')}" for each in lost]
    return PeerLostError("; ".join(how), lost)


def living_sets(sets: ProcessSets, world: World, dead: Mapping[int, str]) -> ProcessSets:
    """Process sets in the ranks of a world, of whose ranks at the start they are; those with lost ranks have ended."""
    found: list[Sequence[int] | str] = []
    for each in sets:
        lost = [] if isinstance(each, str) else [rank for rank in each if rank not in world.origins]
        if isinstance(each, str):
            found.append(each)
        elif lost:
            how = "; ".join(f"rank {rank} {dead.get(rank, 'has left')}" for rank in lost)
            found.append(f"it had {ranks_text(each)} of the job's start, and {how}")
        else:
            found.append(tuple(world.origins.index(rank) for rank in each))
    return found
