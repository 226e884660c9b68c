"""Receives of one rank from another, which the caller's thread adds while the engine's looks at them."""

from types import SimpleNamespace

from ringreduce.execution.send_receive import Receiver


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
