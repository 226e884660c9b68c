"""ringrun in a real Slurm of two nodes, on both MPIs, and MPICH's ranks started by srun alone. No ssh is needed."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.cluster.hosts import PROGRAMS, ROOT
from tests.support.cluster.slurm import wait_until_idle
from tests.support.patience import wait_until
from tests.support.tiers import extended

STEPS, WHERE = PROGRAMS / "steps.py", PROGRAMS / "where.py"
TWO_AND_TWO = ["0 h0 0 2 0 2 4", "1 h0 1 2 0 2 4", "2 h1 0 2 1 2 4", "3 h1 1 2 1 2 4"]
TWO_AND_ONE = ["0 h0 0 2 0 2 3", "1 h0 1 2 0 1 3", "2 h1 0 1 1 2 3"]


def placed(done, prefix=True):
    """What the ranks of a job that has succeeded say of their places, by rank."""
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    return [re.fullmatch(r"\[(\d+)\] (\1 .*)", line).group(2) if prefix else line for line in lines]


def told(places, colour=""):
    return [f"{place} {999.0 * sum(range(len(places) + 1))}{colour}" for place in places]


@pytest.mark.adapters
@pytest.mark.parametrize(
    ("tasks", "flags", "places"),
    [
        ("-n4", [], TWO_AND_TWO),
        pytest.param("-n3", [], TWO_AND_ONE, marks=extended),
        pytest.param("-n4", ["-np", "3"], TWO_AND_ONE, marks=extended),
        pytest.param("-n4", ["--launcher", "mpirun"], TWO_AND_TWO, marks=extended),
    ],
)
def test_salloc_and_ringrun(slurm, python, tasks, flags, places):
    command = ["salloc", "-N2", tasks, python.parent / "ringrun", *flags, python, WHERE, "COLOUR"]
    assert placed(slurm.run(0, command, env={"COLOUR": "red wine"})) == told(places, " red wine")
    slurm.assert_nothing_is_left()


def test_a_step_of_one_task_on_each_node_joins(slurm, python):
    """As in containers, where srun is not to be had."""
    command = [python.parent / "ringrun", "join", "-np", "4", python, WHERE, "COLOUR"]
    step = ["salloc", "-N2", "-n2", "srun", "-N2", "--ntasks-per-node=1", "--mpi=none", "--overcommit", *command]
    done = slurm.run(0, step, env={"COLOUR": "red wine", "RINGRUN_KEY": "0123456789abcdef" * 4})
    assert placed(done) == told(TWO_AND_TWO, " red wine")
    slurm.assert_nothing_is_left()


def test_srun_starts_mpichs_ranks_for_ringrun(slurm, python, request):
    command = ["salloc", "-N2", "-n4", python.parent / "ringrun", "--launcher", "srun", python, WHERE, "COLOUR"]
    done = slurm.run(0, command, env={"COLOUR": "red wine"})
    if "mpich" in request.node.callspec.id:
        assert placed(done) == told(TWO_AND_TWO, " red wine")
    else:  # Open MPI 5 speaks PMIx only, and this Slurm's plugin for that does not load
        assert done.returncode == 3, done.stderr
        assert "srun" in done.stderr
        assert "Traceback" not in done.stderr
    slurm.assert_nothing_is_left()


def test_sbatch_takes_the_example(slurm, python):
    output, path = slurm.folder / "output.txt", f"{python.parent}:{os.environ['PATH']}"
    command = ["sbatch", "--parsable", "--chdir", ROOT, "--output", output, ROOT / "examples" / "slurm.sbatch"]
    number = slurm.run(0, command, env={"PATH": path}).stdout.strip()  # --wait looks after 2, 10 and 42 seconds only
    wait_until(lambda: not slurm.check(0, ["squeue", "--noheader"]))
    assert "ExitCode=0:0" in slurm.check(0, ["scontrol", "show", "job", number]), output.read_text()
    assert "[0] parameters are identical on all 4 ranks" in output.read_text()
    assert float(re.search(r"test accuracy: ([\d.]+)", output.read_text()).group(1)) > 0.97
    slurm.assert_nothing_is_left()


def test_the_example_with_gpus_saves_when_signalled_goes_back_into_the_queue_and_resumes(slurm):
    output, path = slurm.folder / "output.txt", f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    two = ["--ntasks-per-node=1", "--gpus-per-node=1", "--chdir", ROOT, "--output", output]
    small = ["--model=resnet18", "--pixels=32", "--batch=8", "--workers=0", "--every=1", "--epochs=1", "--warmup=1"]
    command = ["sbatch", "--parsable", *two, ROOT / "examples" / "slurm-gpu.sbatch", *small]
    checkpoint = slurm.folder / "imagenet.pt"
    number = slurm.run(0, [*command, "--checkpoint", checkpoint], env={"PATH": path}).stdout.strip()
    wait_until(lambda: output.exists() and "] epoch 0" in output.read_text(), within_s=120)
    slurm.check(0, ["scancel", "--batch", "--signal=USR1", number])
    wait_until(lambda: "JobState=PENDING" in slurm.check(0, ["scontrol", "show", "job", number]), within_s=60)
    first = output.read_text()
    assert f"SIGUSR1: stopped; --resume goes on from {checkpoint}\n" in first
    wait_until_idle(slurm)
    time.sleep(1.1)  # what runs in the second in which Slurm has ended it is taken for the first run, and refused
    slurm.check(0, ["scontrol", "update", f"JobId={number}", "StartTime=now"])  # by itself after two minutes
    wait_until(lambda: "JobState=COMPLETED" in slurm.check(0, ["scontrol", "show", "job", number]), within_s=120)
    done = [float(each) for each in re.findall(r"epoch (\d\.\d+): ", output.read_text())]
    assert done == pytest.approx([step / 15 for step in range(1, 16)], abs=1e-3), "each step once"
    assert "[0] epoch 1 of 1: validation loss" in output.read_text().removeprefix(first)
    slurm.wait_until_gone()  # torch leaves a folder in /tmp


def test_a_rank_that_dies_on_the_other_node(slurm, python):
    done = slurm.run(0, ["salloc", "-N2", "-n4", python.parent / "ringrun", python, STEPS, 0, "kill"], returncode=137)
    slurm.assert_nothing_is_left()
    card = done.stderr[done.stderr.index("-- ringrun: rank 2 of 4 failed first --") :]
    assert re.search(r"^how +killed by signal 9 \(SIGKILL\), exit code 137$", card, re.MULTILINE)
    assert re.search(r"^where +host h1, pid \d+, ran for ", card, re.MULTILINE)
    wait_until(lambda: not slurm.check(0, ["squeue", "--noheader"]))  # Slurm may be completing it yet


def submit(slurm, command):
    """Submit a batch job of four ranks on both nodes; return its number."""
    job = slurm.folder / "job.sh"
    job.write_text(f"#!/bin/bash\n#SBATCH -N2 -n4 -o output\n{command}\n")
    return re.search(r"\d+", slurm.check(0, ["sbatch", job])).group()


@pytest.mark.parametrize("which", ["--batch", "--full"])
def test_a_signal_to_the_batch_script_reaches_ranks_on_both_nodes(slurm, python, which):
    ringrun = f"{python.parent}/ringrun --forward-signals USR1,USR2"
    number = submit(slurm, f"exec {ringrun} {python} {ROOT}/tests/launcher/programs/gets_signals.py")
    wait_until(lambda: all((slurm.folder / f"up{rank}").exists() for rank in range(4)))
    for name in ("USR1", "USR2"):
        slurm.check(0, ["scancel", which, f"--signal={name}", number])
    wait_until(lambda: not slurm.check(0, ["squeue", "--noheader"]))
    output = (slurm.folder / "output").read_text()
    assert "ExitCode=9:0" in slurm.check(0, ["scontrol", "show", "job", number]), output
    assert "passed SIGUSR2 on to 4 ranks" in output


def test_scancel_ends_the_job_on_both_nodes(slurm, python):
    number = submit(slurm, f"{python.parent}/ringrun {python} {STEPS} 0 pass")
    wait_until(lambda: (slurm.folder / "training").exists())
    slurm.check(0, ["scancel", number])
    slurm.wait_until_gone(within_s=15)
    left = [path for k in range(2) for path in slurm.left_behind(k)]
    assert [path for path in left if "hydra_hwloc" not in path] == [], (
        "agents clean up after ranks; Hydra has been killed"
    )


def test_srun_alone_starts_mpichs_ranks(slurm, mpich_python):
    done = slurm.run(0, ["srun", "-N2", "-n4", "--mpi=pmi2", mpich_python, WHERE])
    assert placed(done, prefix=False) == told(TWO_AND_TWO)
    slurm.wait_until_gone()


def test_srun_without_pmi_is_told(slurm, mpich_python):
    done = slurm.run(0, ["srun", "-N2", "-n4", mpich_python, WHERE], returncode=1)
    assert "srun started 4 ranks, but MPI counts 1" in done.stderr


TORCH = """
import sys, torch, torch.distributed as dist
import ringreduce.torch.distributed
dist.init_process_group(sys.argv[1])
value = torch.ones(1) + dist.get_rank()
dist.all_reduce(value)
print(dist.get_rank(), dist.get_world_size(), dist.group.WORLD._get_backend(value.device).name(), value.item())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("backends", "cpu"), [("cpu:ring", "ring"), ("cpu:gloo,cuda:ring", "gloo")])
def test_srun_alone_tells_torch_the_ranks(slurm, mpich_python, script, backends, cpu):
    done = slurm.run(0, ["srun", "-N2", "-n4", "--mpi=pmi2", mpich_python, script(TORCH), backends])
    assert placed(done, prefix=False) == [f"{rank} 4 {cpu} 10.0" for rank in range(4)]
    slurm.wait_until_gone()
