"""Memory that the ranks of one host share, and flags that publish each rank's progress.

Each rank of the host owns a block; all may read and write all blocks. A block is cut into regions, one for each process
set that uses shared memory at the same time, and a region into slots:

    block of rank r   | flags | region 0: slot 0, 1, 2, 3 | region 1: slot 0, 1, 2, 3 | ... | counters 0 | 1 | ...

Flags only grow, and only their owner writes them. A rank writes data first and then its flag, with a fence between;
others read the flag first and then the data, with a fence between.

Who waits tests the flag, and yields the core between tests: it is almost there, and where ranks share a core the other
needs it. When that took the core for long, other programs have it, and it sleeps (futex.py): a sleeper that is woken
interrupts them. It first sets a word of its own, ASLEEP; who publishes then looks at all of these, with fences between.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.kernels import native
from ringreduce.settings import MOST_REGIONS, SHARED_SLOTS
from ringreduce.transport import futex, waiting
from ringreduce.transport.base import Work
from ringreduce.transport.stores import StoresBySize

CACHE_LINE_BYTES = 64
PACKED, SUMMED = 0, 1
"""A region's flags: how many slots its owner has filled, and in how many it has finished its own chunk."""
GPU_PACKED = 2  # the first of two more for slots on GPUs: there the flags count slots whose work the owner has queued
ASLEEP = 7  # the word of a member's first flag's line; kernels/native.c does as this file does
SIGNED = 4  # the first of two more for `Signatures`
FLAGS_PER_REGION = 6
FLAGS_BYTES = MOST_REGIONS * FLAGS_PER_REGION * CACHE_LINE_BYTES
SLOTS = SHARED_SLOTS  # slots of a region
PIECE_BYTES = 256 << 10
"""What an all-reduce works on at a time, and the most of a slot that a pipelined one uses: its four slots then stay in
a core's second-level cache. A slot has more, for operations that fit in one. Two ranks, Intel Xeon: 161 gradients of
102 MB 22.7 ms, by 1 MiB 26.2; 512 KiB 109 to 133 µs, in one piece 86.
"""
LARGEST_ITEMSIZE = 16  # of an element
ZERO = np.uint8(0)
VECTOR_BYTES = 4096  # from this size on a copy from another core's cache is worth a ufunc's 1 µs
SPINS = 20  # tests of a flag before yielding the core: the other rank is usually microseconds behind
YIELD_S = 200e-6  # then a wait yields this long before the engine looks for other work, which takes it 50 µs
TAKEN_S = 1e-3  # who yields for so long has lost the core to others' work
SLEEPS = 100  # so many waits sleep then
SLEEP_S = 2e-3  # at most


_LOCK = threading.Lock()
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def fence_by_lock() -> None:
    """As `memory_fence`, where there is no compiled module; takes six times as long.

    Nothing moves down past a lock's release or up past an acquire, and a release and a later acquire keep their order.
    On x86 one lock suffices: each of its instructions is a fence.
    """
    _LOCK.acquire()
    _LOCK.release()
    if not _IS_X86:
        _LOCK.acquire()
        _LOCK.release()


memory_fence: Callable[[], None] = native.module.fence if native.module else fence_by_lock
"""Orders this thread's reads and writes of shared memory before it against those after it, for other processes too."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The blocks of one host's ranks, by local rank, each 1-D uint8 of equal length."""

    blocks: Sequence[Any]
    fence: Callable[[], None] = memory_fence
    check: Callable[[int], None] = lambda rank: None  # called during a long wait for a rank (of the world); may raise


def block_bytes(slot_bytes: int, regions: int, group_bytes: int = 0) -> int:
    """The length of a block.  group_bytes: of the part in which a process set negotiates, after all regions.

    A slot has one line more than that, for the number of rows before so many bytes of elements (execution/in_slot.py).
    """
    return FLAGS_BYTES + regions * (SLOTS * (slot_bytes + CACHE_LINE_BYTES) + group_bytes)


def flags_at(number: int, first: int, end: int) -> slice:
    """Where a block has the flags `first` to `end` - 1 of region `number`."""
    low = number * FLAGS_PER_REGION * CACHE_LINE_BYTES
    return slice(low + first * CACHE_LINE_BYTES, low + end * CACHE_LINE_BYTES)


class Flags:
    """The flags PACKED and SUMMED of each member of a process set on this host; number `first` of a region is PACKED.

    members: the members' local ranks;  ranks: their ranks in the world, for reports;  rank: this one's index there.
    """

    def __init__(
        self, window: Window, number: int, first: int, members: Sequence[int], ranks: Sequence[int], rank: int
    ) -> None:
        self.window = window
        self.size = len(members)
        self.rank = rank
        self.ranks = tuple(ranks)
        self.sequence = (
            0  # slots used so far: the next is slot sequence % SLOTS; equal on all members between operations
        )
        # a memoryview's items are read ten times faster than an array's
        flags = [memoryview(window.blocks[k][flags_at(number, first, first + 2)].view(np.int64)) for k in members]
        self._flags = [each[:: CACHE_LINE_BYTES // 8] for each in flags]
        self._asleep = [each[ASLEEP : ASLEEP + 1] for each in flags]
        self._flags[rank][PACKED] = self._flags[rank][SUMMED] = self._asleep[rank][0] = 0
        self._lines = [window.blocks[k][flags_at(number, first, first + 2)] for k in members]
        self._sleeps = 0  # how many of the next waits sleep

    def publish(self, flag: int, sequence: int) -> None:
        """Announce that this rank has done its part of `sequence`, and of all sequence numbers before."""
        self.window.fence()
        self._flags[self.rank][flag] = sequence + 1
        if futex.EXISTS:
            self.window.fence()
            for each in self._asleep:
                if each[0]:
                    futex.wake(self._address(self.rank, flag))
                    break

    def published(self, flag: int, sequence: int) -> bool:
        """True when this rank has published this sequence number."""
        return bool(self._flags[self.rank][flag] > sequence)

    def arrived(self, flag: int, sequence: int) -> bool:
        """True when every member has published this sequence number."""
        for each in self._flags:
            if each[flag] <= sequence:
                return False
        self.window.fence()
        return True

    def arrived_soon(self, flag: int, sequence: int) -> bool:
        """As `arrived`; waits for up to `YIELD_S`, or `SLEEP_S` where others' work has the core."""
        for _ in range(SPINS):
            if self.arrived(flag, sequence):
                return True
        sleeps = self._sleeps > 0
        self._sleeps -= sleeps
        before_s = time.monotonic()
        until_s = before_s + (SLEEP_S if sleeps else YIELD_S)
        while before_s < until_s:
            if sleeps:
                self._sleep(flag, sequence, until_s - before_s)
            else:
                os.sched_yield()
            if self.arrived(flag, sequence):
                return True
            now_s = time.monotonic()
            if futex.EXISTS and not sleeps and now_s - before_s > TAKEN_S:
                self._sleeps = SLEEPS
            before_s = now_s
        return False

    def _sleep(self, flag: int, sequence: int, limit_s: float) -> None:
        """Sleep until a member that is late publishes, or the time is over."""
        mine = self._asleep[self.rank]
        mine[0] = 1
        self.window.fence()
        for member, each in enumerate(self._flags):
            seen = each[flag]
            if seen <= sequence:
                futex.wait(self._address(member, flag), seen, limit_s)
                break
        mine[0] = 0

    def _address(self, member: int, flag: int) -> int:
        return int(self._lines[member].ctypes.data) + flag * CACHE_LINE_BYTES

    def arrival(self, flag: int, sequence: int) -> Arrival:
        """A `Work` that is done when every member has published this sequence number."""
        return Arrival(self, flag, sequence)

    def late(self, flag: int, sequence: int) -> int:
        """The world rank of the first member that has not published this sequence number; this rank's if all have."""
        for rank, each in zip(self.ranks, self._flags, strict=True):
            if each[flag] <= sequence:
                return rank
        return self.ranks[self.rank]


class Signatures(Flags):
    """Where the members compare hashes of what each does next, in a channel (execution/channel.py).

    A flag counts a member's operations, and the words behind it hold the hashes of the last two, and a number beside
    each: a member that signs number n + 2 has seen all sign number n + 1, so all have read number n.
    """

    def __init__(self, window: Window, number: int, members: Sequence[int], ranks: Sequence[int], rank: int) -> None:
        super().__init__(window, number, SIGNED, members, ranks, rank)
        low = (number * FLAGS_PER_REGION + SIGNED) * CACHE_LINE_BYTES + 8
        self._words = [memoryview(window.blocks[k][low : low + 32].view(np.int64)) for k in members]

    @functools.cached_property
    def compiled(self) -> Any:
        """See `Region.compiled`; its memory is these lines."""
        return native.module.Region(self._lines, self._lines, self.rank, 1)

    def sign(self, value: int, beside: int = 0) -> int:
        """Publish the hash of this rank's next operation, and another number; returns the operation's."""
        number = self.sequence
        self.sequence = number + 1
        words = self._words[self.rank]
        words[number % 2], words[2 + number % 2] = value, beside
        self.publish(PACKED, number)
        return number

    def differ(self, number: int) -> None:
        """Change this rank's hash, which all members have signed, so that no other one equals it."""
        self._words[self.rank][number % 2] ^= 1

    def read(self, number: int) -> list[int]:
        """The hashes of all members, which have `arrived` at this number."""
        return [each[number % 2] for each in self._words]

    def beside(self, number: int) -> list[int]:
        """What the members have published beside their hashes."""
        return [each[2 + number % 2] for each in self._words]


class Region(Flags):
    """One process set's part of a window, as one of its members on this host uses it; see `Flags`."""

    @property
    def can_be_compiled(self) -> bool:
        """True when the compiled module can work in it."""
        return native.module is not None and self.size <= native.MOST_PARTS

    def __init__(
        self, window: Window, number: int, slot_bytes: int, members: Sequence[int], ranks: Sequence[int], rank: int
    ) -> None:
        super().__init__(window, number, PACKED, members, ranks, rank)
        self.slot_bytes = slot_bytes
        self.stores = StoresBySize()
        self.reads_peers = True  # until one of its ranks could not (collectives/shared_halves.py)
        first, end = block_bytes(slot_bytes, number), block_bytes(slot_bytes, number + 1)
        self._slots = [window.blocks[k][first:end].reshape(SLOTS, -1) for k in members]
        self._views: dict[Any, list[list[Any]]] = {}

    @functools.cached_property
    def compiled(self) -> Any:
        """The compiled module's view of it; there must be such a module."""
        return native.module.Region(self._lines, self._slots, self.rank, SLOTS)

    @property
    def holds_a_piece_of_each(self) -> bool:
        """True when a slot has room for an element of each member, of any type."""
        return self.slot_bytes >= self.size * LARGEST_ITEMSIZE

    def piece_bytes(self, nbytes: int) -> int:
        """What an all-reduce of so many bytes works on at a time; two pieces are not worth the second's waits."""
        return self.slot_bytes if nbytes <= 2 * PIECE_BYTES else min(self.slot_bytes, PIECE_BYTES)

    def write(self, source: Any, target: Any) -> None:
        """Copy into a slot."""
        target[...] = source

    @staticmethod
    def read(source: Any, target: Any) -> None:
        """Copy 1-D contiguous elements of one type out of a slot that another rank has written.

        NumPy's assignment is memcpy, for which glibc uses `rep movsb` on many processors; from another core's cache
        that reads half as fast as a loop of vector instructions, such as any ufunc, on one (AMD EPYC: 7 and 15 GB/s),
        and a tenth faster on another (Intel Xeon).
        """
        if target.nbytes < VECTOR_BYTES:
            target[...] = source
        else:
            np.bitwise_or(source.view(np.uint8), ZERO, out=target.view(np.uint8))

    def slots(self, sequence: int, dtype: np.dtype[Any]) -> list[Any]:
        """The slot of a sequence number in every member's block: 1-D arrays of `dtype`."""
        views = self._views.get(dtype)
        if views is None:
            nbytes = (self.slot_bytes + CACHE_LINE_BYTES) // dtype.itemsize * dtype.itemsize
            whole = [each[:, :nbytes].view(dtype) for each in self._slots]
            views = self._views[dtype] = [[each[slot] for each in whole] for slot in range(SLOTS)]
        return views[sequence % SLOTS]


class Arrival(Work):
    """See `transport.base.Work`: all members have published a sequence number."""

    waits_for = waiting.WaitsFor.FLAGS

    def __init__(self, flags: Flags, flag: int, sequence: int) -> None:
        self._flags, self._flag, self._sequence = flags, flag, sequence

    @property
    def peer(self) -> int:  # type: ignore[override]
        """The world rank that is waited for."""
        return self._flags.late(self._flag, self._sequence)

    def done(self) -> bool:
        """See `Work.done`."""
        return self._flags.arrived(self._flag, self._sequence)

    def done_soon(self) -> bool:
        """See `Work.done`."""
        return self._flags.arrived_soon(self._flag, self._sequence)

    def wait(self) -> None:
        """See `Work.wait`."""
        if not self.done_soon():
            waiting.until(self._arrived_or_lost)

    def _arrived_or_lost(self) -> bool:
        if self._flags.arrived(self._flag, self._sequence):
            return True
        self._flags.window.check(self.peer)
        return False
