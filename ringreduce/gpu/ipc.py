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
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.gpu.runtime import Block, Device, Event, Stream, runtime
from ringreduce.transport import waiting
from ringreduce.transport.base import Work
from ringreduce.transport.window import PACKED, SLOTS, SUMMED, Flags

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


class OwnSlots:
    """This rank's slots and events."""

    def __init__(self, device: Device, slot_bytes: int) -> None:
        """slot_bytes: a multiple of 256. Raises CuPy's CUDARuntimeError where there is no memory."""
        self.device, self.slot_bytes = device, slot_bytes
        self.block = Block(device, SLOTS * slot_bytes)
        with device:
            flags = runtime().eventInterprocess | runtime().eventDisableTiming
            self.events = [[int(runtime().eventCreateWithFlags(flags)) for _ in range(SLOTS)] for _ in (PACKED, SUMMED)]

    def handle(self) -> Any:
        """What the other members need to map the slots: HANDLE_BYTES of uint8."""
        handle = np.zeros((), _HANDLE)
        handle["process"], handle["memory"] = process(), self.block.pointer
        handle["events"] = self.events
        with self.device:
            handle["memory_handle"] = np.void(runtime().ipcGetMemHandle(self.block.pointer))
            handle["event_handles"] = [[np.void(runtime().ipcGetEventHandle(e)) for e in kind] for kind in self.events]
        return handle.reshape(1).view(np.uint8)

    def free(self) -> None:
        """Free everything, after all members have closed their mappings."""
        self.block.free()
        for event in (*self.events[PACKED], *self.events[SUMMED]):
            runtime().eventDestroy(event)


class PeerSlots:
    """The slots of all members on this host, as one of them maps them."""

    def __init__(self, own: OwnSlots, handles: Sequence[Any], flags: Flags, elastic: bool) -> None:
        """handles: the members', in order. Raises CuPy's CUDARuntimeError where one cannot be mapped."""
        self.own, self.flags, self.elastic = own, flags, elastic
        self._queued: deque[tuple[Event, int, int]] = deque()  # in an elastic job: what is to be published
        self.rank, self.size = flags.rank, flags.size
        self.slot_bytes = own.slot_bytes
        self._memory: list[int] = []
        self._events: list[Any] = []
        self._mapped: list[int] = []
        self._opened: list[int] = []
        try:
            for handle in handles:
                self._open(handle.view(_HANDLE)[0])
        except Exception:
            self.close()
            raise

    def _open(self, handle: Any) -> None:
        if handle["process"] == process():
            self._memory.append(int(handle["memory"]))
            self._events.append(handle["events"].tolist())
            return
        with self.own.device:
            lazily = runtime().cudaIpcMemLazyEnablePeerAccess
            self._mapped.append(int(runtime().ipcOpenMemHandle(handle["memory_handle"].tobytes(), lazily)))
            events = [
                [int(runtime().ipcOpenEventHandle(each.tobytes())) for each in kind] for kind in handle["event_handles"]
            ]
        self._memory.append(self._mapped[-1])
        self._opened += events[PACKED] + events[SUMMED]
        self._events.append(events)

    def slots(self, sequence: int) -> list[int]:
        """The address of the slot of a sequence number on every member's GPU."""
        return [memory + sequence % SLOTS * self.slot_bytes for memory in self._memory]

    def publish(self, flag: int, sequence: int, stream: Stream) -> None:
        """Record on a stream that this rank's part of `sequence` is done, and publish the record."""
        if self.elastic:
            self._queued.append((stream.record(), flag, sequence))
            return
        with self.own.device:
            runtime().eventRecord(self.own.events[flag][sequence % SLOTS], stream.pointer)
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
        """Unmap the others' memory; after all members have, each frees its own."""
        with self.own.device:
            for memory in self._mapped:
                runtime().ipcCloseMemHandle(memory)
        for event in self._opened:
            runtime().eventDestroy(event)
        self._mapped, self._opened = [], []


class PublishedWhenDone(Work):
    """Work of an elastic job: who waits for the others publishes meanwhile what its own GPU has done."""

    waits_for = waiting.WaitsFor.FLAGS

    def __init__(self, work: Work, peers: PeerSlots) -> None:
        self._work, self._peers = work, peers

    @property
    def peer(self) -> int:  # type: ignore[override]
        """See `Work`."""
        return self._work.peer

    def done(self) -> bool:
        """See `Work.done`."""
        self._peers.publish_done()
        return self._work.done()
