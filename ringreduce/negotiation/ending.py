"""An engine runs, leaves, or has failed; and process sets and channels end before it, or with it.

A rank announces that it leaves, and ends when all have left and their operations are done.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from ringreduce.execution import errors_for
from ringreduce.execution.executor import Running
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.negotiation.protocol import ShutdownAck
from ringreduce.transport.world import World


class Ending:
    """The state of one engine. Any thread may read it.

    It changes with the inbox's lock held, so that what a thread submits meanwhile is announced, or refused.
    """

    def __init__(self, world: World, mailbox: Mailbox, lock: threading.Lock) -> None:
        self.leaving = ""  # not empty: why this rank leaves
        self.leaving_s = math.inf  # since when, for the stall watch
        self.error: Exception | None = None  # why the engine has failed; it runs nothing any more
        self.given_up = False  # true: the world is given up, and nobody is waited for
        self._world, self._mailbox, self._lock, self._acked = world, mailbox, lock, False
        mailbox.handlers[ShutdownAck] = self._receive

    def close(self, on: Running, closed: str, leaver: int) -> None:
        """Close a process set, whose pending submissions fail, or a channel, where running ones fail too."""
        with self._lock:
            if not on.closed:
                on.closed, on.leaver = closed, leaver
            lost = on.close()
        for submission in lost:
            submission.fail(errors_for.never_complete(on, submission, self._world, self.leaving))

    def stop(self, error: Exception, everything: Sequence[Running]) -> None:
        """The engine has failed: fail all pending and running submissions."""
        with self._lock:
            self.error = error
            lost = [submission for on in everything for submission in on.abandon()]
        for submission in lost:
            submission.fail(error)

    def may_end(self, everything: Sequence[Running]) -> bool:
        """True when no rank needs this one any more."""
        if self.error is not None:
            return self.given_up or bool(self.leaving)
        if not self.leaving or any(each.busy for each in everything):
            return False
        states = [each for each in everything if isinstance(each, ProcessSetState)]
        if any(state.coordinator is not None and len(state.left) < len(state.members) for state in states):
            return False  # a message that nobody receives could reach the next engine of this process; see also `ended`
        if self._mailbox.rank == 0 and not self._acked:
            self._mailbox.send_others(ShutdownAck())
            self._acked = True
        # rank 0 does not know what the coordinators of other sets still run: their last responses close the sets
        return (
            self._acked and all(state.closed and state.negotiator.ended for state in states) and self._mailbox.flushed()
        )

    def _receive(self, source: int, message: ShutdownAck) -> None:
        self._acked = True
