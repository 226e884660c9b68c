"""Ranks that torchrun, mp.spawn or a pool of processes has started, without any launcher of MPI: both MPIs."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringrun.agent.master_port import free_port
from tests.end_to_end.conftest import ringrun, run

SAY = """
import os

def say(text):
    os.write(1, f"{text}\\n".encode())  # at once: the ranks share a pipe
"""
TRAINED = (
    SAY
    + """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(rank=None, size=None, store=None):
    of_spawn = {} if rank is None else {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group(BACKEND, **of_spawn)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    values = [v.hex() for p in model.parameters() for v in p.detach().double().flatten().tolist()]
    say(f"rank {dist.get_rank()} of {dist.get_world_size()}: {' '.join(values)}")
    dist.destroy_process_group()

if __name__ == "__main__":
    if "spawn" in sys.argv:
        torch.multiprocessing.spawn(train, (2, os.path.abspath("store")), nprocs=2)
    else:
        train()
"""
)
OF_RANKS = r"rank \d of \d: .*"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


@pytest.fixture
def start(python):
    """Runs `python` with these arguments."""

    def run_to_the_end(*arguments, **variables):
        defaults = {"PATH": f"{python.parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        return run([python, *arguments], **defaults | variables)

    return run_to_the_end


def test_a_process_that_nothing_has_started_needs_no_home(start):
    """A service has none, for which Open MPI ended the process."""
    code = "import ringreduce as rr; rr.init(); print('one of', rr.size())"
    assert "one of 1\n" in start("-c", code, HOME=None, returncode=0).stdout


def ranks(finished):
    assert finished.returncode == 0, finished.stdout
    return sorted(re.findall(OF_RANKS, finished.stdout))


@pytest.mark.timeout(300)
def test_torchrun_and_spawn_train_as_ringrun_does_to_the_last_bit(start, python, script):
    program = script(TRAINED.replace("BACKEND", '"ring"'))
    by_ringrun = ranks(ringrun(python, 2, program))
    assert len(by_ringrun) == 2
    assert ranks(start(*TORCHRUN, program)) == by_ringrun
    assert ranks(start(program, "spawn", cwd=program.parent)) == by_ringrun
    gloo = script(TRAINED.replace("BACKEND", '"gloo"'))
    assert ranks(start(*TORCHRUN, gloo, RINGREDUCE_TORCH_BACKEND="ring")) == by_ringrun


HOROVOD_S = (
    SAY
    + """
import os, numpy as np, ringreduce as hvd
hvd.init()
total = hvd.allreduce(np.arange(3.0) + hvd.rank(), op=hvd.Sum)
say(f"rank {hvd.rank()} of {hvd.size()}: {total.tolist()} {os.environ['RANK']} {hvd.local_rank()}")
hvd.shutdown()
hvd.init()
say(f"rank {hvd.rank()} of {hvd.size()}: again {hvd.allreduce(1.0 + hvd.rank())}")
"""
)


@pytest.mark.adapters
@pytest.mark.parametrize("first", ["", "import torch.distributed as d; d.init_process_group('gloo')"])
def test_init_joins_the_ranks_that_torchrun_has_started(start, script, first):
    """By torchrun's variables, or by the group that the program has made."""
    expected = [f"rank {rank} of 2: [1.0, 3.0, 5.0] {rank} {rank}" for rank in (0, 1)]
    again = [f"rank {rank} of 2: again 1.5" for rank in (0, 1)]
    assert ranks(start(*TORCHRUN, script(first + HOROVOD_S))) == sorted(expected + again)


TWICE = (
    SAY
    + """
import torch, torch.distributed as dist
for turn in (1, 2):  # at the same store
    dist.init_process_group("ring")
    values = torch.arange(3.0) * (dist.get_rank() + turn)
    dist.all_reduce(values)
    say(f"rank {dist.get_rank()} of {dist.get_world_size()}: {turn} {values.tolist()}")
    dist.destroy_process_group()
"""
)


@pytest.mark.timeout(300)
def test_jobs_side_by_side_do_not_meet_and_make_their_groups_twice(start, script):
    program = script(TWICE)
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(start, *TORCHRUN, program) for _ in range(2)]
    expected = [
        f"rank {rank} of 2: {turn} {[0.0, 2.0 * turn + 1, 4.0 * turn + 2]}" for rank in (0, 1) for turn in (1, 2)
    ]
    for job in jobs:
        assert ranks(job.result()) == expected


OF_ACCELERATE = (
    SAY
    + """
import sys, torch

def train():
    from accelerate import Accelerator
    of = Accelerator(cpu=True)
    backend = torch.distributed.get_backend_config()
    values = of.reduce(torch.arange(3.0) + of.process_index, "sum")
    say(f"rank {of.process_index} of {of.num_processes}: {values.tolist()} {'cpu:ring' in backend}")
    of.end_training()

if __name__ == "__main__":
    if "notebook" in sys.argv:
        from accelerate import notebook_launcher
        notebook_launcher(train, num_processes=2, use_port=sys.argv[2])
    else:
        train()
"""
)
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1)
LAUNCH += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", 0)


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("frameworks")
def test_accelerate_s_launchers_start_ranks(start, front_ends, script):
    options = front_ends | {"RINGREDUCE_TORCH_BACKEND": "ring", "ACCELERATE_USE_CPU": "true"}
    program = script(OF_ACCELERATE)
    for command in ([*LAUNCH, program], [program, "notebook", free_port()]):
        found = ranks(start(*command, **options))
        assert found == [f"rank {rank} of 2: [1.0, 3.0, 5.0] True" for rank in (0, 1)]


RESTARTED = (
    SAY
    + """
import os, numpy as np, ringreduce as rr
rr.init()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rr.allreduce(np.ones(4))
if attempt == 0 and rr.rank() == 1:
    os.kill(os.getpid(), 9)
total = rr.allreduce(np.float64(rr.rank()), op=rr.Sum)
say(f"rank {rr.rank()} of {rr.size()}: attempt {attempt} {total}")
"""
)


@pytest.mark.timeout(300)
def test_torchrun_starts_the_ranks_again(start, script):
    finished = start(*TORCHRUN, "--max-restarts", 1, "--monitor-interval", 0.2, script(RESTARTED))
    assert ranks(finished) == [f"rank {rank} of 2: attempt 1 1.0" for rank in (0, 1)]


OF_A_POOL = (
    SAY
    + """
import multiprocessing, os, sys, time

class Store:
    def __init__(self, values):
        self.values = values
    def set(self, key, value):
        self.values[key] = value.encode()
    def get(self, key):
        while key not in self.values:
            time.sleep(0.01)
        return self.values[key]

def be(rank, values, size):
    import numpy as np, ringreduce as rr
    from ringreduce.transport import joining
    joining.join_by_store(Store(values), rank, size)
    rr.init()
    for step in range(10**6):
        for line in open("/proc/self/maps") if step == 4 else ():
            if ("mpich_shm_" in line or "sm_segment" in line) and "(deleted)" not in line:
                say(f"left in shared memory: {line}")
        if (rank, step) == (1, 5):
            os._exit(7)
        try:
            rr.allreduce_(np.ones(4), name="x")
        except rr.PeerLostError as error:
            say(f"rank {rank} of {size}: {error.lost_ranks} {error}")
            sys.exit(3)

if __name__ == "__main__":
    values, context = multiprocessing.Manager().dict(), multiprocessing.get_context("spawn")
    started = [context.Process(target=be, args=(rank, values, 3)) for rank in range(3)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    print([each.exitcode for each in started])
"""
)


@pytest.mark.timeout(300)
def test_the_others_hear_of_a_rank_that_has_ended_where_nobody_else_ends_them(start, script):
    finished = start(script(OF_A_POOL))
    for rank, line in zip((0, 2), ranks(finished), strict=True):
        assert re.fullmatch(rf"rank {rank} of 3: \(1,\) rank 1 of 3, process \d+ on \S+, has ended", line)
    assert "[3, 7, 3]" in finished.stdout
    assert "left" not in finished.stdout
