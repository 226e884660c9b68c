"""Fixtures: ringrun as its users start it, scripts for it to run, and a check that nothing is left behind."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support import jobs, loopback_sshd
from tests.support.patience import patient

PROGRAMS = Path(__file__).parent / "programs"
WITHOUT_MPI = [sys.executable, str(jobs.ROOT / "tests" / "support" / "without_mpi.py")]
GONE_WITHIN_S = 5.0


def _environment(changes):
    # on a host with GPUs ringrun tells their ranks, on its stderr
    return jobs.environment(**{"CUDA_VISIBLE_DEVICES": ""} | (changes or {}))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real sshd on loopback."""
    if reason := loopback_sshd.why_not():
        pytest.skip(f"no sshd: {reason}")
    with loopback_sshd.sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture
def ringrun_command(request, python):
    """How `ringrun` and `start` begin."""
    without_mpi = request.node.get_closest_marker("without_mpi")
    return WITHOUT_MPI if without_mpi else [jobs.ringrun(Path(python))]


@pytest.fixture
def ringrun(tmp_path, ringrun_command):
    """Run ringrun to its end: `ringrun("-np", 2, …, env={…}, input="…", returncode=0)`."""

    def run(*arguments, env=None, **options):
        command = [*ringrun_command, *arguments]
        return jobs.run(command, timeout_s=50, env=_environment(env), **{"cwd": tmp_path} | options)

    return run


@pytest.fixture
def start(tmp_path, ringrun_command):
    """Start ringrun, in its own session, and leave it running; it is killed after the test."""
    started = []

    def run(*arguments, **options):
        process = subprocess.Popen(
            [*ringrun_command, *map(str, arguments)],
            env=_environment(options.pop("env", None)),
            stdin=subprocess.DEVNULL,
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=options.pop("stderr", subprocess.PIPE),
            text=True,
            cwd=tmp_path,
            start_new_session=True,
            **options,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


@pytest.fixture
def grace():
    """Flags by which ranks that are to end have one second: for tests whose ranks use up the time that they have."""
    return ["--grace", 1]


@pytest.fixture
def script(tmp_path, python):
    """Write a Python script and return the command that runs it."""

    def write(source):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(source))
        return [python, str(path)]

    return write


@pytest.fixture
def program(script):
    """Copy one of programs/ to where `processes_of` knows it by its folder, and return the command that runs it."""
    return lambda name: script((PROGRAMS / f"{name}.py").read_text())


@pytest.fixture
def python(request):
    """This one; for the tests of `both_mpis` MPICH's, too."""
    return str(request.getfixturevalue("mpich_python")) if getattr(request, "param", "") == "mpich" else sys.executable


def _command_line(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "" if state == "Z" else os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).replace("\0", " ")
    except OSError:
        return ""


def _folder(pid):
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


@pytest.fixture
def processes_of(tmp_path):
    """Return the live processes of this test: those that run in its folder, or have it in their command line.

    These are ringrun, mpirun, agents and ranks.
    """

    def find():
        lines = {pid: _command_line(pid) for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))}
        return {
            pid: line
            for pid, line in lines.items()
            if line and (str(tmp_path) in line or _folder(pid) == str(tmp_path)) and pid != os.getpid()
        }

    return find


@pytest.fixture
def wait_until_gone(processes_of):
    """Wait until no process of this test is left; return how many seconds it took, or fail after the bar."""

    def wait():
        begin = time.monotonic()
        while left := processes_of():
            assert time.monotonic() < begin + patient(GONE_WITHIN_S), f"left behind: {left}"
            time.sleep(0.02)
        return time.monotonic() - begin

    return wait
