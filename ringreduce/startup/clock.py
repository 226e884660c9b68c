"""How far the clocks of other hosts are ahead of rank 0's: ping-pong along a binomial tree of hosts.

Of each pair of hosts the fastest round counts.
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
    """How many microseconds this host's steady clock is ahead of another's, see `offsets_us`, on a host's first rank.

    hosts:  the number of each rank's host: one rank a host measures, since a host has one clock.
    Cost:   16 messages of 8 bytes for each host but the first, log2(hosts) hosts one after the other.
    Source: Cristian, "Probabilistic clock synchronization", 1989. Off by half of a round trip at most.
    """
    leaders = first_ranks(hosts)
    found = 0.0
    place = leaders.index(transport.rank) if transport.rank in leaders else len(leaders)
    for distance in [1 << k for k in range((len(leaders) - 1).bit_length())]:
        if distance <= place < min(2 * distance, len(leaders)):
            found = yield from _measure(transport, leaders[place - distance])
        elif place < distance and place + distance < len(leaders):
            yield from _answer(transport, leaders[place + distance])
    return found


def offsets_us(leads_us: Sequence[float], hosts: Sequence[int]) -> list[float]:
    """By rank, how far its host's clock is ahead of rank 0's, from what all ranks' `lead_us` found."""
    leaders = first_ranks(hosts)
    found: list[float] = []
    for place, leader in enumerate(leaders):
        nearer = found[place - (1 << place.bit_length() >> 1)] if place else 0.0
        found.append(nearer + leads_us[leader])
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


def _answer(transport: Transport, peer: int) -> Steps[None]:
    for _ in range(ROUNDS):
        yield transport.receive(np.zeros(1), peer, TAG)
        yield transport.send(np.array([_now_us()]), peer, TAG)


def _now_us() -> float:
    return time.monotonic_ns() / 1e3
