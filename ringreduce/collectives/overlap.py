"""Several collectives in flight at the same time, so that one is on the wire while another is summed."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from ringreduce.transport.base import Steps, Task, Work


class AnyOf(Work):
    """See `Work`: one of several tasks can go on."""

    def __init__(self, tasks: Sequence[Task[Any]]) -> None:
        self.tasks = [each for each in tasks if not each.ended]

    @property
    def peer(self) -> int:  # type: ignore[override]
        """The rank that the oldest waits for."""
        return next(each.work.peer for each in self.tasks if each.work is not None)

    def done(self) -> bool:
        """See `Work.done`."""
        for each in self.tasks:  # noqa: SIM110, half the time of any() and a generator
            if each.ready():
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


def overlapped(collectives: Iterable[Steps[None]], width: int) -> Steps[None]:
    """Run collectives, `width` at a time.

    They begin in order, and number n begins when number n - width has ended, so it may use the memory and the channel
    numbered n % width. The oldest advances first.
    """
    coming = iter(collectives)
    running: deque[Task[None]] = deque()
    while True:
        running.extend(Task(steps) for steps in itertools.islice(coming, width - len(running)))
        if not running:
            return
        moved = [each.advance() for each in running]
        while running and running[0].ended:
            running.popleft()
        if not any(moved):
            yield AnyOf(running)


def until_ended(one: Task[None], others: Sequence[Task[None]]) -> Steps[None]:
    """Run one collective to its end, and others as far as they come meanwhile."""
    tasks = [one, *(each for each in others if each is not one)]
    while True:
        moved = [each.advance() for each in tasks]
        if one.ended:
            return
        if not any(moved):
            yield AnyOf(tasks)
