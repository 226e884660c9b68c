"""Several collectives in flight at the same time, so that one is on the wire while another is summed."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from ringreduce.transport.base import Steps, Work


class AnyOf(Work):
    """See `Work`: one of several is done."""

    def __init__(self, requests: Sequence[Work]) -> None:
        self.requests = requests

    @property
    def peer(self) -> int:  # type: ignore[override]
        """The rank that the oldest waits for."""
        return self.requests[0].peer

    def done(self) -> bool:
        """See `Work.done`."""
        for each in self.requests:  # noqa: SIM110, half the time of any() and a generator
            if each.done():
                return True
        return False


class Order:
    """A point that concurrent collectives must pass in order; `passed` is the number of the next one that may."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.passed = 0


class InOrder(Work):
    """See `Work`: all before this one have passed."""

    def __init__(self, order: Order, number: int) -> None:
        self._order, self._number = order, number
        self.peer = order.rank

    def done(self) -> bool:
        """See `Work.done`."""
        return self._order.passed == self._number


class Running:
    """One collective, and what it waits for."""

    def __init__(self, steps: Steps[None]) -> None:
        self.steps = steps
        self.request: Work | None = None
        self.ended = False

    def advance(self) -> bool:
        """Advance as far as possible without waiting; True when it advanced."""
        advanced = False
        while not self.ended and (self.request is None or self.request.done()):
            advanced = True
            try:
                self.request = next(self.steps)
            except StopIteration:
                self.ended, self.request = True, None
        return advanced


def overlapped(collectives: Iterable[Steps[None]], width: int) -> Steps[None]:
    """Run collectives, `width` at a time.

    They begin in order, and number n begins when number n - width has ended, so it may use the memory and the channel
    numbered n % width. The oldest advances first.
    """
    coming = iter(collectives)
    running: deque[Running] = deque()
    while True:
        running.extend(Running(steps) for steps in itertools.islice(coming, width - len(running)))
        if not running:
            return
        advanced = sum(each.advance() for each in running) > 0
        while running and running[0].ended:
            running.popleft()
        if not advanced and running:
            yield AnyOf([each.request for each in running if each.request is not None])


def until_ended(one: Running, others: Sequence[Running]) -> Steps[None]:
    """Run one collective to its end, and others as far as they come meanwhile."""
    while True:
        moved = [each.advance() for each in (one, *others)]
        if one.ended:
            return
        if not any(moved):
            yield AnyOf([each.request for each in (one, *others) if each.request is not None])
