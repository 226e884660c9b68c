"""What process sets share on a host: the window, cut into regions, and the cost model. Makes the sets' routes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.cost_model import Constants
from ringreduce.engine.algorithms import Algorithms
from ringreduce.errors import InputError
from ringreduce.settings import MOST_REGIONS, Settings
from ringreduce.transport.base import EngineTransport
from ringreduce.transport.subset import CHANNELS, TAGS, channels
from ringreduce.transport.window import GPU_PACKED, Flags, Region, Window
from ringreduce.world import World


class Place(NamedTuple):
    """What a process set has of what all share."""

    tags: int
    """The number of a range of tags."""
    region: int | None
    """The number of a region of shared memory; None: there was none left."""
    gpu_flags: int | None
    """That of flags for GPU arrays."""


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
        self._tags = _RegionAllocator(transport.most_tags // (TAGS * CHANNELS))
        self._regions = _RegionAllocator(0 if window is None else settings.shared_regions)
        self._gpu_flags = _RegionAllocator(0 if window is None else MOST_REGIONS)

    def algorithms(self, local_index: Place, members: Sequence[int]) -> Algorithms:
        """The routes of a process set that has this place, and of which this rank is one."""
        tags, region, gpu_flags = local_index
        flags = None
        if gpu_flags is not None and self.window is not None:
            flags = Flags(self.window, gpu_flags, GPU_PACKED, *self._neighbours(members))
        return Algorithms(
            channels(self._transport, members, tags),
            [self.world.hosts[rank] for rank in members],
            self.region(region, members),
            self._settings,
            self.constants,
            flags,
            self.world.comm is not None,
        )

    def reserve(self, members: Sequence[int]) -> Place:
        """The place of a process set; all ranks of the world must call it for all sets, in the same order.

        Sets without a common rank can have equal ones. Raises: InputError when MPI has no tags left for another set.
        """
        tags = self._tags.take(members)
        if tags is None:
            raise InputError(
                f"add_process_set: {list(members)}: MPI has tags for {self._tags.count} process sets that share a "
                "rank, and all are in use; remove_process_set() those that are not needed"
            )
        return Place(tags, self._regions.take(members), self._gpu_flags.take(members))

    def give_back(self, members: Sequence[int]) -> None:
        """A set was removed, on all ranks in the same order, and this rank has nothing under way in it.

        Its tags may be used again: messages of two ranks keep their order. Its memory may not: another rank may still
        be reading that.
        """
        self._tags.give_back(members)

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


class _RegionAllocator:
    """Numbered places, each for process sets without a common rank."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._users: list[set[frozenset[int]]] = []

    def take(self, members: Sequence[int]) -> int | None:
        """The first place that none of these ranks has."""
        ours = frozenset(members)
        for number, users in enumerate(self._users):
            if not any(ours & each for each in users):
                users.add(ours)
                return number
        if len(self._users) == self.count:
            return None
        self._users.append({ours})
        return len(self._users) - 1

    def give_back(self, members: Sequence[int]) -> None:
        """These ranks' place may be taken by others; no two have equal members."""
        for users in self._users:
            users.discard(frozenset(members))
