"""Messages from one rank to another, by tag; those of one sender with one tag arrive in the order in which they were
sent.

A header with the tag, the size and the type goes before the data. A receiver that meets another tag than those it
waits for keeps that message, so messages of several tags may be received in any order.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringreduce.errors import InputError, MismatchError
from ringreduce.execution.context import Context
from ringreduce.execution.signature import tensor_text
from ringreduce.execution.submission import Submission
from ringreduce.transport.base import Steps, Transport, Work

HEADER_TAG, DATA_TAG = 0, 6  # which no collective uses
NUMBERS, TEXT_BYTES = 24, 232  # bytes of a header: tag, size and hash; and who may read it


class Kept(NamedTuple):
    """A message that arrived before its receive."""

    tag: int
    hashed: int  # its type and shape
    text: str  # and these in words, with the sender's line
    data: Any


def _what(submission: Submission) -> str:
    return tensor_text(submission.signature.tensors[0])


def _hash(submission: Submission) -> int:
    hashed = hashlib.blake2b(_what(submission).encode(), digest_size=8)
    return int.from_bytes(hashed.digest(), "little", signed=True)


def tag_of(tag: Any, where: str = "") -> int:
    """A tag as Python's int, as a header has it; raises InputError, which begins with `where`, if it is none."""
    with contextlib.suppress(TypeError):
        number = operator.index(tag)
        if -(2**63) <= number < 2**63:
            return number
    raise InputError(f"{where}tag={tag!r}; expected a whole number of 64 bits")


def send(submission: Submission, context: Context, transport: Transport, destination: int) -> Steps[None]:
    """Send one array. `payload` is the rank and the tag."""
    if submission.ready:
        context.gpu.begin(submission)
    (tensor,) = submission.inputs
    elements = yield from context.gpu.down(tensor)
    header = np.zeros(NUMBERS + TEXT_BYTES, np.uint8)
    header[:NUMBERS].view(np.int64)[:] = submission.payload[1], tensor.nbytes, _hash(submission)
    text = f"{_what(submission)} ({submission.line})".encode()[:TEXT_BYTES]
    header[NUMBERS : NUMBERS + len(text)] = np.frombuffer(text, np.uint8)
    works = [transport.send(header, destination, HEADER_TAG), transport.send(elements, destination, DATA_TAG)]
    yield from works
    context.timeline.message(submission, "SEND")
    submission.complete()


class Header(Work):
    """A header that arrives, or something else that must be done first: see `Receiver._is_due`."""

    def __init__(self, work: Work, is_due: Callable[[], bool]) -> None:
        self.work, self.peer, self._is_due = work, work.peer, is_due

    def done(self) -> bool:
        """See `Work.done`."""
        return self.work.done() or self._is_due()


class Receiver:
    """All receives of one rank (`own`, of the world) from another, `source` in the set and `rank` in the world.

    They run one after the other; the one that runs serves all that have been called. A receive from any rank waits at
    the receivers of all; the first that has its message takes it.
    """

    def __init__(self, context: Context, transport: Transport, source: int, rank: int, own: int) -> None:
        self._context, self._transport, self._source, self._rank, self._own = context, transport, source, rank, own
        self._waiting: list[Submission] = []
        self._kept: list[Kept] = []
        self._header: Any = None
        self._coming: Work | None = None  # its receive, which outlives a receive from any rank that another rank ended

    def receive(self, submission: Submission) -> Steps[None]:
        """Take messages until the one for this submission has come."""
        self._waiting.append(submission)  # in the order in which they are called
        return self._receive(submission)

    def _all_waiting(self) -> list[Submission]:
        """The receives that wait, without those that got another rank's message."""
        for each in [each for each in self._waiting if each.payload[0] not in (None, self._rank)]:
            self._waiting.remove(each)  # no new list: another thread may be adding to this one
        return self._waiting

    def _first_waiting(self, tag: int) -> Submission | None:
        return next((each for each in self._all_waiting() if each.payload[1] == tag), None)

    def _waits(self, submission: Submission) -> bool:
        return submission in self._all_waiting()

    def _receive(self, submission: Submission) -> Steps[None]:
        while True:
            while (found := self._wanted()) is not None:
                number, taker = found
                self._deliver(taker, self._kept.pop(number))
            if not self._waits(submission):
                return
            if self._coming is None:
                self._header = np.empty(NUMBERS + TEXT_BYTES, np.uint8)
                self._coming = self._transport.receive(self._header, self._source, HEADER_TAG)
            yield Header(self._coming, lambda: self._is_due(submission))
            if self._coming.done():
                self._coming = None
                yield from self._take(self._header)

    def _is_due(self, submission: Submission) -> bool:
        """True where another rank's message was first, or a receive has been called whose message is kept."""
        return not self._waits(submission) or self._wanted() is not None

    def _wanted(self) -> tuple[int, Submission] | None:
        """The number of the first kept message that is waited for, and by whom."""
        waiting: dict[int, Submission] = {}  # of one moment: one that is called meanwhile gets the first message, too
        for each in list(self._all_waiting()):
            waiting.setdefault(each.payload[1], each)
        return next(((number, waiting[it.tag]) for number, it in enumerate(self._kept) if it.tag in waiting), None)

    def _take(self, header: Any) -> Steps[None]:
        """Receive the data that follow, for whoever waits for them first."""
        tag, nbytes, hashed = header[:NUMBERS].view(np.int64).tolist()
        text = bytes(header[NUMBERS:]).rstrip(b"\0").decode(errors="replace")
        is_first = all(kept.tag != tag for kept in self._kept)  # else those that wait get the kept ones before
        taker = self._first_waiting(tag) if is_first else None
        if taker is not None:
            taker.payload = self._rank, tag
        fits = taker is not None and hashed == _hash(taker)
        data = self._context.gpu.room(taker.outputs[0]) if taker is not None and fits else np.empty(nbytes, np.uint8)
        yield self._transport.receive(data, self._source, DATA_TAG)
        if taker is None:
            self._kept.append(Kept(tag, hashed, text, data))
        else:
            self._deliver(taker, Kept(tag, hashed, text, data), data)

    def _deliver(self, submission: Submission, message: Kept, elements: Any = None) -> None:
        """End a receive.  elements: the data, where they came into `room` for its target."""
        self._waiting.remove(submission)
        submission.payload = self._rank, message.tag
        (target,) = submission.outputs
        if message.hashed != _hash(submission):
            source, tag = submission.payload
            submission.fail(
                MismatchError(
                    f"rank {self._own}, recv with tag {tag} ({submission.line}): {_what(submission)}, but rank "
                    f"{source} sent {message.text}; both must pass equal shapes and dtypes"
                )
            )
            return
        if elements is None:  # the message was kept
            elements = self._context.gpu.room(target)
            elements.view(np.uint8)[:] = message.data
        if submission.ready:
            self._context.gpu.begin(submission)
        self._context.gpu.up(elements, target)
        self._context.timeline.message(submission, "RECV")
        submission.complete()
