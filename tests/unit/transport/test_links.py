"""Which hosts have a slow link, and in which order a ring passes them: by rates alone, and by simulated wires."""

import itertools
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from bench.simulated.cluster import Cluster, Costs
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import ring
from ringreduce.collectives.ops import Sum
from ringreduce.transport.links import arrival_gbs, best_order, distances, judged, measured
from ringreduce.transport.subset import SubsetTransport
from ringreduce.transport.threads import ThreadNetwork
from tests.support.loops import in_a_loop


def found(count, rate, distance_of=distances):
    """The rates that hosts of these links would measure."""
    pairs = [(each, (each + distance) % count) for distance in distance_of(count) for each in range(count)]
    return {pair: rate(*pair) for pair in pairs}


def numbered(count):
    return range(100, 100 + count), [f"node{each}" for each in range(count)]


def slow_neighbours(order, rate):
    return sum(rate(order[at - 1], each) < 1.0 for at, each in enumerate(order))


def test_of_two_hosts_the_one_that_sends_slowly_is_named():
    assert judged({(0, 1): 0.1, (1, 0): 1.25}, *numbered(2)).slow == (("node0", 0.1),)
    assert judged({(0, 1): 1.25, (1, 0): 0.1}, *numbered(2)).slow == (("node1", 0.1),)


@in_a_loop("count", [2, 3, 4, 5, 8, 64])
def test_equal_links_leave_all_as_it_is(count):
    links = judged(found(count, lambda source, to: 1.0 + 0.01 * (source + to)), *numbered(count))
    assert links.order == tuple(range(100, 100 + count))
    assert (links.names, links.slow, str(links)) == ((), (), "")
    assert dict(links.gbs)[100, 101] == 1.01, "between the hosts of these numbers"


@in_a_loop("count", [3, 4, 5, 8, 64])
@in_a_loop("ways", ["out", "in", "both"])
def test_a_host_with_a_slow_link_is_named_alone_and_keeps_its_place(count, ways):
    def rate(source, to):
        slow = {"out": source == 2, "in": to == 2, "both": 2 in (source, to)}[ways]
        return 0.1 if slow else 1.25

    links = judged(found(count, rate), *numbered(count))
    assert links.slow == (("node2", 0.1),)
    assert links.order == tuple(range(100, 100 + count))
    (warning,) = links.warnings()
    assert warning.startswith(
        "host node2's link carries 0.1 GB/s, the others' 1.2: it slows down every all-reduce to its own speed"
    )


@in_a_loop("count", [4, 5, 12])
@in_a_loop("at", [0, 1, 2, 3, -1])
def test_a_slow_link_between_two_hosts_is_not_passed(count, at):
    def rate(source, to):
        return 0.1 if {source, to} == {at % count, (at + 1) % count} else 1.25

    links = judged(found(count, rate), *numbered(count))
    assert links.slow == ()
    order = [each - 100 for each in links.order]
    assert sorted(order) == list(range(count))
    assert slow_neighbours(order, rate) == 0
    assert str(links) == f"order of hosts: {', '.join(f'node{each}' for each in order)}"


@in_a_loop("racks", ["0101", "01010101", "00110011", "01101001", "01" * 32, "0011" * 16, "012" * 8])
def test_hosts_of_a_rack_become_neighbours(racks):
    def rate(source, to):
        return 1.25 if racks[source] == racks[to] else 0.2

    order = [each - 100 for each in judged(found(len(racks), rate), *numbered(len(racks))).order]
    assert sorted(order) == list(range(len(racks)))
    assert slow_neighbours(order, rate) <= slow_neighbours(range(len(racks)), rate) // 2
    if len(racks) <= 8:
        assert slow_neighbours(order, rate) == len(set(racks)), "each rack's uplink is passed once each way"


def test_no_order_is_better_where_all_links_differ():
    assert best_order(dict.fromkeys(itertools.permutations(range(5), 2), True), 5) == [0, 1, 2, 3, 4]


def simulated_gbs(cluster, count):
    """What `measured` finds, in virtual time."""
    gbs = {}
    for distance in distances(count):
        cluster.clocks_us[:] = [max(cluster.clocks_us)] * count  # as after the allgather

        def measure(rank, distance=distance):
            clock = lambda: cluster.clocks_us[rank] / 1e6  # noqa: E731
            return arrival_gbs(cluster.transport(rank), range(count), distance, clock)

        rates = cluster.run(measure)
        gbs |= {((rank - distance) % count, rank): rate for rank, rate in enumerate(rates)}
    return gbs


def seconds(cluster, order):
    """An all-reduce of 16 MB around a ring."""
    cluster.clocks_us[:] = [max(cluster.clocks_us)] * cluster.size
    began = cluster.seconds
    reduction = cluster.reduction(Sum, TABLE["float32"], cluster.size)
    flats = [np.zeros(4_000_000, np.float32) for _ in range(cluster.size)]
    cluster.run(lambda rank: ring.allreduce(flats[rank], SubsetTransport(cluster.transport(rank), order, 0), reduction))
    return cluster.seconds - began


def test_simulated_one_slow_link_of_four_hosts_is_measured_and_not_passed():
    slow = {(0, 1): 1.0, (1, 0): 1.0}
    cluster = Cluster(range(4), Costs(latency_us=20, gbits=10, link_gbits=slow), carries=False)
    links = judged(simulated_gbs(cluster, 4), *numbered(4))
    assert links.names == ("node0", "node2", "node1", "node3")
    bound = 2 * 3 / 4 * 16e6 * 8 / 10e9  # 19.2 ms
    order = [each - 100 for each in links.order]
    assert bound <= seconds(cluster, order) < 1.3 * bound, "as if there were no slow link"
    assert seconds(cluster, range(4)) > 9 * bound


def test_simulated_one_slow_host_of_four_is_named():
    slow = {(0, "out"): 1.0, (0, "in"): 1.0}
    cluster = Cluster(range(4), Costs(latency_us=20, gbits=10, link_gbits=slow), carries=False)
    links = judged(simulated_gbs(cluster, 4), *numbered(4))
    assert [name for name, _ in links.slow] == ["node0"]
    assert 0.08 < links.slow[0][1] <= 0.1251
    assert 0.8 < links.typical_gbs <= 1.25
    bound = 2 * 3 / 4 * 16e6 * 8 / 1e9  # each byte of the ring passes that host
    assert bound <= seconds(cluster, range(4)) < 1.1 * bound


class Delayed:
    """A transport with a clock of its own: a message takes 1 ms; a long one from host 2 more, `times` times."""

    def __init__(self, whole, times):
        self.rank, self.send, self._whole, self._times, self.now_s = whole.rank, whole.send, whole, times, 0.0

    def receive(self, array, source, tag):
        work = self._whole.receive(array, source, tag)
        delayed = source == 2 and array.nbytes > 8 and self._times > 0
        self._times -= delayed
        self.now_s += 0.1 if delayed else 0.001
        return work


@pytest.mark.parametrize(("times", "is_slow"), [(2, False), (1000, True)])
def test_what_seems_slow_is_measured_again(times, is_slow, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)
    count = 4
    network, barrier = ThreadNetwork(count), threading.Barrier(count)
    values, results = [None] * count, [None] * count

    def measure(rank):
        def allgather_object(value):
            values[rank] = value
            barrier.wait()
            everyones = list(values)
            barrier.wait()
            return everyones

        world = SimpleNamespace(rank=rank, hosts=range(count), allgather_object=allgather_object)
        transport = Delayed(network.transport(rank), times)
        results[rank] = measured(world, transport, lambda: transport.now_s)

    threads = [threading.Thread(target=measure, args=(rank,), name=f"host{rank}") for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1, "all ranks find the same"
    assert [name for name, _ in results[0].slow] == ["host2"] * is_slow
