"""Python stacks of a running job: by SIGUSR1, by `ringrun stacks`, and when ringreduce reports a stall."""

import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from dataclasses import replace

import pytest

from ringrun import stacks, top
from ringrun.errors import LauncherError, UsageError
from ringrun.job import control_socket as jobs
from ringrun.job.control_socket import RunningJob
from tests.support.jobs import run
from tests.support.patience import patient, wait_until

HOST = os.uname().nodename

MIXED_STACKS = """\
ranks 0,2 of 4 on {host}: script.py:12, in wait_in_mpi: world.Barrier()
  File "{file}", line 21, in <module>
    wait_in_mpi()
  File "{file}", line 12, in wait_in_mpi
    world.Barrier()
rank 1 of 4 on {host}: it is stopped (by SIGSTOP, Ctrl-Z or a debugger)
rank 3 of 4 on {host}: it runs no Python that ringrun can ask; it sleeps
"""


def all_up(folder, count):
    return lambda: all((folder / f"up{rank}").exists() for rank in range(count))


def ask(job):
    """What `ringrun stacks JOB` prints."""
    program = "import sys; from ringrun.stacks import run; sys.exit(run(sys.argv[1:]))"
    return run([sys.executable, "-c", program, job.pid], returncode=0).stdout


def test_the_stacks_of_a_job_while_it_runs(start, program, tmp_path, wait_until_gone):
    python, path = program("mixed")
    job = start("-np", 4, python, path)
    wait_until(all_up(tmp_path, 4))
    expected = MIXED_STACKS.format(host=HOST, file=path)
    wait_until(lambda: ask(job).endswith(expected))  # what follows "up" may take a rank a while
    head, _, told = ask(job).partition("\n")
    assert re.fullmatch(rf"job {job.pid}: {re.escape(python)} {re.escape(path)}; 4 ranks, for \d+\.?\d* s", head), head
    assert told == expected
    job.send_signal(signal.SIGUSR1)
    expected = f"ringrun: what the ranks are doing:\n{told}"
    assert "".join(itertools.islice(job.stderr, expected.count("\n"))) == expected
    assert job.poll() is None, "the job goes on"
    assert [each.pid for each in jobs.find_jobs() if each.pid == job.pid] == [job.pid]
    job.send_signal(signal.SIGTERM)
    job.wait(patient(20))
    wait_until_gone()
    assert job.pid not in [each.pid for each in jobs.find_jobs()]


@pytest.mark.without_mpi
def test_programs_that_a_rank_starts_are_not_disturbed_and_a_shell_around_it_does_not_matter(start, program, tmp_path):
    job = start("-np", 2, "bash", "-c", '"$@"; exit $?', "bash", *program("workers"), "processes")
    wait_until(all_up(tmp_path, 2))
    both_join = f"ranks 0-1 of 2 on {HOST}: script.py:31, in <module>: worker.join()"
    wait_until(lambda: both_join in ask(job))  # what follows "up" may take a rank a while
    for _ in range(3):
        told = ask(job)
        assert told.count('script.py", line 31, in <module>') == 1, told
        assert both_join in told, told
    (tmp_path / "stop").touch()
    out, errors = job.communicate(timeout=patient(30))
    assert sorted(out.splitlines()) == ["[0] ([0, 0], 0)", "[1] ([0, 0], 0)"], errors
    assert job.returncode == 0


@pytest.mark.without_mpi
def test_asking_does_no_harm_while_other_threads_run(start, program, tmp_path):
    job = start("-np", 1, *program("workers"), "threads")
    wait_until(all_up(tmp_path, 1))
    for _ in range(11):
        job.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    (tmp_path / "stop").touch()
    out, errors = job.communicate(timeout=patient(30))
    assert (job.returncode, out) == (0, "[0] done\n"), errors
    assert "script.py:31, in <module>: worker.join()" in errors


@pytest.mark.without_mpi
def test_several_pythons_of_one_rank_are_all_shown(start, python, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(f"import time\nopen('{name}', 'w').close()\ntime.sleep(60)\n")
    job = start("-np", 1, "bash", "-c", '"$0" one.py & "$0" two.py & wait', python)
    wait_until(lambda: (tmp_path / "one").exists() and (tmp_path / "two").exists())
    wait_until(lambda: all(f'{name}.py", line 3, in <module>' in ask(job) for name in ("one", "two")))
    told = ask(job)
    assert told.count("a Python process of it:") == 2
    assert 'one.py", line 3, in <module>' in told
    assert 'two.py", line 3, in <module>' in told


def test_a_stall_is_told_once_with_all_stacks_and_no_quiet_rank_hides_it(ringrun, program):
    python, path = program("late")
    done = ringrun("-np", 3, "--ranks", 0, "--stall-check-s", "0.7", python, path, returncode=0)
    lines = done.stderr.splitlines()
    reports = [line for line in lines if line.startswith("ringrun: the job is stalled; rank 0 says: ")]
    assert len(reports) >= 2, done.stderr  # after 0.7 s, after twice that and so on
    assert "allreduce 'late' (float64[3]): waiting for" in reports[0]
    assert "missing: rank 1. All ranks must submit it" in reports[0]
    assert lines.count(f"ranks 0,2 of 3 on {HOST}: allreduce 'late' (script.py:13)") == 1
    assert lines.count(f"rank 1 of 3 on {HOST}: script.py:12, in <module>: time.sleep(3)") == 1
    assert done.stderr.count(f'  File "{path}", line 13, in <module>') == 1, "the stacks are printed once"
    assert "ringreduce: stalled" not in done.stderr


JOB = RunningJob(4711, 1000.0, 4, ("python", "my train.py"), "/nowhere/control")


def test_the_list_of_jobs(monkeypatch):
    monkeypatch.setattr(stacks.time, "time", lambda: 50_125.0)  # the clock, which may have been set since it began
    assert stacks.table([], 0.0) == ["no job of yours is running on this host"]
    head, row = stacks.table([JOB], 1125.0)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(50_000.0))
    assert head.split() == ["JOB", "RANKS", "SINCE", "COMMAND"]
    assert row.split("  ", 1)[0] == "4711"
    assert stacks.table([RunningJob(1, 0.0, 4, ("x" * 99,), "")], 0.0)[1].endswith(f"  {'x' * 59}…")
    assert row.endswith(f"  4      {since} (2 min 5 s)  python 'my train.py'")


def test_a_command_of_several_lines_is_shown_in_one():
    job = replace(JOB, command=("python", "-c", "print()\nprint('\x1b')"))
    shown = r"""python -c 'print()\nprint('"'"'\x1b'"'"')'"""
    assert stacks.table([job], 1125.0)[1].endswith(f")  {shown}")
    assert stacks.describe(job, 1125.0) == f"job 4711: {shown}; 4 ranks, for 2 min 5 s"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1", "2"], "ringrun stacks 1 2: expected at most one JOB, a process number"),
        (["--all"], "ringrun stacks --all: expected at most one JOB"),
        (["x"], "ringrun stacks x: JOB is the process number of a ringrun; your jobs are: 4711"),
        (["³"], "ringrun stacks ³: JOB is the process number of a ringrun"),
        (
            [str(os.getpid())],
            f"process {os.getpid()} is not one of your running ringrun jobs; your jobs are: 4711",
        ),
        (["4194999"], "process 4194999 does not exist"),
        (["4" * 5000], f"ringrun stacks {'4' * 59}…: JOB is the process number of a ringrun"),
    ],
    ids=["two jobs", "a flag", "a word", "no digit", "this process", "no process", "5000 digits"],
)
def test_what_cannot_be_asked(arguments, message, monkeypatch):
    monkeypatch.setattr(stacks, "find_jobs", lambda: [JOB])
    with pytest.raises(UsageError, match=re.escape(message)):
        stacks.run(arguments)


def test_a_job_that_ends_meanwhile(monkeypatch):
    monkeypatch.setattr(stacks, "find_jobs", lambda: [JOB])
    with pytest.raises(LauncherError, match="job 4711 does not answer: No such file or directory; it may have ended"):
        stacks.run(["4711"])

    def ask(job, question):
        raise TimeoutError("timed out")

    for command in (stacks, top):
        monkeypatch.setattr(command, "find_jobs", lambda: [JOB])
        monkeypatch.setattr(command, "ask", ask)
        for state, why in (
            ("T", "its ringrun is stopped, as by Ctrl-Z; to continue it: fg, or kill -CONT 4711"),
            ("S", "it may have ended"),
        ):
            monkeypatch.setattr(stacks, "state_of", {4711: state}.__getitem__)
            with pytest.raises(LauncherError, match=f"job 4711 does not answer: timed out; {why}$"):
                command.run(["4711"])
    monkeypatch.setattr(stacks, "ask", lambda job, _: "")
    with pytest.raises(LauncherError, match="job 4711 ended before its ranks had answered"):
        stacks.run(["4711"])


def test_jobs_are_found_where_no_file_can_be_written(tmp_path, monkeypatch):
    """As in another process of a container whose file system is read-only, and whose job has a TMPDIR."""
    folder = tmp_path / "ringrun-abc"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"pid": 99, "since_s": 1.0, "size": 2, "command": ["x"]}))

    def gettempdir():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(jobs.tempfile, "gettempdir", gettempdir)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control"))
        listener.listen()
        assert 99 in [job.pid for job in jobs.find_jobs()]


def test_a_directory_that_a_killed_ringrun_left_is_no_job(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / "ringrun-abc"
    folder.mkdir()
    fields = {"pid": 99, "since_s": 1.0, "size": 2, "command": ["x"]}
    (folder / "job.json").write_text(json.dumps(fields))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control"))
        listener.listen()
        assert 99 in [job.pid for job in jobs.find_jobs()]
        (folder / "job.json").write_text(json.dumps({**fields, "command": None}))
        assert 99 not in [job.pid for job in jobs.find_jobs()]
        (folder / "job.json").write_text(json.dumps(fields))
    assert 99 not in [job.pid for job in jobs.find_jobs()]


@pytest.mark.without_mpi
def test_a_name_that_is_not_utf_8_is_shown_and_hides_nothing(start, ringrun, tmp_path, python):
    name = "caf\udce9.py"
    (tmp_path / name).write_text("import time; print('up', flush=True); time.sleep(1000)")
    process = start("-np", 1, python, name)
    assert process.stdout.readline() == "[0] up\n"
    for arguments in (["stacks"], ["stacks", process.pid], ["--dry-run", "-np", 1, python, name]):
        shown = ringrun(*arguments, returncode=0).stdout
        if shown.startswith("JOB "):  # beside other jobs; a long command is shortened there
            assert re.search(rf"^{process.pid} .* {str(python)[:10]}", shown, re.M), shown
        else:
            assert "caf\\udce9.py" in shown
    process.terminate()
    assert process.wait(patient(20)) == 143
