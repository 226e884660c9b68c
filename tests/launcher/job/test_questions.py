"""Questions to ranks: when they are closed, and which answers count."""

import math

from ringrun.connection.wire import Answer
from ringrun.job.questions import PATIENCE_S, Questions


def answer(number, doing):
    return Answer(number, doing, "", "")


def test_a_question_is_closed_when_all_have_answered():
    questions, closed = Questions(), []
    first = questions.begin({0, 2}, 10.0, closed.append)
    second = questions.begin({2}, 11.0, closed.append)
    assert first.number != second.number
    assert questions.deadline_s == 10.0 + PATIENCE_S
    questions.answer(2, answer(first.number, "a"))
    questions.answer(1, answer(first.number, "was not asked"))
    assert closed == []
    questions.answer(2, answer(second.number, "b"))
    assert closed == [second]
    questions.answer(0, answer(first.number, "c"))
    assert closed == [second, first]
    assert {rank: answer.doing for rank, answer in first.answers.items()} == {2: "a", 0: "c"}
    assert questions.deadline_s == math.inf


def test_a_question_is_closed_in_time_and_what_comes_later_is_dropped():
    questions, closed = Questions(), []
    question = questions.begin({0, 1}, 10.0, closed.append)
    questions.answer(1, answer(question.number, "x"))
    questions.expire(10.0 + PATIENCE_S - 0.1)
    assert closed == []
    questions.expire(10.0 + PATIENCE_S)
    assert closed == [question]
    questions.answer(0, answer(question.number, "late"))
    questions.answer(0, answer(99, "never asked"))
    assert closed == [question]
    assert list(question.answers) == [1]


def test_a_question_to_nobody_is_closed_at_once():
    closed = []
    assert Questions().begin(set(), 0.0, closed.append) in closed
