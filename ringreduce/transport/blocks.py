"""Makes memory that the ranks of a host share: one block of each rank, which the others map."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from ringreduce.transport.base import Steps

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - files there are memory
MARGIN_BYTES = 2 << 20  # of each rank, for MPI, whose own segments grow

Exchange = Callable[[Any], Steps[Sequence[Any]]]
"""Every rank's value, by rank."""


def shared_blocks(nbytes: int, hosts: Sequence[int], rank: int, exchange: Exchange) -> Steps[tuple[list[Any], str]]:
    """A block of each rank of this host, by local rank; every rank must run it.

    hosts:   host number of each rank.
    Returns: the blocks, 1-D uint8, zero, and an empty text; or on all ranks no blocks, and the reason.
    """
    local = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    steps, paths = _allocate(nbytes, len(local)), None
    while True:
        path, error = "", ""
        try:
            path = steps.send(paths)
        except StopIteration as done:
            return done.value, ""
        except OSError as exc:
            error = str(exc)
        everyones = yield from exchange((path, error))
        errors = [f"rank {number}: {each}" for number, (_, each) in enumerate(everyones) if each]
        if errors:
            steps.close()
            return [], errors[0]
        paths = [everyones[each][0] for each in local]


def _allocate(nbytes: int, local_size: int) -> Generator[str, list[str] | None, list[Any]]:
    """Allocate a block and map those of all ranks of this host; after each step all ranks must agree to go on.

    A block is a file that has a name until the others have mapped it, and memory only afterwards: whatever kills a rank
    leaves an empty file at most. Each rank reserves its own block, on its NUMA node; when the memory is missing, that
    is an OSError here, where a write would raise SIGBUS.

    Yields: the path, in exchange for those of all ranks of this host; then nothing.
    """
    descriptor, path = tempfile.mkstemp(prefix="ringreduce_", dir=SHARED_MEMORY)
    with open(descriptor, "rb+") as own:
        try:
            own.truncate(nbytes)
            paths = yield path
            blocks = [mapped(each, nbytes) for each in paths or ()]
            yield ""
        finally:
            os.unlink(path)
        try:
            os.posix_fallocate(descriptor, 0, nbytes + MARGIN_BYTES)
        except OSError as exc:
            status = os.statvfs(SHARED_MEMORY)
            raise OSError(
                f"{SHARED_MEMORY}, {status.f_blocks * status.f_frsize >> 20} MiB, has no room for {local_size} × "
                f"{nbytes + MARGIN_BYTES >> 20} MiB ({exc.strerror}); enlarge it (docker run --shm-size=…), or lower "
                "RINGREDUCE_FUSION_BUFFER_BYTES and RINGREDUCE_SHARED_SLOT_BYTES"
            ) from exc
        yield ""
        own.truncate(nbytes)
    return blocks


def mapped(path: str, nbytes: int) -> Any:
    """A rank's block, which is freed when no rank has an array of it any more."""
    try:
        with open(path, "rb+") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    except FileNotFoundError as exc:
        raise OSError(f"{path} of a rank on this host is not here: containers must share {SHARED_MEMORY}") from exc
