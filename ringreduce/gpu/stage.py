"""Waiting for a GPU as for a message, while the thread does something else; and memory on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringreduce.arrays.cuda import Block, Event, Pinned, Stream
from ringreduce.transport.base import Work

if TYPE_CHECKING:
    from concurrent.futures import Future


class Done(Work):
    """See `transport.base.Work`: this rank's GPU has reached an event, or a thread its result."""

    def __init__(self, event: Event | Future[Any], rank: int) -> None:
        self._event = event
        self.peer = rank

    def done(self) -> bool:
        """See `Work.done`."""
        return self._event.done()


class Stage:
    """The resources of one slot in flight: a stream, and memory on the GPU and on the host for its work."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._block: Block | None = None
        self._pinned: Pinned | None = None

    def block(self, nbytes: int) -> Block:
        """At least `nbytes` on the GPU; kept for later calls."""
        if self._block is None or self._block.nbytes < nbytes:
            self.free()
            self._block = Block(self.stream.device, nbytes)
        return self._block

    def pinned(self, nbytes: int) -> Pinned:
        """At least `nbytes` on the host; kept for later calls."""
        if self._pinned is None or self._pinned.array.nbytes < nbytes:
            self.stream.synchronize()  # copies may still use the old one
            self._pinned = Pinned(nbytes)
        return self._pinned

    def free(self) -> None:
        """Free the memory on the GPU; waits for the stream."""
        self.stream.synchronize()
        if self._block is not None:
            self._block.free()
        self._block = None
