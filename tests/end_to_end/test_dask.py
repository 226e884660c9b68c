"""ringreduce.dask.run() on a LocalCluster."""

import re

import pytest

CLUSTER = """
import os, signal, sys, threading, time
from pathlib import Path
from distributed import Client, LocalCluster
import ringreduce as rr
import ringreduce.dask
from ringrun import lending
from tests.support.engines import go_on, gone, pids, sleep, train, trained

if __name__ == "__main__":
    with LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        slow = {"client": client, "timeout_s": 300, "start_timeout": 300}
"""
WORKS = """
        assert ringreduce.dask.run(train, (2,), env={"ASKED": "for"}, **slow) == trained(3, 2, "for")
        refused = [({"args": "x"}, "args='x'"), ({"min_np": 2}, "add elastic=True"), ({"hosts": "h1"}, "places")]
        refused += [({"reset_limit": 1}, "for jobs that grow"), ({"nonsense": 1}, "--nonsense")]
        for wrong, expected in refused:
            try:
                ringreduce.dask.run(train, **{"args": (2,), **slow, **wrong})
            except rr.InputError as error:
                assert expected in str(error), error
            else:
                raise AssertionError(wrong)
        waiting = client.submit(ringreduce.dask.tasks._lend, lending.ticket(900))  # nobody listens there
        while not any(client.run(lambda dask_worker: bool(dask_worker.state.executing)).values()):
            time.sleep(0.1)
        client.cancel(waiting)
        begin_s = time.monotonic()
        try:
            ringreduce.dask.run(train, (2, True), **slow)
        except rr.JobFailedError as error:
            print(error)
        assert ringreduce.dask.run(train, (3,), workers=[0, 2], **slow) == trained(2, 3)
        assert time.monotonic() - begin_s < 200, "no worker waits for a head that never comes"
        print("done")
"""
INTERRUPTED = """
        folder = sys.argv[1]
        def interrupt():
            while len(pids(folder)) < 3:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            ringreduce.dask.run(sleep, (folder,), **slow)
        except KeyboardInterrupt:
            assert all(map(gone, pids(folder)))
        while any(client.processing().values()):
            time.sleep(0.1)
        print("done")
"""
NOT_THERE = """
        def break_it():
            import ringrun.lending
            ringrun.lending._reached = lambda *_: 1 / 0
        client.run(break_it)
        for elastic in ({}, {"elastic": True}, {"elastic": True, "max_np": 4}):
            try:
                ringreduce.dask.run(train, (2,), **elastic, **slow)
            except rr.StartupError as error:
                print(error)
        print("done")
"""
LOSES = """
        folder = sys.argv[1]
        def kill():
            while len([each for each in Path(folder).iterdir() if each.name.startswith("1 ")]) < 3:
                time.sleep(0.1)
            import psutil
            workers = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
            lender = lambda worker: next(each for each in worker.children() if "--lend=1" in each.cmdline())
            next(each for each in workers if not lender(each).children()).kill()
        threading.Thread(target=kill).start()
        print(ringreduce.dask.run(go_on, (folder, 2), elastic=True, min_np=2, **slow))
"""


@pytest.fixture
def dask(on_engine):
    """Runs a program on a cluster of three workers; returns what it has printed."""
    return lambda program, *arguments: on_engine(CLUSTER + program, *arguments)


@pytest.mark.adapters
@pytest.mark.timeout(600)
def test_ranks_run_beside_the_workers_again_and_again(dask):
    said = dask(WORKS)
    assert "\ndone\n" in said
    assert "[2] rank 2 says hello\n" in said, "output of all ranks comes to the client"
    assert re.search(r"-- ringrun: rank 1 of 3 failed first -.*\nhow +exit code 1\nwhere +host \S+, pid \d+", said)
    assert "ValueError: bad luck" in said


@pytest.mark.timeout(600)
def test_ctrl_c_ends_all_ranks_and_frees_the_workers(dask, tmp_path):
    (folder := tmp_path / "ranks").mkdir()
    assert "\ndone\n" in dask(INTERRUPTED, folder)


@pytest.mark.timeout(600)
def test_workers_that_cannot_lend_say_why_at_once(dask):
    said = dask(NOT_THERE)
    assert said.count("run(): division by zero") == 3


@pytest.mark.timeout(600)
def test_the_loss_of_a_worker_is_that_of_its_rank(dask, tmp_path):
    """Here, of the last worker of the host."""
    (folder := tmp_path / "ranks").mkdir()
    assert "[[3, 2], [3, 2]]\n" in dask(LOSES, folder)
