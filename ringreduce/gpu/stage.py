"""A GPU as a peer: waiting for it as for a message, while the thread does something else, and memory on both sides."""

from __future__ import annotations

from ringreduce.gpu.runtime import Block, Event, Pinned, Stream
from ringreduce.transport import waiting


class Done:
    """See `transport.base.Submission`: this rank's GPU has come as far as an event."""

    def __init__(self, event: Event, rank: int) -> None:
        self._event = event
        self.peer = rank

    def done(self) -> bool:
        """See `Submission.done`."""
        return self._event.done()

    def wait(self) -> None:
        """See `Submission.wait`."""
        waiting.until(self._event.done)


class Stage:
    """What one slot under way uses: a stream, and memory on the GPU and on the host for work that is queued there."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._block: Block | None = None
        self._pinned: Pinned | None = None

    def block(self, nbytes: int) -> Block:
        """At least `nbytes` on the GPU; kept for later calls."""
        if self._block is None or self._block.nbytes < nbytes:
            self._free_block()
            self._block = Block(self.stream.device, nbytes)
        return self._block

    def pinned(self, nbytes: int) -> Pinned:
        """At least `nbytes` on the host; kept for later calls."""
        if self._pinned is None or self._pinned.array.nbytes < nbytes:
            self.stream.synchronize()  # what is being copied must stay
            self._pinned = Pinned(nbytes)
        return self._pinned

    def free(self) -> None:
        """Give the memory back; waits for the stream."""
        self._free_block()
        self._pinned = None

    def _free_block(self) -> None:
        self.stream.synchronize()
        if self._block is not None:
            self._block.free()
        self._block = None
