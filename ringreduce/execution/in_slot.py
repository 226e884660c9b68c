"""Operations of a channel that fit in one slot of shared memory: packed first, and published by the signature's flag.

So they cost one wait, for all to have signed the same, and two where each rank sums a chunk only. The compiled module
does the same in one call (lane.py); ranks that use it and ranks that do not may work together.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce.collectives.cost_model import is_one_shot
from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.partition import chunk_bounds
from ringreduce.execution.allreduce import is_by_elements
from ringreduce.execution.context import Context
from ringreduce.execution.submission import Submission
from ringreduce.transport.base import Steps
from ringreduce.transport.window import CACHE_LINE_BYTES, SUMMED, Region, Signatures


class Gets(enum.IntEnum):
    """What a rank's target gets from the slots, as in kernels/native.c."""

    REDUCED = 0  # of all, combined by each rank
    IN_CHUNKS = 1  # of all, combined chunk by chunk, each by one rank
    OWN_PART = 2  # combined
    GATHERED = 3  # each rank's, one after the other
    OF_ROOT = 4
    NOTHING = 5
    OF_FIRST = 6  # what the first rank has reduced, together with other hosts: across.py
    BY_ROWS = 7  # each rank's, one after the other, which follow the number of its rows


class InSlot(NamedTuple):
    """One operation, of one source and one target, which may be the same."""

    gets: Gets
    region: Region
    where: int = 0  # the root, the own part's first element, or the number of own rows
    reduction: Reduction | None = None
    rows: int | None = None  # of the output, which is made then
    word: int = 0  # signed beside the hash; it is in one slot only where all ranks sign the same

    def pack(self, sources: Sequence[Any]) -> None:
        """Copy sources of one type, one after the other, into this rank's next slot."""
        region, low = self.region, 0
        if self.gets is Gets.BY_ROWS:
            (source,) = sources
            region.slots(region.sequence, np.dtype(np.int64))[region.rank][0] = self.where
            low = CACHE_LINE_BYTES  # in bytes, since elements may be longer, or of a length that does not divide it
            sources = [source.view(np.uint8)] if source.nbytes <= region.slot_bytes else ()
        if self.gets is not Gets.OF_ROOT or region.rank == self.where:
            for each in sources:
                self._slots(each.dtype, low, low + each.size)[self.region.rank][...] = each
                low += each.size

    def finish(self, targets: Sequence[Any]) -> Steps[None]:
        """Fill the target, or that of each rank, when all ranks have packed."""
        if self.gets is Gets.NOTHING:
            return
        region, target = self.region, targets[0]
        if self.gets is Gets.IN_CHUNKS:
            yield from self._chunk_by_chunk(target)
        elif self.gets is Gets.BY_ROWS:
            rows, target, low = self.rows_of_all(), target.view(np.uint8), 0
            for each, count in zip(self._slots(target.dtype, CACHE_LINE_BYTES, None), rows, strict=True):
                nbytes = count * target.size // max(sum(rows), 1)
                target[low : low + nbytes] = each[:nbytes]
                low += nbytes
        elif self.gets is Gets.GATHERED:
            parts = targets if len(targets) == region.size else np.split(target, region.size)
            for each, into in zip(self._slots(target.dtype, 0, parts[0].size), parts, strict=True):
                into[...] = each
        else:
            low = self.where if self.gets is Gets.OWN_PART else 0
            slots = self._slots(target.dtype, low, low + target.size)
            if self.reduction is None:
                target[...] = slots[self.where]
            else:
                self.reduction.reduce_parts(slots, target)
        region.sequence += 1

    def rows_of_all(self) -> list[int]:
        """The number of rows of each rank, when all have packed."""
        return [int(each[0]) for each in self._slots(np.dtype(np.int64), 0, 1)]

    def _chunk_by_chunk(self, target: Any) -> Steps[None]:
        region, bounds = self.region, chunk_bounds(target.size, self.region.size)
        slots, sequence, rank = self._slots(target.dtype, 0, target.size), region.sequence, region.rank
        if self.reduction is not None and not region.published(SUMMED, sequence):  # as the lane may have
            chunks = [each[bounds[rank] : bounds[rank + 1]] for each in slots]
            self.reduction.reduce_parts(chunks, chunks[rank])
            region.publish(SUMMED, sequence)
        if not region.arrived(SUMMED, sequence):
            yield region.arrival(SUMMED, sequence)
        for each, low, high in zip(slots, bounds, bounds[1:], strict=False):
            region.read(each[low:high], target[low:high])

    def compiled(self, signatures: Signatures | Region, signature: int) -> Any:
        """The operation in the compiled module's form, or None where there is none.  signature: its hash.

        signatures: the region itself for an operation of a schedule, which signs nothing.
        """
        numbers: tuple[Any, ...] | None = (0, 0, 1.0, 1.0, 1.0)
        if self.reduction is not None:
            numbers = self.reduction.compiled
        if numbers is None or not self.region.can_be_compiled:
            return None
        return self.region.compiled.exchange(signatures.compiled, signature, self.word, self.gets, *numbers, self.where)

    def _slots(self, dtype: np.dtype[Any], low: int, high: int | None) -> list[Any]:
        return [each[low:high] for each in self.region.slots(self.region.sequence, dtype)]


def in_slot(submission: Submission, context: Context) -> InSlot | None:
    """None for an operation that runs otherwise. Same on all ranks, but where ranks have arrays in shared memory."""
    region, kind, inputs = context.algorithms.shared_region, submission.signature.kind, submission.inputs
    if region is None:
        return None
    if kind == "barrier":
        return InSlot(Gets.NOTHING, region)
    if len(inputs) != (region.size if kind == "reduce_scatter" else 1) or any(each.on_gpu for each in inputs):
        return None
    nbytes = sum(each.nbytes for each in inputs)
    if not 0 < nbytes <= region.slot_bytes or getattr(submission.payload, "number", None):
        return None
    if kind == "broadcast":
        root = submission.signature.detail("root_rank")
        return InSlot(Gets.OF_ROOT, region, context.members.index(root)) if root in context.members else None
    if kind == "all_gather":
        return InSlot(Gets.GATHERED, region)
    if kind == "allgather":  # rows may differ by rank
        rows = inputs[0].shape[0]
        return InSlot(Gets.GATHERED, region, rows=region.size * rows, word=1 + rows)
    in_elements = is_by_elements(submission) and context.algorithms.wire(submission.signature) is None
    if kind not in ("reduce_scatter", "reducescatter") and not in_elements:
        return None
    reduction = submission.reduction(inputs[0].element)
    if kind == "reducescatter":
        low, high = chunk_bounds(inputs[0].shape[0], region.size)[region.rank :][:2]
        return InSlot(Gets.OWN_PART, region, low * (inputs[0].count // inputs[0].shape[0]), reduction, high - low)
    if kind == "reduce_scatter":
        is_equal = len({each.count for each in inputs}) == len({each.element for each in inputs}) == 1
        return InSlot(Gets.OWN_PART, region, region.rank * inputs[0].count, reduction) if is_equal else None
    return InSlot(Gets.REDUCED if is_one_shot(nbytes, region.size) else Gets.IN_CHUNKS, region, 0, reduction)


def in_slot_of_set(submission: Submission, context: Context) -> InSlot | None:
    """Like `in_slot`, for a finished operation of a process set; ranks compare no words there.

    So rows go with the elements: of an allgather this is this rank's own affair, and others may have too many for a
    slot. None for a sum without some ranks, for what takes more than one slot, and where ranks had other rows.
    """
    fits = in_slot(submission, context)
    if fits is None or (fits.reduction is not None and fits.reduction.size != fits.region.size):
        return None
    nbytes = submission.inputs[0].nbytes if submission.inputs else 0
    if fits.gets is Gets.IN_CHUNKS and nbytes > fits.region.piece_bytes(nbytes):
        return None
    if fits.gets is not Gets.GATHERED:
        return fits
    fits = fits._replace(gets=Gets.BY_ROWS, where=submission.inputs[0].shape[0])
    return fits if submission.outputs[0].shape[0] == fits.rows else None
