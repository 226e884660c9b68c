"""Jobs on a GPU: tests/gpu itself on 1, 2 and 4 ranks, a rank that is killed, and the benches in their quick form."""

import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ringrun, run
from tests.support import jobs
from tests.support.jobs import ROOT

PYTHON = Path(sys.executable)
PYTEST = ["-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", "--color=no", "-q", "-rs"]
BENCH = ROOT / "bench" / "gpu"

KILLED = """
import os, signal, time
import cupy
import ringreduce as rr

rr.init()
tensors = [cupy.full(1_000_003, rr.rank(), cupy.float32) for _ in range(4)]
for step in range(10**6):
    if step == 20 and rr.rank() == 1:
        print("failing at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    handles = [rr.allreduce_async_(each, name=f"t{k}") for k, each in enumerate(tensors)]
    for handle in handles:
        rr.synchronize(handle)
"""


ELASTIC = """
import os, signal
import cupy, torch
import ringreduce.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5)).cuda()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

@hvd.elastic.run
def train(state):
    while state.step < 60:
        if state.step == 20 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(32, 20, device="cuda")).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()

train(state)
sums = hvd.allgather_object([each.detach().cpu().numpy().tobytes() for each in model.parameters()])
print("done:", hvd.size(), "ranks, equal:", all(each == sums[0] for each in sums), hvd.info().gpu_algorithm, flush=True)
"""

IN_JAX = """
import jax, jax.numpy as jnp, numpy as np
import ringreduce.jax as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
array, total = jnp.arange(1000.0) * (rank + 1), np.arange(1000.0) * size * (size + 1) / 2
np.testing.assert_allclose(hvd.allreduce(array, op=hvd.Sum), total)
np.testing.assert_allclose(jax.jit(lambda each: hvd.allreduce(2 * each, op=hvd.Sum))(array), 2 * total)
gradient = jax.grad(lambda each: (hvd.allreduce(each, op=hvd.Sum) ** 2).sum())(array)
np.testing.assert_allclose(gradient, 2 * size * total)
print("done on", hvd.allreduce(array).device, flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_suite_passes_on_so_many_ranks(ranks):
    finished = ringrun(PYTHON, ranks, *PYTEST, "tests/gpu", timeout_s=800, returncode=0)
    print(finished.stdout)
    assert re.search(r"^\[0\] \d{3,} passed", finished.stdout, re.MULTILINE), finished.stdout


@pytest.mark.parametrize(
    "variables",
    [{}, {"RINGREDUCE_CUDA_NCCL": "0"}, {"RINGREDUCE_CUDA_NCCL": "0", "RINGREDUCE_CUDA_IPC": "0"}],
    ids=["default", "ipc", "host_staged"],
)
def test_a_rank_that_is_killed_ends_the_job(tmp_path, variables):
    """The others have its GPU memory mapped, or NCCL's kernels wait for it, in their streams."""
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    finished = ringrun(PYTHON, 4, script, timeout_s=120, returncode=137, **variables)
    ended = time.time()
    failing = re.search(r"failing at ([\d.]+)", finished.stdout)
    assert failing, finished.stdout
    print(f"all gone after {ended - float(failing[1]):.2f} s")
    assert re.search(r"rank 1 of 4 failed first -+\nhow .*SIGKILL", finished.stdout), finished.stdout
    assert run(["pgrep", "-f", str(script)]).stdout == "", "nothing is left"


def test_an_elastic_job_goes_on_without_a_rank_that_is_killed(tmp_path):
    torch_with_cuda()
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    command = [jobs.ringrun(PYTHON), "--elastic", "--min-np", 2, "-np", 4, PYTHON, script]
    finished = run(command, timeout_s=120, returncode=0)
    assert finished.stdout.count("done: 3 ranks, equal: True ipc: ") == 3


def test_jax_on_the_gpu(tmp_path):
    """Its arrays go through the host's memory."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    script = tmp_path / "train.py"
    script.write_text(IN_JAX)
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    finished = ringrun(PYTHON, 2, script, timeout_s=120, returncode=0, **variables)
    if "done on TFRT_CPU" in finished.stdout:
        pytest.skip("JAX sees no GPU")
    assert finished.stdout.count("done on cuda:0") == 2


def torch_with_cuda():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


def test_examples_train_on_the_gpu(tmp_path):
    torch_with_cuda()
    flags = ["--steps", "3", "--batch", "12", "--width", "32", "--depth", "2", "--checkpoint", tmp_path / "gpt.pt"]
    for name, arguments in {"train_gpt": flags, "torch_resnet": [], "torch_ddp": [], "numpy_lenet": ["--gpu"]}.items():
        finished = ringrun(PYTHON, 2, ROOT / "examples" / f"{name}.py", *arguments, timeout_s=300, returncode=0)
        assert "on cuda" in finished.stdout or name == "numpy_lenet"


@pytest.mark.parametrize(("name", "ranks"), [("gradients", 2), ("train_step", 2), ("kernels", 0)])
def test_a_bench(tmp_path, name, ranks):
    """It comes to an end, with no wrong element; or says why it was skipped."""
    command = [BENCH / f"{name}.py", "--quick", "--json", tmp_path / "rows.json"]
    finished = ringrun(PYTHON, ranks, *command, timeout_s=300) if ranks else run([PYTHON, *command], timeout_s=300)
    assert finished.returncode == 0, finished.stdout
    if skipped := re.search(r"skipped: (.*)", finished.stdout):
        pytest.skip(skipped[1])
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert {"gpu", "driver", "cupy", "date"} <= set(kept["header"])
    assert all(row["wrong"] in (0, None) for row in kept["rows"])
    assert any(row["wrong"] == 0 for row in kept["rows"])
