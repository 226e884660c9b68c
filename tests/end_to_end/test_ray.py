"""ringreduce.ray.run() on a Ray of this machine; Ray's own daemon gives up after 30 s on a busy one."""

import re
import sys

import pytest

from ringrun.environment import HOROVOD_DIRECTORY
from tests.end_to_end.conftest import PROGRAMS, run

pytestmark = pytest.mark.xdist_group("frameworks")  # not beside others that take all cores

CLUSTER = """
import os, signal, sys, threading, time
from pathlib import Path
import ray
import ringreduce as rr
import ringreduce.ray
from tests.support.engines import gone, pids, sleep, train, trained

def free():
    until_s = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 2.0:
        assert time.monotonic() < until_s, ray.available_resources()
        time.sleep(0.1)

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"ASKED": "of Ray"}})
    slow = {"timeout_s": 300, "start_timeout": 300}
"""
WORKS = """
    assert ringreduce.ray.run(train, (2,), np=2, **slow) == trained(2, 2, "of Ray")
    free()
    try:
        ringreduce.ray.run(train, (2, True), np=2, **slow)
    except rr.JobFailedError as error:
        print(error)
    try:
        ringreduce.ray.run(train, (2,), np=3, timeout_s=2)
    except rr.StartupError as error:
        print(error)
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    assert ringreduce.ray.run(train, (3,), np=2, placement_group=group, **slow) == trained(2, 3, "of Ray")
    assert ray.util.placement_group_table(group)["state"] == "CREATED", "it is not ours to remove"
    ray.util.remove_placement_group(group)
    free()
    print("done")
"""
INTERRUPTED = """
    folder = sys.argv[1]
    def interrupt():
        while len(list(Path(folder).iterdir())) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        ringreduce.ray.run(sleep, (folder,), np=2, **slow)
    except KeyboardInterrupt:
        print("interrupted")
    free()
    assert all(map(gone, pids(folder)))
    print("done")
"""
TWO_NODES = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import psutil, ray
from ray.cluster_utils import Cluster
import ringreduce.ray
from tests.support.engines import go_on, train, trained

folder = Path(sys.argv[1])

def ranks_that_saw(number):  # of the sizes that the world has had
    return [each for each in folder.iterdir() if each.name.startswith(f"{number} ")]

def lends(process):
    return "--lend=1" in process.cmdline()

def lose_a_node():
    # all is on one host, whose agent and ranks are the first lender's children: it is the other one
    raylet = lambda node: psutil.Process(node.all_processes["raylet"][0].process.pid)
    below = {each: raylet(each).children(recursive=True) for each in nodes}
    second = [node for node, found in below.items() if any(lends(each) and not each.children() for each in found)]
    begin_s = time.monotonic()
    cluster.remove_node(*second, allow_graceful=False)
    wait_for(lambda: ranks_that_saw(2))
    print(f"a node lost, went on after {time.monotonic() - begin_s:.1f} s", flush=True)

def wait_for(condition):
    while not condition():
        assert not job.done(), job.result()
        time.sleep(0.01)

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(cluster.address)
    slow = {"timeout_s": 200, "start_timeout": 200}
    assert ringreduce.ray.run(train, (2,), np=2, **slow) == trained(2, 2)
    with ThreadPoolExecutor() as pool:  # Ray starts nodes in the main thread only
        elastic = {"elastic": True, "min_np": 1, "max_np": 2}
        job = pool.submit(ringreduce.ray.run, go_on, (folder, 3), np=2, **elastic, **slow)
        wait_for(lambda: len(ranks_that_saw(1)) == 2)
        lose_a_node()
        cluster.add_node(num_cpus=1)
        print("sizes", job.result(), flush=True)
"""


@pytest.fixture
def on_ray(on_engine):
    """Runs a program on two CPUs of Ray; returns what it has printed."""
    return lambda program, *arguments: on_engine(CLUSTER + program, *arguments)


@pytest.mark.adapters
@pytest.mark.timeout(600)
def test_ranks_run_on_ray_again_and_again(on_ray):
    said = on_ray(WORKS)
    assert "\ndone\n" in said
    assert "[1] rank 1 says hello\n" in said, "output of all ranks comes to the driver"
    assert re.search(r"-- ringrun: rank 1 of 2 failed first -.*\nhow +exit code 1\nwhere +host \S+, pid \d+", said)
    assert "Ray had no room for 3 ranks of {'CPU': 1} within 2 s; the cluster has {'CPU': 2.0}; ask for less" in said


@pytest.mark.timeout(600)
def test_ctrl_c_ends_all_ranks_and_frees_the_cpus(on_ray, tmp_path):
    (folder := tmp_path / "ranks").mkdir()
    assert "\ninterrupted\ndone\n" in on_ray(INTERRUPTED, folder)


@pytest.mark.timeout(600)
def test_ranks_on_two_nodes_of_which_one_is_lost_and_another_comes(on_engine, tmp_path):
    """Each node has room for one rank. Both are on this host; the one that is lost is not that of its first lender."""
    (folder := tmp_path / "ranks").mkdir()
    said = on_engine(TWO_NODES, folder)
    assert re.search(r"a node lost, went on after \d+\.\d s\n", said)
    assert "sizes [[2, 1, 2], [2, 1, 2]]\n" in said


@pytest.mark.timeout(600)
def test_horovod_s_example_with_keras_2(engines, frameworks, tmp_path):
    """Its driver is no rank, so the path to `import horovod` is what docs/horovod.md says."""
    path = f"{HOROVOD_DIRECTORY}:{engines['PYTHONPATH']}:{frameworks['PYTHONPATH']}"
    variables = {**frameworks, **engines, "PYTHONPATH": path, "TF_USE_LEGACY_KERAS": "1"}
    ended = run(
        [sys.executable, PROGRAMS / "horovod_in_ray.py"], timeout_s=500, cwd=tmp_path, returncode=0, **variables
    )
    assert "ranks [(0, 2), (1, 2)] equal True\n" in ended.stdout
    assert "sizes [2, 2]\n" in ended.stdout
    assert (tmp_path / "checkpoint-1.h5").exists()
