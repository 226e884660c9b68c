"""Questions to all ranks, what they do: each is open until all have answered, or have not in time."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count

from ..connection.wire import State

PATIENCE_S = 2.0
"""How long all answers may take; an agent takes stack_dumper.ANSWER_S."""

Deliver = Callable[["Inquiry"], None]


def nobody(_: "Inquiry") -> None:
    """Deliver to nobody: who asks looks at the answers himself."""


@dataclass
class Inquiry:
    """One question, and the answers that have come so far, by rank; `deliver` is called when it is closed."""

    number: int
    asked: frozenset[int]
    until_s: float
    deliver: Deliver
    answers: dict[int, State] = field(default_factory=dict)


class Inquiries:
    """Those of one job. Times are seconds on any one clock."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._open: dict[int, Inquiry] = {}

    def begin(self, asked: Collection[int], now_s: float, deliver: Deliver = nobody) -> Inquiry:
        """Return a new question to the ranks `asked`; if these are none it is closed at once."""
        inquiry = Inquiry(next(self._numbers), frozenset(asked), now_s + PATIENCE_S, deliver)
        self._open[inquiry.number] = inquiry
        if not asked:
            self._close(inquiry)
        return inquiry

    def answer(self, rank: int, state: State) -> None:
        """Take an answer; one to a question that is closed, or that was not asked of this rank, is too late."""
        inquiry = self._open.get(state.number)
        if inquiry and rank in inquiry.asked:
            inquiry.answers[rank] = state
            if inquiry.answers.keys() >= inquiry.asked:
                self._close(inquiry)

    @property
    def deadline_s(self) -> float:
        """When the next one is to be closed."""
        return min((inquiry.until_s for inquiry in self._open.values()), default=math.inf)

    def expire(self, now_s: float) -> None:
        """Close those whose time is over."""
        for inquiry in list(self._open.values()):
            if now_s >= inquiry.until_s:
                self._close(inquiry)

    def _close(self, inquiry: Inquiry) -> None:
        del self._open[inquiry.number]
        inquiry.deliver(inquiry)
