"""The control messages between engines: named tuples. All come from ranks of the same job, over MPI."""

from __future__ import annotations

import functools
import pickle
from typing import Any, NamedTuple

from ringreduce.execution.signature import Signature, SubmissionRecord

GLOBAL = 0  # the number of the process set of all ranks
JOIN = "join"  # the kind of what join() submits


class Announcement(NamedTuple):
    """What a rank has submitted since its last announcement; to the coordinator of a process set."""

    process_set: int
    seen: int  # the number of the last response that this rank had read
    records: tuple[SubmissionRecord, ...] = ()  # of what is not cached
    join: bool | None = None
    """Not None: this rank has joined, and counts nothing by id that is not ready; True: averages divide by the live
    ranks only."""
    leave: str = ""  # not empty: why this rank leaves; it sends the coordinator nothing after this but `Ready`


class Failure(NamedTuple):
    """A submission that fails on all ranks."""

    key: str
    kind: str  # the name of the exception's class
    message: str


class Response(NamedTuple):
    """The coordinator's decision, the same for all ranks of a process set."""

    process_set: int
    number: int
    forgotten: tuple[int, ...] = ()  # cache ids; applied first
    new: tuple[Signature, ...] = ()  # tensors that are ready; run in this order
    learned: tuple[tuple[int, Signature], ...] = ()  # new contents of the cache, by id
    failures: tuple[Failure, ...] = ()
    joined: tuple[int, ...] = ()  # the ranks that have joined, and take part in reductions with neutral elements
    live_average: bool = False  # true: averages divide by the ranks that have not joined
    all_joined: int = -1  # the rank that joined last, when all have
    closed: str = ""  # not empty: which rank has left the job, and why; this process set runs nothing any more
    leaver: int = -1


class Ready(NamedTuple):
    """To the leader above: news of a subtree of groups."""

    process_set: int
    ids: list[int]  # submitted by all its ranks; that of an unnamed tensor may be there several times
    withdrawn: list[int]  # earlier ones that will not be scheduled
    applied: int  # the last response that all its ranks have applied; nothing follows one that closes the set
    partial: bytes = b""  # the sum of its ranks' elements of the only id, where that is short; see short.py


class Scheduled(NamedTuple):
    """To the leaders below: the next entries of the schedule, the ids of a batch or, without ids, a response."""

    process_set: int
    entries: list[list[int]]
    reduced: bytes = b""  # the finished elements of the only id


class Overdue(NamedTuple):
    """To the coordinator: ids to forget, so that those who submitted them announce records.

    Some ranks of a group did long ago, and records show which; or a rank did that is to join.
    """

    process_set: int
    ids: list[int]


class ShutdownAck(NamedTuple):
    """From rank 0 to all: every rank has left, the job may end."""


class StackRequest(NamedTuple):
    """From a coordinator to the missing ranks of a stall; or from a rank that has waited long to the coordinator."""

    number: int  # for the reply
    process_set: int = 0
    kind: str = ""  # the kind of operation of the first stalled tensor
    names: tuple[str, ...] = ()  # the first stalled tensors


class StackReply(NamedTuple):
    """What a rank is doing: its last submission, what it waits for, and a thread's stack."""

    number: int
    doing: str
    stack: str


class Broken(NamedTuple):
    """This rank's engine failed inside an operation, which the others cannot complete."""

    message: str


class TimelineStart(NamedTuple):
    """Start recording events."""

    mark_cycles: bool


class TimelineStop(NamedTuple):
    """Record what the sender has run, and stop; send the remaining events."""

    followed: dict[int, int]  # by process set: how many entries of the schedule the sender has followed


class TimelineEvents(NamedTuple):
    """Events of one rank, in its own clock."""

    events: tuple[Any, ...]
    answers: bool  # that recording has started; or stopped, and that these are the last events


KINDS: tuple[type[Any], ...] = (
    *(Announcement, Response, Ready, Scheduled, Overdue, ShutdownAck, Broken),
    *(StackRequest, StackReply, TimelineStart, TimelineStop, TimelineEvents),
)
_NUMBERS = {kind: bytes([number]) for number, kind in enumerate(KINDS)}


def encode(message: Any) -> bytes:
    """A control message as bytes: its kind's number, and its fields, pickled. A class by its name takes 3 us longer."""
    return _NUMBERS[type(message)] + pickle.dumps(tuple(message), pickle.HIGHEST_PROTOCOL)


def decode(content: bytes) -> Any:
    """The control message; only for those of this job's own ranks."""
    kind = KINDS[content[0]]
    return kind(*(_fields_of_many if kind is Announcement else _fields)(content))


def _fields(content: bytes) -> Any:
    return pickle.loads(memoryview(content)[1:])  # noqa: S301


_fields_of_many = functools.lru_cache(maxsize=16)(_fields)
"""Equal announcements of many ranks are read once."""
