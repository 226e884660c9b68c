"""Memory on the GPUs of one host's ranks that all of them map: each rank's slots, and the events that order their use.

    GPU of rank r   | slot 0 | slot 1 | slot 2 | slot 3 |     mapped by the other ranks through CUDA's IPC
                    PACKED[0..3], SUMMED[0..3]                events, opened by the other ranks

A rank tells its GPU to fill a slot, records the slot's event behind that, and then raises its flag in the host's shared
memory (window.py): "recorded". A rank that sees the flag tells its own GPU to wait for the event. So GPUs wait for
GPUs, and the host says only that there is something to wait for: it must see the flag first, for an event that has not
been recorded yet holds nobody up.

An event is recorded again with the slot's next sequence number, SLOTS sequence numbers later. Nobody waits for the
wrong one: by then all members have told their GPUs to wait for this one, for they have raised the flags of later
sequence numbers; collectives/shared.py counts them.

Works for several ranks on one GPU too, and, without IPC, for ranks that are threads of one process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.gpu import runtime as cuda
from ringreduce.gpu.runtime import Block, Device, SharedEvent, Stream
from ringreduce.transport.window import PACKED, SLOTS, SUMMED, Flags

_CARD = np.dtype(
    [
        ("process", np.int64),
        ("memory", np.uint64),
        ("events", np.uint64, (2, SLOTS)),
        ("memory_handle", np.uint8, cuda.HANDLE_BYTES),
        ("event_handles", np.uint8, (2, SLOTS, cuda.HANDLE_BYTES)),
    ]
)
CARD_BYTES = _CARD.itemsize


@functools.cache
def process() -> int:
    """What tells this process from the others of the host; containers may count theirs alike."""
    return int.from_bytes(os.urandom(7), "little")


class OwnSlots:
    """This rank's slots and events."""

    def __init__(self, device: Device, slot_bytes: int) -> None:
        """slot_bytes: a multiple of 256. Raises CuPy's CUDARuntimeError where there is no memory."""
        self.device, self.slot_bytes = device, slot_bytes
        self.block = Block(device, SLOTS * slot_bytes)
        self.events = [[SharedEvent(device) for _ in range(SLOTS)] for _ in (PACKED, SUMMED)]

    def card(self, exported: bool) -> Any:
        """What the other members need: CARD_BYTES of uint8. exported: they are other processes."""
        card = np.zeros((), _CARD)
        card["process"], card["memory"] = process(), self.block.pointer
        card["events"] = [[event.pointer for event in each] for each in self.events]
        if exported:
            card["memory_handle"] = np.frombuffer(cuda.export(self.block), np.uint8)
            for kind, events in enumerate(self.events):
                for slot, event in enumerate(events):
                    card["event_handles"][kind, slot] = np.frombuffer(event.handle(), np.uint8)
        return card.reshape(1).view(np.uint8)

    def free(self) -> None:
        """Give all back, when nobody maps it any more."""
        self.block.free()
        for event in (*self.events[PACKED], *self.events[SUMMED]):
            event.free()


class PeerSlots:
    """The slots of all members on this host, as one of them uses them."""

    def __init__(self, own: OwnSlots, cards: Sequence[Any], flags: Flags) -> None:
        """cards: the members' of this host, in order. Raises CuPy's CUDARuntimeError where one cannot be mapped."""
        self.own, self.flags = own, flags
        self.rank, self.size = flags.rank, flags.size
        self.slot_bytes = own.slot_bytes
        self._memory: list[int] = []
        self._events: list[Any] = []
        self._mapped: list[int] = []
        self._opened: list[int] = []
        try:
            for card in cards:
                self._open(card.view(_CARD)[0])
        except Exception:
            self.close()
            raise

    def _open(self, card: Any) -> None:
        device = self.own.device
        if card["process"] == process():
            self._memory.append(int(card["memory"]))
            self._events.append(card["events"].tolist())
            return
        self._mapped.append(cuda.map_memory(card["memory_handle"].tobytes(), device))
        self._memory.append(self._mapped[-1])
        events = [[cuda.open_event(each.tobytes(), device) for each in kind] for kind in card["event_handles"]]
        self._opened += events[PACKED] + events[SUMMED]
        self._events.append(events)

    def slots(self, sequence: int) -> list[int]:
        """The address of the slot of a sequence number on every member's GPU."""
        return [memory + sequence % SLOTS * self.slot_bytes for memory in self._memory]

    def publish(self, flag: int, sequence: int, stream: Stream) -> None:
        """Tell the others that a stream will have done this rank's part of `sequence`."""
        self.own.events[flag][sequence % SLOTS].record(stream)
        self.flags.publish(flag, sequence)

    def follow(self, flag: int, sequence: int, stream: Stream) -> None:
        """Let a stream wait for what the others have published of a sequence number; `flags` has told that all have."""
        for rank, events in enumerate(self._events):
            if rank != self.rank:
                cuda.wait_for(events[flag][sequence % SLOTS], stream)

    def close(self) -> None:
        """Give back what is the others'; then, when all have, each frees its own."""
        for memory in self._mapped:
            cuda.unmap_memory(memory, self.own.device)
        for event in self._opened:
            cuda.close_event(event)
        self._mapped, self._opened = [], []
