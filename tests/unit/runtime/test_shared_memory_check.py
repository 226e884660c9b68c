"""What is found out before the engine starts."""

import math
import os

from ringreduce.runtime.startup.shared_memory import host_cores
from ringreduce.transport.world import World


class BoundWorld(World):
    """Hosts 0: ranks 0, 2; 1: ranks 1, 3. Some ranks are bound to cores of their own, others share."""

    limits = (math.inf, math.inf)

    def gather_on_host(self, value):
        assert value[0] == os.sched_getaffinity(0)
        cores = [{0, 1}, {2, 3}] if self.hosts[self.rank] == 0 else [{0, 1, 2}, {0, 1, 2}]
        return list(zip(cores, self.limits, strict=True))


class LimitedWorld(BoundWorld):
    """The ranks of a host may use the time of 2.5 of its cores."""

    limits = (2.5, 2.5)


def test_the_cores_of_a_host_are_those_of_all_its_ranks_together():
    assert [host_cores(BoundWorld(rank, 4, (0, 1, 0, 1))) for rank in range(4)] == [4, 3, 4, 3]
    assert [host_cores(LimitedWorld(rank, 4, (0, 1, 0, 1))) for rank in range(4)] == [2, 2, 2, 2]
