"""Operations that are known, which lane.py and engine/express.py run in the caller's thread.

What fits in a slot is one call of the compiled module. Of a longer all-reduce that call only agrees on it with the
other ranks, and its pieces follow.

A program is made when an operation has gone the usual way. It is found by what a call passes, so a plan may have
several, of an allgather's different rows; like a plan it holds no array, and ends with its engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from ringreduce.arrays.buffer import numpy_buffer
from ringreduce.collectives import compiled
from ringreduce.execution.allreduce import is_by_elements, travelling
from ringreduce.execution.channel import Channel, hash_of
from ringreduce.execution.context import Context
from ringreduce.execution.in_slot import Gets, InSlot, in_slot, in_slot_of_set
from ringreduce.execution.steps import label
from ringreduce.execution.submission import Handle, Submission
from ringreduce.transport.base import Task

MOST_KNOWN = 1024  # programs of an engine's process sets, or of a channel
MOST_BYTES = 8 << 20
"""Of one in pieces: in the two milliseconds that it takes nothing else of the engine moves; what is longer gains little
by the tenth of one that is saved."""


class Program:
    """A known operation."""

    __slots__ = (
        *("algorithm", "fits", "in_pieces", "in_python", "plan", "recorded", "region", "run", "shape", "slots"),
        *("state", "told"),
    )

    def __init__(
        self,
        submission: Submission,
        run: Callable[..., int],
        region: Any,
        fits: Any = None,
        in_python: bool = False,
        in_pieces: bool = False,
    ) -> None:
        """run:       of the compiled module's Exchange, or of several hosts' `Across.lane`.
        region:    the `Region` whose slots it uses, if any;  fits: as an `InSlot`, where it is one.
        in_python: it waits in Python: where the user's own code may run meanwhile, for a signal, it must not.
        in_pieces: `run` only agrees on it with the others, and `pieces` follow.
        """
        self.in_pieces = in_pieces
        signature = submission.signature
        self.state: Any = None  # of its process set, which engine/express.py looks at
        self.plan, self.run, self.region, self.fits, self.in_python = submission.plan, run, region, fits, in_python
        self.slots = int(not in_python if fits is None else fits.gets is not Gets.NOTHING)  # how many it uses
        self.shape = submission.outputs[0].shape if submission.outputs else ()  # of the result
        shares = region is not None and (signature.kind == "allreduce" or submission.process_set < 0)  # a channel's
        self.algorithm = "shared" if shares else ""  # see Submission
        self.told = signature, submission.line  # what a stall report says of it: also the caller's line
        nbytes = sum(each.nbytes for each in submission.inputs or submission.outputs)
        self.recorded = label(signature, submission.process_set), signature.kind, nbytes  # by steps

    def pieces(self, source: Any, target: Any) -> Callable[[], Task[None]]:
        """What begins the pieces, once all have agreed.

        Raises: ValueError now where an array cannot be read or written as it lies.
        """
        flat = numpy_buffer(source, False).flat, numpy_buffer(target, True).flat
        return lambda: Task(compiled.allreduce(flat[:1], flat[1:], self.region, self.fits.reduction))


class Programs:
    """Those of all process sets, or of one channel, by what a call passes."""

    def __init__(self, made: Callable[[Submission], Program | None]) -> None:
        self._made, self._by_call = made, dict[Hashable, Program]()
        self.find = self._by_call.get

    def learn(self, call: Hashable, done: Handle) -> None:
        """Learn from an operation that went the usual way to run those of equal calls, if these have a program."""
        known = self._by_call.get(call)
        if not isinstance(done, Submission) or (known is not None and known.plan is done.plan):
            return
        program = self._made(done)
        if program is not None:
            if len(self._by_call) >= MOST_KNOWN:
                self._by_call.clear()
            self._by_call[call] = program


def program_of(submission: Submission, context: Context, channel: Channel | None = None) -> Program | None:
    """The program of an operation that has none yet; None where the compiled module does not run such ones."""
    if channel is not None and (across := channel.across) is not None:
        reduction = travelling(submission, across.most_bytes)
        if reduction is None or not submission.inputs[0].count:
            return None
        run = across.lane(hash_of(submission.signature), reduction, functools.partial(setattr, channel, "crossing"))
        return run and Program(submission, run, across.region, in_python=across.transport is not None)
    fits = in_slot_of_set(submission, context) if channel is None else in_slot(submission, context)
    in_pieces = fits is None and (fits := _in_pieces(submission, context)) is not None
    signatures = None if fits is None else fits.region if channel is None else channel.signatures
    if fits is None or signatures is None:
        return None
    exchange = fits.compiled(signatures, 0 if channel is None else hash_of(submission.signature))
    return exchange and Program(submission, exchange.run, fits.region, fits, in_pieces, in_pieces)


def _in_pieces(submission: Submission, context: Context) -> InSlot | None:
    """How ranks agree on an all-reduce of one array that takes several slots: as on a barrier. None for all else."""
    algorithms, inputs, region = context.algorithms, submission.inputs, context.algorithms.shared_region
    if region is None or len(inputs) != 1 or not is_by_elements(submission) or algorithms.wire(submission.signature):
        return None
    if inputs[0].on_gpu or not 0 < inputs[0].nbytes <= MOST_BYTES or getattr(submission.payload, "number", None):
        return None
    reduction = submission.reduction(inputs[0].element)
    if reduction.size != region.size or not compiled.can(region, reduction):
        return None
    shares = algorithms.choose(inputs[0].nbytes, reduction) == "shared"
    return InSlot(Gets.NOTHING, region, reduction=reduction) if shares else None
