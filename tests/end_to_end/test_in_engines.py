"""Ranks that are processes of Dask, Ray and Spark, without any launcher of MPI: both MPIs."""

import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import PROGRAMS, run
from tests.support.pages import blocks
from tests.support.tiers import extended

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(900), pytest.mark.xdist_group("frameworks")]


@pytest.fixture(params=["mpich", pytest.param("openmpi", marks=extended)])
def start(request, engines):
    """Runs a program with this MPI and the engines; returns its lines."""
    python = request.getfixturevalue("mpich_python") if request.param == "mpich" else Path(sys.executable)

    def run_to_the_end(*command, **options):
        path = f"{python.parent}:/usr/bin:/bin"  # Spark starts the python that is found there
        options |= {"PATH": path, "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600"}
        done = run([python, *command], timeout_s=600, returncode=0, **engines, **options)
        return done.stdout.splitlines()

    return run_to_the_end


def test_dask_s_workers_train_where_the_chunks_lie(start):
    found = start(PROGRAMS / "in_dask.py")
    trained = ["ranks (0, 1, 2) rows 900 workers 3", "as alone True", "the same bits True"]
    assert found[:2] == ["ValueError: chunk 1 has 70 rows", "soon True"], found
    assert found[2:10] == [*trained, *trained, "the same processes True", "frame {45.0}"], found
    assert found[10] == "kinds {(3.0, True, 'category', True)}", "of several chunks, too"
    errors = found[11:21]
    assert errors[0] == "KeyError: 'shard'"
    assert errors[1] == "InputError: map: collection 1 has 800 rows; expected 900, as in the first one"
    assert errors[2] == "InputError: map: collection 0 is a ndarray; expected an array or a dataframe of Dask"
    unknown = "the sizes of its chunks are unknown; call compute_chunk_sizes() of it first"
    assert errors[3:5] == [f"InputError: map: collection {number}: {unknown}" for number in (0, 1)]
    assert errors[5] == "InputError: map: the cluster has no workers []"
    assert errors[6].startswith(
        "StartupError: 2 of these 2 processes have been ranks before, in 1 world of other processes"
    )
    assert errors[6].endswith(
        "MPI can be started only once per process: get new workers, with client.restart() or from another cluster"
    )
    assert re.search("PeerLostError: .*rank 1 of 3, process .* has ended", errors[7])
    assert errors[8] == "two calls [[45.0, 45.0], [450.0, 450.0]]"
    assert errors[9] == "InputError: map: the cluster has no workers"


def test_ray_s_actors_keep_their_state(start, tmp_path):
    found = start(PROGRAMS / "in_ray.py", TMPDIR=str(tmp_path))
    ranks = [[[(rank, 2, rank, 3.0 * step) for rank in (0, 1)] for step in (1, 2, 3)]]
    said = [line for line in found if line.startswith(("run", "the same", "execute", "raised"))]
    assert said == [
        f"run {ranks[0]}",
        "the same actors True",
        "execute [(1, 1, 'a'), (11, 1, 'a')] [(1, 2, 'a'), (11, 2, 'a')]",
        "execute_single 2",
        "raised KeyError KeyError: 'shard'",
        "raised StartupError RayExecutor.run(): there are no ranks; call start() first",
    ], found
    assert not list(tmp_path.glob("ringrun-pmi-*")), "Ray kills what its actors have started"


def test_ray_s_trainer_trains_over_ring_and_starts_its_workers_again(start, tmp_path):
    """Rank 1 is killed once, before step 3; the group that Ray makes then goes on from the last checkpoint."""
    found = start(PROGRAMS / "in_torch_trainer.py", tmp_path)
    said = [line for line in found if line.startswith(("trained", "killed", "the same", "as alone"))]
    assert re.fullmatch("trained over ring to step 5 from [123]", said[0]), found
    assert said[1:] == ["killed True ranks 2", "the same bits True", "as alone True"], found


def test_spark_s_barrier_tasks_are_ranks_and_its_distributor_trains(start):
    found = start(PROGRAMS / "in_spark.py")
    said = [line for line in found if line.startswith(("ranks", "the same", "raised", "distributor"))]
    assert said[:3] == ["ranks [0, 1] [50, 50] {4950.0}"] * 2 + ["the same processes True"], found
    assert re.search("2 of these 3 processes have been ranks .* set spark.python.worker.reuse=false", said[3]), found
    assert "KeyError: 'shard'" in said[4], f"of whichever task Spark shows: {found}"
    assert said[5] == "distributor ([1.0, 3.0, 5.0], 'ring', 2)", found


@pytest.mark.parametrize("block", blocks("python", page="engines.md"), ids=lambda block: block.title)
def test_an_example_of_the_page_prints_what_it_says(start, tmp_path, block):
    program = tmp_path / block.title
    program.write_text(block.text)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    found = start(*(torchrun if "DistributedDataParallel" in block.text else []), program)
    for line in re.findall(r"print\(.*\)  # (.*)$", block.text, re.MULTILINE):
        assert line in found, found
