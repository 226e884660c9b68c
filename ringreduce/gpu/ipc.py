"""GPU memory that all ranks of a host map: each rank's slots, and the events that order their use.

    GPU of rank r   | slot 0 | slot 1 | slot 2 | slot 3 |     mapped by the other ranks through CUDA's IPC
                    PACKED[0..3], SUMMED[0..3]                events, opened by the other ranks

A rank queues the work that fills a slot, records the slot's event behind it, and then publishes its flag in the host's
shared memory (window.py): "recorded". A rank that sees the flag makes its own stream wait for the event. So GPUs wait
for GPUs; the host must see the flag first, because waiting for an event that was never recorded returns at once.

An event is recorded again for the slot's next use, SLOTS sequence numbers later. No rank waits for the wrong record: by
then all members have queued their wait for the earlier one, since they have published later sequence numbers; see the
proof in collectives/shared.py.

In an elastic job a rank publishes its flag only when its GPU has done the work, so no GPU waits for another process,
and none waits for one that has died, whose events are never done.

Works for several ranks on one GPU too, and, without IPC, for ranks that are threads of one process.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from ringreduce.arrays.cuda import Block, Device, Event, Stream, runtime
from ringreduce.transport import waiting
from ringreduce.transport.base import Work
from ringreduce.transport.window import SLOTS, Flags

IPC_HANDLE = np.dtype("V64")  # of memory or of an event
_HANDLE = np.dtype(
    [
        ("process", np.int64),
        ("memory", np.uint64),
        ("events", np.uint64, (2, SLOTS)),
        ("memory_handle", IPC_HANDLE),
        ("event_handles", IPC_HANDLE, (2, SLOTS)),
    ]
)
HANDLE_BYTES = _HANDLE.itemsize


@functools.cache
def process() -> int:
    """A random id of this process; pids can be equal in two containers."""
    return int.from_bytes(os.urandom(7), "little")


class Slots:
    """The slots of all members on this host, as one of them uses them: its own from the start, others' once opened."""

    def __init__(self, device: Device, slot_bytes: int, flags: Flags, elastic: bool) -> None:
        """slot_bytes: a multiple of 256. Raises CuPy's CUDARuntimeError where there is no memory."""
        self.device, self.slot_bytes, self.flags, self.elastic = device, slot_bytes, flags, elastic
        self.rank, self.size = flags.rank, flags.size
        self._queued: deque[tuple[Event, int, int]] = deque()  # in an elastic job: what is to be published
        self._own = Block(device, SLOTS * slot_bytes)
        with device:
            kind = runtime().eventInterprocess | runtime().eventDisableTiming
            self._own_events = [[int(runtime().eventCreateWithFlags(kind)) for _ in range(SLOTS)] for _ in range(2)]
        self._memory: list[int] = []  # each member's
        self._events: list[list[list[int]]] = []  # each member's, by flag and slot
        self._mapped: list[int] = []
        self._opened: list[int] = []

    def handle(self) -> Any:
        """What the other members need to map this rank's slots: HANDLE_BYTES of uint8."""
        handle = np.zeros((), _HANDLE)
        handle["process"], handle["memory"], handle["events"] = process(), self._own.pointer, self._own_events
        with self.device:
            handle["memory_handle"] = np.void(runtime().ipcGetMemHandle(self._own.pointer))
            handle["event_handles"] = [
                [np.void(runtime().ipcGetEventHandle(e)) for e in kind] for kind in self._own_events
            ]
        return handle.reshape(1).view(np.uint8)

    def open(self, handles: Iterable[Any]) -> None:
        """Map the members', in order. Raises CuPy's CUDARuntimeError where one cannot be; `close` what was then."""
        for each in handles:
            self._open(each.view(_HANDLE)[0])

    def _open(self, handle: Any) -> None:
        if handle["process"] == process():
            self._memory.append(int(handle["memory"]))
            self._events.append(handle["events"].tolist())
            return
        with self.device:
            lazily = runtime().cudaIpcMemLazyEnablePeerAccess
            self._mapped.append(int(runtime().ipcOpenMemHandle(handle["memory_handle"].tobytes(), lazily)))
            events = [
                [int(runtime().ipcOpenEventHandle(each.tobytes())) for each in kind] for kind in handle["event_handles"]
            ]
        self._memory.append(self._mapped[-1])
        self._opened += itertools.chain(*events)
        self._events.append(events)

    def addresses(self, sequence: int) -> list[int]:
        """The address of the slot of a sequence number on every member's GPU."""
        return [memory + sequence % SLOTS * self.slot_bytes for memory in self._memory]

    def publish(self, flag: int, sequence: int, stream: Stream) -> None:
        """Record on a stream that this rank's part of `sequence` is done, and publish the record."""
        if self.elastic:
            self._queued.append((stream.record(), flag, sequence))
            return
        with self.device:
            runtime().eventRecord(self._own_events[flag][sequence % SLOTS], stream.pointer)
        self.flags.publish(flag, sequence)

    def follow(self, flag: int, sequence: int, stream: Stream) -> None:
        """Make a stream wait for the others' part of `sequence`; `flags` has shown that all have published it."""
        for rank, events in enumerate(self._events):
            if rank != self.rank and not self.elastic:
                runtime().streamWaitEvent(stream.pointer, events[flag][sequence % SLOTS])

    def publish_done(self) -> None:
        """Publish what this rank's GPU has done meanwhile."""
        while self._queued and self._queued[0][0].done():
            _, flag, sequence = self._queued.popleft()
            self.flags.publish(flag, sequence)

    def close(self) -> None:
        """Unmap the others'; after all members have, each may `free` its own."""
        with self.device:
            for memory in self._mapped:
                runtime().ipcCloseMemHandle(memory)
        for event in self._opened:
            runtime().eventDestroy(event)
        self._mapped, self._opened = [], []

    def free(self) -> None:
        """Free this rank's, after all members have closed theirs."""
        self._own.free()
        for event in itertools.chain(*self._own_events):
            runtime().eventDestroy(event)


class PublishedWhenDone(Work):
    """Work of an elastic job: who waits for the others publishes meanwhile what its own GPU has done."""

    waits_for = waiting.WaitsFor.FLAGS

    def __init__(self, work: Work, peers: Slots) -> None:
        self._work, self._peers = work, peers

    @property
    def peer(self) -> int:  # type: ignore[override]
        """See `Work`."""
        return self._work.peer

    def done(self) -> bool:
        """See `Work.done`."""
        self._peers.publish_done()
        return self._work.done()
