"""Jobs of `ringrun --elastic` on GPU arrays, of the stand-in for CuPy: what a world has on its GPUs ends with it."""

import os
import sys
from pathlib import Path

import pytest

from tests.support import jobs

STAND_IN = os.pathsep.join([str(jobs.ROOT / "tests" / "support" / "stand_in"), str(jobs.ROOT)])
PATHS = {
    "ipc": {},
    "host_staged": {"CUDA_IPC": "0", "CUDA_AWARE_MPI": "0"},
    "cuda_aware": {"CUDA_IPC": "0", "CUDA_AWARE_MPI": "1"},
}
HELD = {"ipc": "1 1 8", "host_staged": "1 0 0", "cuda_aware": "4 0 0"}
"""By the two ranks that are left: own blocks, those of others, events; MPI may still use what it had of cuda_aware."""


def train(*deaths, **settings):
    """A job of three ranks, on one GPU, of which so many die."""
    variables = {f"RINGREDUCE_{name}": value for name, value in settings.items()}
    env = jobs.environment(PYTHONPATH=STAND_IN, RINGREDUCE_CUDA_SLOT_BYTES="65536", **variables)
    rank = [sys.executable, "-m", "tests.support.elastic.gpu_training", *deaths]
    return jobs.run([jobs.ringrun(Path(sys.executable)), "--elastic", "-np", 3, *rank], env=env)


@pytest.mark.parametrize("death", ["1 4 submitted", "0 4 between"])
@pytest.mark.parametrize("path", PATHS)
def test_the_others_go_on(path, death):
    done = train(death, **PATHS[path])
    assert done.returncode == 0, done.stderr
    expected = [f"[{rank}] 2 True {path} {HELD[path]}" for rank in range(3) if str(rank) != death[0]]
    assert sorted(done.stdout.splitlines()) == expected


def test_no_gpu_waits_for_one_whose_process_has_died():
    done = train("2 4 queued", CUDA_NCCL="0")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] 2 True ipc 1 1 8" for rank in range(2)]
