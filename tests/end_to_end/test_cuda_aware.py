"""A trial of MPI with GPU memory, in a job: the child is no part of it, and it goes on."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ringrun

pytestmark = pytest.mark.timeout(600)  # the first use makes the environment for MPICH
CUPY = Path(__file__).parents[1] / "support" / "cupy_on_host"
SCRIPT = f"""\
import sys
import ringreduce as rr
from ringreduce.gpu.cuda_aware import Trial

rr.init()
sys.path.insert(0, {str(CUPY)!r})
trial = Trial(rr.rank(), rr.rank())
rr.allreduce(1.0)
trial.wait()
print(trial.outcome())
print("total", rr.allreduce(rr.rank() + 1.0, op=rr.Sum))
"""


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("", r"\(True, 'a child process that gave MPI an array on GPU {} got it back'\)"),
        # Open MPI is ended by the kernel, MPICH by itself
        ("an address that is none", r"\(False, 'a .* array on GPU {} ended with exit code -?[1-9].*\)"),
    ],
)
def test_the_child_is_alone_and_the_job_goes_on(fault, answer, python, script, tmp_path):
    log = tmp_path / "log"
    variables = {"CUPY_ON_HOST": fault, "CUPY_ON_HOST_LOG": str(log)}
    done = ringrun(python, 2, script(SCRIPT), timeout_s=120, returncode=0, **variables)
    assert done.stdout.count("total 3.0") == 2, done.stdout
    for rank in range(2):
        assert re.search(answer.format(rank), done.stdout), done.stdout
        assert f"rank 0 of 1: GPU {rank}\n" in log.read_text()
