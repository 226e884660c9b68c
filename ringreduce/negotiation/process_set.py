"""A process set on one rank: its pending and running submissions, and what its ranks have agreed on."""

from __future__ import annotations

from ringreduce.execution.executor import Executor
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.cache import Cache
from ringreduce.negotiation.coordinator import Coordinator


class ProcessSetState:
    """The state of one process set; the inbox's lock guards `pending` and `running`, shared with submitting threads."""

    def __init__(self, number: int, executor: Executor, coordinator: Coordinator | None) -> None:
        self.number = number
        self.executor = executor
        self.members = executor.context.members  # ranks of the world, by rank in the set
        self.algorithms = executor.context.algorithms
        self.coordinator = coordinator  # on the first member only
        self.cache = Cache()
        self.seen = 0  # the number of the last response
        self.submitted = 0  # how many unnamed submissions there were: they are numbered
        self.pending: dict[str, Submission] = {}
        """Submissions that are not ready on all ranks, by key, the oldest first."""
        self.running: dict[str, Submission] = {}  # submissions that are ready, and not complete
        self.joined = False
        self.closed = ""  # not empty: which rank has left, and why; nothing can run any more
        self.leaver = -1

    @property
    def leader(self) -> int:
        """The rank that coordinates."""
        return self.members[0]
