"""Operations in program order: every rank of a process set calls the same ones in one order, so none is negotiated.

A channel has tags and shared memory of its own, so it and named operations never wait for each other. The thread that
waits for an operation drives it; the engine's thread drives what nobody waits for.

Each operation begins with an exchange of its signature's hash, on one host by flags, else by Bruck's allgather. Where
hashes differ, all ranks exchange the signatures themselves, and the operation fails on all; then the channel goes on.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import pickle
import threading
import time
from collections.abc import Callable

import numpy as np

from ringreduce.collectives import bruck, ring
from ringreduce.cost_model import is_one_shot
from ringreduce.errors import CollectiveError, InputError, MismatchError
from ringreduce.execution import operations
from ringreduce.execution.context import Context
from ringreduce.execution.executor import Executor
from ringreduce.execution.send_receive import Receiver, send
from ringreduce.execution.signature import Signature, SubmissionRecord, mismatch_message
from ringreduce.execution.submission import Handle, Submission
from ringreduce.transport.base import Steps
from ringreduce.transport.waiting import WaitsFor
from ringreduce.transport.window import Region, Signatures
from ringreduce.world import World

ORDERED = "ordered"  # the name of all operations, in messages
TURN_S = 1e-3  # how often a thread that waits while another one runs operations looks at its own
YIELD_S = 10e-3  # for this long after progress a waiting thread only yields the core
LONGEST_SLEEP_S, SLEEP_SHARE = 10e-3, 0.05  # then it sleeps this share of the time that it has waited


class Channel:
    """One process set's, on one rank; any thread may call it.

    signatures: where the members, all on one host, compare hashes; None: they send messages.
    wake:       lets the engine's thread call `poll`.
    """

    def __init__(self, context: Context, world: World, signatures: Signatures | None, wake: Callable[[], None]) -> None:
        self.error: Exception | None = None  # not None: the channel is closed
        self._context, self._world, self._signatures, self._wake = context, world, signatures, wake
        self._collectives = Executor(context)
        self._executors = [self._collectives]  # and one for each peer and direction of send and recv
        self._senders: dict[int, Executor] = {}
        self._receivers: dict[int, tuple[Executor, Receiver]] = {}
        self._lock = threading.Lock()  # guards what follows; `_driving` is held by the thread that runs operations
        self._driving = threading.Lock()
        self._running: dict[str, Submission] = {}
        self._count = 0

    def submit(self, submission: Submission) -> Handle:
        """Run an operation after those submitted before; the order of the calls is the same on all ranks."""
        kind = submission.signature.kind
        if any(each.on_gpu for each in (*submission.inputs, *submission.outputs)):
            raise InputError(
                f"{kind}: ordered() takes arrays in host memory; pass array.cpu() or .get(), or call ringreduce.{kind}"
            )
        handle = submission.handle = Handle(submission.signature, self._drive, self.poll)
        with self._lock:
            if self.error is not None:
                raise copy.copy(self.error)
            self._count += 1
            submission.key = str(self._count)
            submission.begin(self._running, self._lock)
            self._enqueue(submission)
        if not submission.waits:
            self._wake()
        return handle

    def _enqueue(self, submission: Submission) -> None:
        kind, transport = submission.signature.kind, self._context.algorithms.channels[1]
        if kind == "send":
            peer = self._context.members.index(submission.payload[0])
            executor = self._senders.setdefault(peer, Executor(self._context))
            executor.enqueue(send(submission, transport, peer))
        elif kind == "recv":
            peer = self._context.members.index(submission.payload[0])
            if peer not in self._receivers:
                self._receivers[peer] = Executor(self._context), Receiver(transport, peer, self._world.rank)
            executor, receiver = self._receivers[peer]
            executor.enqueue(receiver.receive(submission))
        else:
            executor = self._collectives
            executor.enqueue(self._checked(submission))
        if executor not in self._executors:
            self._executors.append(executor)

    # Operations

    def _checked(self, submission: Submission) -> Steps[None]:
        """Run an operation, if all ranks have called the same."""
        region = self._context.algorithms.region
        if region is not None and self._is_one_shot(submission):
            yield from self._one_shot(submission, region)
        elif (yield from self._is_same(submission)):
            yield from operations.run([submission], self._context, len(self._context.members))
        else:
            yield from self._mismatch(submission)

    def _is_same(self, submission: Submission) -> Steps[bool]:
        """True when all ranks have called the same; on all ranks alike."""
        mine, signatures = _hash(submission.signature), self._signatures
        if signatures is None:
            gathered = yield from bruck.allgather(np.array([mine], np.int64), self._context.transport)
            return bool((gathered == mine).all())
        number = signatures.sign(mine)
        if not signatures.arrived(0, number):
            yield signatures.arrival(0, number)
        return all(each == mine for each in signatures.read(number))

    def _is_one_shot(self, submission: Submission) -> bool:
        """True for a short sum of one array on one host."""
        if self._signatures is None or len(submission.inputs) != 1:
            return False
        (source,), size = submission.inputs, len(self._context.members)
        is_sum = submission.signature.kind == "allreduce" and submission.signature.details[0] != ("op", "Adasum")
        return is_sum and source.nbytes > 0 and is_one_shot(source.nbytes, size)

    def _one_shot(self, submission: Submission, region: Region) -> Steps[None]:
        """As shared.one_shot, but one flag says both that a rank has packed its elements and what it has called."""
        (source,), (target,) = submission.inputs, submission.outputs
        self._context.divisor = len(self._context.members)
        reduction = self._context.reduction(submission, source.element)
        slots = [each[: source.count] for each in region.slots(region.sequence, source.element.storage)]
        slots[region.rank][...] = source.flat
        if (yield from self._is_same(submission)):
            region.sequence += 1
            reduction.reduce_parts(slots, target.flat)
            submission.complete()
        else:
            yield from self._mismatch(submission)

    def _mismatch(self, submission: Submission) -> Steps[None]:
        transport, members = self._context.transport, self._context.members
        mine = np.frombuffer(pickle.dumps(SubmissionRecord(submission.signature, submission.line)), np.uint8)
        lengths = (yield from bruck.allgather(np.array([mine.size], np.int64), transport))[:, 0].tolist()
        everyones, start = np.empty(sum(lengths), np.uint8), sum(lengths[: transport.rank])
        everyones[start : start + mine.size] = mine
        yield from ring.allgather(everyones, transport, lengths, transport.rank)
        pickled = np.split(everyones, np.cumsum(lengths)[:-1])
        records = {rank: pickle.loads(each.data) for rank, each in zip(members, pickled, strict=True)}  # noqa: S301
        submission.fail(MismatchError(mismatch_message(records, self._world.size)))

    # Progress

    def _drive(self, handle: Handle) -> None:
        """Run operations in the calling thread until this one is complete, or wait while another thread runs them."""
        moved_s = time.monotonic()
        while not handle.done() and self.error is None:
            if not self._driving.acquire(timeout=TURN_S):
                continue
            try:
                while not handle.done() and self.error is None:
                    if self._advance():
                        moved_s = time.monotonic()
                    elif (waited_s := time.monotonic() - moved_s) < YIELD_S:
                        os.sched_yield()
                    else:
                        time.sleep(min(SLEEP_SHARE * waited_s, LONGEST_SLEEP_S))
            finally:
                self._driving.release()
        handle.block()

    def poll(self) -> bool:
        """Advance all operations without waiting, unless another thread does; True when anything moved."""
        if self._running and self._driving.acquire(blocking=False):
            try:
                return self.error is None and self._advance()
            finally:
                self._driving.release()
        return False

    def _advance(self) -> bool:
        """Advance all operations without waiting; an exception closes the channel."""
        moved = False
        try:
            for executor in self._executors:
                moved |= executor.advance(latency_critical=True)
        except BaseException as exc:
            rank, size = self._world.rank, self._world.size
            error = CollectiveError(f"rank {rank} of {size} failed inside an operation: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            self._close(error)
            if not isinstance(exc, Exception):
                raise
        return moved

    def waits_for(self) -> WaitsFor:
        """What the engine's thread must poll for."""
        if not self._running:
            return WaitsFor.NOTHING
        if self._driving.locked():
            return WaitsFor.CONTROL
        return max(WaitsFor.CONTROL, *(each.waits_for() for each in self._executors))

    def stalled(self) -> tuple[float, str]:
        """For how many seconds nothing has moved, and what waits for which rank."""
        with self._lock:
            oldest = next(iter(self._running.values()), None)
        busy = [each for each in self._executors if each.busy]
        if oldest is None or not busy:
            return 0.0, ""
        first = min(busy, key=lambda each: each.moved_s)
        waited_s = time.monotonic() - first.moved_s
        what = f"ordered {oldest.signature.kind} ({oldest.line})"
        return waited_s, f"{what} has waited {waited_s:.0f} s for rank {first.stuck_on()}"

    def fail(self, error: Exception) -> None:
        """Close the channel: what is under way or called later raises `error`."""
        if self.error is None:
            self.error = error  # ends the driving of another thread
            with self._driving:
                self._close(error)

    def _close(self, error: Exception) -> None:
        """With `_driving` held."""
        with self._lock:
            self.error = error
            lost = list(self._running.values())
            for executor in self._executors:
                executor.abandon()
        for submission in lost:
            submission.fail(error)


@functools.lru_cache(maxsize=4096)
def _hash(signature: Signature) -> int:
    """The same on all ranks."""
    return int.from_bytes(hashlib.blake2b(repr(signature).encode(), digest_size=8).digest(), "little", signed=True)
