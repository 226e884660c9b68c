"""What a process does with its world; start and end: tests/mpi, end_to_end/test_children.py."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import ringreduce as rr
from ringreduce.runtime import lifecycle


@pytest.mark.parametrize(("lost", "ranks"), [([2], [[0]]), ([0, 3], [[1, 2]]), ([1], [])])
def test_of_lost_processes_those_end_a_world_that_are_in_it_by_their_numbers_there(lost, ranks, monkeypatch):
    given_up = []
    world = SimpleNamespace(in_comm_world=lambda: [2, 0, 3])
    engine = SimpleNamespace(give_up=lambda error: given_up.append((str(error), list(error.lost_ranks))))
    monkeypatch.setattr(lifecycle.process, "runtime", SimpleNamespace(world=world, engine=engine))
    lifecycle._lose(lost, "a process has ended")
    assert given_up == [("a process has ended", each) for each in ranks]


def test_threads_that_all_call_init_start_mpi_one_after_the_other(monkeypatch):
    """At once, each waited in MPI for the other ranks for ever."""
    inside, most = [], []

    def start(*_, **__):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    monkeypatch.setattr(lifecycle, "start", start)
    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(rr.init) for _ in range(4)]:
            each.result()
    assert most == [1, 1, 1, 1]
