"""Simulated ranks: times that can be computed by hand, the same each time, and the patterns of hundreds of ranks."""

import math

import numpy as np
import pytest

from bench.simulated.cluster import Cluster, Costs
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import direct, doubling, halving, hierarchical, ring
from ringreduce.collectives.ops import Average, Sum
from ringreduce.collectives.partition import chunk_bounds
from ringreduce.collectives.shared import BufferPair
from ringreduce.errors import CollectiveError
from ringreduce.transport.subset import channels
from tests.support.reference import assert_reduced, data
from tests.support.tiers import parted

FREE = {"message_us": 0.0, "copy_gbs": 1e9, "local_us": 0.0, "local_gbs": 1e9}
EXACT = Costs(latency_us=20.0, gbits=8.0, **FREE)  # 1000 bytes a µs


def send_to_next(cluster, nbytes, times=1, hop=1):
    """Each rank sends to the rank `hop` ahead, so many times at once."""

    def program(rank):
        transport, out = cluster.transport(rank), np.full(nbytes, rank % 256, np.uint8)
        into = [np.empty(nbytes, np.uint8) for _ in range(times)]
        receives = [transport.receive(each, (rank - hop) % cluster.size, 0) for each in into]
        sends = [transport.send(out, (rank + hop) % cluster.size, 0) for _ in range(times)]
        yield from receives
        yield from sends
        assert all((each == (rank - hop) % cluster.size).all() for each in into)

    cluster.run(program)
    return cluster.seconds * 1e6


def test_a_message_takes_its_latency_and_its_bytes():
    assert send_to_next(Cluster([0, 1], EXACT), 5000) == pytest.approx(25)
    assert send_to_next(Cluster([0, 1], EXACT), 5000, times=4) == pytest.approx(40), "one after the other"
    slower = Costs(latency_us=20.0, gbits=8.0, **{**FREE, "message_us": 3.0})
    assert send_to_next(Cluster([0, 1], slower), 5000) == pytest.approx(31), "the processor sends, and receives"


# with 6 ranks some fold in when doubling, and so are not like the others
STANDS_FOR_ALL = [(ring, 4), (ring, 6), (ring, 8), (direct, 4), (direct, 6), (direct, 8), (doubling, 4), (doubling, 8)]


@pytest.mark.parametrize(
    ("algorithm", "size"), STANDS_FOR_ALL, ids=lambda each: getattr(each, "__name__", str(each)).rpartition(".")[2]
)
def test_one_rank_that_stands_for_all_takes_their_time(algorithm, size):
    def took(alike):
        cluster = Cluster(range(size), Costs(latency_us=20.0, gbits=8.0), carries=False, alike=alike)
        reduction, flat = cluster.reduction(Sum, TABLE["float32"], size), np.zeros(30_000 * size, np.float32)
        cluster.run(lambda rank: algorithm.allreduce(flat, cluster.transport(rank), reduction))
        return cluster.seconds, cluster.sent[0, 1]

    assert took(True) == pytest.approx(took(False))


def test_ranks_of_a_host_share_its_wire_each_way():
    assert send_to_next(Cluster([0, 0, 1, 1], EXACT), 5000, hop=2) == pytest.approx(30)
    assert send_to_next(Cluster([0, 1], EXACT, mirrors=2), 5000) == pytest.approx(30), "one stands for two"


def test_several_senders_share_the_wire_of_a_receiver():
    cluster = Cluster([0, 1, 2], EXACT)

    def program(rank):
        transport, memory = cluster.transport(rank), np.zeros((2, 5000), np.uint8)
        if rank:
            yield transport.send(memory[0], 0, 0)
        else:
            yield from [transport.receive(memory[each - 1], each, 0) for each in (1, 2)]

    cluster.run(program)
    assert cluster.clocks_us == pytest.approx([30, 5, 5])


def test_a_short_message_does_not_wait_for_a_long_one_to_another_host():
    cluster = Cluster([0, 1, 2], EXACT)

    def program(rank):
        transport = cluster.transport(rank)
        if rank == 0:
            yield from [transport.send(np.zeros(n, np.uint8), to, 0) for to, n in ((1, 100_000), (2, 1000))]
        else:
            yield transport.receive(np.zeros(100_000 if rank == 1 else 1000, np.uint8), 0, 0)

    cluster.run(program)
    assert cluster.clocks_us[1:] == pytest.approx([121, 22])


def test_one_slow_link_sets_the_pace_of_a_ring():
    costs = Costs(latency_us=20.0, gbits=8.0, link_gbits={(2, 3): 2.0}, **FREE)
    arrays = [data("float32", 1_000_000, rank) for rank in range(4)]
    times = {}
    for name, each in (("equal", EXACT), ("slow", costs)):
        cluster = Cluster(range(4), each, carries=False)
        kind = cluster.reduction(Sum, TABLE["float32"], 4)
        cluster.run(lambda rank, c=cluster, k=kind: ring.allreduce(arrays[rank], c.transport(rank), k))
        times[name] = cluster.seconds * 1e6
    assert times["equal"] == pytest.approx(6000, rel=0.1), "2 n (P - 1) / P bytes at 1000 a µs"
    assert times["slow"] == pytest.approx(24000, rel=0.1)


def test_ranks_that_wait_for_each_other_are_named():
    cluster = Cluster([0, 1])

    def program(rank):
        yield cluster.transport(rank).receive(np.zeros(1), 1 - rank, 0)

    with pytest.raises(CollectiveError, match="deadlock of 2 of 2 simulated ranks: rank 0 waits for rank 1"):
        cluster.run(program)


def test_a_length_on_which_ranks_disagree_is_an_error():
    cluster = Cluster([0, 1])

    def program(rank):
        transport = cluster.transport(rank)
        yield transport.send(np.zeros(2), 1, 0) if rank == 0 else transport.receive(np.zeros(3), 0, 0)

    with pytest.raises(CollectiveError, match="rank 0 sent 16 bytes, but rank 1 expected 24"):
        cluster.run(program)


def by_halving(cluster, arrays, reduction, capacity, halved_bytes=math.inf, chunks=None):
    """`hierarchical` in units of `capacity` elements."""
    local = [cluster.hosts[:rank].count(host) for rank, host in enumerate(cluster.hosts)]

    def program(rank):
        parts = [arrays[rank][low : low + capacity] for low in range(0, arrays[rank].size, capacity)]
        own = channels(cluster.transport(rank), range(cluster.size), 0)
        hierarchy = hierarchical.Hierarchy(own, cluster.hosts, local[rank], halved_bytes)
        hierarchy.chunks = chunks or hierarchy.chunks
        units = [[BufferPair(each, each)] for each in parts]
        return hierarchical.allreduce(units, cluster.region(rank, 4096), hierarchy, reduction)

    cluster.run(program)


def test_short_buffers_are_halved_across_and_long_ones_go_around_a_ring():
    hosts = [host for host in range(8) for _ in range(2)]
    most = {}
    for count in (1000, 1001):
        cluster = Cluster(hosts, carries=False)
        reduction = cluster.reduction(Sum, TABLE["float32"], len(hosts))
        by_halving(cluster, [np.zeros(count, np.float32)] * len(hosts), reduction, 10**6, 4000)
        most[count] = max(sum(n for (source, _), n in cluster.sent.items() if source == each) for each in range(16))
    assert most[1000] <= 2 * 3 + 2, "two for each halving; where chunks go beyond the last one a message more"
    assert most[1001] == 2 * 7


@pytest.mark.parametrize("jitter_us", [0, 50])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 1, 2, 2, 2], [0, 1, 0, 1]], ids=str)
def test_the_collectives_compute_what_they_compute_elsewhere(hosts, dtype, jitter_us):
    size = len(hosts)
    for way in (ring, halving, direct, doubling, "rings across", "halves across"):
        arrays = [data(dtype, 5003, rank) for rank in range(size)]
        expected, times = [each.copy() for each in arrays], set()
        for seed in (1, 1, 2):
            cluster = Cluster(hosts, Costs(jitter_us=jitter_us), seed=seed)
            reduction = cluster.reduction(Average, TABLE[dtype], size)
            results = [each.copy() for each in expected]
            if isinstance(way, str):
                by_halving(cluster, results, reduction, 700, math.inf if way == "halves across" else 0)
            else:
                cluster.run(
                    lambda rank, c=cluster, r=reduction, a=results, w=way: w.allreduce(a[rank], c.transport(rank), r)
                )
            assert_reduced(results[0], Average, expected)
            assert all(each.tobytes() == results[0].tobytes() for each in results)
            times.add(cluster.seconds)
        assert len(times) == (2 if jitter_us else 1), "a seed gives its time, each time"


# Patterns


def test_a_ring_of_64_loads_each_link_alike_and_halving_is_ten_times_faster_for_few_bytes():
    size, count, times = 64, 6400, {}
    bounds = chunk_bounds(count, size)
    for algorithm in (ring, halving):
        cluster = Cluster(range(size), EXACT, carries=False)
        flat, kind = np.zeros(count, np.float32), cluster.reduction(Sum, TABLE["float32"], size)
        cluster.run(lambda rank, a=algorithm, c=cluster, k=kind, f=flat: a.allreduce(f, c.transport(rank), k))
        times[algorithm] = cluster.seconds
        if algorithm is ring:
            assert set(cluster.sent) == {(rank, (rank + 1) % size) for rank in range(size)}
            assert set(cluster.sent.values()) == {2 * (size - 1)}
            assert set(cluster.sent_bytes.values()) == {2 * (size - 1) * 4 * (bounds[1] - bounds[0])}
    assert times[ring] > 8 * times[halving]
    steps_us, bytes_us = 2 * 6 * 20, 2 * 4 * count / 1000
    assert times[halving] * 1e6 == pytest.approx(steps_us + bytes_us, rel=0.02)


@pytest.mark.parametrize("mirrors", parted([1, 8], lambda mirrors: mirrors == 8))
def test_64_hosts_of_8_ranks_send_what_one_rank_a_host_would(mirrors):
    hosts = [host for host in range(64) for _ in range(8 // mirrors)]
    cluster = Cluster(hosts, carries=False, mirrors=mirrors)
    count = 64 * 8 * 4
    arrays = [np.zeros(count, np.float32)] * len(hosts)
    by_halving(cluster, arrays, cluster.reduction(Sum, TABLE["float32"], 512), count, chunks=8)
    for host in (0, 63):
        sent = sum(nbytes for (source, _), nbytes in cluster.sent_bytes.items() if source == host)
        assert sent == 2 * 4 * (count - count // 64)
    assert all(hosts[source] != hosts[to] for source, to in cluster.sent), "inside a host memory is shared"
