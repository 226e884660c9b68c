"""Questions to ranks: when they are closed, and which answers count."""

import math

from ringrun.connection.wire import State
from ringrun.job.inquiry import PATIENCE_S, Inquiries, Inquiry


def answer(number: int, doing: str) -> State:
    return State(number, doing, "", "")


def test_a_question_is_closed_when_all_have_answered() -> None:
    inquiries, closed = Inquiries(), []
    first = inquiries.begin({0, 2}, 10.0, closed.append)
    second = inquiries.begin({2}, 11.0, closed.append)
    assert first.number != second.number
    assert inquiries.deadline_s == 10.0 + PATIENCE_S
    inquiries.answer(2, answer(first.number, "a"))
    inquiries.answer(1, answer(first.number, "was not asked"))
    assert closed == []
    inquiries.answer(2, answer(second.number, "b"))
    assert closed == [second]
    inquiries.answer(0, answer(first.number, "c"))
    assert closed == [second, first]
    assert {rank: state.doing for rank, state in first.answers.items()} == {2: "a", 0: "c"}
    assert inquiries.deadline_s == math.inf


def test_a_question_is_closed_in_time_and_what_comes_later_is_dropped() -> None:
    inquiries, closed = Inquiries(), []
    question = inquiries.begin({0, 1}, 10.0, closed.append)
    inquiries.answer(1, answer(question.number, "x"))
    inquiries.expire(10.0 + PATIENCE_S - 0.1)
    assert closed == []
    inquiries.expire(10.0 + PATIENCE_S)
    assert closed == [question]
    inquiries.answer(0, answer(question.number, "late"))
    inquiries.answer(0, answer(99, "never asked"))
    assert closed == [question]
    assert list(question.answers) == [1]


def test_a_question_to_nobody_is_closed_at_once() -> None:
    closed: list[Inquiry] = []
    assert Inquiries().begin(set(), 0.0, closed.append) in closed
