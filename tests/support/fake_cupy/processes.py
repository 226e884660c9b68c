"""CUDA's IPC between real processes, on the fake machine: memory and events that others open by a handle of 64 bytes.

    owner     memory without a name | bytes …           handle: process, its file, how long
    others    open /proc/PROCESS/fd/FILE, and map it: the same bytes at another address

Nothing is left behind: the memory goes with the last process that has it, however that ends. Whoever has mapped it
holds a lock, by which the owner can tell that it frees what is still mapped.

An event is three numbers: how often it was recorded, how many of these records are done, and for how many somebody
waits. Streams run late here too, in each process by itself; so a process has a thread that runs what others wait for.
"""

import fcntl
import mmap
import os
import struct
import threading
import time
import weakref

import numpy as np

HANDLE = struct.Struct("<8s7q")
"""Kind, process, file, its inode, bytes, GPU; nothing twice."""
POLL_S, IDLE_POLL_S, IDLE_AFTER = 50e-6, 2e-3, 200
"""How often a process looks what another has done or wants, and how often after so many times in vain."""


class SharedMemory:
    """Bytes that other processes can map; `opened`: by what the owner's `place` says."""

    def __init__(self, nbytes, opened=None):
        if opened is None:
            self._file = os.memfd_create("memory of a fake GPU")
            os.ftruncate(self._file, nbytes)
            self.place = os.getpid(), self._file, os.fstat(self._file).st_ino
        else:
            process, file, inode = self.place = opened
            self._file = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
            if os.fstat(self._file).st_ino != inode:
                os.close(self._file)
                raise FileNotFoundError("what the handle says is there no more")
            fcntl.flock(self._file, fcntl.LOCK_SH)
        self.bytes = np.frombuffer(mmap.mmap(self._file, nbytes), np.uint8)

    @property
    def is_mapped_elsewhere(self):
        """For the owner."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def close(self):
        """The handle is worth nothing any more; the bytes stay while somebody holds them."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)


class Counters:
    """The three numbers of an event."""

    def __init__(self, opened=None):
        self.memory = SharedMemory(mmap.PAGESIZE, opened)
        self._numbers = self.memory.bytes.view(np.int64)
        self.is_foreign = opened is not None

    recorded = property(lambda self: int(self._numbers[0]))
    done = property(lambda self: int(self._numbers[1]))
    wanted = property(lambda self: int(self._numbers[2]))

    def record(self):
        """Called when a record is queued; returns what to call when it is done."""
        number = self._numbers[0] = self.recorded + 1

        def run():
            self._numbers[1] = number

        return run

    def reached(self, number):
        """True when so many records are done; if not, their owner gets to know that somebody waits."""
        if self.done < number and self.wanted < number:
            self._numbers[2] = number  # of several who write at once the last one wins; the others ask again
        return self.done >= number


def handle(kind, memory, device=0):
    """By which another process opens memory, or the counters of an event."""
    return HANDLE.pack(kind.encode(), *memory.place, len(memory.bytes), device, 0, 0)


def parsed(kind, told):
    """What a handle says: where, how many bytes, which GPU. Raises ValueError for one of another kind."""
    name, process, file, inode, nbytes, device, *_ = HANDLE.unpack(told)
    if name.rstrip(b"\0").decode(errors="replace") != kind:
        raise ValueError(name)
    return (process, file, inode), nbytes, device


class Driver(threading.Thread):
    """Runs what other processes' streams wait for, until the machine is gone."""

    def __init__(self, machine):
        super().__init__(name="what other processes wait for", daemon=True)
        self._machine = weakref.ref(machine)

    def run(self):
        in_vain = 0
        while (machine := self._machine()) is not None and not machine.is_closed:
            in_vain = 0 if machine.serve() else in_vain + 1
            del machine
            time.sleep(POLL_S if in_vain < IDLE_AFTER else IDLE_POLL_S)
