"""tests/gpu and bench/gpu where no GPU is, on the fake CuPy: that they run, and would tell what is wrong. No more.

What a GPU does, and how long it takes, only a GPU shows. All of tests/gpu takes some minutes more:

    PYTHONPATH=tests/support/stand_in:. ringrun -np 2 python -m pytest --with-mpi --timeout=900 tests/gpu
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import PROGRAMS, ringrun, run
from tests.support.jobs import ROOT

pytestmark = pytest.mark.timeout(600)
PYTHON = Path(sys.executable)
PYTEST = ["-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", "--color=no", "-q", "-rs"]
FAKE = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "support" / "stand_in"), str(ROOT)]),
    "RINGREDUCE_CUDA_SLOT_BYTES": str(1 << 20),
}
QUICK = "not short and not array_of_many_slots"


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_gpu_tests_run(ranks):
    finished = ringrun(PYTHON, ranks, *PYTEST, "tests/gpu", "-k", QUICK, timeout_s=500, returncode=0, **FAKE)
    print(finished.stdout)
    assert re.search(r"^\[0\] \d{2,} passed", finished.stdout, re.MULTILINE), finished.stdout


def test_the_gpu_benches_run(tmp_path):
    bench, rows = ROOT / "bench" / "gpu", tmp_path / "rows.json"
    options = ["--quick", "--json", rows]
    checked(run([PYTHON, bench / "kernels.py", *options], timeout_s=300, **FAKE), rows, 10)
    checked(ringrun(PYTHON, 2, bench / "gradients.py", *options, timeout_s=300, **FAKE), rows, 3)


def checked(finished, rows, count):
    assert finished.returncode == 0, finished.stdout
    kept = json.loads(rows.read_text())
    assert [row["wrong"] for row in kept["rows"]] == [0] * count, finished.stdout
    assert kept["header"]["gpu"] == "Fake GPU"


@pytest.mark.adapters
@pytest.mark.parametrize("racing", [False, True])
def test_a_race_in_a_program_fails_it(racing):
    finished = ringrun(PYTHON, 2, PROGRAMS / "races.py", *["racing"] * racing, timeout_s=60, **FAKE)
    assert finished.returncode == int(racing), finished.stdout
    assert ("the fake CuPy has found races" in finished.stdout) == racing
