"""Whole runs in which a rank fails: the exit code, the end of the others, and the report."""

import os
import re
import sys
import time

import pytest

from tests.support.jobs import executable
from tests.support.patience import patient

GONE_WITHIN_S = 5.0


def seconds_since_failure(tmp_path):
    return time.time() - (tmp_path / "failed").stat().st_mtime


NOT_SENT_SO = r"message \d of this connection was changed, repeated, reordered or inserted on the way"
IS_ENDED = rf"ringrun: rank 1 of 2 on host \S+ was ended: {NOT_SENT_SO}".replace(r"\d", "0")  # its Setup


@pytest.mark.without_mpi
@pytest.mark.parametrize(
    ("attack", "says"),
    [
        ("changed to agent", IS_ENDED),
        ("cut to ringrun", "how its agent disappeared without a message"),
        ("repeated to ringrun", f"how its connection is broken: {NOT_SENT_SO}"),
        ("of another job to agent", IS_ENDED),
        *(
            pytest.param(*each, marks=pytest.mark.adapters)
            for each in [
                ("cut to agent", "how its agent disappeared without a message"),
                ("another length to ringrun", f"how its connection is broken: {NOT_SENT_SO}"),
                ("reordered to ringrun", f"how its connection is broken: {NOT_SENT_SO}"),
                ("the agent's own to agent", IS_ENDED),
                ("of another job to ringrun", f"how its connection is broken: {NOT_SENT_SO}"),
            ]
        ),
    ],
)
def test_an_attack_on_a_connection_ends_its_rank_and_is_named(attack, says, ringrun, script, wait_until_gone):
    done = ringrun("-np", 2, *script("import time; print('up', flush=True); time.sleep(1000)"), env={"ATTACK": attack})
    wait_until_gone()
    assert done.returncode == 1
    assert re.search(says, " ".join(done.stderr.split())), done.stderr
    assert "-- ringrun: rank 1 of 2 failed first --" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.without_mpi
def test_who_has_another_jobs_key_is_refused_and_the_job_goes_on(ringrun, script):
    source = """
        import os
        from ringrun.connection.link import connect
        from ringrun.environment import Settings
        variables = dict(each.split("=", 1) for each in open(f"/proc/{os.getppid()}/environ").read().split("\\0")[:-1])
        try:
            connect(Settings.from_environment(variables).address, b"another job's key")
        except PermissionError as error:
            print(error)
    """
    done = ringrun("-np", 2, *script(source))
    refused = "what listens there has not shown that it knows this job's key"
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[0] {refused}", f"[1] {refused}"]


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        ("import os; os._exit(3)", 3, "exit code 3"),
        ("raise ValueError('boom é')", 1, "exit code 1"),
        ("import signal; signal.raise_signal(signal.SIGKILL)", 137, "killed by signal 9 (SIGKILL), exit code 137"),
        ("import signal; signal.raise_signal(signal.SIGTERM)", 143, "killed by signal 15 (SIGTERM), exit code 143"),
        ("world.Abort(7)", 7, "exit code 7"),
    ],
)
def test_a_rank_that_ends_while_others_wait_in_mpi(failure, code, words, ringrun, program, tmp_path, wait_until_gone):
    done = ringrun("-np", 3, *program("fails"), failure, returncode=code)
    assert seconds_since_failure(tmp_path) < patient(GONE_WITHIN_S)
    wait_until_gone()
    card = done.stderr[done.stderr.index("-- ringrun: rank 1 of 3 failed first --") :].splitlines()
    assert card[1] == f"how         {words}"
    if "ValueError" in failure:
        assert "Traceback (most recent call last):" in card, "no rank before it"
        assert card[-2:] == ["ValueError: boom é", "-" * 80], "told last"
    assert f"where       host {os.uname().nodename}, pid " in "\n".join(card[2:4])
    # under hydra a rank that calls MPI_Abort takes the others with it before they can be asked
    if "Abort" not in failure:
        assert "the others  ranks 0,2: script.py:14, in <module>: world.Barrier()" in card


def test_atexit_functions_run_after_an_uncaught_exception(ringrun, program):
    failure = "import atexit; atexit.register(print, 'cleaned up'); raise KeyError(1)"
    assert ringrun("-np", 2, *program("fails"), failure, returncode=1).stdout == "[1] cleaned up\n"


@pytest.mark.without_mpi
def test_the_first_failure_in_time_is_the_cause(ringrun, program):
    done = ringrun("-np", 3, *program("fails_in_turn"), returncode=11)
    report = done.stderr[done.stderr.index("-- ringrun:") :].splitlines()
    assert report[1] == "how         exit code 11"
    assert report[3] == f"failed too  rank 0 on host {os.uname().nodename}: exit code 10"
    assert report[4].startswith("the others  rank")  # 0 too, in a row of its own, if it had the time to answer
    assert any("2: script.py:13, in <module>: time.sleep(30)" in row for row in report[4:-3]), report
    assert report[-3:] == ["its last lines on stderr:", "words of 1", "-" * 80]


@pytest.mark.without_mpi
@pytest.mark.parametrize(("code", "cause"), [(6, 1), (0, 0)], ids=["failed too", "ended well"])
def test_a_rank_that_blames_another_that_failed_is_not_the_cause(code, cause, ringrun, program):
    done = ringrun("-np", 2, *program("blames"), code, returncode=code or 1)
    first, how, _, *others, traceback, _ = done.stderr.splitlines()
    assert first.startswith(f"-- ringrun: rank {cause} of 2 failed first")
    assert how == f"how         exit code {code or 1}"
    blames = f"failed too  rank 0 on host {os.uname().nodename}: exit code 1, lost rank 1"
    assert others == [blames] if code else blames not in others
    assert traceback == f"the traceback of {cause}"


@pytest.mark.without_mpi
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "#!/nowhere/python3 -u\n",
            r"No such .*/program\): its first line, '#!/nowhere/python3 -u', names an interpreter",
        ),
        (
            "#!/bin/sh\r\n",
            r"No such .*/program\): it has Windows line endings, so the system looks for '/bin/sh\\r'; to change them: "
            r"sed -i 's/\\r\$//' \S+/program$",
        ),
        ("print(1)\n", r"Exec format error .*/program\): a script's first line must .*ringrun … python \S+/program$"),
    ],
)
def test_a_command_that_cannot_be_executed_is_not_tried_again(text, why, ringrun, tmp_path):
    executable(tmp_path / "program", text)
    done = ringrun("-np", 2, "--restarts", 2, "./program", returncode=2)
    assert re.match(rf"ringrun: error: rank \d on host \S+ cannot execute the command: {why}", done.stderr.strip())
    assert done.stderr.count("\n") == 1


@pytest.fixture
def broken_mpirun(tmp_path):
    """Return variables under which ringrun finds an Open MPI whose mpirun does what `shell` says."""

    def make(shell):
        version = '[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.99" && exit'
        executable(tmp_path / "bin" / "mpirun", f"#!/bin/sh\n{version}\n{shell}\n")
        package = tmp_path / "shadow" / "mpi4py"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("class rc: pass\n")
        (package / "MPI.py").write_text("def Get_library_version(): return 'Open MPI v5.0.99'")
        # the real mpirun stands beside the interpreter, so that has to be elsewhere
        (package.parent / "sitecustomize.py").write_text(f"import sys\nsys.prefix = {str(tmp_path)!r}\n")
        return {"PYTHONPATH": str(package.parent)}

    return make


def test_an_mpirun_that_fails_is_quoted(ringrun, broken_mpirun):
    words = "(sleep 0.3; echo no slots left >&2) & exit 42"  # read after it has ended, as on a busy machine
    done = ringrun("-np", 2, sys.executable, "-c", "", env=broken_mpirun(words), returncode=3)
    assert done.stderr.startswith("ringrun: error: mpirun ended with exit code 42 when 0 of 2 ranks had started")
    assert done.stderr.endswith("wrote:\nno slots left\n")


def test_an_mpirun_that_starts_nothing_is_tried_once_more(ringrun, broken_mpirun, tmp_path):
    shell = f"echo again >> {tmp_path}/tries; wc -l < {tmp_path}/tries >&2; exit 42"
    done = ringrun("--verbose", "-np", 2, sys.executable, "-c", "", env=broken_mpirun(shell), returncode=3)
    assert "ringrun: trying once more: mpirun ended with exit code 42" in done.stderr
    assert done.stderr.endswith("wrote:\n2\n")


def test_an_mpirun_that_is_killed_ends_the_job(start, script, processes_of, wait_until_gone):
    process = start("-np", 2, *script("print('up'); import time; time.sleep(60)"))
    assert [process.stdout.readline() for _ in range(2)] != ["", ""]
    launcher = next(pid for pid, line in processes_of().items() if "mpi" in line.split()[0].rpartition("/")[2]
                    or "prterun" in line.split()[0])  # fmt: skip
    os.kill(launcher, 9)
    _, errors = process.communicate(timeout=patient(20))
    wait_until_gone()
    assert process.returncode == 137
    assert re.match(r"ringrun: mpi(run|exec\.hydra) ended with exit code 137 before the ranks did", errors), errors


def test_a_rank_is_heard_after_mpirun_has_killed_what_it_started(ringrun, script, wait_until_gone):
    """As hydra does at MPI_Abort, before the rank that called it has ended."""
    source = """
        import os, sys, time
        def parent(pid):
            return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        def started_by_mpirun(pid):
            above = parent(pid)
            return started_by_mpirun(above) if "ringrun.agent" in open(f"/proc/{above}/cmdline").read() else pid
        if os.environ["RANK"] == "0":
            time.sleep(60)
        os.kill(started_by_mpirun(os.getpid()), 9)
        time.sleep(0.1)
        sys.exit(7)
    """
    done = ringrun("-np", 2, *script(source), returncode=7)
    wait_until_gone()
    assert "ringrun: rank 1 of 2 failed first" in done.stderr
