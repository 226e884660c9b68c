"""What engines write to each other: tuples, pickled. All come from ranks of the same job, over MPI."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from ringreduce.engine.signature import Signature, SubmissionRecord


class Announcement(NamedTuple):
    """A rank tells the coordinator of a process set what it has submitted since the last one."""

    process_set: int
    seen: int
    """The number of the last response that this rank had read."""
    bits: int = 0
    """Tensors seen before: bit k stands for the tensor with number k in the cache."""
    records: tuple[SubmissionRecord, ...] = ()
    """All others."""
    join: bool | None = None
    """This rank has joined; True: averages are to be divided by the live ranks only."""
    leave: str = ""
    """Not empty: why this rank leaves; nothing comes from it after this."""


class Failure(NamedTuple):
    """A tensor that will not be reduced."""

    key: str
    kind: str
    """The name of the exception's class."""
    message: str


class Response(NamedTuple):
    """The coordinator tells all ranks of a process set what to do now, the same to each."""

    process_set: int
    number: int
    bits: int = 0
    """Tensors of the cache that all ranks have given; run first, in the order of their numbers."""
    new: tuple[Signature, ...] = ()
    """Others that all ranks have given; run next, in this order."""
    learned: tuple[tuple[int, Signature], ...] = ()
    """What the cache holds from now on, by number."""
    forgotten: tuple[int, ...] = ()
    """Numbers that the cache holds no more; applied before `learned`, after `bits`."""
    failures: tuple[Failure, ...] = ()
    joined: tuple[int, ...] = ()
    """The ranks that have joined, and take part in reductions with neutral elements."""
    live_average: bool = False
    all_joined: int = -1
    """The rank that joined last, when all have."""
    closed: str = ""
    """Not empty: which rank has left the job, and why; this process set does nothing any more."""
    leaver: int = -1

    def is_empty(self) -> bool:
        """True when there is nothing to tell."""
        return self == Response(self.process_set, self.number)


class ShutdownAck(NamedTuple):
    """Rank 0 tells all: every rank has left, the job may end."""


class StallProbe(NamedTuple):
    """A rank that has waited long asks the coordinator to look at its control messages and to answer."""

    process_set: int
    waited_s: float


class StackRequest(NamedTuple):
    """What do you do, instead of what we wait for?"""

    number: int
    process_set: int = 0
    kind: str = ""
    names: tuple[str, ...] = ()
    """The first of the tensors that wait, and the kind of the very first."""


class StackReply(NamedTuple):
    """What a rank does: its last submission, what it waits for, and its threads' stacks."""

    number: int
    doing: str
    stack: str


class Broken(NamedTuple):
    """This rank's engine failed in the middle of an operation; the others cannot complete it."""

    message: str


class TimelineStart(NamedTuple):
    """Record events from now on."""

    mark_cycles: bool


class TimelineStop(NamedTuple):
    """Record no more, and send what there is."""


class TimelineEvents(NamedTuple):
    """Events of one rank, in its own clock; `last`: it sends no more of this timeline."""

    events: tuple[Any, ...]
    last: bool


def encode(message: Any) -> bytes:
    """As bytes."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode(content: bytes) -> Any:
    """From bytes; only for control messages of this job's own ranks."""
    return pickle.loads(content)  # noqa: S301
