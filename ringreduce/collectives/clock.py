"""How far the clocks of other hosts are ahead of rank 0's: ping-pong, of which the fastest round counts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ringreduce.collectives import bruck
from ringreduce.transport.base import Steps, Transport

TAG = 6
ROUNDS = 8


def offsets_us(transport: Transport, hosts: Sequence[int]) -> Steps[list[float]]:
    """By rank, how many microseconds its host's steady clock is ahead of rank 0's; 0 on rank 0's own host.

    hosts:  the number of each rank's host: one rank a host measures, since a host has one clock.
    Cost:   16 messages of 8 bytes for each other host, one host after the other, and a small allgather.
    Source: Cristian, "Probabilistic clock synchronization", 1989. Off by half of a round trip at most.
    """
    mine = 0.0
    leaders = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    for leader in sorted(set(leaders.values()) - {0}):
        if transport.rank == leader:
            mine = yield from _measure(transport)
        elif transport.rank == 0:
            yield from _answer(transport, leader)
    everyones = yield from bruck.allgather(np.array([mine]), transport)
    return [float(everyones[leaders[host], 0]) for host in hosts]


def _measure(transport: Transport) -> Steps[float]:
    rounds = []
    theirs = np.zeros(1)
    for _ in range(ROUNDS):
        before = _now_us()
        yield transport.send(np.array([before]), 0, TAG)
        yield transport.receive(theirs, 0, TAG)
        after = _now_us()
        rounds.append((after - before, (before + after) / 2 - float(theirs[0])))
    return min(rounds)[1]


def _answer(transport: Transport, leader: int) -> Steps[None]:
    for _ in range(ROUNDS):
        yield transport.receive(np.zeros(1), leader, TAG)
        yield transport.send(np.array([_now_us()]), leader, TAG)


def _now_us() -> float:
    return time.monotonic_ns() / 1e3
