"""The ring all-reduce: scatter-reduce, then allgather.

The P ranks stand in a ring. Each sends only to its right neighbour and receives only from its left one. The buffer is
cut into P chunks (partition.py). With P = 3, the columns being the chunks, `a1` rank 1's part of chunk a:

            rank 0            rank 1            rank 2
          a0  b0  c0        a1  b1  c1        a2  b2  c2         step 0: rank r sends chunk r to the right
              ·
          a0  b0  c02       a01 b1  c1        a2  b12 c2         step 1: rank r sends chunk r - 1, the sum so far
              ·
          a0  B   c02       a01 b1  C         A   b12 c2         scatter-reduce is done: rank r owns chunk r + 1
              ·
          A   B   c02       a01 B   C         A   b12 C          step 2: rank r sends chunk r + 1, finished
              ·
          A   B   C         A   B   C         A   B   C          step 3: rank r sends chunk r; allgather is done

Cost: 2 (P - 1) steps; every rank sends and receives 2 n (P - 1) / P elements, the lower bound for any algorithm, and
every link carries the same load at every moment. Latency grows with P: small messages have better algorithms.

A chunk travels in segments. A segment is sent on as soon as it has arrived and was summed; receives are posted ahead,
so the wire and the processor work at the same time, and no step waits for a whole chunk. A rank begins with SENDS_AHEAD
segments and then sends one for each that arrives, so every link always has that many in flight: enough to keep the wire
busy while a rank is delayed, and never more than the right neighbour can buffer.

Over TCP, Open MPI sends a message of up to 64 KiB at once; a longer one needs a handshake (rendezvous), which advances
only while both ranks are inside MPI. Four hosts of 1 Gbit/s, 4 MiB: 0.97 of a raw TCP stream with segments of
60 KiB, 0.72 with 512 KiB. Segments of 30 KiB gain nothing, not even where a chunk has only a few of them.

Every element is summed by one rank after the other in ring order, and the finished one is copied, so all ranks get the
same bits. The functions are generators (transport/base.py): `complete(allreduce(...))` runs one to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.partition import (
    Step,
    allgather_steps,
    bounds_of,
    chunk_bounds,
    scatter_reduce_steps,
    segments,
)
from ringreduce.errors import InputError
from ringreduce.settings import Settings
from ringreduce.transport.base import Steps, Transport, Work

TAG = 1
RECEIVES_AHEAD = 4  # receives posted before they are needed
SENDS_AHEAD = 32
"""Segments sent before as many have arrived from the left.

Without a limit the whole first chunk would be sent at once. MPI buffers what has no receive yet; from some MiB on, its
receiver stops reading for 0.2 s now and then (Open MPI 5.0, 64 MiB: one time in ten).
"""
SEGMENT_BYTES = Settings.ring_segment_bytes


class _Arrival(NamedTuple):
    """One segment that arrives from the left at a step."""

    step: int
    low: int
    high: int
    reduce: bool  # reduced into the chunk; else it replaces it
    finished: bool  # every rank has added its part
    forward: bool  # sent on to the right
    overwrites: tuple[int, int] | None  # the send (step, low) that must be done before this arrival replaces its memory


class Workspace(NamedTuple):
    """Memory for a reduction, so that none is allocated per call; on the device of `flat`, each 1-D."""

    partial: Any  # of `reduction.sum_type`, holding the started elements; `flat` itself when the reduction is in place
    scratch: Any  # of `reduction.sum_type`, at least RECEIVES_AHEAD segments, or chunks where these are shorter


def allreduce(
    flat: Any,
    transport: Transport,
    reduction: Reduction,
    segment_bytes: int = SEGMENT_BYTES,
    workspace: Workspace | None = None,
) -> Steps[None]:
    """Reduce `flat` over all ranks, in place; every rank gets the same bits.

    Shape:  (count,), contiguous, `reduction.element.storage`, equal counts everywhere; NumPy, or CuPy with a workspace.
    workspace: memory to use; its `partial` is reduced, and `flat` only written. By default it is made here.
    Cost:   2 (size - 1) messages a rank, cut into segments; about 2 count (size - 1) / size elements sent by each.
            Partial results travel in `reduction.sum_type`, finished ones as they are. Memory: RECEIVES_AHEAD segments
            beside `flat`, and a copy of it where `sum_type` is wider; MPI buffers SENDS_AHEAD segments.
    Source: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    rank, size = transport.rank, transport.size
    bounds = chunk_bounds(flat.size, size)
    partial = reduction.start(flat) if workspace is None else workspace.partial
    if size == 1:
        reduction.finish(partial, flat)
        return
    steps = scatter_reduce_steps(size, rank + 1) + allgather_steps(size, rank + 1)
    scratch = None if workspace is None else workspace.scratch
    yield from _Ring(flat, partial, bounds, steps, transport, reduction, segment_bytes, scratch).run()


def scatter_reduce(
    flat: Any,
    transport: Transport,
    reduction: Reduction,
    segment_bytes: int = SEGMENT_BYTES,
    counts: Sequence[int] | None = None,
    owned: int | None = None,
) -> Steps[tuple[int, int]]:
    """Reduce `flat` around the ring; leave one finished chunk on each rank.

    Shape:  as `allreduce`; changed in place, and outside the owned chunk left with partial sums.
    counts: the elements of each chunk; by default they differ by one at most.
    owned:  the chunk that this rank ends with, rank + 1 by default; the same distance on all ranks.
    Result: (low, high): the finished part of `flat`.
    Cost:   size - 1 messages a rank, cut into segments; about count (size - 1) / size elements sent by each.
    Raises: InputError when `counts` does not fit.
    Source: Patarasuk & Yuan, 2009.
    """
    rank, size = transport.rank, transport.size
    bounds = _bounds("scatter_reduce", flat, size, counts)
    partial = reduction.start(flat)
    owned = (rank + 1 if owned is None else owned) % size
    low, high = bounds[owned], bounds[owned + 1]
    if size == 1:
        reduction.finish(partial, flat)
    else:
        steps = scatter_reduce_steps(size, owned)
        yield from _Ring(flat, partial, bounds, steps, transport, reduction, segment_bytes).run()
    return low, high


def allgather(
    flat: Any,
    transport: Transport,
    counts: Sequence[int] | None = None,
    owned: int | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> Steps[None]:
    """Spread each rank's own chunk of `flat` to all ranks, in place.

    Shape:  (count,), contiguous, NumPy or CuPy, any element type; equal counts on all ranks.
    counts: the elements of each chunk; by default the chunks of `scatter_reduce`.
    owned:  the chunk that this rank has, rank + 1 by default as after `scatter_reduce`; the same distance on all ranks.
    Cost:   size - 1 messages a rank, cut into segments; all chunks but one sent by each.
    Raises: InputError when `counts` does not fit.
    Source: Patarasuk & Yuan, 2009.
    """
    rank, size = transport.rank, transport.size
    bounds = _bounds("allgather", flat, size, counts)
    steps = allgather_steps(size, rank + 1 if owned is None else owned)
    if size > 1:
        yield from _Ring(flat, flat, bounds, steps, transport, None, segment_bytes).run()


def _bounds(function: str, flat: Any, size: int, counts: Sequence[int] | None) -> list[int]:
    if counts is None:
        return chunk_bounds(flat.size, size)
    if len(counts) != size or sum(counts) != flat.size:
        raise InputError(
            f"{function}: {len(counts)} counts with sum {sum(counts)} for {size} ranks and {flat.size} elements"
        )
    return bounds_of(counts)


class _Ring:
    """The loop of all three: reducing steps work on `partial`, the others on `flat`; often both are one array."""

    def __init__(
        self,
        flat: Any,
        partial: Any,
        bounds: list[int],
        steps: list[Step],
        transport: Transport,
        reduction: Reduction | None,
        segment_bytes: int,
        scratch: Any = None,
    ) -> None:
        self.flat, self.partial = flat, partial
        self.transport, self.reduction = transport, reduction
        self.left, self.right = (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size
        self.bounds, self.steps = bounds, steps
        self.length = max(1, segment_bytes // partial.itemsize)
        self.arrivals = list(_arrivals(steps, bounds, self.length))
        self.scratch = _scratch(partial, self.arrivals, scratch)
        self.receives: list[tuple[Work, Any]] = []
        self.outgoing: deque[tuple[int, slice, Any]] = deque()
        self.sends: dict[tuple[int, int], Work] = {}

    def run(self) -> Steps[None]:
        """Run all steps; afterwards the memory is the caller's again."""
        yield from self.post_receives(0)
        first = self.steps[0]
        for low, high in segments(self.bounds[first.send], self.bounds[first.send + 1], self.length):
            self.outgoing.append((0, slice(low, high), self.partial if first.reduce else self.flat))
        for index in range(len(self.arrivals)):
            self.send(index + SENDS_AHEAD)
            yield from self.post_receives(index)
            yield from self.process(index)
        self.send(len(self.sends) + len(self.outgoing))  # more than arrived, where chunks differ in length
        yield from self.sends.values()

    def post_receives(self, current: int) -> Steps[None]:
        """Post the receive of arrival `current` and, as far as their memory is free, some of the following ones."""
        for index in range(len(self.receives), min(current + RECEIVES_AHEAD, len(self.arrivals))):
            arrival = self.arrivals[index]
            if arrival.overwrites is not None:
                send = self.sends.get(arrival.overwrites)
                if send is None or (index > current and not send.done()):
                    return
                yield send
            low, high = arrival.low, arrival.high
            into = self.scratch[index % RECEIVES_AHEAD][: high - low] if arrival.reduce else self.flat[low:high]
            self.receives.append((self.transport.receive(into, self.left, TAG), into))

    def process(self, index: int) -> Steps[None]:
        """Wait for one arrival, reduce it, and send it on."""
        arrival = self.arrivals[index]
        request, received = self.receives[index]
        yield request
        here = slice(arrival.low, arrival.high)
        if arrival.reduce and self.reduction is not None:
            self.reduction.combine(self.partial[here], received)
            if arrival.finished:
                self.reduction.finish(self.partial[here], self.flat[here])
        if arrival.forward:
            self.outgoing.append((arrival.step + 1, here, self.flat if arrival.finished else self.partial))

    def send(self, number: int) -> None:
        """Send segments to the right, in order, until `number` have been sent or no more are ready."""
        while self.outgoing and len(self.sends) < number:
            step, here, array = self.outgoing.popleft()
            self.sends[step, here.start] = self.transport.send(array[here], self.right, TAG)


def _arrivals(steps: list[Step], bounds: list[int], length: int) -> Iterator[_Arrival]:
    """All segments that arrive from the left, in order."""
    sent_at = {step.send: number for number, step in reversed(list(enumerate(steps)))}
    for number, step in enumerate(steps):
        last = number + 1 == len(steps)
        finished = not step.reduce or last or not steps[number + 1].reduce
        sent = number if step.reduce else sent_at.get(step.receive, number)
        for low, high in segments(bounds[step.receive], bounds[step.receive + 1], length):
            overwrites = (sent, low) if sent < number else None
            yield _Arrival(number, low, high, step.reduce, finished, forward=not last, overwrites=overwrites)


def _scratch(partial: Any, arrivals: list[_Arrival], memory: Any) -> list[Any]:
    """Memory for the receives posted ahead whose data is to be reduced: in `memory`, or new."""
    longest = max((arrival.high - arrival.low for arrival in arrivals if arrival.reduce), default=0)
    flat = np.empty(RECEIVES_AHEAD * longest, partial.dtype) if memory is None else memory
    return [flat[k * longest : (k + 1) * longest] for k in range(RECEIVES_AHEAD)]
