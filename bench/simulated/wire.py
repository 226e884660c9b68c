"""A wire in virtual time; see cluster.py."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any


class Wire:
    """Carries flows at a time, each with an equal share of its rate; the messages of a flow one after the other."""

    def __init__(self, bytes_per_us: float, later: Callable[..., None]) -> None:
        self._rate, self._later = bytes_per_us, later
        self._flows: dict[Any, deque[tuple[int, Callable[[float], None]]]] = {}
        self._first: list[tuple[float, int, Any]] = []  # of each flow: when it ends, in bytes that each flow has sent
        self._sent, self._at_us = 0.0, 0.0  # these bytes, and until when they are counted
        self._number = itertools.count()
        self._plan = 0

    def enter(self, now_us: float, flow: Any, nbytes: int, left: Callable[[float], None]) -> None:
        """Carry a message, after those of its flow; left(time) is called when it has passed."""
        waiting = self._flows.get(flow)
        if waiting is not None:
            waiting.append((nbytes, left))
            return
        self._count(now_us)
        self._flows[flow] = deque([(nbytes, left)])
        self._begin(now_us, flow)
        self._expect(now_us)

    def _count(self, now_us: float) -> None:
        if self._first:
            self._sent += (now_us - self._at_us) * self._rate / len(self._first)
        self._at_us = now_us

    def _begin(self, now_us: float, flow: Any) -> None:
        heapq.heappush(self._first, (self._sent + self._flows[flow][0][0], next(self._number), flow))

    def _expect(self, now_us: float) -> None:
        self._plan += 1
        if self._first:
            left = max(0.0, self._first[0][0] - self._sent)
            self._later(now_us + left * len(self._first) / self._rate, self._end, self._plan)

    def _end(self, now_us: float, plan: int) -> None:
        """The message that ends first has passed, unless the plan has changed."""
        if plan != self._plan:
            return
        self._count(now_us)
        _, _, flow = heapq.heappop(self._first)
        waiting = self._flows[flow]
        _, left = waiting.popleft()
        if waiting:
            self._begin(now_us, flow)
        else:
            del self._flows[flow]
        self._expect(now_us)
        left(now_us)
