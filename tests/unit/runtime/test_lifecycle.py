"""What a process does with its world; start and end: tests/mpi, end_to_end/test_children.py."""

from types import SimpleNamespace

import pytest

from ringreduce.runtime import lifecycle


@pytest.mark.parametrize(("lost", "ranks"), [([2], [[0]]), ([0, 3], [[1, 2]]), ([1], [])])
def test_of_lost_processes_those_end_a_world_that_are_in_it_by_their_numbers_there(lost, ranks, monkeypatch):
    given_up = []
    world = SimpleNamespace(in_comm_world=lambda: [2, 0, 3])
    engine = SimpleNamespace(give_up=lambda error: given_up.append((str(error), list(error.lost_ranks))))
    monkeypatch.setattr(lifecycle.process, "runtime", SimpleNamespace(world=world, engine=engine))
    lifecycle._lose(lost, "a process has ended")
    assert given_up == [("a process has ended", each) for each in ranks]
