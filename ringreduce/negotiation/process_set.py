"""A process set on one rank: its pending and running submissions, and what its ranks have agreed on."""

from __future__ import annotations

from ringreduce.execution.executor import Executor, Running
from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.coordinator import Coordinator
from ringreduce.negotiation.negotiator import Negotiator

UNNAMED = "unnamed"


class ProcessSetState(Running):
    """The state of one process set; the inbox's lock guards `pending`, too, shared with submitting threads."""

    counts = True

    def __init__(self, number: int, executor: Executor, negotiator: Negotiator) -> None:
        super().__init__(number, executor, UNNAMED)
        self.algorithms = executor.context.algorithms
        self.negotiator = negotiator
        self.submitted = 0  # how many unnamed submissions there were: they are numbered
        self.pending: dict[str, Submission] = {}
        """Submissions that are not ready on all ranks, by key, the oldest first."""
        self.express = ""  # not empty: the key of an operation that a thread runs by itself: engine/express.py
        self.followed = 0  # entries of the schedule
        self.joined = False
        self.joins = 0  # how often all its ranks have joined; equal on them between two operations of the set
        self.left: set[int] = set()  # on the coordinator: the members that have left

    def numbered(self, signature: Signature) -> Signature:
        """See `Running.numbered`."""
        self.submitted += 1
        kind, _, tensors, details, _ = signature  # half as long as `_replace`
        return Signature(kind, f"{self.name}.{self.submitted}", tensors, details, True)

    def close(self) -> list[Submission]:
        """See `Running.close`: what was ready runs on."""
        pending, self.pending = self.pending, {}
        return list(pending.values())

    def abandon(self) -> list[Submission]:
        """See `Running.abandon`."""
        return self.close() + super().abandon()

    @property
    def coordinator(self) -> Coordinator | None:
        """The coordinator, on the first member only."""
        return self.negotiator.coordinator
