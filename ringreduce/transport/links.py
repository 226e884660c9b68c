"""The links between hosts, as init() measures them: hosts whose link is slow, and an order that avoids slow links.

A ring passes every host, so a host with a slow link slows every all-reduce, whatever the order: it is named. A slow
link between two hosts is passed only if they are neighbours, and what hosts of several racks share is passed least if
the hosts of a rack are neighbours. Links are measured from each host to those 1, 2, 3, 5, 8, … after it, all of a
distance at the same time, so that it shows what they share.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ringreduce.transport.base import Steps, Transport, complete
from ringreduce.transport.world import World, first_ranks

TAG = 2
NBYTES = 256 << 10
ROUNDS = 2  # the faster one counts
ATTEMPTS = 3  # what seems slow is measured again, in case a processor was busy
SLOW_SHARE = 0.5  # of what both hosts can do with others; or of what most hosts can do
FEW = 7  # hosts of which all orders are compared; of more some, which begin at the first BEGINNINGS hosts
BEGINNINGS = 8


class Links(NamedTuple):
    """What was found, equal on all ranks; empty where there is one host, or nothing was measured."""

    order: tuple[int, ...] = ()  # hosts by number, around a ring
    names: tuple[str, ...] = ()  # theirs, where that is another order than of their ranks
    slow: tuple[tuple[str, float], ...] = ()  # hosts with a slow link, and GB/s
    typical_gbs: float = 0.0  # of most hosts
    gbs: tuple[tuple[tuple[int, int], float], ...] = ()  # what was measured, from one host to another, by number

    def __str__(self) -> str:
        return "; ".join([*self.warnings(), *([f"order of hosts: {', '.join(self.names)}"] if self.names else [])])

    def warnings(self) -> list[str]:
        """A line for each host with a slow link, with what to do."""
        return [
            f"host {name}'s link carries {gbs:.2g} GB/s, the others' {self.typical_gbs:.2g}: it slows down every "
            "all-reduce to its own speed; check its speed, cable and switch port (`ringrun doctor` measures "
            "all links), or leave it out"
            for name, gbs in self.slow
        ]


def measured(world: World, transport: Transport, clock: Callable[[], float] = time.perf_counter) -> Links:
    """Measure the links between hosts; every rank must call it.

    Cost: for H hosts about 1.5 log2 H times an allgather and `arrival_gbs`; three times that where a link is slow.
    """
    leaders = first_ranks(world.hosts)
    if len(leaders) < 2:
        return Links()
    names = world.allgather_object(socket.gethostname())
    gbs: dict[tuple[int, int], float] = {}
    found = Links()
    for _ in range(ATTEMPTS):
        for distance in distances(len(leaders)):
            own = complete(arrival_gbs(transport, leaders, distance, clock)) if world.rank in leaders else 0.0
            rates = world.allgather_object(own)
            for index, rank in enumerate(leaders):
                pair = (index - distance) % len(leaders), index
                gbs[pair] = max(gbs.get(pair, 0.0), rates[rank])
        found = judged(gbs, [world.hosts[rank] for rank in leaders], [names[rank] for rank in leaders])
        if not str(found):
            break
    return found


def distances(count: int) -> list[int]:
    """How far apart the hosts are that measure at a time.

    >>> distances(2), distances(4), distances(9)
    ([1], [1, 2, 3], [1, 2, 3, 5, 8])
    """
    found, following = [1], 2
    while following < count:
        found.append(following)
        following += found[-2]
    return found


def arrival_gbs(
    transport: Transport, ring: Sequence[int], distance: int, clock: Callable[[], float] = time.perf_counter
) -> Steps[float]:
    """At which rate this rank, one of `ring`, receives from the one `distance` before it, while all send so.

    Cost: a message of 8 bytes, then ROUNDS of NBYTES, each way; 20 ms a round on a wire of 100 Mbit/s.
    """
    index, best = list(ring).index(transport.rank), 0.0
    source, destination = ring[index - distance], ring[(index + distance) % len(ring)]
    outgoing, incoming = np.zeros(NBYTES, np.uint8), np.empty(NBYTES, np.uint8)
    for nbytes in (8, *[NBYTES] * ROUNDS):  # the first one connects
        started = clock()
        received = transport.receive(incoming[:nbytes], source, TAG)
        sent = transport.send(outgoing[:nbytes], destination, TAG)
        yield received
        best = max(best, nbytes / max(1e-9, clock() - started) / 1e9 if nbytes == NBYTES else 0.0)
        yield sent
    return best


def judged(gbs: Mapping[tuple[int, int], float], hosts: Sequence[int], names: Sequence[str]) -> Links:
    """What the rates between `hosts` (by their indices: from, to) say; equal on all ranks, as `gbs` is."""
    count = len(hosts)
    out = [max(rate for (source, _), rate in gbs.items() if source == each) for each in range(count)]
    into = [max(rate for (_, to), rate in gbs.items() if to == each) for each in range(count)]
    carries = [min(pair) for pair in zip(out, into, strict=True)] if count > 2 else out  # of two hosts: to the other
    typical = sorted(carries)[count // 2]
    is_slow = {pair: rate < SLOW_SHARE * min(out[pair[0]], into[pair[1]]) for pair, rate in gbs.items()}
    order = best_order(is_slow, count)
    return Links(
        tuple(hosts[each] for each in order),
        () if order == list(range(count)) else tuple(names[each] for each in order),
        tuple((names[each], rate) for each, rate in enumerate(carries) if rate < SLOW_SHARE * typical),
        typical,
        tuple(((hosts[source], hosts[to]), rate) for (source, to), rate in gbs.items()),
    )


def best_order(is_slow: Mapping[tuple[int, int], bool], count: int) -> list[int]:
    """An order of hosts around a ring with few slow links: their own, unless another has fewer.

    >>> best_order({(0, 1): True, (1, 2): False, (2, 3): False, (3, 0): False, (0, 2): False, (1, 3): False}, 4)
    [0, 2, 1, 3]
    """

    def price(source: int, to: int) -> int:
        """0 fast, 1 not measured, 2 slow."""
        found = is_slow.get((source, to), is_slow.get((to, source)))
        return 1 if found is None else 2 * found

    def total(order: Sequence[int]) -> int:
        return sum(price(order[at - 1], to) for at, to in enumerate(order))

    def greedy(first: int) -> list[int]:
        order, left = [first], set(range(count)) - {first}
        while left:
            order.append(min(left, key=lambda each: (price(order[-1], each), each)))
            left.discard(order[-1])
        return order

    own = list(range(count))
    if not total(own):
        return own
    if count <= FEW:
        return min(([0, *others] for others in itertools.permutations(own[1:])), key=total)
    return min([own, *map(greedy, own[:BEGINNINGS])], key=total)
