"""A process set on one rank: what is pending in it, and the operations under way, one after the other."""

from __future__ import annotations

import time
from collections import deque

from ringreduce.engine.cache import Cache
from ringreduce.engine.context import Context
from ringreduce.engine.coordinator import Coordinator
from ringreduce.engine.submission import Submission
from ringreduce.transport.base import Steps, Work
from ringreduce.transport.window import Arrival


class ProcessSetState:
    """One process set's; `pending` and `running` are shared with the threads that submit, under the engine's lock."""

    def __init__(self, number: int, context: Context, coordinator: Coordinator | None) -> None:
        self.number = number
        self.context = context
        self.members = context.members
        """Ranks of the world, by rank in the set."""
        self.algorithms = context.algorithms
        self.coordinator = coordinator
        """On the first member only."""
        self.cache = Cache()
        self.seen = 0
        """The number of the last response."""
        self.submitted = 0
        """Submissions without a name so far: they are numbered."""
        self.pending: dict[str, Submission] = {}
        """What this rank has submitted and the ranks have not agreed on yet, by key, the oldest first."""
        self.running: dict[str, Submission] = {}
        """What they have agreed on, and is not done yet."""
        self.joined = False
        self.closed = ""
        """Not empty: which rank has left, and why; nothing can be run any more."""
        self.leaver = -1
        self.moved_s = time.monotonic()
        self.waits_for: Work | None = None
        self._queue: deque[Steps[None]] = deque()
        self._abandoned: list[Steps[None]] = []
        """What will never be complete. MPI may still read or write its memory: that must stay."""

    @property
    def leader(self) -> int:
        """The rank that coordinates."""
        return self.members[0]

    @property
    def busy(self) -> bool:
        """True while an operation is under way or queued."""
        return bool(self._queue)

    def enqueue(self, steps: Steps[None]) -> None:
        """Run these steps when all earlier ones are done."""
        if not self._queue:
            self.moved_s = time.monotonic()
        self._queue.append(steps)

    def advance(self, draining: bool) -> bool:
        """Move on as far as it goes without waiting; True when anything moved.

        hurried: somebody waits for a result: look some microseconds longer before the engine does something else.
        """
        moved = False
        try:
            while self._queue:
                if self.waits_for is not None:
                    if not (self._is_done_soon() if draining else self.waits_for.done()):
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
        submission = self.waits_for
        return (
            submission.done_soon() if isinstance(submission, Arrival) else submission is not None and submission.done()
        )

    def stuck_on(self) -> int | None:
        """The rank of the world whose message the operation under way waits for."""
        return None if self.waits_for is None else self.waits_for.peer

    def clear(self) -> None:
        """Drop everything; what was under way will never be complete."""
        self.pending, self.running, self.waits_for = {}, {}, None
        self._abandoned.extend(self._queue)
        self._queue.clear()


class Idle:
    """See `transport.base.Submission`: nothing is under way in a process set."""

    def __init__(self, state: ProcessSetState) -> None:
        self._lane = state

    @property
    def peer(self) -> int:
        """The rank that it waits for itself."""
        stuck_on = self._lane.stuck_on()
        return self._lane.leader if stuck_on is None else stuck_on

    def done(self) -> bool:
        """See `Submission.done`."""
        return not self._lane.busy

    def wait(self) -> None:
        """Called when it is done."""
