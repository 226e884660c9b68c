"""No rank dies alone: whatever happens to one, the job ends within seconds and says which rank it was."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.conftest import PROGRAMS, ringrun, run
from tests.support.jobs import ROOT
from tests.support.patience import patient, wait_until
from tests.support.tiers import parted

pytestmark = pytest.mark.timeout(900)  # the first use makes the environment for MPICH

FAILURES = {
    "raise": (1, r"rank 1 of 4 failed first -+\nhow .*exit code 1"),
    "exit3": (3, r"rank 1 of 4 failed first -+\nhow .*exit code 3"),
    "_exit4": (4, r"rank 1 of 4 failed first -+\nhow .*exit code 4"),
    "_exit0": (
        1,
        r"rank 1 of 4 ended with exit code 0 in mid-training \(as os\._exit\(0\) does\) while ranks? [023,-]+ w",
    ),
    "SIGKILL": (137, r"rank 1 of 4 failed first -+\nhow .*SIGKILL"),
    "SIGSEGV": (139, r"rank 1 of 4 failed first -+\nhow .*SIGSEGV"),
    "return": (
        1,
        r"(?s)rank 1 of 4 left first: its script ended -+\nwhere .*\nso failed +rank [023]: exit code 1\n.*same",
    ),
    "MPI_Abort": (5, r"rank 1 of 4 failed first"),
}


@pytest.mark.adapters
@pytest.mark.parametrize("kind", parted(FAILURES, lambda kind: kind in ("SIGKILL", "raise", "return")))
def test_one_rank_ends_and_the_others_wait_for_it(python, tmp_path, kind):
    code, message = FAILURES[kind]
    variables = {"PYTHONPATH": str(ROOT), "RINGREDUCE_STALL_CHECK_S": "0" if kind == "_exit0" else "10"}
    finished = ringrun(python, 4, PROGRAMS / "fails.py", kind, tmp_path, timeout_s=60, returncode=code, **variables)
    ended = time.time()
    failing = re.search(r"failing at ([\d.]+)", finished.stdout)
    assert failing, f"exit code {finished.returncode}, and it said: {finished.stdout!r}"
    failed = float(failing.group(1))
    print(f"{kind}: all gone after {ended - failed:.2f} s")
    assert re.search(message, finished.stdout), finished.stdout
    told = set(re.findall(r"^\[(\d)\] Traceback", finished.stdout, re.M))
    assert told == ({"1"} if kind == "raise" else set()), "those that lose it print no tracebacks of their own"
    if kind == "raise":
        last = finished.stdout.splitlines()[-7:]
        assert last[-2:] == ["ValueError: on purpose", "-" * 80]
        assert any(line.startswith("Traceback (most recent call last):") for line in last)
    assert ended - failed < patient(5)
    assert run(["pgrep", "-f", str(tmp_path)]).stdout == "", "nothing is left"


@pytest.mark.adapters
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_among_short_sums(python, tmp_path, rank):
    """Where each call is one of the compiled module's (engine/express.py): whichever step of it was the last."""
    program = PROGRAMS / "dies_among_short_sums.py"
    finished = ringrun(python, 3, program, rank, timeout_s=60, returncode=137, PYTHONPATH=str(ROOT))
    ended = time.time()
    failing = re.search(r"failing at ([\d.]+)", finished.stdout)
    assert failing, finished.stdout
    assert re.search(rf"rank {rank} of 3 failed first -+\nhow .*SIGKILL", finished.stdout), finished.stdout
    assert ended - float(failing.group(1)) < patient(5)


LEAVES = {
    "raise SystemExit(7)": 7,
    "argparse.ArgumentParser().error('x')": 2,
    "handle = rr.allreduce_async(np.ones(10**6), name='never'); sys.exit(7)": 7,
    "sys.excepthook = lambda *_: print('shown'); raise ValueError('x')": 1,
    "rr.shutdown(); sys.exit(7)": 7,
    "rr.shutdown(); raise ValueError('x')": 1,
    "threading.Thread(target=lambda: rr.allreduce(1.0, name='never')).start(); sys.exit(7)": 7,
    "sys.excepthook = print; threading.Thread(target=time.sleep, args=[60]).start(); raise ValueError('x')": 1,
    "os.execv('/bin/sh', ['sh', '-c', 'exit 7'])": 7,
}
"""How rank 1 leaves while the others compute for long, and with which code."""
LONG = """
import argparse, os, sys, threading, time
import numpy as np, ringreduce as rr

rr.init()
rr.allreduce(np.ones(3))
rank = rr.rank()
if rank == 1:
    {door}
if {all_shut}:
    rr.shutdown()
time.sleep(100)
"""


@pytest.mark.adapters
@pytest.mark.parametrize(
    "door", parted(LEAVES, lambda door: door.startswith(("raise", "rr.shutdown(); sys", "sys.excepthook = print")))
)
def test_a_rank_that_fails_ends_others_that_compute_for_long(python, script, door):
    path = script(LONG.format(door=door, all_shut="shutdown" in door))
    begin_s = time.monotonic()
    finished = ringrun(python, 3, path, timeout_s=60, returncode=LEAVES[door])
    assert time.monotonic() - begin_s < patient(40)
    said = finished.stdout
    assert re.search(rf"rank 1 of 3 failed first -+\nhow .*exit code {LEAVES[door]}\n", said), said
    assert (" is killed; " in said) == door.startswith("threading"), "else it ends by itself, and at once"
    wait_until(lambda: run(["pgrep", "-f", str(path)]).stdout == "", within_s=5)


def test_a_rank_that_fails_ends_the_others_where_its_python_was_started_by_another(python, script, tmp_path):
    """As by torchrun: only the first one of a rank has ringrun's hook when it starts."""
    run_it = "subprocess.run([sys.executable, *sys.argv[1:]], close_fds=False).returncode"
    (tmp_path / "wrapper.py").write_text(f"import subprocess, sys\nsys.exit({run_it})\n")
    path = script(LONG.format(door="raise SystemExit(7)", all_shut=False))
    begin_s = time.monotonic()
    finished = ringrun(python, 2, tmp_path / "wrapper.py", path, timeout_s=60, returncode=7)
    assert time.monotonic() - begin_s < patient(40)
    assert "rank 1 of 2 failed first" in finished.stdout


WITHOUT_INIT = """
import os, time
import ringreduce as rr

if os.environ["RANK"] == "1":
    {instead}
rr.init()
print("rank", rr.rank(), "is through")
"""


@pytest.mark.parametrize(
    ("ranks", "instead", "code", "told"),
    [
        (
            3,
            "raise SystemExit(0)",
            1,
            [
                "rank 1 of 3 ended with exit code 0 without calling init(), where ranks 0,2 were waiting",
                "\nranks 0,2: train.py:7, in <module>: rr.init()\n",
            ],
        ),
        (
            2,
            "time.sleep(8)",
            0,
            [
                "rank 0 waited 1 s in init() for rank 1 of 2, which did not call it:",
                "\nrank 1: train.py:6, in <module>: time.sleep(8)\n",
                "rank 0 is through",
            ],
        ),
    ],
    ids=["ends", "is late"],
)
def test_a_rank_that_does_not_come_to_init_is_named_with_its_line(python, script, ranks, instead, code, told):
    """One that has ended ends those that wait for it there."""
    path = script(WITHOUT_INIT.format(instead=instead))
    finished = ringrun(python, ranks, path, timeout_s=60, RINGREDUCE_STALL_CHECK_S="1", returncode=code)
    assert [finished.stdout.count(each) for each in told] == [1] * len(told), finished.stdout
    assert run(["pgrep", "-f", str(path)]).stdout == "", "nothing is left"


ENDS_MPI = """\
from mpi4py import MPI
import ringreduce as rr
rr.init()
assert rr.allreduce(1.0, op=rr.Sum) == 2
MPI.Finalize()
print("ended", rr.is_initialized(), flush=True)
rr.init()
"""


def test_a_script_that_ends_mpi_itself_has_left_and_cannot_begin_again(python, script):
    """As mpi4py's scripts do. The engine went on, and MPI ended the job at its next call."""
    told = ringrun(python, 2, script(ENDS_MPI), timeout_s=60, returncode=1).stdout
    assert told.count("] ended False\n") == 2, told
    assert "StartupError: init(): MPI.Finalize() has been called, and MPI can be started only once" in told, told


def test_another_mpis_launcher_is_told(mpich_python, script):
    path = script("import ringreduce as rr\nrr.init()\n")
    finished = run([mpich_python.parent / "mpiexec.hydra", "-np", "2", sys.executable, path])
    assert "is one of 2 that MPICH's launcher started, but mpi4py loads Open MPI" in finished.stdout
    mpirun = Path(sys.executable).parent / "mpirun"
    finished = run([mpirun, "--allow-run-as-root", "-np", "2", mpich_python, path])
    assert "is one of 2 that Open MPI's launcher started, but mpi4py loads MPICH" in finished.stdout
    assert finished.returncode != 0


@pytest.mark.parametrize(("error", "code"), [("ValueError", 1), ("KeyboardInterrupt", 130)])
def test_under_ringrun_an_exception_is_reported_and_ends_the_process_at_once(python, tmp_path, error, code):
    path = tmp_path / "rank0.json"
    script = f"import atexit, ringreduce; ringreduce.init(); atexit.register(print, 'too late'); raise {error}('x')"
    finished = run([python, "-c", script], RINGREDUCE_ERROR_FILE=str(path), returncode=code)
    assert "too late" not in finished.stdout
    assert ("Traceback" in finished.stdout) == (error != "KeyboardInterrupt"), "ringrun tells of Ctrl-C, once"
    assert json.loads(path.read_text())["exception"] == error


def test_settings_that_differ_end_the_job_at_the_start(python, script):
    differ = "os.environ['RINGREDUCE_RING_SEGMENT_BYTES'] = os.environ['RANK'] + '64'"
    finished = ringrun(python, 3, script(f"import os, ringreduce as rr\n{differ}\nrr.init()\n"), timeout_s=60)
    assert finished.returncode == 1, finished.stdout
    assert "ring_segment_bytes=164, but rank 0 has ring_segment_bytes=64" in finished.stdout.splitlines()[-2]


@pytest.mark.adapters
def test_a_process_alone_ends_as_ever(python):
    script = "import sys, ringreduce; ringreduce.init(); assert sys.excepthook is sys.__excepthook__; raise ValueError"
    finished = run([python, "-c", script])
    assert (finished.returncode, finished.stdout.splitlines()[-1]) == (1, "ValueError")
