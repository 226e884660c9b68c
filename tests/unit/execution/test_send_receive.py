"""Receives of one rank from another, which the caller's thread adds while the engine's looks at them."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from ringreduce.execution.send_receive import NUMBERS, Kept, Receiver, _hash


def test_a_receive_that_is_added_while_another_is_looked_for_is_not_lost():
    receiver = Receiver(SimpleNamespace(), None, 1, 1, 0)
    mine, of_another_rank, late = (SimpleNamespace(payload=(source, 0)) for source in (None, 2, 1))
    for each in (mine, of_another_rank):
        receiver.receive(each)
    about_to_add = receiver._waiting.append  # by the caller's thread, which the engine's interrupts here
    assert receiver._waits(mine)
    about_to_add(late)
    assert receiver._waits(late)
    assert not receiver._waits(of_another_rank)


@pytest.mark.parametrize("steps", [2, 3])
def test_a_message_goes_to_no_receive_before_an_earlier_one_of_its_tag(steps):
    """The first came before both receives were called, the second before the first of these has run.

    steps: of the receive that runs, before they are called: the first message's header, its data, the second's header.
    """
    sent = [np.array([20 + number], np.uint8) for number in range(3)]
    tags = [7, 7, 5]
    posted = itertools.count()

    def receive(array, source, tag):
        number, is_data = divmod(next(posted), 2)
        if is_data:
            array[:] = sent[number]
        else:
            array[:NUMBERS].view(np.int64)[:] = tags[number], 1, _hash(of_5)
        return SimpleNamespace(peer=1, done=lambda: True)

    gpu = SimpleNamespace(room=lambda target: target, up=lambda *_: None)
    context = SimpleNamespace(gpu=gpu, timeline=SimpleNamespace(message=lambda *_: None))
    receiver = Receiver(context, SimpleNamespace(receive=receive), 1, 1, 0)
    of_5, first, second = (submission(tag) for tag in (5, 7, 7))
    running = receiver.receive(of_5)
    for _ in range(steps):
        next(running)
    others = [receiver.receive(each) for each in (first, second)]
    for each in (running, *others):
        assert all(work.done() for work in each)
    assert [each.outputs[0][0] for each in (of_5, first, second)] == [22, 20, 21]


class Late(list):
    """Receives that wait, to which another is added when they have been looked at so many times."""

    def __init__(self, late, times):
        super().__init__()
        self.late, self.times = late, times

    def __iter__(self):
        yield from super().__iter__()
        self.times -= 1
        if self.times == 0:
            self.append(self.late)


def test_a_receive_that_is_called_while_kept_messages_are_looked_at_gets_the_first():
    for times in range(1, 9):
        receiver, late = Receiver(SimpleNamespace(), None, 1, 1, 0), submission(7)
        receiver._kept += [Kept(7, 0, "", number) for number in range(3)]
        receiver._waiting = Late(late, times)
        found = [receiver._wanted() for _ in range(times + 1)]
        assert found[-1] == (0, late)
        assert all(each in (None, (0, late)) for each in found), times


def submission(tag):
    tensor = SimpleNamespace(dtype="uint8", shape=(1,))
    return SimpleNamespace(
        payload=(1, tag),
        outputs=[np.zeros(1, np.uint8)],
        ready=False,
        complete=lambda: None,
        signature=SimpleNamespace(tensors=[tensor]),
        line="",
    )
