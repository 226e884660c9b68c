"""What process sets share on a host: tags, regions of the window, flags, and the cost model's constants."""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from ringreduce.collectives.cost_model import Constants
from ringreduce.errors import InputError
from ringreduce.execution.algorithms import Algorithms
from ringreduce.execution.living import Living
from ringreduce.settings import MOST_REGIONS, Settings
from ringreduce.transport.base import EngineTransport
from ringreduce.transport.counters import group_bytes
from ringreduce.transport.links import Links
from ringreduce.transport.subset import CHANNELS, TAGS, channels, tags_of
from ringreduce.transport.window import (
    FLAGS_BYTES,
    FLAGS_PER_REGION,
    GPU_PACKED,
    PACKED,
    Flags,
    Region,
    Signatures,
    Window,
    block_bytes,
    flags_at,
)
from ringreduce.transport.world import World
from ringrun.machine.cpus import usable_count


class Resources(NamedTuple):
    """The shared resources reserved for a process set, by number; None: none was left."""

    tags: int  # a range of MPI tags
    region: int | None  # a region of shared memory
    gpu_flags: int | None  # flags for GPU arrays


def window_bytes(settings: Settings) -> int:
    """Shared memory that each rank of a host contributes."""
    return block_bytes(settings.shared_slot_bytes, settings.shared_regions, group_bytes(settings.cache_capacity))


def clear_block(window: Window, settings: Settings, local_rank: int) -> None:
    """Reset a rank's flags and counters, after a world that was given up; nobody may count on them."""
    block = window.blocks[local_rank]
    block[:FLAGS_BYTES] = 0
    block[block_bytes(settings.shared_slot_bytes, settings.shared_regions) :] = 0


class HostResources:
    """This rank's host. `window` is None on all ranks or on none."""

    def __init__(
        self,
        world: World,
        transport: EngineTransport,
        settings: Settings,
        window: Window | None = None,
        constants: Constants | None = None,
        cores: int | None = None,
        links: Links | None = None,
    ) -> None:
        self.world = world
        self.links = links or Links()
        self.window = window
        self.constants = constants or Constants.parse(settings.costs)
        self.cores = cores or usable_count()  # how many cores this host's ranks may use together
        self.settings = settings
        self.reducers: Living[Any] = Living()  # of the rank's optimizers; `no_overlap` says why not
        self._transport = transport
        self.most_tags = transport.most_tags // (TAGS * CHANNELS)  # ranges of tags
        self.first_own_tags = self.most_tags // 2
        """From here on for channels that their members open alone; by this range they agree on others (opening.py)."""
        self.next_own_tags = self.first_own_tags + 1
        self.opening: set[int] = set()  # ranks with which this one opens a channel, or has given up to open one
        self._tags = _NumberAllocator(self.first_own_tags)
        self._regions = _NumberAllocator(0 if window is None else settings.shared_regions)
        self._gpu_flags = _NumberAllocator(0 if window is None else MOST_REGIONS)

    @property
    def overlaps(self) -> bool:
        """True where data moves faster while backward computes than after it: a core or a wire is free for it."""
        return len(set(self.world.hosts)) > 1 or self.world.local_size < self.cores

    @property
    def no_overlap(self) -> str:
        """Why gradients are not reduced during backward, as one of the rank's optimizers says; empty: none does."""
        return next(filter(None, (each.no_overlap for each in self.reducers)), "")

    def algorithms(self, resources: Resources, members: Sequence[int]) -> Algorithms:
        """The algorithms of a process set with these resources that this rank is in."""
        tags, region, gpu_flags = resources
        flags = None
        if gpu_flags is not None and self.window is not None:
            flags = Flags(self.window, gpu_flags, GPU_PACKED, *self._local_members(members))
        return self.own_algorithms(tags, members, self.region(region, members), flags)

    def own_algorithms(
        self, tags: int, members: Sequence[int], region: Region | None = None, gpu_flags: Flags | None = None
    ) -> Algorithms:
        """The algorithms of members that have these tags, and this shared memory."""
        hosts = [self.world.hosts[rank] for rank in members]
        places = {host: place for place, host in enumerate(self.links.order)}
        return Algorithms(
            channels(self._transport, members, tags),
            hosts,
            sorted(range(len(members)), key=lambda member: places.get(hosts[member], 0)),
            region,
            self.settings,
            self.constants,
            gpu_flags,
            functools.partial(self._transport.in_flight.abandon, tags_of(tags)),
        )

    def abandon_opening(self, others: Container[int]) -> None:
        """The channel that this rank is opening with these ranks is given up; those with other ranks continue."""
        self._transport.in_flight.abandon(tags_of(self.first_own_tags), others)

    def signatures(self, resources: Resources, members: Sequence[int]) -> Signatures | None:
        """Where the members on this host of a channel with these resources compare hashes; None: they send messages."""
        if resources.gpu_flags is None or self.window is None:
            return None
        return Signatures(self.window, resources.gpu_flags, *self._local_members(members))

    def reserve(self, members: Sequence[int]) -> Resources:
        """Reserve resources for a process set; all ranks of the world must call it for all sets, in the same order.

        Disjoint sets can share resources. Raises: InputError when MPI has no tags left for another set.
        """
        tags = self._tags.allocate(members)
        if tags is None:
            raise InputError(
                f"add_process_set: {list(members)}: MPI has tags for {self._tags.count} process sets that share a "
                "rank, and all are in use; call remove_process_set() on those not needed"
            )
        return Resources(tags, self._regions.allocate(members), self._gpu_flags.allocate(members))

    def clear(self, resources: Resources, is_member: bool) -> None:
        """Reset this rank's part of the shared memory of a removed set; nobody may look at it meanwhile."""
        if self.window is None or not is_member:
            return
        own = self.window.blocks[self.world.local_rank]
        if resources.region is not None:
            own[flags_at(resources.region, PACKED, GPU_PACKED)] = 0
            own[self._counters_at(resources.region)] = 0
        if resources.gpu_flags is not None:
            own[flags_at(resources.gpu_flags, GPU_PACKED, FLAGS_PER_REGION)] = 0

    def release(self, resources: Resources, members: Sequence[int]) -> None:
        """Release the resources of a removed set, on all ranks in the same order, when no rank uses them any more."""
        for allocator, number in zip((self._tags, self._regions, self._gpu_flags), resources, strict=True):
            if number is not None:
                allocator.release(number, members)

    def region(self, number: int | None, members: Sequence[int]) -> Region | None:
        """This rank's view of a region."""
        if number is None or self.window is None:
            return None
        return Region(self.window, number, self.settings.shared_slot_bytes, *self._local_members(members))

    def group_blocks(self, number: int | None, members: Sequence[int]) -> list[Any] | None:
        """The memory in which a process set with this region negotiates, by member on this host."""
        if number is None or self.window is None:
            return None
        return [self.window.blocks[each][self._counters_at(number)] for each in self._local_members(members)[0]]

    def _counters_at(self, number: int) -> slice:
        nbytes = group_bytes(self.settings.cache_capacity)
        low = block_bytes(self.settings.shared_slot_bytes, self.settings.shared_regions) + number * nbytes
        return slice(low, low + nbytes)

    def _local_members(self, members: Sequence[int]) -> tuple[list[int], list[int], int]:
        """Of the members on this host: local ranks, ranks, and this rank's index among them."""
        hosts, rank = self.world.hosts, self.world.rank
        ours = [each for each in members if hosts[each] == hosts[rank]]
        return [self.world.local_ranks[each] for each in ours], ours, ours.index(rank)


class _NumberAllocator:
    """Allocates numbers below `count`; disjoint process sets can share one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._users: list[set[frozenset[int]]] = []

    def allocate(self, members: Sequence[int]) -> int | None:
        """The first number that none of these ranks uses; None when all are in use."""
        ours = frozenset(members)
        for number, users in enumerate(self._users):
            if not any(ours & each for each in users):
                users.add(ours)
                return number
        if len(self._users) == self.count:
            return None
        self._users.append({ours})
        return len(self._users) - 1

    def release(self, number: int, members: Sequence[int]) -> None:
        """Free a number of the set with these members."""
        self._users[number].discard(frozenset(members))
