"""Programs of PyTorch and its front ends, unchanged: over gloo, and under ringrun --torch-backend ring."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ringrun.agent.master_port import free_port
from tests.end_to_end.conftest import PROGRAMS, ringrun

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("frameworks")]
PYTHON = Path(sys.executable)
FRONT_ENDS = ["ddp_tutorial", "torchvision_reference", "nanogpt", "accelerated", "trainer", "fabric", "lit"]
TRAINED = "import torch; model = torch.nn.Linear(2, 1); model(torch.ones(1, 2)).sum().backward()\n"
OF_ITS_OWN = """
import os, sys, torch.multiprocessing

def train(*_):
    import ringreduce
    try:
        ringreduce.init()
    finally:
        print("MPI has begun:", "mpi4py.MPI" in sys.modules)

if __name__ == "__main__":
    if {"torchrun", "accelerate launch"} & set(sys.argv):
        train()
    elif "mp.spawn" in sys.argv:
        torch.multiprocessing.spawn(train, nprocs=2)
    else:
        from accelerate import notebook_launcher
        notebook_launcher(train, num_processes=2, use_port=sys.argv[2 + int(os.environ["RANK"])])
"""


def ports(count):
    """So many that are free, and that no connection is given meanwhile."""
    found = set()
    while len(found) < count:
        found.add(free_port())
    return sorted(found)


def trained(folder, ranks, **options):
    """What each front end has trained, by name and rank."""
    folder.mkdir()
    programs = [f"{name}={port}" for name, port in zip(FRONT_ENDS, ports(len(FRONT_ENDS)), strict=True)]
    command = [PROGRAMS / "front_ends" / "all.py", folder, *programs]
    done = ringrun(PYTHON, ranks, *command, cwd=folder, timeout_s=500, returncode=0, **options)
    assert "joined" not in done.stdout
    return {name: [dict(np.load(folder / f"{name}.{rank}.npz")) for rank in range(ranks)] for name in FRONT_ENDS}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.adapters), 3])
def test_over_ring_they_train_what_they_train_over_gloo(front_ends, tmp_path, ranks):
    over_gloo = trained(tmp_path / "gloo", ranks, **front_ends)
    over_ring = trained(tmp_path / "ring", ranks, **front_ends, RINGREDUCE_TORCH_BACKEND="ring")
    for name in FRONT_ENDS:
        expected = over_gloo[name][0]["parameters"]
        for rank in range(ranks):
            gloos, rings = over_gloo[name][rank], over_ring[name][rank]
            assert (gloos["rings"], rings["rings"] > 0) == (0, True), name
            np.testing.assert_array_equal(gloos["parameters"], expected, err_msg=f"{name}, gloo, rank {rank}")
            atol = 0 if ranks == 2 else 1e-6  # of three, gloo adds in another order
            np.testing.assert_allclose(rings["parameters"], expected, rtol=0, atol=atol, err_msg=f"{name}, rank {rank}")


@pytest.mark.parametrize("backend", ["", "ring"])
@pytest.mark.parametrize(
    ("program", "cure"),
    [
        ("import accelerate; accelerate.Accelerator()", "accelerate needs Accelerator(cpu=True)"),
        (
            "import transformers; transformers.Trainer(model, transformers.TrainingArguments('out', report_to=[]))",
            "transformers needs TrainingArguments(use_cpu=True)",
        ),
        ("import lightning; lightning.Trainer(accelerator='cpu')", 'Lightning needs strategy="ddp"'),
    ],
)
def test_where_each_rank_takes_itself_for_the_only_one_ringrun_tells(front_ends, script, program, cure, backend):
    done = ringrun(PYTHON, 2, script(TRAINED + program), **front_ends, RINGREDUCE_TORCH_BACKEND=backend, returncode=0)
    assert f"the 2 ranks are not connected: each is running alone; without GPUs {cure}" in done.stdout


LAUNCH = "accelerate.commands.launch"
STARTS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2],
    "accelerate launch": ["-m", LAUNCH, "--main_process_port", 0, "--multi_gpu", "--num_processes", 2],
}


@pytest.mark.parametrize("started_by", ["mp.spawn", "notebook_launcher", *STARTS])
def test_processes_that_a_rank_starts_by_torch_are_refused_before_mpi_begins(front_ends, script, started_by):
    command = [*STARTS.get(started_by, []), script(OF_ITS_OWN), started_by, *ports(2)]
    done = ringrun(PYTHON, 2, *command, returncode=1, **front_ends)
    assert (
        f"init(): {started_by} started this process in a rank, and MPI takes it for that rank; "
        f"in place of {started_by}, " in done.stdout
    )
    assert "start with: ringrun -np 2 python train.py" in done.stdout
    assert "MPI has begun: False" in done.stdout
    assert "MPI has begun: True" not in done.stdout


ACCELERATED = """
import torch, torch.distributed
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.ones(1) + accelerator.process_index).item()
config = torch.distributed.get_backend_config()
print("rank", accelerator.process_index, "of", accelerator.num_processes, total, config)
"""


def test_under_ringrun_accelerate_launch_starts_one_process_in_each_rank(front_ends, script):
    command = ["-m", LAUNCH, "--cpu", "--num_processes", 2, script(ACCELERATED)]
    done = ringrun(PYTHON, 2, *command, **front_ends, RINGREDUCE_TORCH_BACKEND="ring", returncode=0)
    for rank in range(2):
        assert f"[{rank}] rank {rank} of 2 3.0 cpu:ring" in done.stdout
