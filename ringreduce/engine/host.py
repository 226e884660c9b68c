"""What process sets share on a host: the window, cut into regions, and the cost model. Makes the sets' routes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ringreduce.collectives.choose import Constants
from ringreduce.engine.routes import Routes
from ringreduce.settings import MOST_REGIONS, Settings
from ringreduce.transport.base import EngineTransport
from ringreduce.transport.subset import channels
from ringreduce.transport.window import GPU_PACKED, Flags, Region, Window
from ringreduce.world import World


class Host:
    """This rank's host. `window` is None on all ranks or on none."""

    def __init__(
        self,
        world: World,
        transport: EngineTransport,
        settings: Settings,
        window: Window | None = None,
        constants: Constants | None = None,
        cores: int | None = None,
    ) -> None:
        self.world = world
        self.window = window
        self.constants = constants or Constants.parse(settings.costs)
        self.cores = cores or len(os.sched_getaffinity(0))
        """How many its ranks may run on, all together."""
        self._transport = transport
        self._settings = settings
        self._regions = _Places(0 if window is None else settings.shared_regions)
        self._gpu_flags = _Places(0 if window is None else MOST_REGIONS)

    def routes(self, number: int, members: Sequence[int]) -> Routes:
        """The routes of process set `number`, of which this rank is one; see `reserve`."""
        region, gpu_flags = self.reserve(members)
        flags = None
        if gpu_flags is not None and self.window is not None:
            flags = Flags(self.window, gpu_flags, GPU_PACKED, *self._neighbours(members))
        return Routes(
            channels(self._transport, members, number),
            [self.world.hosts[rank] for rank in members],
            self.region(region, members),
            self._settings,
            self.constants,
            flags,
            None if self.world.comm is None else self._transport,
            len(members) == self.world.size,
        )

    def reserve(self, members: Sequence[int]) -> tuple[int | None, int | None]:
        """The numbers of a region for a process set and of flags for its GPU arrays; None: there are none left.

        All ranks of the world must call it for all sets, in the same order. Sets without a common rank can have equal
        ones. What was given is not given again when its set is removed: another rank may still be reading it.
        """
        return self._regions.take(members), self._gpu_flags.take(members)

    def region(self, number: int | None, members: Sequence[int]) -> Region | None:
        """This rank's view of a region."""
        if number is None or self.window is None:
            return None
        return Region(self.window, number, self._settings.shared_slot_bytes, *self._neighbours(members))

    def _neighbours(self, members: Sequence[int]) -> tuple[list[int], list[int], int]:
        """Of the members on this host: local ranks, ranks, and this rank's place among them."""
        hosts, rank = self.world.hosts, self.world.rank
        ours = [each for each in members if hosts[each] == hosts[rank]]
        return [self.world.local_ranks[each] for each in ours], ours, ours.index(rank)


class _Places:
    """Numbered places, each for process sets without a common rank."""

    def __init__(self, count: int) -> None:
        self._users: list[list[frozenset[int]]] = [[] for _ in range(count)]

    def take(self, members: Sequence[int]) -> int | None:
        """The first place that none of these ranks has."""
        ours = frozenset(members)
        for number, users in enumerate(self._users):
            if not any(ours & each for each in users):
                users.append(ours)
                return number
        return None
