"""The memory of the fake machine, and who may touch it when: the search for races.

Every stream numbers its operations. A clock, {stream: number}, says which operations of each stream are known to be
done before a point: those before it in its stream, those of the streams that were waited for, and what the host had
waited for when it queued the operation. Two operations that touch the same bytes, one of them writing, must be ordered:
when the second runs, its clock must cover the first. Else the order was luck, whatever the data say.

    stream 1   write x ── record e ─────────────            clock of e: {1: 1}
    stream 2                  wait e ── read x              clock of the read: {1: 1, 2: 1} covers the write
    stream 3                            read x              clock of the read: {3: 1} does not: a race
"""

import bisect
import ctypes
import threading
from typing import NamedTuple

import numpy as np

ALIGNMENT = 256
POISON = 0xDB
FILLED_BYTES = 4 << 20
"""Memory up to this long is filled with nonsense when it is new and when it is freed; more would take long."""
QUARANTINE_BYTES = 256 << 20
"""Freed memory that stays, poisoned and out of use, so that who uses it still is found."""
QUARANTINE_FILES = 32
"""Of it what is memory of several processes: each keeps a file open."""


class Use(NamedTuple):
    """An operation that has touched low:high."""

    low: int
    high: int
    writes: bool
    operation: object

    def is_before(self, clock):
        return clock.get(self.operation.stream.number, 0) >= self.operation.number

    def __str__(self):
        return f"{self.operation} {'writes' if self.writes else 'reads'} {self.high - self.low} bytes at {self.low:#x}"


class Allocation:
    """A piece of device or pinned memory. `pool`: the stream whose pool it goes back to; None: not of a pool.

    shared: it is SharedMemory of several processes;  is_foreign: of another one, which is mapped here.
    """

    def __init__(self, nbytes, kind, device, process, pool=None, shared=None, is_foreign=False):
        self.nbytes, self.kind, self.device, self.process, self.pool = nbytes, kind, device, process, pool
        self.shared, self.is_foreign = shared, is_foreign
        self._backing = np.empty(nbytes + ALIGNMENT, np.uint8) if shared is None else shared.bytes
        if nbytes <= FILLED_BYTES and not is_foreign:
            self._backing.fill(0xCD)
        self.base = -(-self._backing.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.mapped = set()  # the other processes that have mapped it by CUDA IPC
        self.freed_by = ""
        self.copies_into = 0  # queued and not run: what they will write is no host's change
        self.uses = []

    def __str__(self):
        where = f"GPU {self.device}" if self.kind == "device" else "the host"
        return f"{self.nbytes} bytes on {where} of {self.process} at {self.base:#x}"

    def poison(self):
        if self.nbytes <= FILLED_BYTES and not self.is_foreign:
            ctypes.memset(self.base, POISON, self.nbytes)


class Memory:
    """All memory of the machine, by address."""

    def __init__(self):
        self._bases = []
        self._at = {}
        self._lock = threading.RLock()  # of both: ranks are threads
        self._quarantine = []
        self.used_bytes = {}  # by device

    def add(self, allocation):
        if allocation.kind == "device" and not allocation.is_foreign:
            self.used_bytes[allocation.device] = self.used_bytes.get(allocation.device, 0) + allocation.nbytes
        with self._lock:
            bisect.insort(self._bases, allocation.base)
            self._at[allocation.base] = allocation
        return allocation

    def starts(self, address):
        """The allocation in use that begins there, or None."""
        allocation = self._at.get(address)
        return None if allocation is None or allocation.freed_by else allocation

    def of(self, address):
        """The allocation, in use or in quarantine, that holds an address, or None."""
        with self._lock:
            place = bisect.bisect_right(self._bases, address) - 1
            allocation = self._at[self._bases[place]] if place >= 0 else None
        return allocation if allocation and address < allocation.base + allocation.nbytes else None

    def in_use(self):
        """What was neither freed nor unmapped, but for the memory of pools."""
        return [each for each in self._at.values() if each.pool is None and not each.freed_by]

    def free(self, allocation, by):
        allocation.freed_by = by
        allocation.poison()
        allocation.uses = []
        if allocation.kind == "device" and not allocation.is_foreign:
            self.used_bytes[allocation.device] -= allocation.nbytes
        if allocation.shared is not None:
            allocation.shared.close()
        self._quarantine.append(allocation)
        for each in [each for each in self._quarantine if each.shared is not None][:-QUARANTINE_FILES]:
            self._forget(each)
        while sum(each.nbytes for each in self._quarantine) > QUARANTINE_BYTES:
            self._forget(self._quarantine[0])

    def _forget(self, allocation):
        self._quarantine.remove(allocation)
        with self._lock:
            self._bases.remove(allocation.base)
            del self._at[allocation.base]

    def what_is_wrong(self, operation, address, nbytes):
        """Why an operation must not touch these bytes at all, whenever; empty when it may."""
        allocation = self.of(address)
        what = f"{operation} touches {nbytes} bytes at {address:#x}"
        if allocation is None:
            return f"{what}: neither a GPU's memory nor pinned memory"
        if address + nbytes > allocation.base + allocation.nbytes:
            return f"{what}: past the end of {allocation}"
        if allocation.freed_by:
            return f"{what}: {allocation} was freed by {allocation.freed_by}"
        process = operation.stream.process
        if not {process, allocation.process} & {"main"} and process not in {allocation.process, *allocation.mapped}:
            return f"{what}: {allocation} is not mapped in {process}"
        return ""

    def is_in_a_pool(self, address):
        """True where memory went back to CuPy's pool: a GPU would not notice that it is still used."""
        allocation = self.of(address)
        return allocation is not None and allocation.pool is not None and bool(allocation.freed_by)

    def use(self, operation, address, nbytes, writes):
        """Note a use, and return the earlier uses with which it is in no order."""
        allocation = self.of(address)
        use = Use(address, address + nbytes, writes, operation)
        races, kept = [], []
        for other in allocation.uses:
            apart = other.high <= use.low or use.high <= other.low
            ordered = other.is_before(operation.clock)
            if not apart and not ordered and (writes or other.writes):
                races.append(other)
            covered = use.low <= other.low and other.high <= use.high
            # who is in order with this use is in order with the other one too: it need not be kept
            if not (covered and ordered and (writes or not other.writes)):
                kept.append(other)
        kept.append(use)
        allocation.uses = kept
        return [f"no order between: {other}; {use}" for other in races]
