"""What this rank does and waits for, in words: for stall reports and for the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from ringreduce.engine.inbox import Inbox
from ringreduce.execution.signature import ranks_text
from ringreduce.negotiation.negotiation import Negotiation
from ringreduce.negotiation.protocol import StackRequest

NAMED = 3  # how many operations a text names


class Activity:
    """Any thread may call it.  members: of all process sets, by number."""

    def __init__(self, inbox: Inbox, negotiation: Negotiation, members: Mapping[int, tuple[int, ...]]) -> None:
        self._inbox, self._negotiation, self._members = inbox, negotiation, members

    def doing(self, request: StackRequest) -> str:
        """This rank's last submission, what it waits for, and whether a stalled name waits in another process set."""
        with self._inbox.lock:
            text = self._inbox.last_submission_text()
            waiting = [each for state in self._negotiation.states.values() for each in state.pending.values()]
        if waiting:
            names = ", ".join(f"{each.signature.kind} {each.signature.name!r}" for each in waiting[:NAMED])
            text += f", and waits for {names}" + _more(len(waiting))
        for each in waiting:
            (kind, name, *_), number = each.signature, each.process_set
            if name in request.names and (number, kind) != (request.process_set, request.kind):
                text += f"; it submitted {kind} {name!r} ({each.line}) to process set {number}"
                text += f" ({ranks_text(self._members[number])})"
                return f"{text}: all ranks must pass the same operation and the same process set"
        return text

    def waiting_for(self) -> str:
        """What threads of this rank wait for, as `allreduce 'layer3.w' (train.py:41)`; empty for nothing."""
        with self._inbox.lock:
            lines = {id(each): each.line for each in self._negotiation.unfinished()}
            handles = self._inbox.waited_for()
        texts = [
            f"{each.signature.kind} {each.signature.name!r} ({lines[id(each)]})"
            for each in handles
            if id(each) in lines  # not one that has just been completed
        ]
        leaving = self._negotiation.leaving
        if leaving and not texts:
            return f"waits in shutdown() for the others ({leaving})"
        return ", ".join(texts[:NAMED]) + (f",{_more(len(texts))}" if texts[NAMED:] else "")


def _more(count: int) -> str:
    return f" and {count - NAMED} more" if count > NAMED else ""
