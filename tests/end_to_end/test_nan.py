"""`ringrun --check nan`, of a job that goes to NaN."""

import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import PROGRAMS, run
from tests.support import jobs
from tests.support.tiers import parted

CASES = {  # the rank that is shown; and what its output, or the report of a failure, says
    "nan": (0, r"\[0\] rank 0: 40 steps, 0 of them by zeros, finite: False"),
    "nan:zero": (1, r"\[1\] rank 1: 40 steps, 1 of .*, finite: True"),
    "nan:raise": (
        0,
        r"-- ringrun: rank 1 of 2 failed first -+\n(.*\n)+failed too  rank 0 on .*: exit code 1\nTraceback",
    ),
}
FOUND = (
    r"rank 1 of 2, allreduce 'group 0' \(goes_to_nan.py:\d+\), step 37: NaN in its own values, before the sum "
    r"\(float32\); it is in the gradient of the optimizer's parameter 2, of shape \[2, 3\]"
)


@pytest.mark.adapters
@pytest.mark.parametrize("check", parted(CASES, lambda check: check == "nan:raise"))
def test_ddp_that_goes_to_nan(check):
    shown, message = CASES[check]
    command = [
        jobs.ringrun(Path(sys.executable)),
        "-np",
        2,
        "--check",
        check,
        "--ranks",
        shown,
        sys.executable,
        PROGRAMS / "goes_to_nan.py",
    ]
    code = int(check == "nan:raise")
    finished = run([*command, "nan"], returncode=code, timeout_s=60, PYTHONPATH=str(jobs.ROOT), OMP_NUM_THREADS="1")
    assert len(re.findall(message, finished.stdout)) == 1, finished.stdout
    if code:
        assert re.search(f"^found       {FOUND}$", finished.stdout, re.MULTILINE), finished.stdout
    else:
        assert re.findall(f"^ringreduce: check: ({FOUND})", finished.stdout, re.MULTILINE), finished.stdout
        assert len(re.findall(FOUND, finished.stdout)) == 1, finished.stdout
