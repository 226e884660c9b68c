"""Clock offsets between hosts: from what the ranks' clocks showed when they left the same exchanges."""

import numpy as np
import pytest

from ringreduce.runtime.startup.clock import compared, offsets_us
from ringreduce.transport.world import World
from tests.support.loops import in_a_loop

AHEAD_US = [0.0, 5e6, -3e6, 7e6, 1e6]


@in_a_loop("hosts", [[0, 0], [0, 1], [0, 0, 1, 1], [0, 1, 0, 2, 1], [3, 1, 3], [4, 3, 2, 1, 0]])
def test_a_host_s_offset_is_told_although_ranks_are_late_now_and_then(hosts):
    rng = np.random.default_rng(len(hosts))
    rounds = np.arange(8)[:, None] * 1e3 + np.array([AHEAD_US[host] for host in hosts]) + rng.uniform(0, 50, (8, 1))
    rounds[rng.permutation(8)[:3]] += rng.uniform(20e3, 50e3, (3, len(hosts)))
    for host, offset in zip(hosts, compared(rounds.tolist(), hosts), strict=True):
        assert offset == pytest.approx(AHEAD_US[host] - AHEAD_US[hosts[0]], abs=1)


def test_on_one_host_nothing_is_sent():
    assert offsets_us(World(1, 3, (2, 2, 2))) == [0.0, 0.0, 0.0]


def test_the_first_exchange_does_not_count(monkeypatch):
    """Into that one the ranks came when each liked."""
    clocks = iter([7e9, *range(1, 9)])
    monkeypatch.setattr(World, "allgather_object", lambda self, value: [next(clocks), value])
    monkeypatch.setattr("time.monotonic_ns", lambda: 1000 * 400)
    assert offsets_us(World(1, 2, (0, 1))) == [0.0, 395.5]
