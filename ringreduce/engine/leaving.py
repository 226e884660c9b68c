"""How an engine ends: a rank announces that it leaves, and ends when all have left and their operations are done."""

from __future__ import annotations

from ringreduce.engine.process_sets import ProcessSets
from ringreduce.execution.ending import Ending
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.protocol import ShutdownAck


class Leaving:
    """One engine's."""

    def __init__(self, mailbox: Mailbox, ending: Ending, process_sets: ProcessSets) -> None:
        self._mailbox, self._ending, self._process_sets = mailbox, ending, process_sets
        self._acked = False
        self.given_up = False  # true: the world is given up, and nobody is waited for
        mailbox.handlers[ShutdownAck] = self._receive

    def _receive(self, source: int, message: ShutdownAck) -> None:
        self._acked = True

    def may_end(self) -> bool:
        """True when no rank needs this one any more."""
        ending, mailbox = self._ending, self._mailbox
        states = self._process_sets.states.values()
        if ending.error is not None:
            return self.given_up or bool(ending.leaving)
        if not ending.leaving or self._process_sets.is_busy():
            return False
        if any(state.coordinator is not None and len(state.left) < len(state.members) for state in states):
            return False  # a message that nobody receives could reach the next engine of this process; see also `ended`
        if mailbox.rank == 0 and not self._acked:
            mailbox.send_others(ShutdownAck())
            self._acked = True
        # rank 0 does not know what the coordinators of other sets still run: their last responses close the sets
        return self._acked and all(state.closed and state.negotiator.ended for state in states) and mailbox.flushed()
