"""Questions to all ranks, what they do: each is open until all have answered, or have not in time."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count

from ..connection.wire import Answer

PATIENCE_S = 2.0
"""How long all answers may take; an agent takes stack_dumper.ANSWER_S."""

Deliver = Callable[["Question"], None]


def nobody(_: "Question") -> None:
    """Deliver to nobody: who asks looks at the answers himself."""


@dataclass
class Question:
    """One question, and the answers that have come so far, by rank; `deliver` is called when it is closed."""

    number: int
    asked: frozenset[int]
    until_s: float
    deliver: Deliver
    answers: dict[int, Answer] = field(default_factory=dict)


class Questions:
    """Those of one job. Times are seconds on any one clock."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._open: dict[int, Question] = {}

    def begin(self, asked: Collection[int], now_s: float, deliver: Deliver = nobody) -> Question:
        """Return a new question to the ranks `asked`; if these are none it is closed at once."""
        question = Question(next(self._numbers), frozenset(asked), now_s + PATIENCE_S, deliver)
        self._open[question.number] = question
        if not asked:
            self._close(question)
        return question

    def answer(self, rank: int, answer: Answer) -> None:
        """Take an answer; one to a question that is closed, or that was not asked of this rank, is too late."""
        question = self._open.get(answer.number)
        if question and rank in question.asked:
            question.answers[rank] = answer
            if question.answers.keys() >= question.asked:
                self._close(question)

    @property
    def deadline_s(self) -> float:
        """When the next one is to be closed."""
        return min((question.until_s for question in self._open.values()), default=math.inf)

    def expire(self, now_s: float) -> None:
        """Close those whose time is over."""
        for question in list(self._open.values()):
            if now_s >= question.until_s:
                self._close(question)

    def _close(self, question: Question) -> None:
        del self._open[question.number]
        question.deliver(question)
