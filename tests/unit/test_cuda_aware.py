"""Whether MPI may be given GPU memory: what MPI says, what a child finds out, and what a rank answers."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringreduce.gpu import cuda_aware
from ringreduce.gpu.cuda_aware import Trial, alone, local_answer
from ringreduce.transport.base import complete
from tests.support.patience import patient

CUPY = Path(__file__).parents[1] / "support" / "cupy_on_host"


def in_mpi(program, python=sys.executable):
    """What a program prints that starts MPI, alone."""
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, env=alone(os.environ), timeout=patient(50)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pip_s_mpis_say_that_they_have_no_cuda():
    said = in_mpi(
        "from mpi4py import MPI\n"
        "from ringreduce.gpu.cuda_aware import declared\n"
        "name, version = MPI.get_vendor()\n"
        "print(declared() == (False, f\"{name} {'.'.join(map(str, version))} says that it has no CUDA\"))\n"
    )
    assert said == "True\n"


def library(name, answer):
    """A loaded library with one function."""
    return type("Library", (), {name: staticmethod(answer)})()


def test_the_questions_of_open_mpi_and_mpich():
    def answers(kind, flag):
        assert kind == 0
        flag._obj.value = given
        return 0

    for given in (0, 1):
        assert cuda_aware.says(library("MPIX_Query_cuda_support", lambda given=given: given)) is bool(given)
        assert cuda_aware.says(library("MPIX_GPU_query_support", answers)) is bool(given)
    given = 1
    assert cuda_aware.says(library("MPIX_GPU_query_support", lambda *_: 15)) is False  # an MPI error
    assert cuda_aware.says(library("another", None)) is None


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (True, (True, "An MPI 1.2 says that it has CUDA")),
        (False, (False, "An MPI 1.2 says that it has no CUDA")),
        (None, (False, "An MPI 1.2 does not say whether it has CUDA; set RINGREDUCE_CUDA_AWARE_MPI=1 if it has")),
    ],
)
def test_what_mpi_says(says, expected, monkeypatch):
    monkeypatch.setattr(cuda_aware, "says", lambda library: says)
    monkeypatch.setattr(cuda_aware.mpi, "mpi_library", lambda: ("An MPI 1.2", "multiple"))
    assert cuda_aware.declared() == expected


class FakeTrial:
    """A trial with an outcome that is known."""

    works, tried = True, ()

    def __init__(self, device, rank):
        self.device, self.peer, self.waited, self.stopped = device, rank, False, False
        FakeTrial.tried += (self,)

    def wait(self):
        self.waited = True

    def outcome(self):
        assert self.waited
        return self.works, "it was tried"

    def stop(self):
        self.stopped = True


@pytest.fixture
def trial(monkeypatch):
    monkeypatch.setattr(FakeTrial, "tried", ())
    monkeypatch.setattr(cuda_aware, "Trial", FakeTrial)
    return FakeTrial


@pytest.mark.parametrize(
    ("setting", "declares", "is_first_of_host", "works", "answer"),
    [
        *((setting, *two, True, (setting == "1", f"RINGREDUCE_CUDA_AWARE_MPI={setting}"))
          for setting in "01" for two in itertools.product([False, True], repeat=2)),
        *(("auto", declares, False, True, (declares, "it was asked")) for declares in (False, True)),
        ("auto", False, True, True, (False, "it was asked")),
        *(("auto", True, True, works, (works, "it was tried")) for works in (False, True)),
    ],
)  # fmt: skip
def test_the_answer_of_one_rank(setting, declares, is_first_of_host, works, answer, trial, monkeypatch):
    monkeypatch.setattr(cuda_aware, "declared", lambda: (declares, "it was asked"))
    monkeypatch.setattr(trial, "works", works)
    assert complete(local_answer(setting, 3, 5, is_first_of_host=is_first_of_host)) == answer
    expected = [(3, 5, True)] if answer[1] == "it was tried" else []
    assert [(each.device, each.peer, each.stopped) for each in trial.tried] == expected


def test_a_rank_that_gives_up_stops_its_trial(trial, monkeypatch):
    monkeypatch.setattr(cuda_aware, "declared", lambda: (True, "it was asked"))
    steps = local_answer("auto", 0, 0, is_first_of_host=True)
    next(steps)
    steps.close()
    assert trial.tried[0].stopped


def test_the_environment_of_a_process_that_is_alone():
    stays = {
        "PATH": "/bin", "OPAL_PREFIX": "/x", "PMIX_PREFIX": "/x", "PRTE_PREFIX": "/x", "OMPI_MCA_pml": "ucx",
        "PMIX_MCA_gds": "hash", "UCX_TLS": "all", "CUDA_VISIBLE_DEVICES": "1", "MPICH_GPU_SUPPORT_ENABLED": "1",
        "MPIR_CVAR_ENABLE_GPU": "1",
    }  # fmt: skip
    goes = {
        "OMPI_COMM_WORLD_SIZE": "4", "OMPI_UNIVERSE_SIZE": "4", "PMIX_RANK": "1", "PMIX_SERVER_URI41": "x",
        "PRTE_LAUNCHED": "1", "PMI_FD": "9", "PMI_RANK": "1", "PMI2_x": "1", "HYDI_CONTROL_FD": "7",
        "SLURM_PROCID": "1", "MPI_LOCALNRANKS": "4", "PALS_RANKID": "1", "WORLD_SIZE": "4",
    }  # fmt: skip
    assert alone(stays | goes) == stays


@pytest.fixture
def on_host(monkeypatch, tmp_path):
    """Has the child find a CuPy whose arrays are in host memory; returns what sets its fault, and the log's path."""
    log = tmp_path / "log"
    monkeypatch.syspath_prepend(CUPY)
    monkeypatch.setenv("CUPY_ON_HOST_LOG", str(log))
    return lambda fault: (monkeypatch.setenv("CUPY_ON_HOST", fault), log)[1]


def outcome(**options):
    trial = Trial(2, 0, **options)
    trial.wait()
    assert trial.done()
    return trial.outcome()


WHAT = "a child process that gave MPI an array on GPU 2"


def test_arrays_that_mpi_can_read_travel(on_host):
    log = on_host("")
    assert outcome() == (True, f"{WHAT} got it back")
    assert log.read_text() == "rank 0 of 1: GPU 2\n" * 2  # a short and a long message


@pytest.mark.parametrize(
    ("fault", "code"),
    [("a segmentation fault", -11), ("other data", 1), ("an error", 1), ("success without a word", 0)],
)
def test_every_other_end_is_a_no(fault, code, on_host):
    on_host(fault)
    assert outcome() == (False, f"{WHAT} ended with exit code {code}")


def test_an_mpi_that_cannot_read_the_address_ends_the_child_only(on_host):
    on_host("an address that is none")
    assert outcome()[0] is False  # by a signal, or an error of MPI's


def wait_for_the_end_of(pids):
    """Return when no process has one of these ids, or waits to be reaped by nobody."""
    for pid in pids:
        while (status := Path(f"/proc/{pid}/status")).exists() and "State:\tZ" not in status.read_text():
            time.sleep(0.01)


def hanging(log):
    """The child and the grandchild, once they hang."""
    while not (log.exists() and "pids" in log.read_text()):
        time.sleep(0.01)
    return log.read_text().split("pids ")[1].split()


def test_a_child_that_hangs_is_killed_with_what_it_has_started(on_host):
    log = on_host("no end")
    trial = Trial(2, 0)
    pids = hanging(log)
    assert not trial.done()
    trial._until_s = time.monotonic() - 1
    trial.wait()
    assert trial.outcome() == (False, f"{WHAT} did not end within 30 s")
    trial.stop()
    trial.stop()
    wait_for_the_end_of(pids)


def test_a_child_ends_itself_when_its_parent_is_gone(on_host):
    log = on_host("no end")
    program = "import os; from ringreduce.gpu.cuda_aware import Trial; Trial(0, 0, 5.0); os._exit(0)"
    path = os.pathsep.join([str(CUPY), *sys.path])
    subprocess.run(
        [sys.executable, "-c", program], env=alone(os.environ) | {"PYTHONPATH": path}, timeout=patient(50), check=True
    )
    child, grandchild = hanging(log)
    wait_for_the_end_of([child])
    os.kill(int(grandchild), 9)
