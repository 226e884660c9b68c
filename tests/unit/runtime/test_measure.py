"""The constants of the cost model are measured until other work has not made them slower."""

from types import SimpleNamespace

import pytest

from bench.simulated.cluster import Cluster, Costs
from ringreduce.runtime.startup import measure
from ringreduce.transport.base import complete
from tests.support.loops import in_a_loop

QUIET = [2e-4, 0.0, 0.0, 50.0, 3200.0]  # µs: a byte copied; between hosts a small message, and a large one
WIRE_GBS = 1e-3 * measure.LARGE_BYTES / 3150


def measured(monkeypatch, attempts, rank=0):
    """The constants of two ranks, one of which is busy as `attempts` say, and how many attempts were made."""
    coming = iter(attempts)

    def figures(*_):
        yield from ()
        return [each * factor for each, factor in zip(QUIET, next(coming), strict=True)]

    monkeypatch.setattr(measure, "figures", figures)
    world = SimpleNamespace(rank=rank, hosts=(0, 1), allgather_object=lambda own: [QUIET, own])
    return measure.measured(world, None), len(attempts) - len(list(coming))


def test_twice_on_a_quiet_machine(monkeypatch):
    found, attempts = measured(monkeypatch, [[1.0] * 5, [1.05] * 5, [1.0] * 5])
    assert attempts == 2
    assert (found.copy_gbs, found.wire_us, found.wire_gbs) == pytest.approx((5, 50, WIRE_GBS))


def test_a_rate_does_not_come_from_a_small_message_that_took_long(monkeypatch):
    """Taken alone the first attempt would say 3200 µs - 2700 µs for the bytes: a wire six times too fast."""
    found, attempts = measured(monkeypatch, [[1, 1, 1, 54, 1], [1, 1, 1, 1, 2], [3, 1, 1, 1, 1], [1] * 5])
    assert attempts == 3
    assert (found.wire_us, found.wire_gbs) == pytest.approx((50, WIRE_GBS))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_that_stays_busy_is_told_of_once(monkeypatch, rank):
    lines = []
    monkeypatch.setattr(measure, "JOB", SimpleNamespace(info=lines.append))
    found, attempts = measured(monkeypatch, [[factor] * 5 for factor in (16, 8, 4, 2, 1)], rank)
    assert attempts == measure.ATTEMPTS == 4
    assert found.wire_us == 100
    assert len(lines) == (rank == 0)
    assert all("keeps this machine or its links busy" in line and "wire_us=200" in line for line in lines)


class Shaped:
    """A transport to itself over a link that lets `BURST_BYTES` through at once, and then 125 bytes a µs."""

    rank, now_us, at_once = 0, 0.0, measure.BURST_BYTES

    def receive(self, array, source, tag):
        return SimpleNamespace(wait=lambda: None)

    def send(self, array, destination, tag):
        begun_us = self.now_us
        self.now_us += 50 + max(0, array.nbytes - self.at_once) / 125
        after = self.at_once - array.nbytes + 125 * (self.now_us - begun_us)
        self.at_once = min(max(after, 0), measure.BURST_BYTES)
        return SimpleNamespace(wait=lambda: None)


def test_what_a_shaped_link_lets_through_at_once_is_no_rate():
    link = Shaped()
    found = complete(measure.figures(link, [0, 1], clock=lambda: link.now_us / 1e6))
    assert measure.slowest([found]).wire_gbs == pytest.approx(0.125, rel=0.03)


@in_a_loop("seed", range(10))
@in_a_loop(("gbits", "late_us"), [(0.1, 100), (1, 50), (1, 100), (10, 10)])
def test_simulated_the_wire_is_found_although_messages_are_late(gbits, late_us, seed):
    cluster = Cluster(range(4), Costs(gbits=gbits, jitter_us=late_us), seed=seed, carries=False)

    def attempt():
        def of(rank):
            return measure.figures(cluster.transport(rank), cluster.hosts, clock=lambda: cluster.clocks_us[rank] / 1e6)

        return cluster.run(of)

    fastest = [[*map(min, *both)] for both in zip(attempt(), attempt(), strict=True)]
    assert measure.slowest(fastest).wire_gbs == pytest.approx(gbits / 8, rel=0.1)
