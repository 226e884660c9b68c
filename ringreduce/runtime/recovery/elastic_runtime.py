"""The runtime of an elastic job: one world after the other, and who is lost in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ringreduce.arrays import device_selection
from ringreduce.errors import CollectiveError, PeerLostError, StartupError
from ringreduce.execution.signature import ranks_text
from ringreduce.execution.timeline import BY_HAND, Event, now_us
from ringreduce.monitor import launcher_link
from ringreduce.monitor.launcher_link import StatusServer
from ringreduce.runtime import RECOVERY_S, ProcessSets, Runtime, Setup
from ringreduce.runtime.recovery import death_notice
from ringreduce.runtime.recovery.daemon import outlive_daemon
from ringreduce.runtime.recovery.membership import Members, Membership
from ringreduce.runtime.recovery.rendezvous import meet, setup_of, world_of
from ringreduce.settings import Settings
from ringreduce.settings.log import JOB, LOGGER
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.world import World

A_PLACE = "the place of a rank that is lost: it is a spare"
LEAVE_S = 2.0  # how long a rank that ends waits for the others to end
NO_COMMITS = -1  # of a rank that has no state yet


class ElasticRuntime(Runtime):
    """A runtime whose world is formed anew when ranks are lost or come. All ranks must make it."""

    is_elastic = True

    def __init__(self, start: Setup, settings: Settings, gpu: device_selection.Choice) -> None:
        """Begin with the start's ranks but the spares: each of those waits for a list that names it."""
        outlive_daemon()
        death_notice.give(settings.error_file)
        whole, trainers = start.world, start.world.size - settings.spares
        self.start, self.members = start, Members(whole.rank)
        self.has_state = whole.rank < trainers
        self.times_s: dict[str, float] = {}  # of the last re-forming, by what had ended; this host's monotonic clock
        server = StatusServer(settings.error_file, lambda: A_PLACE, self.members.hear)
        setup = start
        if not self.has_state:
            self.members.wait(lambda each: whole.rank in each.ranks)
            setup, _ = self._rendezvous(start, NO_COMMITS, None)
            launcher_link.report(settings.error_file, reformed=setup.world.number)
        elif trainers < whole.size:
            world = world_of(whole, Membership(0, whole.origins[:trainers], {}))
            setup = setup_of(start, world, MessageTransport(world), start.process_sets)
        super().__init__(setup, settings, gpu, server)

    def enter(self, setup: Setup) -> None:
        """Start the engine of a world; give it up as soon as a newer list is known."""
        super().enter(setup)
        self.setup, world, engine = setup, self.world, self.engine

        def hear(membership: Membership) -> None:
            engine.give_up(lost_error(world, membership))

        self.members.on_news = hear
        if self.members.newer_than(world.number):
            hear(self.members.newest)

    def membership_changed(self) -> bool:
        """True when a list is known that is newer than this world."""
        return self.members.newer_than(self.world.number)

    def hosts_came(self) -> str:
        """See `Members.hosts`."""
        return self.members.hosts

    def reform(self, commits: int) -> bool:
        """See `Runtime.reform`; form the world of the launcher's newest list.

        Cost:   waits for the list, up to RECOVERY_S, and for the ranks that it names; two small allgathers.
        Raises: the error that ended the world, where no list comes; CollectiveError when the ranks of the list do not
                come, or this rank's GPU does not end its work.
        """
        begun_s, engine, last = time.monotonic(), self.engine, self.world
        if not self.membership_changed():  # where others have left in order no list would come by itself
            launcher_link.report(self.settings.error_file, meeting=last.number)
        if not self.members.wait(lambda each: each.number > last.number, RECOVERY_S):
            return super().reform(commits)  # raises
        engine.give_up(lost_error(last, self.members.newest))
        engine.join()
        self.await_gpu(after_loss=True)
        engine.gpu.close()
        stopped_s = time.monotonic()
        setup, is_equal = self._rendezvous(self.setup, commits, engine.process_sets.numbered())
        engine.gpu.free(of_lost_world=True)  # all have unmapped it before they met
        met_s = time.monotonic()
        self.enter(setup)
        self.start_checks()
        launcher_link.report(self.settings.error_file, reformed=setup.world.number)
        heard_s = self.members.newest.heard_s
        self.times_s = {"heard": heard_s, "failed": begun_s, "stopped": stopped_s, "met": met_s}
        self.times_s["new engine"] = time.monotonic()
        since = [f"{name} {1e3 * (at_s - heard_s):.1f}" for name, at_s in self.times_s.items()]
        who = f"rank {self.start.world.rank} of the start, list {self.members.newest.number}"
        LOGGER.debug(f"{who}: ms since it was heard: {', '.join(since)}")
        self._record(last)
        return is_equal

    def _record(self, last: World) -> None:
        """Go on with the timeline of the settings: a file for each world, FILE.2.json for that of list 2."""
        path, membership = Path(self.settings.timeline), self.members.newest
        if self.world.rank or not path.name or path.name.upper() == BY_HAND:
            return
        heard_us = membership.heard_s * 1e6  # by the clock of the timeline
        loss = Event(str(lost_error(last, membership)), "elastic", heard_us, now_us() - heard_us)
        file = path.with_name(f"{path.stem}.{self.world.number}{path.suffix}")
        try:
            self.engine.timeline.start(str(file), self.settings.timeline_mark_cycles, [loss])
        except (OSError, CollectiveError) as error:
            JOB.warning(f"the timeline cannot continue in {file}: {error}")

    def _rendezvous(self, last: Setup, commits: int, sets: ProcessSets | None) -> tuple[Setup, bool]:
        """Meet the ranks of the newest list, see `meet`; the sets are those of the rank with the most commits.

        Returns: the world, and whether all ranks have the same number of commits.
        Raises:  CollectiveError where only spares meet that have no state yet.
        """
        origins = last.world.origins
        if sets is not None:
            sets = [each if isinstance(each, str) else [origins[rank] for rank in each] for each in sets]
        met = meet(self.start, last, self.members, (commits if self.has_state else NO_COMMITS, sets))
        gathered = [each for each, _ in met.values]
        self.root = root = gathered.index(max(gathered))
        if gathered[root] == NO_COMMITS:
            who = ranks_text(met.world.origins)
            raise CollectiveError(f"only spares ({who}) are left, which have no state to continue from")
        sets = living_sets(met.values[root][1], met.world, met.membership.dead)
        return setup_of(self.start, met.world, met.transport, sets), len(set(gathered)) == 1

    def leave(self, why: str, interrupted: Callable[[], bool]) -> bool:
        """Leave the world; the loss of a rank ends the wait, and nothing is freed in which lost ranks have a part."""
        launcher_link.report(self.settings.error_file, left=why)
        self.engine.leave(why, interrupted)
        self._status_server.close()
        return True

    def leave_at_exit(self, why: str) -> None:
        """Leave the world, but wait for nobody who may be lost, here or in MPI_Finalize."""
        launcher_link.report(self.settings.error_file, left=why)
        until_s = time.monotonic() + LEAVE_S
        self.engine.leave(why, lambda: time.monotonic() > until_s)


def check_start(settings: Settings, comm: Any, worlds: int) -> None:
    """Raise StartupError where an elastic job cannot begin.  worlds: how many this process had before."""
    if not settings.error_file:
        raise StartupError(
            "RINGREDUCE_ELASTIC=1, but ringrun has not started this rank: only its agents see how a rank ends, which "
            "mpirun and srun do not report; start with `ringrun --elastic`"
        )
    if comm is not None:
        raise StartupError("init(comm=…): an elastic job uses all ranks that ringrun started; leave comm out")
    if worlds:
        raise StartupError("init() after shutdown(): an elastic job calls init() once; elastic.run handles lost ranks")


def lost_error(world: World, membership: Membership) -> PeerLostError:
    """What the operations of a world raise that a list has ended."""
    lost = [rank for rank, each in enumerate(world.origins) if each not in membership.ranks]
    if not lost:
        return PeerLostError(f"ranks have joined: there are {len(membership.ranks)} now, and the world is formed again")
    how = [f"rank {each} of {world.size} {membership.dead.get(world.origins[each], 'has left')}" for each in lost]
    return PeerLostError("; ".join(how), lost)


def living_sets(sets: ProcessSets, world: World, dead: Mapping[int, str]) -> ProcessSets:
    """Process sets in the ranks of a world, of whose ranks at the start they are; those with lost ranks have ended."""
    found: list[Any] = []
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
