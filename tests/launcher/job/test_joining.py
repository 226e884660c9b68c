"""Ranks that never join each other: when that is told, and with which cure."""

import pytest

from ringrun.connection.wire import Alone, Grouped, InInit, Initialized, RankError
from ringrun.job.events import RankEnded, Reported
from ringrun.job.plan import Job
from ringrun.report.outcome import RankEnd
from tests.launcher.job.test_init_watch import Answering
from tests.launcher.job.test_supervise import arrived, ended
from tests.support.loops import in_a_loop

TOLD = "ringrun: the 2 ranks are not connected: each is running alone; "
TORCH = TOLD + "call torch.distributed.init_process_group() or ringreduce.init()"
LATER = TORCH.replace("the 2", "after a minute the 2")
OWN = TOLD + "let ringrun start the ranks, in place of torchrun, mp.spawn and notebook_launcher"
IN_VAIN = (
    "ringrun: the 2 ranks are connected, but have reduced no gradients: each has trained its own model; wrap "
    "the model in torch's DistributedDataParallel, or the optimizer in ringreduce.torch.DistributedOptimizer"
)
CPU = TOLD + "without GPUs transformers needs TrainingArguments(use_cpu=True)"


def alone(*ranks, imported="torch", ends=True, in_vain=False):
    return [Reported(rank, Alone(imported, ends, in_vain)) for rank in ranks]


def groups(members, size=2):
    return [Reported(rank, Grouped(member, size)) for rank in (0, 1) for member in members[rank]]


@in_a_loop(
    ("events", "told"),
    [
        (alone(0), []),
        (alone(0, 1), [TORCH]),
        (alone(0, 1, imported="numpy"), [TOLD + "call ringreduce.init()"]),
        (alone(0, 1, 1, 0, ends=False) + alone(0, 1), [LATER]),
        ([Reported(1, InInit(1.0)), *alone(0, 1)], []),
        ([Reported(0, Initialized()), *alone(0, 1)], []),  # with RINGREDUCE_STALL_CHECK_S=0
        (groups([[0], [1]]) + alone(0, 1), []),
        (groups([[0, 1], [1, 0]]) + alone(0, 1), [OWN]),
        (groups([[0, 1], [2, 3]], size=4) + alone(0, 1), []),
        (groups([[0], [1]]) + alone(0) + alone(1, in_vain=True), []),
        (groups([[0], [1]]) + alone(0, 1, imported="transformers.trainer", in_vain=True), [CPU]),
        (groups([[0], [1]]) + alone(0, 1, in_vain=True), [IN_VAIN]),
        ([Reported(1, Initialized()), *alone(0, 1, in_vain=True)], [IN_VAIN]),
        ([Reported(1, Initialized()), *alone(1, in_vain=True)], []),
    ],
)
def test_what_is_told_of_ranks_that_run_alone(events, told):
    assert said(*events, ended(0), ended(1)) == told


def test_it_is_told_at_once_of_ranks_that_go_on_and_not_at_all_of_a_job_that_fails():
    assert said(*alone(0, 1, ends=False), ended(0, 3), ended(1))[0] == LATER
    assert TORCH not in said(*alone(0, 1), ended(0, 3), ended(1))


def test_a_job_of_one_rank_is_not_told():
    assert said(*alone(0), ended(0), size=1) == []


def said(*events, size=2):
    fake = Answering(*arrived(*range(size)), *events)
    fake.supervisor(Job(size, ["x"])).run()
    return fake.said


@pytest.mark.without_mpi
def test_a_program_that_forgets_to_join_is_told_last_of_all(ringrun, script, tmp_path):
    (tmp_path / "numpy.py").touch()
    done = ringrun("-np", 2, *script("import numpy\nprint('trained')"), returncode=0)
    assert sorted(done.stdout.splitlines()) == ["[0] trained", "[1] trained"]
    assert done.stderr == TOLD + "call ringreduce.init()\n"
    assert ringrun("-np", 2, *script("print('trained')"), returncode=0).stderr == ""


def test_a_program_whose_child_joins_by_mpi_is_not_told(ringrun, script, tmp_path):
    (tmp_path / "numpy.py").touch()
    program = """
        import numpy, os
        if not (child := os.fork()):
            from mpi4py import MPI
            print("sum", MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1), flush=True)
            MPI.COMM_WORLD.barrier()
            MPI.Finalize()
            os._exit(0)
        os.waitpid(child, 0)
    """
    done = ringrun("-np", 2, *script(program), returncode=0)
    assert sorted(done.stdout.splitlines()) == ["[0] sum 3", "[1] sum 3"]
    assert done.stderr == ""


TRAINING = """
    import sys, torch, torch.distributed as dist, ringreduce as rr, ringreduce.torch as hvd

    how = sys.argv[1]
    rr.init()
    dist.init_process_group("ring")
    model = torch.nn.Linear(30, 10)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    forward = torch.nn.parallel.DistributedDataParallel(model) if how == "DDP" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "hvd":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(1, 7):
        forward(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "metrics":
            dist.all_reduce(torch.ones(2))
            rr.allreduce(torch.ones(3), name="more")
        elif how == "averages" and step % 3 == 0:
            for each in model.parameters():
                dist.all_reduce(each.detach())
        elif how == "activations":
            dist.all_reduce(torch.ones(20))
        elif how == "once":
            break
"""


MORE = [pytest.param(how, marks=pytest.mark.extended) for how in ("nothing", "hvd", "averages", "activations", "once")]


@pytest.mark.parametrize("how", ["metrics", "DDP", *MORE])
def test_ranks_that_join_and_train_each_a_model_of_its_own_are_told(ringrun, script, how):
    no_stalls = {"RINGREDUCE_STALL_CHECK_S": "100"}  # of a loaded machine
    done = ringrun("-np", 2, *script(TRAINING), how, returncode=0, env=no_stalls)
    assert done.stderr == (IN_VAIN + "\n" if how in ("nothing", "metrics") else "")


@in_a_loop(
    ("traceback", "starter"),
    [
        ("in notebook_launcher\n self._store = TCPStore(", "notebook_launcher"),
        ("torch.multiprocessing.spawn.ProcessRaisedException: dist.init_process_group(", "mp.spawn"),
        ("torch.multiprocessing.spawn.ProcessRaisedException: no data", ""),
        ("dist.init_process_group(", ""),
    ],
)
def test_a_failure_of_processes_that_a_rank_started_is_told_with_who_starts_ranks(traceback, starter):
    end = RankEnd(1, "here", 1, 1, 0.0, error=RankError("DistNetworkError", "EADDRINUSE", traceback))
    told = f"ringrun: {starter} starts more processes in rank 1, though ringrun has started all 2 ranks; instead "
    told += f"of {starter}, call the function that it was given, once in each rank"
    assert said(RankEnded(end), ended(0))[0] == told if starter else "starts" not in str(said(RankEnded(end), ended(0)))
