"""Clock offsets between hosts and rank 0, measured by ping-pong along a binomial tree of hosts.

The fastest of several rounds counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ringreduce.transport.base import Steps, Transport
from ringreduce.world import first_ranks

TAG = 6
ROUNDS = 8


def lead_us(transport: Transport, hosts: Sequence[int]) -> Steps[float]:
    """How many µs this host's monotonic clock is ahead of its parent's in the tree; 0 but on a host's first rank.

    hosts:  number of each rank's host.
    Cost:   16 messages of 8 bytes for each host but the first, in log2(hosts) sequential steps.
    Source: Cristian, "Probabilistic clock synchronization", 1989. The error is at most half a round trip.
    """
    leaders = first_ranks(hosts)
    lead = 0.0
    index = leaders.index(transport.rank) if transport.rank in leaders else len(leaders)
    for distance in [1 << k for k in range((len(leaders) - 1).bit_length())]:
        if distance <= index < min(2 * distance, len(leaders)):
            lead = yield from _measure(transport, leaders[index - distance])
        elif index < distance and index + distance < len(leaders):
            yield from _reply(transport, leaders[index + distance])
    return lead


def offsets_us(leads_us: Sequence[float], hosts: Sequence[int]) -> list[float]:
    """By rank, how far its host's clock is ahead of rank 0's; `leads_us` are all ranks' results of `lead_us`."""
    leaders = first_ranks(hosts)
    found: list[float] = []
    for index, leader in enumerate(leaders):
        parent = found[index - (1 << index.bit_length() >> 1)] if index else 0.0
        found.append(parent + leads_us[leader])
    by_host = {hosts[leader]: each for leader, each in zip(leaders, found, strict=True)}
    return [by_host[host] for host in hosts]


def _measure(transport: Transport, peer: int) -> Steps[float]:
    rounds = []
    theirs = np.zeros(1)
    for _ in range(ROUNDS):
        before = _now_us()
        yield transport.send(np.array([before]), peer, TAG)
        yield transport.receive(theirs, peer, TAG)
        after = _now_us()
        rounds.append((after - before, (before + after) / 2 - float(theirs[0])))
    return min(rounds)[1]


def _reply(transport: Transport, peer: int) -> Steps[None]:
    for _ in range(ROUNDS):
        yield transport.receive(np.zeros(1), peer, TAG)
        yield transport.send(np.array([_now_us()]), peer, TAG)


def _now_us() -> float:
    return time.monotonic_ns() / 1e3
