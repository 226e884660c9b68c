"""ringrun --elastic: which jobs go on, and what is printed of a loss. The ranks use no MPI; see elastic_rank.py."""

import contextlib
import json
import re
import signal
import subprocess
import sys

import pytest

from ringrun import cli
from ringrun.elastic import Elastic, rank_variables
from ringrun.engines import ENGINES, Launcher
from ringrun.errors import LauncherError, UsageError
from tests.support import jobs
from tests.support.loops import in_a_loop
from tests.support.patience import patient, wait_until

pytestmark = pytest.mark.without_mpi
RANK = str(jobs.ROOT / "tests" / "support" / "elastic_rank.py")
FAILED = "-- ringrun: rank {} of {} failed --"


def lists(done):
    """The lists that each rank has printed."""
    found = {}
    for line in done.stdout.splitlines():
        rank, _, text = line[1:].partition("] ")
        found.setdefault(int(rank), []).append(json.loads(text))
    return found


def test_survivors_hear_of_each_loss_and_the_job_ends_well(ringrun, python, wait_until_gone, tmp_path):
    flags = ["--elastic", "--min-np", 2, "-np", 4, "--spares", 1, "--report", "run"]
    done = ringrun(*flags, python, RANK, 3, "1@0=kill", "0@1=raise", "4@2=sysexit-3", returncode=0)
    dead = {"1": "was killed by SIGKILL", "0": "ended with exit code 1", "4": "ended with exit code 3"}
    first = {"number": 1, "ranks": [0, 2, 3, 4], "dead": {"1": dead["1"]}}
    second = {"number": 2, "ranks": [2, 3, 4], "dead": {"0": dead["0"], "1": dead["1"]}}
    third = {"number": 3, "ranks": [2, 3], "dead": dead}
    assert lists(done) == {0: [first], 2: [first, second, third], 3: [first, second, third], 4: [first, second]}
    cards = [done.stderr.index(FAILED.format(rank, 5)) for rank in (1, 0, 4)]
    assert cards == sorted(cards)
    of_rank_0 = done.stderr[cards[1] : cards[2]]
    assert "how         exit code 1\n" in of_rank_0
    assert "continuing  with ranks 2-4\n" in of_rank_0
    assert "ValueError: of rank 0\n" in of_rank_0
    assert "[0] the last words of 0\n" in done.stderr
    assert re.findall("ringrun: ranks (.+) resumed after [0-9]+ ms\n", done.stderr) == ["0,2-4", "2-4", "2-3"]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    texts = [each["text"] for each in report["elastic"]]
    assert texts[0] == "rank 1 was lost (killed by signal 9 (SIGKILL), exit code 137); continuing with ranks 0,2-4"
    assert [text.split()[1] for text in texts if " was lost " in text] == ["1", "0", "4"]
    assert [text.split()[1] for text in texts if " resumed " in text] == ["0,2-4", "2-4", "2-3"]
    assert {each["rank"] for each in report["failures"]} == {0, 1, 4}
    assert wait_until_gone() < patient(5.0)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("action", "how"),
    [
        ("kill-SEGV", "was killed by SIGSEGV"),
        ("kill-ABRT", "was killed by SIGABRT"),
        ("exit-7", "ended with exit code 7"),
        ("agent", "was lost: its agent disappeared without a message"),
    ],
)
def test_every_kind_of_death_is_heard_of(action, how, ringrun, python, wait_until_gone):
    done = ringrun("--elastic", "-np", 3, python, RANK, 1, f"0@0={action}", returncode=0)
    assert lists(done) == {rank: [{"number": 1, "ranks": [1, 2], "dead": {"0": how}}] for rank in (1, 2)}
    wait_until_gone()


@pytest.mark.extended
def test_a_rank_that_ends_with_0_before_the_others_is_missed_but_did_not_fail(ringrun, python):
    done = ringrun("--elastic", "-np", 3, python, RANK, 1, "1@0=exit-0", returncode=0)
    dead = {"1": "ended with exit code 0"}
    assert lists(done) == {rank: [{"number": 1, "ranks": [0, 2], "dead": dead}] for rank in (0, 2)}
    assert done.stderr.splitlines()[0] == (
        "ringrun: rank 1 ended with exit code 0 before others did; continuing with ranks 0,2"
    )
    assert "-- ringrun" not in done.stderr


@pytest.mark.parametrize(
    ("actions", "why", "told"),
    [
        (["1@0=kill-STOP", "0@0=suspect-1"], "it kept others waiting", "waiting for rank 1 where "),
        (["1@0=abort-5"], "it called MPI_Abort", "in an elastic job MPICH itself does not end a rank; "),
    ],
)
def test_a_rank_is_killed(ringrun, python, actions, why, told):
    done = ringrun("--elastic", "-np", 3, python, RANK, 1, *actions, returncode=0)
    dead = {"1": f"was killed, since {why}"}
    assert lists(done) == {rank: [{"number": 1, "ranks": [0, 2], "dead": dead}] for rank in (0, 2)}
    text = " ".join(done.stderr[done.stderr.index(FAILED.format(1, 3)) :].split())
    assert f"ringrun killed it, since {why}: {told}" in text
    said = "it said 'Abort(5) on node 1 (rank 1 in comm 0): application called MPI_Abort'"
    assert (said in text) == ("MPI_Abort" in why)


def test_stacks_after_a_loss_are_those_of_the_ranks_that_are_left(start, python, tmp_path):
    job = start("--elastic", "-np", 3, python, RANK, 9, "1@0=kill")
    wait_until(lambda: all((tmp_path / f"{rank}@1").exists() for rank in (0, 2)))
    program = "import sys; from ringrun.stacks import run; sys.exit(run(sys.argv[1:]))"
    told = subprocess.check_output([sys.executable, "-c", program, str(job.pid)], text=True)
    assert re.search(r"\nranks? 0.* of 3 on \S+: elastic_rank.py:\d+, in ", told), told
    assert re.search(r"\nranks? (0,)?2 of 3 on \S+: elastic_rank.py:\d+, in ", told), told
    assert told.endswith("\nrank 1 of 3: not running\n")
    job.send_signal(signal.SIGTERM)
    job.wait(patient(20))


@pytest.mark.adapters  # it waits for 30 s
@pytest.mark.parametrize("when", ["1@0", pytest.param("1@left", marks=pytest.mark.extended)])
def test_a_rank_that_is_stopped_when_others_have_left_goes_on(ringrun, python, monkeypatch, when):
    monkeypatch.setenv("RINGREDUCE_STALL_ABORT_S", "1")
    done = ringrun("--elastic", "-np", 2, python, RANK, 0, f"{when}=kill-STOP", returncode=0)
    told = r"ringrun: rank 1 of 2 on host \S+, pid \d+, was stopped while the others waited for it to end; it has been"
    assert re.search(f"{told} continued\n", done.stderr)
    assert "-- ringrun" not in done.stderr


def test_a_script_that_catches_nothing_is_started_again_at_once(ringrun, python):
    flags = ["--elastic", "-np", 4, "--restarts", 1]
    done = ringrun(*flags, python, RANK, 1, "2@0=exit-5", "0@1=lost-2")
    assert done.returncode == 5, "the second attempt fails as the first"
    assert done.stderr.count("ringrun: restart 1 of 1 in 1 s\n") == 1
    assert done.stderr.count("the job cannot continue: rank 0 did not catch the loss of rank 2; ") == 2
    assert done.stderr.count("-- ringrun: rank 2 of 4 failed first --") == 2


SRUN = "srun ends the job when a rank is lost; leave --launcher srun out"


@in_a_loop(
    ("arguments", "message"),
    [
        ("--elastic --min-np 0", "--min-np: expected a whole number from 1 to 999999, got '0'"),
        ("--elastic --spares x", "--spares: expected a whole number from 0 to 999999, got 'x'"),
        ("--elastic --max-failures -1", "--max-failures: expected a whole number from 0 to 999999, got '-1'"),
        ("--spares 1", "--spares is for an elastic job; add --elastic"),
        ("--max-np 2", "--max-np is for an elastic job; add --elastic"),
        ("--min-np 2 --launcher srun", f"--min-np: {SRUN}"),
        ("--max-failures 2", "--max-failures is for an elastic job; add --elastic"),
        ("--elastic --launcher srun", f"--elastic: {SRUN}"),
        ("--elastic --max-np 1", "--max-np 1: the job would start with 2 ranks; lower -np, or raise --max-np"),
        ("--elastic --max-np x", "--max-np: expected a whole number from 1 to 999999, got 'x'"),
        (
            "--elastic --blacklist-cooldown-range 9 x",
            "--blacklist-cooldown-range: expected a number of seconds above 0, got 'x'",
        ),
        (
            "--elastic --blacklist-cooldown-range 9 5",
            "--blacklist-cooldown-range: expected the longer time last, got 9 5",
        ),
        ("--elastic --min-np 3", "--min-np 3: the job would start with 2 ranks; raise -np, or lower --min-np"),
        (
            "--elastic --min-np 3 --spares 2",
            "--min-np 3: the job would start with 2 ranks, plus 2 spares; raise -np, or lower --min-np",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(UsageError) as error:
        cli.run(["-np", "2", *arguments.split(), sys.executable, "-c", ""])
    assert str(error.value) == message


@in_a_loop(
    ("flags", "elastic"),
    [
        (["--elastic"], Elastic()),
        (["--min-np", "2"], Elastic(2)),
        (["--min-num-proc", "2", "--max-num-proc", "6"], Elastic(2, max_np=6, takes_hosts=True)),
        (["--host-discovery-script", "echo h1:4"], Elastic(4, takes_hosts=True)),
        (["--host-discovery-script", "echo h1:4", "--elastic"], Elastic(1, takes_hosts=True)),
    ],
)
def test_horovods_flags_make_a_job_elastic(flags, elastic):
    """And then --min-np is by default as many as -np."""
    assert cli.parse(["-np", "4", *flags, "true"]).job.elastic == elastic


def test_the_ranks_variables_are_the_mpis_and_the_users_count_more():
    environ = {"OMPI_MCA_smsc": "xpmem"}
    of_engine = ENGINES["openmpi"].elastic_environment(Launcher("mpirun", (5, 0)), environ, is_across=True)
    assert rank_variables(Elastic(2, 1), of_engine, environ) == {
        "OMPI_MCA_mpi_ft_enable": "1",
        "MPI4PY_RC_FINALIZE": "0",
        "RINGREDUCE_STALL_ABORT_S": "30",
        "RINGREDUCE_ELASTIC": "1",
        "RINGREDUCE_MIN_NP": "2",
        "RINGREDUCE_SPARES": "1",
    }
    theirs = rank_variables(Elastic(), {}, {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"})
    assert "RINGREDUCE_STALL_ABORT_S" not in theirs


@pytest.mark.parametrize(
    ("environ", "recovery_s"),
    [({}, 50.0), ({"RINGREDUCE_STALL_ABORT_S": "3"}, 23.0), ({"RINGREDUCE_STALL_ABORT_S": "0"}, 50.0)],
)
def test_a_recovery_may_take_longer_than_ranks_are_let_wait(environ, recovery_s, monkeypatch):
    monkeypatch.delenv("RINGREDUCE_STALL_ABORT_S", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    elastic = cli.parse(["--elastic", "-np", "2", "true"]).job.elastic
    assert elastic
    assert elastic.recovery_s == recovery_s


def test_open_mpi_4_cannot_outlive_a_host():
    engine, old = ENGINES["openmpi"], Launcher("mpirun", (4, 1, 6))
    assert engine.elastic_environment(old, {}, is_across=False)
    with pytest.raises(LauncherError, match="Open MPI 4 ends every rank that loses another on another host; install 5"):
        engine.elastic_environment(old, {}, is_across=True)


@in_a_loop(
    ("chosen", "is_fit"), [("ucx", False), ("cm,ucx", False), ("^ob1", False), ("^ucx", True), ("ob1,ucx", True)]
)
def test_ucx_cannot_outlive_a_rank(chosen, is_fit):
    engine, environ = ENGINES["openmpi"], {"OMPI_MCA_pml": chosen}
    with contextlib.nullcontext() if is_fit else pytest.raises(LauncherError) as error:
        assert engine.elastic_environment(Launcher("mpirun", (5, 0)), environ, is_across=False)
    assert is_fit or str(error.value) == (
        f"--elastic: OMPI_MCA_pml={chosen}: of Open MPI's PMLs, only ob1 survives the loss of ranks (UCX does not); "
        "unset OMPI_MCA_pml"
    )
