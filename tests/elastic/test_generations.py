"""What belongs to a world that ends with a loss: what lives on, and what says that it cannot."""

import json
import re
from pathlib import Path

import pytest

from tests.support import jobs

pytestmark = pytest.mark.timeout(300)
PROGRAMS = Path(__file__).parent / "programs"


def run(python, size, program, *arguments, flags=()):
    """Run a program to its end, which is a good one."""
    job = [jobs.ringrun(python), "--elastic", "-np", size, *flags, python, PROGRAMS / f"{program}.py", *arguments]
    return jobs.run(job, timeout_s=90, returncode=0)


@pytest.mark.adapters
@pytest.mark.timeout(120)
def test_what_lives_on_and_what_says_that_it_cannot(python, tmp_path):
    done = run(python, 3, "process_sets", flags=["--spares", 1, "--timeline", tmp_path / "times.json"])
    said = set(done.stdout.splitlines())
    assert {line for line in said if "together" in line} == {
        "[0] together True 0 2",
        "[2] together True 1 2",
        "[3] together False None 2",
    }
    gone = "allreduce: process set 2 no longer exists: it had ranks 0-1 of the job's start, and rank 1 was killed"
    assert sum(f"lost {gone} by SIGKILL" in line for line in said) == 3
    ended = "channel allreduce: ordered(ranks=[0, 1, 2]) ended with the world of 3 ranks in which it was made"
    assert sorted(line[:3] for line in said if ended in line) == ["[0]", "[2]"]
    events = json.loads((tmp_path / "times.1.json").read_text())
    assert "rank 1 of 3 was killed by SIGKILL" in [each["name"] for each in events if each["ph"] == "X"]
    assert {each["pid"] for each in events if "ALLREDUCE" in each["name"]} == {0, 1, 2}


def test_a_death_does_not_hold_up_those_that_call_shutdown(python):
    assert sorted(run(python, 3, "leaves").stdout.splitlines()) == ["[0] went on", "[2] went on"]


def test_the_others_go_on_without_a_rank_that_leaves_before_them(python):
    done = run(python, 3, "returns")
    assert sorted(done.stdout.splitlines()) == [
        "[0] ended with 4 steps of 2",
        "[1] ended with 2 steps of 3",
        "[2] ended with 4 steps of 2",
    ]
    assert "ringrun: rank 1 left before others did; continuing with ranks 0,2\n" in done.stderr


def test_ranks_outlive_the_daemon_that_has_started_them(python):
    """It ends, as mpirun does, when another host is lost."""
    assert sorted(run(python, 3, "orphaned").stdout.splitlines()) == [f"[{rank}] ended with 3" for rank in range(3)]


@pytest.mark.extended
def test_mpi_abort_ends_one_rank_and_it_is_said_who_called_it(python):
    done = run(python, 3, "aborts", flags=["--stall-abort-s", 100])
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] ended with 2" for rank in (0, 2)]
    told = " ".join(done.stderr.split())
    assert "-- ringrun: rank 1 of 3 failed --" in told
    by_mpirun = (
        "mpirun has ended with exit code 5: rank 1 called MPI_Abort, which ends only that rank here; to end a rank,"
    )
    by_mpich = (
        "ringrun killed it, since it called MPI_Abort: in an elastic job MPICH itself does not end a rank; to end a "
        "rank,"
    )
    assert by_mpirun in told or by_mpich in told


@pytest.mark.extended
def test_a_rank_that_is_stopped_in_shutdown_is_woken(python, tmp_path):
    done = run(python, 3, "stopped", "0", flags=["--stall-abort-s", 3, "--wdir", tmp_path])
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] left" for rank in range(3)]


@pytest.mark.parametrize(
    "arguments",
    [["0"], pytest.param(["1"], marks=pytest.mark.extended), pytest.param(["0", "ends"], marks=pytest.mark.extended)],
    ids=" ".join,
)
def test_of_those_that_others_await_in_shutdown_the_stopped_are_woken_and_the_busy_are_left_alone(python, arguments):
    done = run(python, 3, "late", *arguments, flags=["--stall-abort-s", 3])
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] left" for rank in range(3)]
    woken = re.findall(r"ringrun: rank (\d) of 3 on host \S+, pid \d+, was stopped while", done.stderr)
    assert woken == [arguments[0]], done.stderr
    assert "-- ringrun" not in done.stderr


@pytest.mark.parametrize("when", ["joined", "before"])
def test_join_goes_on_with_those_that_are_left(python, when):
    done = run(python, 4, "joins", when)
    trained = "last True sums [3.0, 3.0, 3.0, 2.0, 2.0, 2.0]"
    assert sorted(done.stdout.splitlines()) == ["[0] last True sums []", f"[2] {trained}", f"[3] {trained}"]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_sweep_goes_on_with_the_teams_that_are_left(python, tmp_path, victim):
    done = run(python, 3, "sweeps", tmp_path / "study.journal", victim, 1)
    assert "Traceback" not in done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line[:3] for line in lines] == [f"[{rank}]" for rank in range(3) if rank != victim]
    right = re.compile(r"\[.\] ranks 2 trials \[0, 1, 2, .*\] {'complete'}")
    assert [line for line in lines if not right.fullmatch(line)] == []


def test_a_sweep_says_that_no_teams_can_be_made_of_the_ranks_that_are_left(python, tmp_path):
    rank = [python, PROGRAMS / "sweeps.py", tmp_path / "study.journal", 3, 2]
    done = jobs.run([jobs.ringrun(python), "--elastic", "-np", 4, *rank], timeout_s=90)
    assert done.returncode != 0
    assert "sweep: 3 ranks cannot be split into teams of ranks=2; expected a divisor of 3" in done.stderr
