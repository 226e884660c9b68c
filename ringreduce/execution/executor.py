"""The executor of one process set: runs operations in the order given, which must be the same on all its ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from ringreduce.execution import operations
from ringreduce.execution.context import Context
from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Submission
from ringreduce.transport.base import Steps, Task, Work
from ringreduce.transport.waiting import WaitsFor


class Executor:
    """The queue of one process set's operations, which only the thread that polls runs (engine/polling.py).

    Those of a channel are enqueued by the user's threads, with the inbox's lock held.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.moved_s = time.monotonic()
        self.queue: deque[Task[None]] = deque()

    @property
    def busy(self) -> bool:
        """True while an operation is under way or queued."""
        return bool(self.queue)

    def run(self, submissions: Sequence[Submission], divisor: int) -> None:
        """Run operations after all earlier ones.  divisor: of an Average."""
        for each in submissions:
            each.divisor = divisor
        self.enqueue(operations.run(submissions, self.context))

    def enqueue(self, steps: Steps[None]) -> None:
        """Run these steps after all earlier ones."""
        if not self.queue:
            self.moved_s = time.monotonic()
        self.queue.append(Task(steps))
        self.context.busy[self] = None  # last: see `_rest`

    def advance(self, latency_critical: bool) -> bool:
        """Run the queue as far as possible without waiting; True when anything moved.

        latency_critical: poll flags some microseconds longer before the engine does something else.
        """
        moved = False
        try:
            while self.queue and self.queue[0].ready(latency_critical):
                moved = True
                self.queue[0].step()
                if self.queue[0].ended:
                    self.queue.popleft()
        finally:
            if self.context.completions.settled:
                self.context.completions.flush()
        if moved:
            self.moved_s = time.monotonic()
            if not self.queue:
                self._rest()
        return moved

    def _rest(self) -> None:
        """Leave `busy`, unless one of the user's threads enqueues something just now."""
        self.context.busy.pop(self, None)
        if self.queue:
            self.context.busy[self] = None

    def waits_for(self) -> WaitsFor:
        """What the current operation must be polled for."""
        if not self.queue:
            return WaitsFor.NOTHING
        work = self.queue[0].work
        return WaitsFor.FLAGS if work is None else work.waits_for

    def stuck_on(self) -> int | None:
        """The rank that the current operation waits for."""
        work = self.queue[0].work if self.queue else None
        return None if work is None else work.peer

    def abandon(self) -> None:
        """Drop all operations; the current one will never complete. Its messages are left to `InFlight`."""
        if self.queue:
            self.context.gpu.abandon(self.queue[0].steps)
        self.queue.clear()
        self._rest()


class Running:
    """What runs on one process set or channel, on this rank; the inbox's lock guards `running`."""

    counts = False  # how often each operation is submitted

    def __init__(self, number: int, executor: Executor, name: str) -> None:
        """name: of unnamed submissions."""
        self.number, self.name = number, name
        self.executor = executor
        self.executors = [executor]
        self.members = executor.context.members  # ranks of the world, by rank in the set
        self.running: dict[str, Submission] = {}  # submissions that are ready, and not complete
        self.closed = ""  # not empty: which rank has left, and why; nothing can run any more
        self.leaver = -1

    def numbered(self, signature: Signature) -> Signature:
        """The signature that tells an unnamed submission apart; with the lock held."""
        return signature

    @property
    def busy(self) -> bool:
        """True while an operation is under way or queued."""
        return any([each.busy for each in self.executors])  # noqa: C419, a list: takes half the time

    def poll(self, latency_critical: bool = True) -> bool:
        """Advance all operations as far as possible without waiting; True when anything moved."""
        return any([each.advance(latency_critical) for each in self.executors if each.busy])  # noqa: C419, all advance

    def stuck(self) -> Executor:
        """The executor that has not moved for the longest time, of those that are busy."""
        return min([each for each in self.executors if each.busy], key=lambda each: each.moved_s)

    def close(self) -> list[Submission]:
        """Close it, with the lock held; returns what fails: here all that is not complete."""
        return self.abandon()

    def abandon(self) -> list[Submission]:
        """Drop all operations, with the lock held; returns what was not complete."""
        lost, self.running = list(self.running.values()), {}
        for each in self.executors:
            each.abandon()
        self.executor.context.algorithms.abandon()
        return lost


class Ended(Work):
    """Done when a process set is closed, by its schedule, and all that stood there before has run."""

    def __init__(self, on: Running) -> None:
        self._on = on

    @property
    def peer(self) -> int:  # type: ignore[override]
        """The rank that its operation waits for, else its coordinator."""
        stuck_on = self._on.executor.stuck_on()
        return self._on.members[0] if stuck_on is None else stuck_on

    def done(self) -> bool:
        """See `Work.done`."""
        return bool(self._on.closed) and not self._on.busy
