"""What init() does before the engine starts: the host's shared memory, and measuring for the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.collectives.cost_model import Constants
from ringreduce.execution.algorithms import candidates, check, usable_algorithms
from ringreduce.execution.host import HostResources, window_bytes
from ringreduce.runtime.startup import measure
from ringreduce.settings import Settings
from ringreduce.settings.log import JOB
from ringreduce.transport import links
from ringreduce.transport.base import Steps, complete
from ringreduce.transport.blocks import shared_blocks
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.window import FLAGS_BYTES, Window
from ringreduce.transport.world import World
from ringrun.machine.cpus import cpu_quota, limited, usable_cpus


def prepare_host(world: World, transport: MessageTransport, settings: Settings) -> HostResources:
    """Make the window, and measure constants and links where several algorithms are possible; every rank must call it.

    Without shared memory, and for a slow link, rank 0 logs a warning. Cost: on several hosts up to 500 ms.
    Raises: SettingsError for an algorithm that cannot be used.
    """
    constants = Constants.parse(settings.costs)
    window, why_not = make_window(world, settings)
    usable = usable_algorithms(world.hosts, window is not None)
    check(settings, usable, world.hosts, why_not)
    found = links.Links()
    if world.size > 1 and not settings.costs and len(candidates(settings, usable)) > 1:
        slots = [] if window is None else [block[FLAGS_BYTES:][: settings.shared_slot_bytes] for block in window.blocks]
        constants = measure.measured(world, transport, slots)
        found = links.measured(world, transport)
    for warning in found.warnings() if world.rank == 0 else ():
        JOB.warning(warning)
    return HostResources(world, transport, settings, window, constants, host_cores(world), found)


def host_cores(world: World) -> int:
    """How many cores this host's ranks may use together; a launcher may have bound each rank to some."""
    found = world.gather_on_host((usable_cpus(), cpu_quota()))
    cpus = set().union(*(each for each, _ in found))
    cores: int = limited(len(cpus), max(quota for _, quota in found))
    return cores


def make_window(world: World, settings: Settings) -> tuple[Window | None, str]:
    """The host's shared memory, or None and the reason; the same on all ranks."""
    if len(set(world.hosts)) == world.size:
        return None, "no two ranks are on one host"

    def allgather_object(value: Any) -> Steps[Sequence[Any]]:
        yield from ()
        return world.allgather_object(value)

    blocks, why_not = complete(shared_blocks(window_bytes(settings), world.hosts, world.rank, allgather_object))
    if why_not and world.rank == 0:
        JOB.warning(f"no shared memory between the ranks of a host, so messages are used: {why_not}")
    return None if why_not else Window(blocks), why_not
