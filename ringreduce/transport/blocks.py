"""Makes memory that the ranks of a host share: one block of each rank, which the others map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce.transport.base import Steps

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - files there are memory
MARGIN_BYTES = 2 << 20  # of each rank, for MPI, whose own segments grow

AllgatherObject = Callable[[Any], Steps[Sequence[Any]]]
"""Every rank's value, by rank."""


class SharedFile(NamedTuple):
    """Where this host's processes find a file that has no name, while its own process has it open."""

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> SharedFile:
        """Of this process's file."""
        found = os.fstat(descriptor)
        return cls(f"/proc/{os.getpid()}/fd/{descriptor}", found.st_dev, found.st_ino)


def shared_blocks(
    nbytes: int, hosts: Sequence[int], rank: int, allgather: AllgatherObject
) -> Steps[tuple[list[Any], str]]:
    """A block of each rank of this host, by local rank; every rank must run it.

    hosts:   host number of each rank.
    Returns: the blocks, 1-D uint8, zero, and an empty text; or on all ranks no blocks, and the reason.
    """
    local = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    steps, shared_files = _allocate(nbytes, len(local)), None
    while True:
        shared_file, error = None, ""
        try:
            shared_file = steps.send(shared_files)
        except StopIteration as done:
            return done.value, ""
        except OSError as exc:
            error = str(exc)
        gathered = yield from allgather((shared_file, error))
        errors = [f"rank {number}: {each}" for number, (_, each) in enumerate(gathered) if each]
        if errors:
            steps.close()
            return [], errors[0]
        shared_files = [gathered[each][0] for each in local]


def _allocate(nbytes: int, local_size: int) -> Generator[SharedFile | None, list[SharedFile] | None, list[Any]]:
    """Allocate a block and map those of all ranks of this host; after each step all ranks must agree to go on.

    A block is a file that never has a name, so whatever kills a rank leaves nothing. Each rank reserves its own block,
    on its NUMA node; when the memory is missing, that is an OSError here, where a write would raise SIGBUS.

    Yields: its file, in exchange for those of all ranks of this host; then nothing.
    """
    descriptor = os.open(SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR, 0o600)
    with open(descriptor, "rb+") as own:
        own.truncate(nbytes)
        shared_files = yield SharedFile.of(descriptor)
        blocks = [mapped(each, nbytes) for each in shared_files or ()]
        yield None
        try:
            os.posix_fallocate(descriptor, 0, nbytes + MARGIN_BYTES)
        except OSError as exc:
            status = os.statvfs(SHARED_MEMORY)
            raise OSError(
                f"{SHARED_MEMORY}, {status.f_blocks * status.f_frsize >> 20} MiB, has no room for {local_size} × "
                f"{nbytes + MARGIN_BYTES >> 20} MiB ({exc.strerror}); enlarge it (docker run --shm-size=…), or lower "
                "RINGREDUCE_FUSION_BUFFER_BYTES and RINGREDUCE_SHARED_SLOT_BYTES"
            ) from exc
        yield None
        own.truncate(nbytes)
    return blocks


def mapped(shared_file: SharedFile, nbytes: int) -> Any:
    """A rank's block, which is freed when no rank has an array of it any more.

    Raises: OSError where its process has another number here, as in another container, or belongs to another user.
    """
    try:
        with open(shared_file.path, "rb+") as file:
            if SharedFile.of(file.fileno())[1:] != shared_file[1:]:
                raise FileNotFoundError
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    except (FileNotFoundError, PermissionError) as exc:
        raise OSError(
            f"{shared_file.path}, the memory of a rank on this host, cannot be opened here: containers must share "
            "process numbers (docker run --pid=…) and the user"
        ) from exc
