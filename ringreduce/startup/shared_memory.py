"""What init() does before the engine starts: the host's shared memory, and measuring for the cost model."""

from __future__ import annotations

import os
from typing import Any

from ringreduce.cost_model import Constants
from ringreduce.errors import SettingsError
from ringreduce.execution.algorithms import candidates, check, usable_algorithms
from ringreduce.execution.host import Host
from ringreduce.log import LOGGER
from ringreduce.settings import Settings
from ringreduce.startup import measure
from ringreduce.transport.base import complete
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.window import FLAGS_BYTES, Window, block_bytes
from ringreduce.world import World

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where MPI allocates it
MARGIN_BYTES = 4 << 20  # what other processes may allocate between our check of the free memory and our allocation


def prepare_host(world: World, transport: MessageTransport, settings: Settings) -> Host:
    """Make the window, and measure the constants where several algorithms are possible; every rank must call it.

    Without shared memory, rank 0 logs a warning, and messages are used. Cost: on several hosts up to 100 ms.
    Raises: SettingsError for an algorithm that cannot be used.
    """
    constants = Constants.parse(settings.costs)
    window, why_not = make_window(world, settings)
    usable = usable_algorithms(world.hosts, window is not None)
    try:
        check(settings, usable, world.hosts, why_not)
    except SettingsError:
        if window is not None:  # raised on all ranks
            window.close()
        raise
    if world.size > 1 and not settings.costs and len(candidates(settings, usable)) > 1:
        slots = [] if window is None else [block[FLAGS_BYTES:][: settings.shared_slot_bytes] for block in window.blocks]
        constants = measure.slowest(world.allgather_object(complete(measure.figures(transport, world.hosts, slots))))
    return Host(world, transport, settings, window, constants, host_cores(world))


def host_cores(world: World) -> int:
    """How many cores this host's ranks may use together; a launcher may have bound each rank to some."""
    return len(set().union(*world.gather_on_host(os.sched_getaffinity(0))))


def make_window(world: World, settings: Settings) -> tuple[Window | None, str]:
    """The host's shared memory, or None and the reason; the same on all ranks."""
    if len(set(world.hosts)) == world.size:
        return None, "no two ranks are on one host"
    nbytes = block_bytes(settings.shared_slot_bytes, settings.shared_regions)
    why_not = _first(world, _too_small(nbytes * world.local_size))
    window = None
    if not why_not:
        try:
            window = Window(*world.allocate_shared(nbytes))
        except Exception as exc:
            why_not = f"MPI cannot allocate it: {exc}"
        why_not = _first(world, why_not)
    if window is not None and not why_not:
        why_not = _first(world, _zero(window.blocks[world.local_rank]))
        if why_not:
            window.close()
    if why_not and world.rank == 0:
        LOGGER.warning(f"no shared memory between the ranks of a host, so messages are used: {why_not}")
    return (None if why_not else window), why_not


def _first(world: World, why_not: str) -> str:
    """The first rank's reason, if any rank has one."""
    reasons = [f"rank {rank}: {reason}" for rank, reason in enumerate(world.allgather_object(why_not)) if reason]
    return reasons[0] if reasons else ""


def _zero(block: Any) -> str:
    """Touch all of this rank's block; returns an error text when memory is missing, empty otherwise.

    The kernel writes the zeros, so missing memory is an OSError; a write by this process would raise SIGBUS.
    """
    filled, memory = 0, memoryview(block)
    try:
        with open("/dev/zero", "rb", buffering=0) as zeros:
            while filled < len(memory):
                filled += zeros.readinto(memory[filled:]) or 0
    except OSError:
        return f"{SHARED_MEMORY} is full: there is room for {filled} of {len(memory)} B"
    return ""


def _too_small(nbytes: int) -> str:
    """An error text when too little is free, empty otherwise: MPI itself would often end in SIGBUS."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return ""
    free = status.f_bavail * status.f_frsize
    if free >= nbytes + MARGIN_BYTES:
        return ""
    return (
        f"{SHARED_MEMORY} has {free >> 20} MiB free, but {(nbytes + MARGIN_BYTES) >> 20} MiB are needed; enlarge it "
        "(docker run --shm-size=…), or lower RINGREDUCE_FUSION_BUFFER_BYTES and RINGREDUCE_SHARED_SLOT_BYTES"
    )
