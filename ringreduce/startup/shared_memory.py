"""What init() does before the engine starts: the host's shared memory, and measuring for the cost model."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Generator
from typing import Any

import numpy as np

from ringreduce.cost_model import Constants
from ringreduce.execution.algorithms import candidates, check, usable_algorithms
from ringreduce.execution.host import Host, window_bytes
from ringreduce.log import LOGGER
from ringreduce.settings import Settings
from ringreduce.startup import measure
from ringreduce.transport.base import complete
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.window import FLAGS_BYTES, Window
from ringreduce.world import World

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - files there are memory
MARGIN_BYTES = 2 << 20  # of each rank, for MPI, whose own segments grow


def prepare_host(world: World, transport: MessageTransport, settings: Settings) -> Host:
    """Make the window, and measure the constants where several algorithms are possible; every rank must call it.

    Without shared memory, rank 0 logs a warning, and messages are used. Cost: on several hosts up to 100 ms.
    Raises: SettingsError for an algorithm that cannot be used.
    """
    constants = Constants.parse(settings.costs)
    window, why_not = make_window(world, settings)
    usable = usable_algorithms(world.hosts, window is not None)
    check(settings, usable, world.hosts, why_not)
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
    steps = _allocate(world, window_bytes(settings))
    while True:
        error = ""
        try:
            next(steps)
        except StopIteration as done:
            return Window(done.value), ""
        except OSError as exc:
            error = str(exc)
        errors = [f"rank {rank}: {each}" for rank, each in enumerate(world.allgather_object(error)) if each]
        if errors:
            steps.close()
            if world.rank == 0:
                LOGGER.warning(f"no shared memory between the ranks of a host, so messages are used: {errors[0]}")
            return None, errors[0]


def _allocate(world: World, nbytes: int) -> Generator[None, None, list[Any]]:
    """Allocate a block and map those of all ranks of this host; after each step all ranks must agree to go on.

    A block is a file that has a name until the others have mapped it, and memory only afterwards: whatever kills a rank
    leaves an empty file at most. Each rank reserves its own block, on its NUMA node; when the memory is missing, that
    is an OSError here, where a write would raise SIGBUS.
    """
    descriptor, path = tempfile.mkstemp(prefix="ringreduce_", dir=SHARED_MEMORY)
    with open(descriptor, "rb+") as own:
        try:
            own.truncate(nbytes)
            yield
            blocks = [_map(each, nbytes) for each in world.gather_on_host(path)]
            yield
        finally:
            os.unlink(path)
        try:
            os.posix_fallocate(descriptor, 0, nbytes + MARGIN_BYTES)
        except OSError as exc:
            status = os.statvfs(SHARED_MEMORY)
            raise OSError(
                f"{SHARED_MEMORY}, {status.f_blocks * status.f_frsize >> 20} MiB, has no room for {world.local_size} × "
                f"{nbytes + MARGIN_BYTES >> 20} MiB ({exc.strerror}); enlarge it (docker run --shm-size=…), or lower "
                "RINGREDUCE_FUSION_BUFFER_BYTES and RINGREDUCE_SHARED_SLOT_BYTES"
            ) from exc
        yield
        own.truncate(nbytes)
    return blocks


def _map(path: str, nbytes: int) -> Any:
    """A rank's block, which is freed when no rank has an array of it any more."""
    try:
        with open(path, "rb+") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    except FileNotFoundError as exc:
        raise OSError(f"{path} of a rank on this host is not here: containers must share {SHARED_MEMORY}") from exc
