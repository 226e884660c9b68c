"""Measures the constants of the cost model (cost_model.py) in init(), on all ranks together.

Other work on a machine only makes things slower. So all is measured again until the fastest times stay what they were,
which takes two attempts on a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.collectives.cost_model import Constants
from ringreduce.settings.log import JOB
from ringreduce.transport.base import Steps, Transport, complete
from ringreduce.transport.world import World, first_ranks

TAG = 2
SMALL_TIMES = 4
LARGE_BYTES = 384 << 10
BURST_BYTES = 128 << 10
"""Sent before each large message, at once: it uses up what a shaped link lets through at its wire's rate."""
POSTS = 3  # a send, its receive and what looks for their ends cost as many times what the send alone costs
ROUNDS = 5  # the fastest round counts, without other load on the machine
ATTEMPTS = 4
UNCHANGED = 1.1  # by no more than this factor


def measured(world: World, transport: Transport, slots: Sequence[Any] = ()) -> Constants:
    """The constants, equal on all ranks; every rank must call it. Rank 0 logs that they are uncertain, where they are.

    Cost: that of `figures` and an allgather, two to ATTEMPTS times.
    """
    found: list[list[float]] = []
    for _ in range(ATTEMPTS):
        before, now = found, world.allgather_object(complete(figures(transport, world.hosts, slots)))
        found = [[*map(min, *each)] for each in zip(before or now, now, strict=True)]
        if before and all(old <= UNCHANGED * new for old, new in zip(map(max, *before), map(max, *found), strict=True)):
            return slowest(found)
    if world.rank == 0:
        JOB.info(f"other work keeps this machine or its links busy: costs {slowest(before)} became {slowest(found)}")
    return slowest(found)


def figures(
    transport: Transport,
    hosts: Sequence[int],
    slots: Sequence[Any] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Steps[list[float]]:
    """Measure between neighbours, inside a host and from host to host, all pairs at the same time.

    slots:  unused shared memory of equal length, by local rank.
    Cost:   some 50 messages of 8 bytes to 384 KiB, and 5 copies of half a slot; 130 ms on a wire of 100 Mbit/s.
    Result: for `slowest`: this rank's µs of copying a byte, and of a small and a large message inside its host and
            between hosts; 0 for what it did not measure.
    """
    rank = transport.rank
    mine = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    leaders = first_ranks(hosts)
    found = [0.0] * 5
    if len(mine) > 1:
        found[1:3], _ = yield from _shift(transport, mine, clock)
        if slots:
            found[0] = _copy_us_per_byte(slots, mine.index(rank))
    if len(leaders) > 1 and rank in leaders:
        found[3:5], posting_us = yield from _shift(transport, leaders, clock)
        found[1] = found[1] or POSTS * posting_us
    return found


def slowest(figures_of_all: Sequence[Sequence[float]]) -> Constants:
    """The constants from the figures of all ranks, equal on all."""
    names = ("copy_gbs", "message_us", "message_gbs", "wire_us", "wire_gbs")
    own = [(each[0], each[1], _us_per_byte(*each[1:3]), each[3], _us_per_byte(*each[3:])) for each in figures_of_all]
    found = zip(names, map(max, zip(*own, strict=True)), strict=True)
    return Constants(**{name: value if name.endswith("_us") else 1e-3 / value for name, value in found if value > 0})


def _us_per_byte(small_us: float, large_us: float) -> float:
    return max(large_us - small_us, 1e-3) / LARGE_BYTES if large_us else 0.0


def _copy_us_per_byte(slots: Sequence[Any], local_index: int) -> float:
    """Copy from the next rank's slot into this rank's own, as the collectives do."""
    half: int = slots[local_index].size // 2
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        slots[local_index][:half] = slots[(local_index + 1) % len(slots)][half : 2 * half]
        best = min(best, time.perf_counter() - started)
    return 1e6 * best / half


def _shift(transport: Transport, ring: Sequence[int], clock: Callable[[], float]) -> Steps[tuple[list[float], float]]:
    """µs of a small message, and of a large one, while every rank of `ring` sends to the next.

    Returns these, and the µs of the processor alone to begin a send.
    """
    index = list(ring).index(transport.rank)
    right, left = ring[(index + 1) % len(ring)], ring[index - 1]
    outgoing, incoming = np.zeros(LARGE_BYTES, np.uint8), np.empty(LARGE_BYTES, np.uint8)
    found, posting_us = [], float("inf")

    def exchange(nbytes: int) -> Steps[None]:
        nonlocal posting_us
        received = transport.receive(incoming[:nbytes], left, TAG)
        posted = clock()
        sent = transport.send(outgoing[:nbytes], right, TAG)
        posting_us = min(posting_us, 1e6 * (clock() - posted))
        yield received
        yield sent

    for nbytes, times, rounds, before in ((8, SMALL_TIMES, ROUNDS, 8), (LARGE_BYTES, 1, 3, BURST_BYTES)):
        best = float("inf")
        for _ in range(rounds):
            yield from exchange(before)
            started = clock()
            for _ in range(times):
                yield from exchange(nbytes)
            best = min(best, 1e6 * (clock() - started) / times)
        found.append(best)
    return found, posting_us
