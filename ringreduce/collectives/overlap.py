"""Several collectives under way at the same time, so that one is on the wire while another is summed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ringreduce.transport import waiting
from ringreduce.transport.base import Steps, Work


class AnyOf:
    """See `Work`: one of several is done."""

    def __init__(self, requests: Sequence[Work]) -> None:
        self._requests = requests

    @property
    def peer(self) -> int:
        """Whom the oldest waits for."""
        return self._requests[0].peer

    def done(self) -> bool:
        """See `Work.done`."""
        return any(each.done() for each in self._requests)

    def wait(self) -> None:
        """See `Work.wait`."""
        if len(self._requests) == 1:
            self._requests[0].wait()
        else:
            waiting.until(self.done)


class Order:
    """A point that collectives under way must pass in order; `passed` is the number of the next one that may."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.passed = 0


class InOrder:
    """See `Work`: all before this one have passed."""

    def __init__(self, order: Order, number: int) -> None:
        self._order, self._number = order, number
        self.peer = order.rank

    def done(self) -> bool:
        """See `Work.done`."""
        return self._order.passed == self._number

    def wait(self) -> None:
        """See `Work.wait`; an earlier one's steps must move meanwhile, so nobody waits here alone."""


class _Running:
    """One collective, and what it waits for."""

    def __init__(self, steps: Steps[None]) -> None:
        self.steps = steps
        self.request: Work | None = None
        self.ended = False

    def advance(self) -> bool:
        """Move on as far as it goes without waiting; True when it moved."""
        moved = False
        while not self.ended and (self.request is None or self.request.done()):
            if self.request is not None:
                self.request.wait()
            moved = True
            try:
                self.request = next(self.steps)
            except StopIteration:
                self.ended, self.request = True, None
        return moved


def overlapped(collectives: Iterable[Steps[None]], width: int) -> Steps[None]:
    """Run collectives, `width` at a time.

    They begin in order, and number n begins when number n - width has ended, so n % width tells which memory and which
    channel it may use. The older moves first.
    """
    coming = iter(collectives)
    running: deque[_Running] = deque()
    exhausted = False
    while True:
        while not exhausted and len(running) < width:
            steps = next(coming, None)
            if steps is None:
                exhausted = True
            else:
                running.append(_Running(steps))
        if not running:
            return
        moved = sum(each.advance() for each in running) > 0
        while running and running[0].ended:
            running.popleft()
        if not moved and running:
            yield AnyOf([each.request for each in running if each.request is not None])
