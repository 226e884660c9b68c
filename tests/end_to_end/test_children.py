"""Child processes of a rank: none of them joins the job in its place, whoever started it."""

import re

import pytest

from tests.end_to_end.conftest import PROGRAMS, ringrun, run
from tests.support import tiers
from tests.support.jobs import ringrun as ringrun_of

SIZE = 2


@pytest.mark.parametrize(
    ("launcher", "python"),
    [("mpirun", "openmpi"), pytest.param("ringrun", "mpich", marks=tiers.extended)],
    indirect=["python"],
)
def test_no_child_of_a_rank_joins_in_its_place(tmp_path, python, launcher):
    wrapped = tmp_path / "start.sh"
    # a rank is no child of the launcher's, either
    wrapped.write_text(f"env OMP_NUM_THREADS=1 {python} {PROGRAMS / 'children.py'}\n")
    flags = ["--allow-run-as-root", "--oversubscribe"] if launcher == "mpirun" else []
    told = run([python.parent / launcher, *flags, "-np", str(SIZE), "bash", wrapped], returncode=0).stdout
    assert told.count("spawn BrokenProcessPool forkserver BrokenProcessPool") == SIZE, told
    for rank in range(SIZE):
        text = f"this process was started by rank {rank} and is not a rank itself; put init() under `if __name__"
        assert told.count(text) >= 4, told  # spawn, forkserver, a script of its own, a forked child
        assert f"child 1 ringreduce.errors.StartupError: init(): {text}" in told, told
        assert (
            f"forked {rank} {SIZE} {rank} 1 True allreduce(): ringreduce has not been initialized; this process "
            in told
        )
        items = list(range(rank, 6, SIZE))
        assert f"forked samplers {rank} {items} {items}" in told, told
    assert told.count("forked handle a handle that was pending in its parent ends there only; this process") == 2, told
    assert told.count("total 2.0") == SIZE, told
    assert told.count("inside 0 ['2.0', '2.0', '[0]', '[1]', 'sum', 'sum']") == 1, told
    assert "OSC UCX" not in told, "two lines of Open MPI's that say nothing to anybody"


ALL_OF_THEM = """
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    sys.exit(max(each.exitcode for each in workers))
"""

SIBLINGS = """
import multiprocessing, sys

def work(number):
    import ringreduce as rr
    rr.init()
    print("worker", rr.rank(), rr.size(), rr.allreduce(1.0, op=rr.Sum), flush=True)
    rr.barrier()

if __name__ == "__main__":
    fork, count = multiprocessing.get_context("fork"), int(sys.argv[1])
    workers = [fork.Process(target=work, args=[each]) for each in range(count)]
"""


@pytest.mark.parametrize("python", ["openmpi", pytest.param("mpich", marks=tiers.extended)], indirect=True)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.adapters
def test_one_child_may_be_the_rank_and_a_second_one_is_told(script, python, ranks, workers):
    told = ringrun(python, ranks, script(SIBLINGS + ALL_OF_THEM), workers, returncode=workers - 1).stdout
    for rank in range(ranks):
        assert told.count(f"worker {rank} {ranks} {ranks}.0") == 1, told
        second = re.findall(
            rf"^\[{rank}\] .*StartupError: init\(\): process \d+ cannot be rank {rank}: process", told, re.M
        )
        assert len(second) == workers - 1, told


TORCHS = """
import multiprocessing, os, sys
import torch.distributed as dist

def work(rank):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + os.environ["MASTER_PORT"], rank=rank, world_size=2)

if __name__ == "__main__":
    workers = [multiprocessing.get_context("fork").Process(target=work, args=[each]) for each in range(2)]
"""


@pytest.mark.parametrize("python", ["openmpi", pytest.param("mpich", marks=tiers.extended)], indirect=True)
def test_workers_that_make_a_group_of_their_own_in_one_rank_are_told_before_mpi_starts(script, python):
    command = [ringrun_of(python), "-np", 1, "--torch-backend", "ring", python, script(TORCHS + ALL_OF_THEM)]
    told = run(command, returncode=1).stdout
    for rank in range(2):
        assert f"torch says rank {rank} of 2, but MPI rank 0 of 1; pass the same rank= and world_size=" in told, told
    assert "ringrun -np 2 python train.py, without mp.spawn or multiprocessing.Process" in told
