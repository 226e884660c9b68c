"""A process set on one rank: its pending and running submissions, and what its ranks have agreed on."""

from __future__ import annotations

from ringreduce.execution.executor import Executor
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.coordinator import Coordinator
from ringreduce.negotiation.negotiator import Negotiator


class ProcessSetState:
    """The state of one process set; the inbox's lock guards `pending` and `running`, shared with submitting threads."""

    def __init__(self, number: int, executor: Executor, negotiator: Negotiator) -> None:
        self.number = number
        self.executor = executor
        self.members = executor.context.members  # ranks of the world, by rank in the set
        self.algorithms = executor.context.algorithms
        self.negotiator = negotiator
        self.submitted = 0  # how many unnamed submissions there were: they are numbered
        self.pending: dict[str, Submission] = {}
        """Submissions that are not ready on all ranks, by key, the oldest first."""
        self.running: dict[str, Submission] = {}  # submissions that are ready, and not complete
        self.joined = False
        self.closed = ""  # not empty: which rank has left, and why; nothing can run any more
        self.leaver = -1
        self.left: set[int] = set()  # on the coordinator: the members that have left

    @property
    def coordinator(self) -> Coordinator | None:
        """On the first member only."""
        return self.negotiator.coordinator
