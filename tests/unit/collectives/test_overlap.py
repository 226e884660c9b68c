"""Collectives that overlap: in which order they begin and move, and how many are under way. By hand-made requests."""

import pytest

from ringreduce.collectives.overlap import AnyOf, overlapped
from ringreduce.transport.base import Task, Work, complete
from tests.support.loops import in_a_loop


class Wait(Work):
    """A request that is done after so many looks at it."""

    def __init__(self, looks, peer=0):
        self.looks, self.peer = looks, peer

    def done(self):
        self.looks -= 1
        return self.looks < 0


def collective(number, waits, story):
    """Tells when it begins, after each wait, and when it ends."""
    story.append(("begin", number))
    for step, request in enumerate(waits):
        yield request
        story.append((step, number))
    story.append(("end", number))


def run(waits, width):
    """Run collectives with these waits; returns their story."""
    story = []
    complete(overlapped((collective(n, each, story) for n, each in enumerate(waits)), width))
    return story


@in_a_loop("width", [1, 2, 3, 7])
@in_a_loop("seed", range(10))
def test_each_begins_when_the_one_that_had_its_channel_has_ended(width, seed):
    """With waits of all lengths; the younger may end before the older."""
    waits = [[Wait((seed + 3 * n + 5 * k * k) % 7) for k in range((seed + n) % 4)] for n in range(12)]
    lengths = [len(each) for each in waits]
    story = run(waits, width)
    assert [n for what, n in story if what == "begin"] == list(range(12))
    for number, length in enumerate(lengths):
        own = [what for what, n in story if n == number]
        assert own == ["begin", *range(length), "end"], "each takes all its steps, in order"
        before = story[: story.index(("begin", number))]
        assert all(("end", n) in before for n in range(number - width + 1)), (
            "number n - width has ended, and all before"
        )


def test_a_wait_of_one_is_time_for_the_next():
    story = run([[Wait(3)], [Wait(0)], [Wait(0)]], 2)
    assert story.index(("end", 1)) < story.index(("end", 0)), "1 moves while 0 waits"
    assert story.index(("begin", 2)) > story.index(("end", 0)), "2 has 0's memory"


def test_the_older_moves_first():
    story = run([[Wait(0), Wait(0)], [Wait(0), Wait(0)]], 2)
    assert [n for _, n in story] == [0] * 4 + [1] * 4


def test_nothing_to_do():
    assert run([], 2) == []
    assert run([[], [], []], 2) == [(what, n) for n in range(3) for what in ("begin", "end")]


def test_every_request_is_waited_for():
    waits = [[Wait(n + k) for k in range(3)] for n in range(4)]
    run(waits, 2)
    assert all(request.looks < 0 for each in waits for request in each)


def test_whoever_drives_it_may_do_something_else_meanwhile():
    """It yields when no collective can move, and says whom the oldest waits for."""
    gate = [Wait(10**9, peer=4), Wait(10**9, peer=5)]
    steps = overlapped((collective(n, [gate[n]], []) for n in range(2)), 2)
    request = next(steps)
    assert request.peer == 4
    assert not request.done()
    gate[1].looks = 0
    assert request.done(), "any of them is enough"
    request = steps.send(None)
    assert not request.done()
    gate[0].looks = 0
    assert request.done()
    with pytest.raises(StopIteration):
        next(steps)


def test_a_collective_that_fails_ends_all():
    def broken():
        yield Wait(2)
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        complete(overlapped(iter([collective(0, [Wait(50)], []), broken()]), 2))


@pytest.mark.parametrize("looks", [(0, 9), (9, 0), (5, 5)])
def test_any_of_several_is_done_when_one_is(looks):
    tasks = [Task(collective(k, [Wait(each, peer=k)], [])) for k, each in enumerate(looks)]
    for each in tasks:
        each.step()
    either = AnyOf(tasks)
    assert either.peer == 0
    either.wait()
