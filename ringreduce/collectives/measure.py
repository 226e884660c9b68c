"""Measures the constants of the cost model (choose.py), once, at the start; all ranks together, in under 100 ms."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from ringreduce.collectives import bruck
from ringreduce.collectives.choose import Constants
from ringreduce.transport.base import Steps, Transport
from ringreduce.transport.window import PACKED, Region

TAG = 2
SMALL_TIMES = 4
LARGE_BYTES = 128 << 10
ROUNDS = 5
"""The best of so many counts: what else the machine did is not the network's."""


def constants(transport: Transport, hosts: Sequence[int], region: Region | None) -> Steps[Constants]:
    """Measure between neighbours: in a host, and from host to host, all pairs at the same time.

    Cost: some 50 messages of 8 bytes or 128 KiB, and 10 copies of a slot; a wire of 100 Mbit/s takes 60 ms.
    Result: the slowest rank's figures, so that they are the same on all ranks.
    """
    rank = transport.rank
    mine = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    leaders = sorted({host: r for r, host in reversed(list(enumerate(hosts)))}.values())
    figures = [0.0] * 6
    if region is not None and region.size > 1:
        figures[0] = yield from _wait_us(region)
        figures[1] = yield from _copy_us_per_byte(region)
    if len(mine) > 1:
        figures[2:4] = yield from _shift(transport, mine)
    if len(leaders) > 1 and rank in leaders:
        figures[4:6] = yield from _shift(transport, leaders)
    everyones = yield from bruck.allgather(np.array(figures), transport)
    return _constants(everyones.max(axis=0))


def _constants(slowest: Sequence[float]) -> Constants:
    names = ("wait_us", "copy_gbs", "message_us", "message_gbs", "wire_us", "wire_gbs")
    known = {
        name: float(value if name.endswith("_us") else 1e-3 / value)
        for name, value in zip(names, slowest, strict=True)
        if value > 0
    }
    found = Constants(**known)
    # a message inside a host is made of such waits: where it seems quicker, the machine was doing something else
    return dataclasses.replace(found, wait_us=min(found.wait_us, found.message_us))


def _wait_us(region: Region) -> Steps[float]:
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(SMALL_TIMES):
            region.publish(PACKED, region.turn)
            if not region.arrived(PACKED, region.turn):
                yield region.arrival(PACKED, region.turn)
            region.turn += 1
        best = min(best, 1e6 * (time.perf_counter() - started) / SMALL_TIMES)
    return best


def _copy_us_per_byte(region: Region) -> Steps[float]:
    """Each from another's slot into its own, as it is done later."""
    nbytes = region.slot_bytes // 2
    best = float("inf")
    for _ in range(ROUNDS):
        slots = region.slots(region.turn, np.dtype(np.uint8))
        started = time.perf_counter()
        slots[region.rank][:nbytes] = slots[(region.rank + 1) % region.size][nbytes : 2 * nbytes]
        best = min(best, time.perf_counter() - started)
        region.publish(PACKED, region.turn)
        yield region.arrival(PACKED, region.turn)
        region.turn += 1
    return 1e6 * best / nbytes


def _shift(transport: Transport, ring: Sequence[int]) -> Steps[list[float]]:
    """µs of a small message, and µs per byte of a large one, while every rank of `ring` sends to the next."""
    place = list(ring).index(transport.rank)
    right, left = ring[(place + 1) % len(ring)], ring[place - 1]
    outgoing, incoming = np.zeros(LARGE_BYTES, np.uint8), np.empty(LARGE_BYTES, np.uint8)
    figures = []
    for nbytes, times, rounds in ((8, SMALL_TIMES, ROUNDS), (LARGE_BYTES, 1, 2)):
        best = float("inf")
        for _ in range(rounds):
            started = time.perf_counter()
            for _ in range(times):
                received = transport.receive(incoming[:nbytes], left, TAG)
                sent = transport.send(outgoing[:nbytes], right, TAG)
                yield received
                yield sent
            best = min(best, 1e6 * (time.perf_counter() - started) / times)
        figures.append(best)
    return [figures[0], max(figures[1] - figures[0], 1e-3) / LARGE_BYTES]
