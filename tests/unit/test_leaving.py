"""When an engine may end: no message to it may be left, since the next engine of the process would get it."""

from types import SimpleNamespace

from ringreduce.engine.leaving import Leaving
from ringreduce.negotiation.protocol import ShutdownAck


def test_a_coordinator_stays_until_all_members_of_its_set_have_left():
    mailbox = SimpleNamespace(rank=1, size=3, handlers={}, flushed=lambda: True)
    everyone = SimpleNamespace(coordinator=None, left={1}, members=(0, 1, 2), closed="rank 0 has left")
    pair = SimpleNamespace(coordinator="this rank's", left={1}, members=(1, 2), closed="rank 1 has left")
    negotiation = SimpleNamespace(error=None, leaving="it called shutdown()", states={0: everyone, 2: pair})
    leaving = Leaving(mailbox, negotiation, SimpleNamespace(is_busy=lambda: False))
    mailbox.handlers[ShutdownAck](0, ShutdownAck())
    assert not leaving.may_end()
    pair.left.add(2)
    assert leaving.may_end()
