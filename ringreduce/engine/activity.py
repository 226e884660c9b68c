"""What this rank does and waits for, in words: for stall reports and for the launcher."""

from __future__ import annotations

from ringreduce.engine.inbox import Inbox
from ringreduce.engine.process_sets import ProcessSets
from ringreduce.execution.signature import ranks_text
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.protocol import StackRequest

NAMED = 3  # how many operations a text names


class Activity:
    """Any thread may call it."""

    def __init__(self, inbox: Inbox, ending: Ending, process_sets: ProcessSets) -> None:
        self._inbox, self._ending, self._process_sets = inbox, ending, process_sets

    def doing(self, request: StackRequest) -> str:
        """This rank's last submission, what it waits for, and whether a stalled name waits in another process set."""
        with self._inbox.lock:
            text = self._inbox.last_submission_text()
            waiting = self._process_sets.pending()
            refusals = [
                f"{name!r}: {self._inbox.refusals[name]}" for name in request.names if name in self._inbox.refusals
            ]
        if waiting:
            names = ", ".join(each.signature.text for each in waiting[:NAMED])
            text += f", and waits for {names}" + _more(len(waiting))
        text += "".join(f"; of {each}" for each in refusals)
        for each in waiting:
            (kind, name, *_), number = each.signature, each.process_set
            if name in request.names and (number, kind) != (request.process_set, request.kind):
                text += f"; it submitted {each.signature.text} ({each.line}) to process set {number}"
                text += f" ({ranks_text(self._process_sets.members[number])})"
                return f"{text}: all ranks must pass the same operation and the same process set"
        return text

    def waiting_for(self) -> str:
        """What threads of this rank wait for, as `allreduce 'layer3.w' (train.py:41)`; empty for nothing."""
        with self._inbox.lock:
            running = [each for on in self._process_sets.all() for each in list(on.running.values())]
            lines = {id(each): each.line for each in self._process_sets.pending() + running}
            handles = self._inbox.waited_for()
        texts = [
            f"{each.signature.text} ({lines[id(each)]})"
            for each in handles
            if id(each) in lines  # not one that has just been completed
        ]
        leaving = self._ending.leaving
        if leaving and not texts:
            return f"waits in shutdown() for the others ({leaving})"
        return ", ".join(texts[:NAMED]) + (f",{_more(len(texts))}" if texts[NAMED:] else "")


def _more(count: int) -> str:
    return f" and {count - NAMED} more" if count > NAMED else ""
