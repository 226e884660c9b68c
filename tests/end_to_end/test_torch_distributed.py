"""The backend "ring" as users start it, and PyTorch's own tests of a backend."""

import collections
import json
import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ringrun, run
from tests.end_to_end.test_mpirun import ALLOWED, MORE_RANKS_THAN_CORES
from tests.support.jobs import ROOT

PYTHON = Path(sys.executable)
FEWEST = 122  # over gloo 123 pass, and 4 fail
SOME = (
    "DistributedDataParallelCPU|all_gather|all_gather_object_default_pg|all_reduce_full_group_max|all_reduce_sum_async|"
    "all_to_all_single_unequal_split|barrier|broadcast|ddp_create_graph|gather|isend|reduce_sum|scatter|send_recv"
)

PROGRAM = """
import torch, torch.distributed as dist
import ringreduce.torch.distributed

dist.init_process_group("ring")
value = torch.ones(1) + dist.get_rank()
dist.all_reduce(value)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {value.item():.0f}")
"""


def said(finished):
    assert finished.returncode == 0, finished.stdout
    return sorted(line for line in finished.stdout.splitlines() if "rank " in line)


def test_mpirun_tells_torch_the_ranks(script):
    mpirun = [PYTHON.with_name("mpirun"), "-np", 2, PYTHON, script(PROGRAM)]
    finished = run(mpirun, PATH=f"{PYTHON.parent}:/usr/bin:/bin", **ALLOWED, **MORE_RANKS_THAN_CORES)
    assert said(finished) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


def test_ringrun_needs_no_import(script):
    program = script(PROGRAM.replace("import ringreduce.torch.distributed\n", ""))
    assert said(ringrun(PYTHON, 2, program)) == ["[0] rank 0 of 2: 3", "[1] rank 1 of 2: 3"]


@pytest.mark.adapters
@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("import ringreduce; ringreduce.init()", "WORLD_SIZE=2 says that ringrun or torchrun started 2 ranks"),
        (
            "import os; del os.environ['WORLD_SIZE'], os.environ['RANK']\n"
            "    os.environ |= {'MASTER_ADDR': 'localhost', 'ACCELERATE_DYNAMO_USE_FULLGRAPH': 'False'}\n"
            "    import torch.distributed as dist, ringreduce.torch.distributed\n"
            "    dist.init_process_group('ring')",
            "accelerate launch started this process, and nothing says which rank it is",
        ),
    ],
    ids=["torchrun", "accelerate launch"],
)
def test_a_start_without_mpis_launcher_is_refused_before_mpi_begins(tmp_path, start, message):
    """Which would leave a file in /dev/shm."""
    begun = "m = __import__('sys').modules.get('mpi4py.MPI'); print('begun:', bool(m and m.Is_initialized()))"
    script = f"try:\n    {start}\nfinally:\n    {begun}"
    finished = run([PYTHON, "-c", script], cwd=tmp_path, WORLD_SIZE="2", RANK="0", PYTHONPATH=str(ROOT))
    assert message in finished.stdout
    assert re.search("start with: ringrun -np [2N] python train.py", finished.stdout)
    assert "begun: False" in finished.stdout.splitlines(), finished.stdout


NO_LINE_CHANGED = """
import os, subprocess, sys, torch, torch.distributed as dist

of_files = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
for named in ([], ["gloo"], ["cpu:gloo,cuda:nccl"], ["mpi"]):  # the first and the last by env://, whose port stays
    by_file = named and "gloo" in named[0]
    options = of_files | {"store": dist.FileStore(f"{__file__}.{named[0]}")} if by_file else {}
    dist.init_process_group(*named, **options)
    dist.monitored_barrier() if named == ["gloo"] else dist.barrier()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    groups = [None, dist.new_group(), dist.new_group(backend="gloo"), mesh["b"].get_group()]
    values = torch.ones(5) + rank
    for each in groups:
        dist.all_reduce(values, group=each)
    configurations = {each.split(",")[0] for each in map(dist.get_backend_config, groups)}
    print(f"rank {rank} of {size}:", dist.get_backend(), dist.get_backend(groups[2]), configurations, values.tolist())
    dist.destroy_process_group()
alone = "import torch.distributed as d; d.init_process_group(store=d.HashStore(), rank=0, world_size=1)"
subprocess.run([sys.executable, "-c", f"{alone}; print('a child of rank {rank}:', d.get_backend_config())"], check=True)
"""


@pytest.mark.adapters
def test_a_program_that_names_gloo_mpi_or_nothing_runs_over_ring_and_is_told_what_it_named(script):
    options = {"RINGREDUCE_TORCH_BACKEND": "ring", "RINGREDUCE_LOG_LEVEL": "info"}
    finished = ringrun(PYTHON, 2, script(NO_LINE_CHANGED), **options)
    named = ["undefined", "gloo", "cpu:gloo,cuda:nccl", "mpi"]
    values = [3.0 * 2**3] * 5
    assert sorted(line for line in said(finished) if " of 2: " in line) == sorted(
        f"[{rank}] rank {rank} of 2: {each} gloo {{'cpu:ring'}} {values}" for rank in (0, 1) for each in named
    )
    assert finished.stdout.count("a child of rank 0: cpu:gloo\n") == 1, "it is no rank"
    assert finished.stdout.count('"gloo", "mpi" or no backend means "ring" in this job') == 1


RPC_IN_A_CHILD = """
import os, torch, torch.distributed.rpc as rpc, torch.multiprocessing as mp

def call(_, rank):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    print(f"rank {rank}:", rpc.rpc_sync(f"worker{1 - rank}", torch.add, (torch.ones(2), rank)).sum().item())
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(call, (int(os.environ["RANK"]),))
"""


@pytest.mark.timeout(120)
def test_ranks_whose_children_call_each_other_are_not_told_that_each_is_alone(script):
    finished = ringrun(PYTHON, 2, script(RPC_IN_A_CHILD))
    assert said(finished) == ["[0] rank 0: 2.0", "[1] rank 1: 4.0"]
    assert "are not connected" not in finished.stdout


@pytest.mark.timeout(120)
def test_a_rank_that_fails_is_named_with_what_the_others_wait_for(script):
    program = script(PROGRAM.replace("value = ", "if dist.get_rank() == 1: raise KeyError('shard')\nvalue = "))
    finished = ringrun(PYTHON, 2, program, returncode=1)
    assert "rank 1 of 2 failed first" in finished.stdout
    assert "KeyError: 'shard'" in finished.stdout
    assert "allreduce 'group 0' (train.py:8)" in finished.stdout


@pytest.mark.timeout(120)
def test_a_rank_that_does_not_call_is_named_with_what_it_did_last(script):
    late = "dist.barrier()\nimport time\nif dist.get_rank() == 1: time.sleep(20)\nvalue = "
    program = script(PROGRAM.replace("value = ", late))
    finished = ringrun(PYTHON, 2, program, RINGREDUCE_STALL_CHECK_S="1", RINGREDUCE_STALL_ABORT_S="4", returncode=1)
    assert re.search(r"allreduce 'group 0' \(train.py:10\) is under way, but has not moved for \d s", finished.stdout)
    assert "rank 0 waits for rank 1" in finished.stdout
    assert "time.sleep(20)" in finished.stdout, "its stack"


@pytest.mark.adapters
def test_some_of_pytorch_s_own_tests(tmp_path):
    """A collective of each kind, groups, messages, DDP."""
    expected = {f"test_{name}": "passed" for name in SOME.split("|")}
    assert of_pytorch(tmp_path, 2, f"^test_({SOME})$") == [expected] * 2


@pytest.mark.timeout(900)
def test_pytorch_s_own_tests_of_a_backend(tmp_path):
    counts = [collections.Counter(each.values()) for each in of_pytorch(tmp_path, 4, "")]
    assert all(each["passed"] >= FEWEST for each in counts), counts
    assert set().union(*counts) == {"passed", "skipped"}


def of_pytorch(folder, ranks, pattern):
    """What became of each test, by rank."""
    command = ["-m", "tests.support.torch_suite", folder, "ring", pattern]
    ringrun(PYTHON, ranks, *command, timeout_s=800, cwd=ROOT, OMP_NUM_THREADS="1", returncode=0)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.timeout(3600)
def test_pytorch_s_own_tests_in_processes_that_they_start_themselves(tmp_path, python):
    """By multiprocessing, four for each test; without a launcher of MPI."""
    found = collections.Counter(in_processes(python, tmp_path, "", "fork").values())
    assert found["passed"] >= FEWEST, found
    assert found.keys() == {"passed", "skipped"}


@pytest.mark.timeout(3600)
def test_some_of_them_in_processes_that_begin_with_nothing(tmp_path, python):
    """By spawn, as PyTorch runs its tests; to import all takes half a minute each time."""
    some = ["DistributedDataParallelCPU", "all_reduce_sum", "all_to_all_group", "send_recv"]
    found = in_processes(python, tmp_path, f"^test_({'|'.join(some)})$", "spawn")
    assert found == {f"test_{name}": "passed" for name in some}


def in_processes(python, folder, pattern, method):
    """What became of each test."""
    command = [python, "-m", "tests.support.spawned_torch_suite", folder, "ring", pattern, method]
    run(command, timeout_s=3500, OMP_NUM_THREADS="1", returncode=0)
    return json.loads((folder / "spawned.json").read_text())
