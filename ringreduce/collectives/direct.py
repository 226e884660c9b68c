"""The direct all-reduce: every rank sends chunk k of its elements straight to rank k, which reduces and spreads it.

With P = 3, the columns being the chunks, `a1` rank 1's part of chunk a:

            rank 0            rank 1            rank 2
          a0  b0  c0        a1  b1  c1        a2  b2  c2        gather: rank r sends chunk k to each other rank k
          a0 a1 a2          b0 b1 b2          c0 c1 c2          reduce: in the order of the ranks, rounded once
          A                     B                     C         spread: rank r sends chunk r to each other rank
          A   B   C         A   B   C         A   B   C

Cost: as the ring's, 2 n (P - 1) / P elements sent by every rank, and they travel in their own type both times: 16-bit
floats as 16 bits, where the ring's partial sums are float32. Two steps instead of 2 (P - 1), but each rank talks to all
others, and a link inside the network may carry several of these conversations.

A rank reduces the original elements of all ranks, so the result for an element depends on nothing else: not on its
chunk, nor on what travelled with it, nor on which rank came first.

A chunk travels in segments, and segment j of all chunks makes up row j:

          row 0     rank r sends segment 0 of each chunk k to rank k      and gets segment 0 of chunk r from all
          row 1     ...                 1
          ...                               as soon as a row has arrived it is reduced, and its result sent to all

Some rows are in flight ahead of the one being reduced, so no wire waits for a processor; the results follow while later
rows arrive, so the second half begins without a pause.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ringreduce.collectives.partition import bounds_of, chunk_bounds, segments
from ringreduce.settings import Settings
from ringreduce.transport.base import Steps, Transport, Work

RAW_TAG, FINISHED_TAG = 7, 1
SEGMENT_BYTES = Settings.ring_segment_bytes
AHEAD_BYTES = 2 << 20  # received ahead of the reduction; at least two rows
LEAST_SEGMENT_BYTES = 4096  # with many ranks segments shrink, so that two rows fit into AHEAD_BYTES, but no further


class Reduces(Protocol):
    """A `Reduction`, or what reduces elements of another kind."""

    def reduce_parts(self, parts: Sequence[Any], out: Any) -> None:
        """See `Reduction.reduce_parts`. It is called for one segment of this rank's chunk after the other."""


def allreduce(flat: Any, transport: Transport, reduction: Reduces, segment_bytes: int = SEGMENT_BYTES) -> Steps[None]:
    """Reduce `flat` over all ranks, in place; every rank gets the same bits, whatever `segment_bytes` is.

    Shape:   (count,), contiguous, NumPy, as `reduction` has its elements; equal counts on all ranks. Not prescaled.
    Cost:    2 (size - 1) messages a rank, cut into segments; about 2 count (size - 1) / size elements sent by each, in
             their own type. Memory: 2 MiB, or two segments of 4 KiB per rank if that is more; never more than `flat`.
    """
    if transport.size == 1:
        reduction.reduce_parts([flat], flat)
        return
    bounds = chunk_bounds(flat.size, transport.size)
    yield from _Direct(flat, transport, reduction, segment_bytes, bounds, spreads=True).run()


def scatter_reduce(
    flat: Any, transport: Transport, reduction: Reduces, segment_bytes: int, counts: Sequence[int]
) -> Steps[None]:
    """Like `allreduce`, but only rank r gets chunk r, of counts[r] elements; the rest of `flat` stays as it was.

    Cost: size - 1 messages a rank, cut into segments; its elements outside its own chunk are sent.
    """
    yield from _Direct(flat, transport, reduction, segment_bytes, bounds_of(counts), spreads=False).run()


class _Direct:
    """The rows of one all-reduce, or of its first half: then nothing `spreads`."""

    def __init__(
        self,
        flat: Any,
        transport: Transport,
        reduction: Reduces,
        segment_bytes: int,
        bounds: Sequence[int],
        spreads: bool,
    ) -> None:
        self.flat, self.transport, self.reduction, self.spreads = flat, transport, reduction, spreads
        rank, size = transport.rank, transport.size
        self.peers = [(rank + distance) % size for distance in range(1, size)]
        row_bytes = max(AHEAD_BYTES // 2 // max(1, size - 1), LEAST_SEGMENT_BYTES)
        length = max(1, min(segment_bytes, row_bytes) // flat.itemsize)
        self.cuts = [segments(bounds[k], bounds[k + 1], length) for k in range(size)]
        self.rows = max(map(len, self.cuts))
        self.length = min(length, max(high - low for low, high in itertools.pairwise(bounds)))
        row = (size - 1) * self.length
        self.ahead = min(self.rows, max(2, AHEAD_BYTES // max(1, row * flat.itemsize)))
        self.scratch = np.empty(self.ahead * row, flat.dtype)  # receives the raw segments of those rows
        self.raw_receives: list[dict[int, tuple[Work, Any]]] = []
        self.raw_sends: list[list[tuple[int, Work]]] = []
        self.finished: list[Work] = []

    def run(self) -> Steps[None]:
        """Reduce all rows; afterwards the memory is the caller's again."""
        for row in range(self.ahead):
            self.begin(row)
        for row in range(self.rows):
            yield from self.reduce(row)
            if row + self.ahead < self.rows:
                self.begin(row + self.ahead)
            yield from self.expect(row)
        yield from self.finished

    def begin(self, row: int) -> None:
        """Post one row's receives, and send its elements to their owners."""
        transport, receives, sends = self.transport, {}, []
        for index, peer in enumerate(self.peers):
            if row < len(self.cuts[transport.rank]):
                low, high = self.cuts[transport.rank][row]
                start = (row % self.ahead * len(self.peers) + index) * self.length
                into = self.scratch[start : start + high - low]
                receives[peer] = transport.receive(into, peer, RAW_TAG), into
        for peer in self.peers:
            if row < len(self.cuts[peer]):
                low, high = self.cuts[peer][row]
                sends.append((peer, transport.send(self.flat[low:high], peer, RAW_TAG)))
        self.raw_receives.append(receives)
        self.raw_sends.append(sends)

    def reduce(self, row: int) -> Steps[None]:
        """Wait for one row of this rank's own chunk, reduce it in the order of the ranks, send the result to all."""
        rank = self.transport.rank
        if row >= len(self.cuts[rank]):
            return
        receives = self.raw_receives[row]
        for request, _ in receives.values():
            yield request
        low, high = self.cuts[rank][row]
        mine = self.flat[low:high]
        parts = [mine if k == rank else receives[k][1] for k in range(self.transport.size)]
        self.reduction.reduce_parts(parts, mine)
        if self.spreads:
            self.finished += [self.transport.send(mine, peer, FINISHED_TAG) for peer in self.peers]

    def expect(self, row: int) -> Steps[None]:
        """Post the receives of one row's results, into the memory that its raw elements occupied."""
        for peer, send in self.raw_sends[row]:
            yield send
            if self.spreads:
                low, high = self.cuts[peer][row]
                self.finished.append(self.transport.receive(self.flat[low:high], peer, FINISHED_TAG))
