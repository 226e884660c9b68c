"""A process set on one rank: its pending submissions, and the queue of its operations."""

from __future__ import annotations

import time
from collections import deque

from ringreduce.execution.context import Context
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.cache import Cache
from ringreduce.negotiation.coordinator import Coordinator
from ringreduce.transport.base import Steps, Work
from ringreduce.transport.window import Arrival


class ProcessSetState:
    """The state of one process set; the inbox's lock guards `pending` and `running`, shared with submitting threads."""

    def __init__(self, number: int, context: Context, coordinator: Coordinator | None) -> None:
        self.number = number
        self.context = context
        self.members = context.members  # ranks of the world, by rank in the set
        self.algorithms = context.algorithms
        self.coordinator = coordinator  # on the first member only
        self.cache = Cache()
        self.seen = 0  # the number of the last response
        self.submitted = 0  # how many unnamed submissions there were: they are numbered
        self.pending: dict[str, Submission] = {}
        """Submissions that are not ready on all ranks, by key, the oldest first."""
        self.running: dict[str, Submission] = {}  # submissions that are ready, and not complete
        self.joined = False
        self.closed = ""  # not empty: which rank has left, and why; nothing can run any more
        self.leaver = -1
        self.moved_s = time.monotonic()
        self.waits_for: Work | None = None
        self._queue: deque[Steps[None]] = deque()
        self._abandoned: list[Steps[None]] = []
        """Operations that will never complete, kept alive since MPI may still access their memory."""

    @property
    def leader(self) -> int:
        """The rank that coordinates."""
        return self.members[0]

    @property
    def busy(self) -> bool:
        """True while an operation is under way or queued."""
        return bool(self._queue)

    def enqueue(self, steps: Steps[None]) -> None:
        """Run these steps after all earlier ones."""
        if not self._queue:
            self.moved_s = time.monotonic()
        self._queue.append(steps)

    def advance(self, latency_critical: bool) -> bool:
        """Run the queue as far as possible without waiting; True when anything moved.

        latency_critical: poll flags some microseconds longer before the engine does something else.
        """
        moved = False
        try:
            while self._queue:
                if self.waits_for is not None:
                    if not (self._is_done_soon() if latency_critical else self.waits_for.done()):
                        break
                    self.waits_for.wait()
                moved = True
                try:
                    self.waits_for = next(self._queue[0])
                except StopIteration:
                    self.waits_for = None
                    self._queue.popleft()
        finally:
            if moved:
                self.context.completions.flush()
        if moved:
            self.moved_s = time.monotonic()
        return moved

    def _is_done_soon(self) -> bool:
        work = self.waits_for
        return work.done_soon() if isinstance(work, Arrival) else work is not None and work.done()

    def stuck_on(self) -> int | None:
        """The rank of the world that the current operation waits for."""
        return None if self.waits_for is None else self.waits_for.peer

    def clear(self) -> None:
        """Drop all submissions and operations; the current one will never complete."""
        self.pending, self.running, self.waits_for = {}, {}, None
        self._abandoned.extend(self._queue)
        self._queue.clear()


class Idle:
    """A `transport.base.Work` that is done when a process set has no operation queued."""

    def __init__(self, state: ProcessSetState) -> None:
        self._state = state

    @property
    def peer(self) -> int:
        """The rank that the process set waits for."""
        stuck_on = self._state.stuck_on()
        return self._state.leader if stuck_on is None else stuck_on

    def done(self) -> bool:
        """See `Work.done`."""
        return not self._state.busy

    def wait(self) -> None:
        """See `Work.wait`."""
