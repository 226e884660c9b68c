"""What a channel on several hosts does first: do all ranks mean the same? The sum of a short array comes with that.

One message a host. With two ranks on each of two hosts, `a` and `b` what a host's first rank packs, and its second:

    all            pack what they have into their slots, and sign: `transport.window.Signatures`
    first ranks    have seen all sign; sum a + b; exchange that, with the hash, by doubling (collectives/hashed.py);
                   write the finished elements into their own slot; publish SUMMED
    other ranks    have published SUMMED at once; when all have, they copy the first one's slot

Where hosts differ, a first rank changes its own hash before it publishes. Ranks that share no memory are first ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import hashed
from ringreduce.collectives.ops import Reduction
from ringreduce.execution.algorithms import Algorithms
from ringreduce.execution.in_slot import Gets
from ringreduce.transport.base import Steps, Task, Transport
from ringreduce.transport.subset import SubsetTransport
from ringreduce.transport.window import PACKED, SUMMED, Region, Signatures

PATIENCE_US = 2000.0  # how long the lane waits for other hosts, before the engine looks for other work
NO_ELEMENTS = np.empty(0, np.uint8)


class Across:
    """The first step of one channel's operations.  signatures: of this host's members; None: they share no memory."""

    def __init__(self, algorithms: Algorithms, signatures: Signatures | None) -> None:
        region, whole = algorithms.region, algorithms.channels[0]
        self.most_bytes = algorithms.short_bytes
        self.transport: Transport | None = whole  # of the first ranks
        self.region: Region | None = None
        if signatures is not None and region is not None:
            self.region, self.signatures = region, signatures
            self.most_bytes = min(self.most_bytes, region.slot_bytes)
            first = algorithms.first_ranks
            self.transport = SubsetTransport(whole, first, 0) if whole.rank in first else None

    def lane(self, mine: int, reduction: Reduction, keep: Callable[[Task[Any]], object]) -> Callable[..., int] | None:
        """Like the compiled module's Exchange.run (see lane.py), for short arrays; None where it is not compiled.

        keep: called with what a first rank has begun, and not ended well.
        """
        region, numbers, exchange = self.region, reduction.part().compiled, None
        if region is not None:
            if numbers is None or not region.can_be_compiled:
                return None
            gets = Gets.OF_FIRST if self.transport is None else Gets.REDUCED
            exchange = region.compiled.exchange(self.signatures.compiled, mine, 0, gets, *numbers, 0).run
        storage, follows = reduction.element.storage, self.transport is None

        def run(source: Any, target: Any, number: int, sequence: int, _: float) -> int:
            if not (source.flags.c_contiguous and target.flags.c_contiguous and target.flags.writeable):
                raise ValueError
            elements = source.reshape(-1).view(storage)
            if exchange is None:
                partial = sum_of([elements], reduction)
            else:
                partial = np.empty(elements.size, storage)
                state: int = exchange(source, target if follows else partial, number, sequence, PATIENCE_US)
                if state or follows:
                    return state
            task = Task(self.with_hosts(mine, partial, reduction, number))
            until_s = time.monotonic() + PATIENCE_US / 1e6
            while not task.ended and (task.advance() or time.monotonic() < until_s):
                os.sched_yield()
            if not task.ended or task.result is None:
                keep(task)
                return 1
            target.reshape(-1).view(storage)[...] = task.result
            return 0

        return run

    def run(self, mine: int, source: Any, reduction: Reduction | None, number: int | None) -> Steps[Any | None]:
        """The reduction of `source` over all ranks; None on all of them when their operations differ.

        mine:      the hash of this rank's operation.
        reduction: None: there is nothing to be reduced; the result has no elements.
        number:    under which it was packed and signed, if it was.
        """
        if self.region is None:
            return (yield from self.with_hosts(mine, sum_of([source], reduction), reduction))
        count = source.size if reduction else 0
        slots = [each[:count] for each in self.region.slots(self.region.sequence, source.dtype)]
        if number is None:
            slots[self.region.rank][...] = source[:count]
            number = self.signatures.sign(mine)
            if self.transport is None:
                self.signatures.publish(SUMMED, number)
        flag = SUMMED if self.transport is None else PACKED
        if not self.signatures.arrived(flag, number):
            yield self.signatures.arrival(flag, number)
        same = all(each == mine for each in self.signatures.read(number))
        if self.transport is not None:
            partial = sum_of(slots, reduction)
            return (yield from self.with_hosts(mine if same else None, partial, reduction, number))
        self.region.sequence += same and reduction is not None
        return slots[0] if same else None

    def with_hosts(
        self, mine: int | None, partial: Any, reduction: Reduction | None, number: int = 0
    ) -> Steps[Any | None]:
        """A first rank's part, from its host's sum on; then it publishes for the others.  mine: None: they differ."""
        transport, region, found = self.transport, self.region, None
        if transport is None:
            raise AssertionError("the first rank of a host exchanges its sum")
        total = yield from hashed.allreduce(mine, partial, transport, reduction.combine if reduction else _nothing)
        if total is not None:
            found = NO_ELEMENTS if reduction is None else finished(total, reduction)
        if region is not None:
            if found is None:
                self.signatures.differ(number)
            elif reduction is not None:
                region.slots(region.sequence, found.dtype)[region.rank][: found.size] = found
                region.sequence += 1
            self.signatures.publish(SUMMED, number)
        return found


def _nothing(*_: Any) -> None:
    return None


def sum_of(parts: Sequence[Any], reduction: Reduction | None) -> Any:
    """The partial result of a host's arrays, which are not changed."""
    if reduction is None:
        return NO_ELEMENTS
    partial = np.empty(parts[0].size, reduction.sum_type)
    reduction.part().reduce_parts(parts, partial)
    return partial


def finished(total: Any, reduction: Reduction) -> Any:
    """The elements of a result, which the caller may change."""
    elements = total if reduction.in_place else np.empty(total.size, reduction.element.storage)
    reduction.finish(total, elements)
    return elements
