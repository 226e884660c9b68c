"""ringreduce.ray.run() on a Ray of this machine; Ray's own daemon gives up after 30 s on a busy one."""

import re

import pytest

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
