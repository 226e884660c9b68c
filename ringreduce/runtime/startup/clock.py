"""Clock offsets between the hosts and rank 0, for the timeline: ranks leave an exchange of all at about one time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ringreduce.transport.world import World

ROUNDS = 9


def offsets_us(world: World) -> list[float]:
    """By rank, how far its host's monotonic clock is ahead of rank 0's; all ranks must call it.

    Cost: on several hosts ROUNDS small allgathers. The error is about the time that a message takes.
    """
    if len(set(world.hosts)) == 1:
        return [0.0] * world.size
    rounds = [world.allgather_object(time.monotonic_ns() / 1e3) for _ in range(ROUNDS)]
    return compared(rounds[1:], world.hosts)  # before the first exchange the ranks were not together


def compared(rounds_us: Sequence[Sequence[float]], hosts: Sequence[int]) -> list[float]:
    """The offsets from all ranks' clocks in each round: the first rank of a host counts, and the median of the rounds.

    >>> compared([[10.0, 30.0, 25.0], [20.0, 36.0, 35.0], [30.0, 45.0, 99.0]], [0, 1, 1])
    [0.0, 15.0, 15.0]
    """
    by_host: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}
    for host, clock in zip(hosts, np.transpose(rounds_us), strict=True):
        by_host[host] = np.minimum(clock, by_host.get(host, clock))
    return [float(np.median(by_host[host] - by_host[hosts[0]])) for host in hosts]
