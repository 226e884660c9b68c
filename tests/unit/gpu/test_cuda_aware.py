"""Whether MPI may be given GPU memory: what the user says, and what MPI says of itself."""

import sys

import pytest

from ringreduce.gpu import cuda_aware
from ringreduce.gpu.cuda_aware import answer
from tests.support.jobs import environment, run


def test_pip_s_mpis_say_that_they_have_no_cuda():
    program = (
        "from mpi4py import MPI\n"
        "from ringreduce.gpu.cuda_aware import declared\n"
        "name, version = MPI.get_vendor()\n"
        "print(declared() == (False, f\"{name} {'.'.join(map(str, version))} says that it is not CUDA-aware\"))\n"
    )
    done = run([sys.executable, "-c", program], env=environment(), returncode=0)
    assert done.stdout == "True\n"


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
        (True, (True, "An MPI 1.2 says that it is CUDA-aware")),
        (False, (False, "An MPI 1.2 says that it is not CUDA-aware")),
        (None, (False, "An MPI 1.2 does not say whether it is CUDA-aware; set RINGREDUCE_CUDA_AWARE_MPI=1 if it is")),
    ],
)
def test_what_mpi_says(says, expected, monkeypatch):
    monkeypatch.setattr(cuda_aware, "says", lambda library: says)
    monkeypatch.setattr(cuda_aware.mpi, "mpi_library", lambda: ("An MPI 1.2", "multiple"))
    assert cuda_aware.declared() == expected


def test_only_the_setting_lets_mpi_have_gpu_memory(monkeypatch):
    for declares in (True, False):
        monkeypatch.setattr(cuda_aware, "declared", lambda declares=declares: (declares, "It speaks"))
        assert answer(True) == (True, "RINGREDUCE_CUDA_AWARE_MPI=1")
        advice = "; RINGREDUCE_CUDA_AWARE_MPI=1 passes GPU memory to it" * declares
        assert answer(False) == (False, f"It speaks{advice}")
