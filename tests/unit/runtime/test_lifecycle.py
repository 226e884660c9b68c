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


@pytest.mark.parametrize("parent", [None, "3"])
def test_only_a_rank_says_that_it_waits_in_init(parent, monkeypatch):
    """Not a child of one, which is refused: the rank itself would be said to wait for others."""
    said = []
    for name, value in [("_generations", 0), ("form_world", lambda *_: 1 / 0), ("rank_that_started", lambda _: parent)]:
        monkeypatch.setattr(lifecycle, name, value)
    monkeypatch.setattr(lifecycle.process, "runtime", None)
    monkeypatch.setattr(lifecycle.launcher_link, "report", lambda *_, **message: said.extend(message))
    monkeypatch.setattr(lifecycle.device_selection, "select", lambda *_: None)
    monkeypatch.setattr(lifecycle.log, "configure", lambda *_: None)
    monkeypatch.setenv("RINGREDUCE_STALL_CHECK_S", "7")
    with pytest.raises(ZeroDivisionError):
        lifecycle.start(None, [], dynamic=False)
    assert said == ([] if parent else ["init", "package"])


@pytest.mark.parametrize(("size", "has_card", "warns"), [(2, True, True), (1, True, False), (2, False, False)])
def test_a_rank_of_several_that_forks_beside_such_a_card_is_warned(size, has_card, warns, monkeypatch):
    said = []
    monkeypatch.setattr(lifecycle.process, "runtime", SimpleNamespace(world=SimpleNamespace(size=size)))
    monkeypatch.setattr(lifecycle, "_has_entries", lambda folder: has_card and folder == "/sys/class/cxi")
    monkeypatch.setattr(lifecycle.log.JOB, "warning", said.append)
    lifecycle._before_fork.__wrapped__()
    assert said == [lifecycle.FORK_WARNING] * warns


def test_a_forked_child_knows_its_parent_s_world_and_has_no_engine(monkeypatch):
    world, told = SimpleNamespace(rank=3), []
    parents = SimpleNamespace(world=world, engine=SimpleNamespace(is_not_here=told.append))
    monkeypatch.setattr(lifecycle.process, "runtime", parents)
    monkeypatch.setattr(lifecycle.process, "parents_world", None)
    lifecycle._after_fork()
    assert (lifecycle.process.runtime, lifecycle.process.parents_world) == (None, world)
    assert told == ["this process was forked from rank 3, and is not a rank itself"]
