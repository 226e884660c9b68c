"""Arrays that a channel's members reduce again and again: all ranks of one host map them, and reduce them in place.

Members decide together, without a message: each publishes a word beside the hash of its operation (`Signatures`).

    0        this rank's array is none of these
    WISHED   it could be: where all members wish it, they move their arrays into memory that can be shared, and map it
    number   of the arrays that all members then have mapped; where all publish the same number, nothing is packed
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.memory import Memory, overlapping
from ringreduce.execution.submission import Submission
from ringreduce.transport.blocks import SHARED_MEMORY, AllgatherObject, SharedFile, mapped

WISHED = 1
ROOM = 2  # times as much memory must be free as all members need
REFUSED = -1  # as 0, for ever


class ArrayMemory(Protocol):
    """What the caller knows of the memory of one array: the payload of an all-reduce."""

    number: int  # see above

    @property
    def nbytes(self) -> int:
        """The size of the array."""

    def move(self) -> tuple[int, Buffer]:
        """Move the array into shared memory, and hold it; returns that file's descriptor, and the array now.

        Raises: OSError where that is impossible.
        """


class SharedArrays:
    """The shared arrays of one channel, on one rank."""

    def __init__(self) -> None:
        self._others: WeakKeyDictionary[ArrayMemory, list[Any]] = WeakKeyDictionary()
        """Every member's bytes, by rank in the channel, while this rank has its own: DDP makes buckets anew."""
        self._count = WISHED

    def common(self, words: list[int], submission: Submission) -> list[Any] | None:
        """Every member's array, by rank; None where these are not what all have mapped."""
        if words[0] <= WISHED or len(set(words)) > 1:
            return None
        (own,) = submission.outputs
        return [each[: own.nbytes].view(own.element.storage) for each in self._others[submission.payload]]

    def share(self, submission: Submission, members: int, allgather: AllgatherObject) -> Generator[Any, Any, int]:
        """Move this array and map the others'; all members call it. Returns its number, or REFUSED, the same on all.

        WISHED where operations that are yet to run would go on with the memory that it has left.
        """
        memory: ArrayMemory = submission.payload
        shared_file, why, stays = None, "", _is_used_by_others(submission)
        try:
            if not stays:
                _check_room(members * memory.nbytes)
                descriptor, array = memory.move()
                submission.inputs = submission.outputs = [array]
                shared_file = SharedFile.of(descriptor)
        except OSError as exc:
            why = str(exc)
        others = yield from allgather((shared_file, why, stays))
        if any(stays for _, _, stays in others):
            return WISHED
        try:
            arrays = [] if any(why for _, why, _ in others) else [mapped(each, memory.nbytes) for each, _, _ in others]
        except OSError:
            arrays = []
        gathered = yield from allgather(bool(arrays))
        memory.number = REFUSED
        if all(gathered):
            self._count += 1
            memory.number, self._others[memory] = self._count, arrays
        return memory.number


def _is_used_by_others(submission: Submission) -> bool:
    """Whether the array has memory in common with one of the channel's other operations."""
    own = submission.outputs
    others = [each for each in list(submission.in_flight.values()) if each is not submission]
    used = [each for other in others for each in (*other.inputs, *other.outputs)]
    return any(overlapping(map(_memory, (*own, each))) is not None for each in used)


def _memory(buffer: Buffer) -> Memory:
    return Memory(buffer.device, buffer.start, buffer.nbytes, "")


def _check_room(nbytes: int) -> None:
    status = os.statvfs(SHARED_MEMORY)
    if status.f_bavail * status.f_frsize < ROOM * nbytes:
        raise OSError(f"{SHARED_MEMORY} has no room for {nbytes >> 20} MiB")
