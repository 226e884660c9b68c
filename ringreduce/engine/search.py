"""Which of some candidates is the fastest, when a measurement is noisy: successive halving. Pure: no clock, no ranks.

All candidates are measured a little; the slower half is dropped, the rest is measured more, and so on. The default,
number 0, is never dropped. In the end it meets the best of the others, in turns; it stays unless it is clearly slower:
in the median, and in nearly every turn, since what disturbs a machine may last as long as a turn.

    rivals of the default     15 -> 8 -> 4 -> 2 -> 1       (turns of each: 1, 1, 2, 2, and 6 in the end)

In turns, forward and then backward, so that a machine that becomes slower or faster meanwhile favours nobody. Noise
makes slower, never faster, and few samples may all have met it: who is dropped is told by the lower quartiles. In the
end there are enough for medians.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

SAMPLES_PER_TURN = 3
LAST_TURNS, LAST_TURNS_WON = 6, 5
MARGIN = 0.03
"""So much faster than the default is clearly faster."""


class Search:
    """Ask `current` whom to measure, tell `record` what was measured, until `ended`; then `best`."""

    def __init__(self, count: int) -> None:
        self._samples: list[list[float]] = [[] for _ in range(count)]
        self._rivals = list(range(1, count))
        self._turns: deque[int] = deque()
        self._before_last: list[int] = []
        """How many samples each had when the last turns began."""
        self._taken = 0
        self.best = 0
        self.ended = not self._rivals
        if self._rivals:
            self._begin()

    @property
    def current(self) -> int:
        """The candidate to be measured now; the best one when the search has ended."""
        return self.best if self.ended else self._turns[0]

    def record(self, cost: float) -> None:
        """What one measurement of `current` has cost: less is better."""
        self._samples[self.current].append(cost)
        self._taken += 1
        if self._taken < SAMPLES_PER_TURN:
            return
        self._taken = 0
        self._turns.popleft()
        if not self._turns:
            self._narrow()

    def cost(self, candidate: int) -> float | None:
        """The median of what was recorded; None for a candidate that was never measured."""
        samples = self._samples[candidate]
        return statistics.median(samples) if samples else None

    def samples(self, candidate: int) -> int:
        """How many were recorded."""
        return len(self._samples[candidate])

    def _begin(self) -> None:
        if len(self._rivals) == 1:
            turns = LAST_TURNS
            self._before_last = [len(each) for each in self._samples]
        else:
            turns = 1 if len(self._rivals) > 4 else 2
        for turn in range(turns):
            order = [0, *self._rivals]
            self._turns += order if turn % 2 == 0 else order[::-1]

    def _narrow(self) -> None:
        """Everybody had the turns: who goes on?"""
        if len(self._rivals) == 1:
            self._end(self._rivals[0])
            return
        by_cost = sorted(self._rivals, key=lambda each: _lower_quartile(self._samples[each]))
        self._rivals = sorted(by_cost[: (len(by_cost) + 1) // 2])
        self._begin()

    def _end(self, rival: int) -> None:
        """Only what was measured in the last turns can be compared."""
        mine, theirs = self._last(0), self._last(rival)
        clearly = statistics.median(theirs) < (1 - MARGIN) * statistics.median(mine)
        won = sum(ours > others for ours, others in zip(_by_turn(mine), _by_turn(theirs), strict=True))
        self.best = rival if clearly and won >= LAST_TURNS_WON else 0
        self.ended = True

    def _last(self, candidate: int) -> Sequence[float]:
        return self._samples[candidate][self._before_last[candidate] :]

    def last_cost(self, candidate: int) -> float | None:
        """As `cost`, of the last turns where there were any: what the decision is made of."""
        last = self._last(candidate) if self._before_last else []
        return statistics.median(last) if last else self.cost(candidate)


def _by_turn(samples: Sequence[float]) -> list[float]:
    """The median of each turn."""
    turns = range(0, len(samples), SAMPLES_PER_TURN)
    return [statistics.median(samples[low : low + SAMPLES_PER_TURN]) for low in turns]


def _lower_quartile(samples: Sequence[float]) -> float:
    return sorted(samples)[(len(samples) - 1) // 4]
