"""Operations in program order: every rank of a process set calls the same ones in one order, so none is negotiated.

A channel has tags and shared memory of its own, so it and named operations never wait for each other.

Each operation begins with an exchange of its signature's hash, on one host by flags, else also by messages, with which
the elements of a short sum travel (across.py). Where hashes differ, all ranks exchange the signatures themselves, and
the operation fails on all; then the channel continues.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from typing import Any

from ringreduce.collectives import shared_in_place
from ringreduce.collectives.overlap import until_ended
from ringreduce.errors import CollectiveError, MismatchError, RingreduceError
from ringreduce.execution import operations
from ringreduce.execution.across import NO_ELEMENTS, Across
from ringreduce.execution.allreduce import travelling
from ringreduce.execution.context import Context
from ringreduce.execution.executor import Executor, Running
from ringreduce.execution.host import HostResources
from ringreduce.execution.in_slot import in_slot
from ringreduce.execution.opening import allgather_object, nothing, opened
from ringreduce.execution.send_receive import Receiver, send
from ringreduce.execution.shared_arrays import WISHED, SharedArrays
from ringreduce.execution.signature import Signature, SubmissionRecord, mismatch_message, ranks_text
from ringreduce.execution.submission import Submission
from ringreduce.transport.base import Steps, Task, Transport
from ringreduce.transport.window import Signatures
from ringreduce.transport.world import World

ORDERED = "ordered"  # the name of all operations of a channel of `ordered()`, in messages


class Channel(Running):
    """The channel of one process set, on a rank that is a member.

    signatures: where the members on this host compare hashes; None: they send messages.
    """

    def __init__(
        self,
        number: int,
        process_set: int,
        context: Context,
        world: World,
        signatures: Signatures | None = None,
        name: str = ORDERED,
    ) -> None:
        super().__init__(number, Executor(context), name)
        self.process_set = process_set
        self.patient = False  # the stall watch leaves it alone
        self._context, self._world = context, world
        self._compare_by(signatures)
        self.crossing: Task[Any] | None = None  # what the lane has begun of an operation that is submitted next
        self.signed: int | None = None
        """The number of an operation that the lane (lane.py) has signed, and which is submitted next."""
        self.rest: tuple[Task[None], Any] | None = None
        """What the lane has begun of the operation that is submitted next, in pieces, and where the result will be."""
        self._senders: dict[int, Executor] = {}  # by peer
        self._receivers: dict[int, tuple[Executor, Receiver]] = {}  # by rank of the world
        self._count = 0
        self.begun = 0  # collectives, of the lane, too; equal on all ranks
        self._shared = SharedArrays()

    def _compare_by(self, signatures: Signatures | None) -> None:
        algorithms, self.signatures = self._context.algorithms, signatures
        several = signatures is None or not algorithms.one_host
        self.across = Across(algorithms, signatures) if several else None

    def open(self, submission: Submission, host: HostResources) -> None:
        """Open it among its members alone (opening.py); that must be complete before anything else is enqueued."""
        submission.begin(self.running)
        self.executor.enqueue(self._open(submission, host))

    def _open(self, submission: Submission, host: HostResources) -> Steps[None]:
        context = self._context
        others = set(context.members) - {self._world.rank}
        if doubtful := sorted(host.opening & others):
            text = (
                f"{self.name!r} of ranks {list(self.members)}: another group with {ranks_text(doubtful)} is still "
                "being created, or was given up; its messages could be mistaken for this one's. Create groups one "
                "at a time, with a longer timeout, or start the job again"
            )
            submission.fail(CollectiveError(text))
            return
        host.opening |= others
        context.algorithms.abandon = functools.partial(host.abandon_opening, others)
        end: Callable[[], object] = submission.complete
        try:
            steps = opened(host, context.members, self.name, context.transport)
            context.algorithms, signatures = yield from steps
            self._compare_by(signatures)
        except RingreduceError as exc:  # raised on all ranks
            context.algorithms.abandon = nothing
            end = functools.partial(submission.fail, exc)
        host.opening -= others
        end()

    def enqueue(self, submission: Submission) -> None:
        """Run an operation after those submitted before, in the same order on all ranks."""
        kind, transport = submission.signature.kind, self._context.algorithms.channels[1]
        self._count += 1
        submission.key, submission.divisor = str(self._count), len(self.members)
        submission.begin(self.running)
        if kind == "send":
            peer = self._context.members.index(submission.payload[0])
            executor = self._senders.setdefault(peer, Executor(self._context))
            executor.enqueue(send(submission, self._context, transport, peer))
            self._keep(executor)
        elif kind == "recv":
            rank = submission.payload[0]
            others = [each for each in self.members if each != self._world.rank]
            for each in others if rank is None else [rank]:
                self._receive(submission, each, transport)
        else:
            self.executor.enqueue(self._checked(submission))

    def _receive(self, submission: Submission, rank: int, transport: Transport) -> None:
        if rank not in self._receivers:
            peer = self.members.index(rank)
            receiver = Receiver(self._context, transport, peer, rank, self._world.rank)
            self._receivers[rank] = Executor(self._context), receiver
        executor, receiver = self._receivers[rank]
        executor.enqueue(receiver.receive(submission))
        self._keep(executor)

    def _keep(self, executor: Executor) -> None:
        if executor not in self.executors:
            self.executors.append(executor)

    def overdue(self, now: float) -> str:
        """Which operation has taken longer than it may, and for which rank it waits; empty for none.

        With the inbox's lock held.
        """
        late = next((each for each in self.running.values() if now > each.deadline_s), None)
        if late is None or not self.busy:  # the caller may be about to enqueue it
            return ""
        return f"Timed out after {now - late.submitted_s:.1f} s, waiting for rank {self.stuck().stuck_on()}"

    def _checked(self, submission: Submission) -> Steps[None]:
        """Run an operation, if all ranks have called the same."""
        self.begun, timeline = self.begun + 1, self._context.timeline
        if timeline.recording:
            timeline.ready([submission], self._world.rank)
        fits = None if self.across is not None else in_slot(submission, self._context)
        if fits is not None and self.signed is None:  # else the lane has packed it
            fits.pack([each.flat for each in submission.inputs])
        own = getattr(submission.payload, "number", 0) if fits is None else fits.word
        words = yield from self._compare(submission, own)
        if words is None or submission.is_refused:
            yield from self._mismatch(submission)
            return
        if timeline.recording:
            schedule = self.number if self.name == ORDERED else self.name  # the number of a group is its rank's own
            timeline.negotiated(submission, (schedule, self.begun, "", len(self.members)))
        if submission.recorder is not None:
            submission.ready_s = submission.begun_s = time.monotonic()
            submission.algorithm = "shared" if self.across is None else ""
        if fits is not None and all(each == own for each in words):
            with timeline.phase([submission], submission.signature.kind.upper()):
                if fits.rows is not None:
                    operations.make_outputs(submission, [fits.rows], self._context)
                yield from fits.finish([each.flat for each in submission.outputs])
            submission.complete()
            return
        if self.rest is not None:
            (pieces, reduced), self.rest = self.rest, None
            with timeline.phase([submission], "ALLREDUCE"):
                yield from until_ended(pieces, ())
                submission.outputs[0].flat[...] = reduced
            submission.complete()
            return
        if submission.signature.kind == "allgather":  # whose words are no arrays' numbers
            words = [0]
        if set(words) == {WISHED}:
            allgather = functools.partial(allgather_object, transport=self._context.transport)
            words = [(yield from self._shared.share(submission, len(self._context.members), allgather))]
        arrays, region = self._shared.common(words, submission), self._context.algorithms.shared_region
        if arrays is None or region is None:
            yield from operations.run([submission], self._context)
        else:
            reduction = submission.reduction(submission.outputs[0].element)
            with timeline.phase([submission], "ALLREDUCE"):
                yield from shared_in_place.allreduce(arrays, region, reduction)
            submission.complete()

    def _compare(self, submission: Submission, word: int) -> Steps[list[int] | None]:
        """None when ranks have called different operations; else their words (shared_arrays.py). Same on all ranks."""
        mine, signatures = hash_of(submission.signature), self.signatures
        number, self.signed = self.signed, None
        if self.across is not None or signatures is None:
            return None if (yield from self._cross(submission, mine, number)) is None else [0]
        if number is None:
            number = signatures.sign(mine, word)
        if not signatures.arrived(0, number):
            yield signatures.arrival(0, number)
        return signatures.beside(number) if all(each == mine for each in signatures.read(number)) else None

    def _cross(self, submission: Submission, mine: int, number: int | None) -> Steps[Any | None]:
        """See `Across.run`; what the lane has begun continues."""
        across, (task, self.crossing) = self.across, (self.crossing, None)
        if across is None:
            raise AssertionError("an operation on one host is signed there")
        reduction = travelling(submission, across.most_bytes)
        if task is None:
            source = NO_ELEMENTS if reduction is None else submission.inputs[0].flat
            found = yield from across.run(mine, source, reduction, number)
        else:
            yield from until_ended(task, ())
            found = task.result
        submission.reduced = None if reduction is None else found
        return found

    def _mismatch(self, submission: Submission) -> Steps[None]:
        record = SubmissionRecord(submission.signature, submission.line)
        records = yield from allgather_object(record, self._context.transport)
        by_rank = dict(zip(self._context.members, records, strict=True))
        submission.fail(MismatchError(mismatch_message(by_rank, self._world.size)))


@functools.lru_cache(maxsize=4096)
def hash_of(signature: Signature) -> int:
    """An operation's hash, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(repr(signature).encode(), digest_size=8).digest(), "little", signed=True)
