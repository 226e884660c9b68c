"""Measures the constants of the cost model (cost_model.py) in init(), on all ranks together, in under 100 ms."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.cost_model import Constants
from ringreduce.transport.base import Steps, Transport
from ringreduce.world import first_ranks

TAG = 2
SMALL_TIMES = 4
LARGE_BYTES = 128 << 10
POSTS = 3  # a send, its receive and what looks for their ends cost as many times what the send alone costs
ROUNDS = 5  # the fastest round counts, without other load on the machine


def figures(transport: Transport, hosts: Sequence[int], slots: Sequence[Any] = ()) -> Steps[list[float]]:
    """Measure between neighbours, inside a host and from host to host, all pairs at the same time.

    slots:  unused shared memory of equal length, by local rank.
    Cost:   some 50 messages of 8 bytes or 128 KiB, and 5 copies of half a slot; 80 ms on a wire of 100 Mbit/s.
    Result: this rank's figures, for `slowest`; 0 for those that it did not measure.
    """
    rank = transport.rank
    mine = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    leaders = first_ranks(hosts)
    found = [0.0] * 5
    if len(mine) > 1:
        found[1:3], _ = yield from _shift(transport, mine)
        if slots:
            found[0] = _copy_us_per_byte(slots, mine.index(rank))
    if len(leaders) > 1 and rank in leaders:
        found[3:5], posting_us = yield from _shift(transport, leaders)
        found[1] = found[1] or POSTS * posting_us
    return found


def slowest(everyones: Sequence[Sequence[float]]) -> Constants:
    """The constants from the figures of all ranks, equal on all."""
    names = ("copy_gbs", "message_us", "message_gbs", "wire_us", "wire_gbs")
    found = zip(names, map(max, zip(*everyones, strict=True)), strict=True)
    return Constants(**{name: value if name.endswith("_us") else 1e-3 / value for name, value in found if value > 0})


def _copy_us_per_byte(slots: Sequence[Any], local_index: int) -> float:
    """Copy from the next rank's slot into this rank's own, as the collectives do."""
    half: int = slots[local_index].size // 2
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        slots[local_index][:half] = slots[(local_index + 1) % len(slots)][half : 2 * half]
        best = min(best, time.perf_counter() - started)
    return 1e6 * best / half


def _shift(transport: Transport, ring: Sequence[int]) -> Steps[tuple[list[float], float]]:
    """µs of a small message, and µs per byte of a large one, while every rank of `ring` sends to the next.

    Returns these, and the µs of the processor alone to begin a send.
    """
    index = list(ring).index(transport.rank)
    right, left = ring[(index + 1) % len(ring)], ring[index - 1]
    outgoing, incoming = np.zeros(LARGE_BYTES, np.uint8), np.empty(LARGE_BYTES, np.uint8)
    found, posting_us = [], float("inf")
    for nbytes, times, rounds in ((8, SMALL_TIMES, ROUNDS), (LARGE_BYTES, 1, 3)):
        best = float("inf")
        for number in range(rounds):
            started = time.perf_counter()
            for _ in range(times):
                received = transport.receive(incoming[:nbytes], left, TAG)
                posted = time.perf_counter()
                sent = transport.send(outgoing[:nbytes], right, TAG)
                posting_us = min(posting_us, 1e6 * (time.perf_counter() - posted))
                yield received
                yield sent
            if number:  # the first round uses up what a shaped link lets through at once
                best = min(best, 1e6 * (time.perf_counter() - started) / times)
        found.append(best)
    return [found[0], max(found[1] - found[0], 1e-3) / LARGE_BYTES], posting_us
