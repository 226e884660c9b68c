"""What process sets share on a host: the window, cut into regions, and the cost model. Makes the sets' routes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ringreduce.collectives.choose import Constants
from ringreduce.engine.routes import Native, Routes
from ringreduce.settings import Settings
from ringreduce.transport.base import EngineTransport
from ringreduce.transport.subset import channels
from ringreduce.transport.window import Region, Window
from ringreduce.world import World, local_ranks


class Host:
    """This rank's host. `window` is None on all ranks or on none."""

    def __init__(
        self,
        world: World,
        transport: EngineTransport,
        settings: Settings,
        window: Window | None = None,
        constants: Constants | None = None,
        native: Native | None = None,
        cores: int | None = None,
    ) -> None:
        self.world = world
        self.window = window
        self.constants = constants or Constants.parse(settings.costs)
        self.cores = cores or len(os.sched_getaffinity(0))
        """How many its ranks may run on, all together."""
        self._transport = transport
        self._settings = settings
        self._native = native
        regions = 0 if window is None else settings.shared_regions
        self._users: list[list[frozenset[int]]] = [[] for _ in range(regions)]

    def routes(self, number: int, members: Sequence[int]) -> Routes:
        """The routes of process set `number`, of which this rank is one; see `reserve`."""
        region = self.region(self.reserve(members), members)
        return Routes(
            channels(self._transport, members, number),
            [self.world.hosts[rank] for rank in members],
            region,
            self._settings,
            self.constants,
            self._native if len(members) == self.world.size else None,
            None if self.world.comm is None else self._transport,
            len(members) == self.world.size,
        )

    def reserve(self, members: Sequence[int]) -> int | None:
        """A region for a process set; all ranks of the world must call it for all sets, in the same order.

        Sets without a common rank can have the same region. One that was given is not given again when its set is
        removed: another rank may still be reading it. None: there is none left, and the set sends messages.
        """
        ours = frozenset(members)
        for number, users in enumerate(self._users):
            if not any(ours & each for each in users):
                users.append(ours)
                return number
        return None

    def region(self, number: int | None, members: Sequence[int]) -> Region | None:
        """This rank's view of a region."""
        if number is None or self.window is None:
            return None
        hosts, rank = self.world.hosts, self.world.rank
        ours = [each for each in members if hosts[each] == hosts[rank]]
        place = local_ranks(hosts)
        slot_bytes = self._settings.shared_slot_bytes
        return Region(self.window, number, slot_bytes, [place[each] for each in ours], ours, ours.index(rank))
