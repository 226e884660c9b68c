"""A ring passes the hosts in the order that their links ask for; who owns which elements of other results stays."""

import functools

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import testing
from ringreduce.execution.host import HostResources
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.links import Links

FOUND = Links((10, 12, 11, 13), ("n0", "n2", "n1", "n3"), (("n3", 0.1),), 1.25)


def program():
    rank, size = rr.rank(), rr.size()
    mine = np.arange(100_003, dtype=np.float32) % 1000 + rank
    summed = rr.allreduce(mine, op=rr.Sum)
    np.testing.assert_array_equal(summed, size * (np.arange(100_003) % 1000) + sum(range(size)))
    np.testing.assert_array_equal(rr.allgather(np.full(3, rank)), np.repeat(np.arange(size), 3))
    part = rr.reducescatter(np.arange(size * 2, dtype=np.float32), op=rr.Sum)
    np.testing.assert_array_equal(part, size * np.arange(2 * rank, 2 * rank + 2))
    noise = np.random.default_rng(rank).standard_normal(5000).astype(np.float32)
    return rr.allreduce(noise).tobytes(), rr.info().links


@pytest.mark.parametrize("algorithm", ["ring", "halving", "direct", "auto"])
@pytest.mark.parametrize("hosts", [(10, 11, 12, 13), (10, 11, 12, 13) * 2, (10, 10, 11, 12, 12, 13)])
def test_all_reduces_over_ordered_hosts(algorithm, hosts, monkeypatch):
    monkeypatch.setattr(testing, "HostResources", functools.partial(HostResources, links=FOUND))
    results = run_ranks(len(hosts), program, hosts=hosts, settings=Settings(algorithm=algorithm))
    assert len({bits for bits, _ in results}) == 1, "the same bits everywhere"
    (told,) = {links for _, links in results}
    assert told.startswith("host n3's link carries 0.1 GB/s, the others' 1.2")
    assert told.endswith("; order of hosts: n0, n2, n1, n3")


@pytest.mark.parametrize("hosts", [(10, 11, 12, 13), (10, 11, 12, 13) * 2])
def test_who_sends_to_whom(hosts, monkeypatch):
    monkeypatch.setattr(testing, "HostResources", functools.partial(HostResources, links=FOUND))
    messages = []
    algorithm = "ring" if len(hosts) == 4 else "hierarchical"

    def reduce():
        rr.allreduce(np.ones(1 << 20, np.float32))

    run_ranks(len(hosts), reduce, hosts=hosts, settings=Settings(algorithm=algorithm), messages=messages)
    pairs = {(each.source % 4, each.destination % 4) for each in messages if each.nbytes > 10_000}
    assert pairs == {(0, 2), (2, 1), (1, 3), (3, 0)}
