"""`ringrun --check nan`, of a job that goes to NaN."""

import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import PROGRAMS, run
from tests.support import jobs
from tests.support.tiers import parted

CASES = {"nan": (0, "40 steps, 0 of them by zeros, finite: False"), "nan:zero": (0, "40 steps, 1 of .*, finite: True")}
CASES["nan:raise"] = (1, r"failed too +rank \d on")
FOUND = (
    r"rank 1 of 2, allreduce 'group 0' \(goes_to_nan.py:\d+\), step 37: NaN in this rank's own values, before the sum "
    r"\(float32\); it is in the gradient of the optimizer's parameter 2, of shape \[2, 3\]"
)


@pytest.mark.quick
@pytest.mark.parametrize("check", parted(CASES, lambda check: check == "nan:raise"))
def test_ddp_that_goes_to_nan(check):
    code, message = CASES[check]
    command = [
        jobs.ringrun(Path(sys.executable)),
        "-np",
        2,
        "--check",
        check,
        sys.executable,
        PROGRAMS / "goes_to_nan.py",
    ]
    finished = run([*command, "nan"], returncode=code, timeout_s=60, PYTHONPATH=str(jobs.ROOT), OMP_NUM_THREADS="1")
    assert re.search(FOUND, finished.stdout), finished.stdout
    assert len(re.findall(message, finished.stdout)) == (1 if code else 2), finished.stdout
