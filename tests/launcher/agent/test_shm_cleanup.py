"""Shared memory that MPI leaves when ranks are killed: none of it stays, and nobody else's is touched."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import hypothesis
import hypothesis.strategies as st
import pytest

from ringrun.agent import shm_cleanup
from ringrun.agent.shm_cleanup import ShmCleanup
from ringrun.engines import MPICH, OpenMPI
from tests.support.jobs import executable
from tests.support.patience import wait_until

SHM = Path("/dev/shm")
KILL = "import signal; signal.raise_signal(signal.SIGKILL)"


def files():
    """The names in shared memory, of all programs of this machine."""
    return {path.name for path in SHM.iterdir()}


@pytest.fixture
def assert_none_left(wait_until_gone):
    """When the job is gone so are these files, and ringrun's folders that belong to no process.

    Other jobs may run at the same time: theirs are mapped, or in the environment of their ranks, but for moments at
    their beginning and their end.
    """
    before = files()

    def check(names=()):
        wait_until_gone()
        wait_until(lambda: not any((SHM / name).exists() for name in names), 5)
        left, deadline_s = unused(files() - before), time.monotonic() + 5
        while left and time.monotonic() < deadline_s:
            time.sleep(0.1)
            left &= unused(files() - before)
        assert left == set()

    return check


@pytest.mark.parametrize(
    "end",
    [
        f"if world.rank == 1: {KILL}",
        f"if world.rank == 0: {KILL}",
        f"import time; time.sleep(2.0); {KILL}",
        "pass",
        "if world.rank == 2: import os; os._exit(3)",
    ],
    ids=["rank 1 is killed", "rank 0 is killed", "all are killed", "all is well", "rank 2 exits"],
)
def test_no_shared_memory_is_left(end, ringrun, program, assert_none_left):
    done = ringrun("-np", 3, *program("shares_memory"), end)
    mapped_by_ranks = [line.split("mapped ")[1].split() for line in done.stdout.splitlines() if "mapped " in line]
    assert [bool(names) for names in mapped_by_ranks] == [True] * 3, done.stdout + done.stderr
    assert_none_left(set().union(*mapped_by_ranks))


def unused(names):
    """Those of these names in shared memory that ringrun gave, and that no process knows."""
    ours = {name for name in names if name.startswith("ringrun-")}
    known = b"".join(
        text_of(process / name) for process in Path("/proc").glob("[0-9]*") for name in ("maps", "environ")
    )
    return {name for name in ours if f"{SHM / name}".encode() not in known}


def text_of(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_ringrun_killed_leaves_none_either(start, program, assert_none_left):
    job = start("-np", 2, *program("shares_memory"), "import time; print('up'); time.sleep(60)")
    lines = list(itertools.takewhile(lambda line: "up" not in line, job.stdout))
    names = [name for line in lines if "mapped " in line for name in line.split("mapped ")[1].split()]
    assert names
    job.send_signal(signal.SIGKILL)
    job.wait()
    assert_none_left(names)


def test_which_engines_have_a_folder():
    number = os.getpid()
    private = f"/somewhere/ringrun-test{number}"
    assert ShmCleanup(private, 0).variables(MPICH(), {}) == {}
    assert ShmCleanup(private, 0).variables(OpenMPI(), {"OMPI_MCA_btl_vader_backing_directory": "/x"}) == {}
    agents = [ShmCleanup(private, rank) for rank in range(3)]
    folders = [Path(*set(agent.variables(OpenMPI(), {}).values())) for agent in agents]
    assert folders == [SHM / f"ringrun-test{number}.rank{rank}" for rank in range(3)]
    agents[1].remove()
    assert [folder.exists() for folder in folders] == [True, False, True]
    shm_cleanup.remove_folders(private)
    assert not any(folder.exists() for folder in folders)


def test_a_killed_agent_and_a_command_that_does_not_start_leave_none(ringrun, program, tmp_path, assert_none_left):
    ringrun("-np", 2, *program("fails"), "import os, time; os.kill(os.getppid(), 9); time.sleep(20)", returncode=1)
    assert ringrun("-np", 2, executable(tmp_path / "program", "#!/nowhere/interpreter\n")).returncode == 2
    assert_none_left()


MAPPER = """
import mmap, sys, time
file = open(sys.argv[1], "r+b")
memory = mmap.mmap(file.fileno(), 4096)
file.close()
print("mapped", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def mapper():
    """Start a process, in a session of its own, that maps a file until it is told to end."""
    with contextlib.ExitStack() as at_end:

        def run(path):
            command, pipes = [sys.executable, "-c", MAPPER, str(path)], {"stdin": PIPE, "stdout": PIPE, "text": True}
            process = at_end.enter_context(subprocess.Popen(command, **pipes, start_new_session=True))
            at_end.callback(process.kill)
            assert process.stdout.readline() == "mapped\n"
            return process

        yield run


@pytest.fixture
def segment():
    """Make a file in shared memory that looks like one of MPI's."""
    with contextlib.ExitStack() as at_end:

        def make(name):
            (SHM / name).write_bytes(bytes(4096))
            at_end.callback((SHM / name).unlink, missing_ok=True)
            return SHM / name

        yield make


def test_only_files_of_mpi_that_the_rank_had_mapped_and_nobody_maps_are_removed(mapper, segment, monkeypatch):
    monkeypatch.setattr(shm_cleanup, "_PAUSES_S", (0.02, 0.08))
    number = os.getpid()
    ours, shared, others = (segment(f"mpich_shm_{number}{letter}_0") for letter in "abc")
    users = segment(f"my_data_{number}")
    ranks = [mapper(path) for path in (ours, shared, users)]
    watches = [ShmCleanup("/somewhere/x", number) for number in range(3)]
    for watch, rank in zip(watches, ranks, strict=True):
        if rank is ranks[0]:  # this one says so itself
            watch.note(Path(f"/proc/{rank.pid}/maps").read_text().splitlines())
        else:
            watch.look(rank.pid)
    another_rank = mapper(shared)
    for rank in ranks:
        rank.kill()
        rank.wait()
    for watch in watches:
        watch.remove()
    assert [path.exists() for path in (ours, shared, others, users)] == [False, True, True, True]
    another_rank.kill()
    another_rank.wait()
    watches[1].remove()
    assert not shared.exists()


def test_a_new_file_of_the_same_name_is_not_removed(mapper, segment):
    path = segment(f"mpich_shm_{os.getpid()}d_0")
    rank = mapper(path)
    watch = ShmCleanup("/somewhere/x", 0)
    watch.look(rank.pid)
    keep_the_inode = path.open("rb")
    path.unlink()
    segment(path.name)
    rank.kill()
    rank.wait()
    watch.remove()
    assert path.exists()
    keep_the_inode.close()


@hypothesis.given(st.lists(st.text()))
@hypothesis.example(["7f-8f rw-s 0 00:1a 12 /dev/shm/mpich_shm_1_0", "7f-8f rw-s 0 00:1a ² /dev/shm/mpich_shm_1_0"])
def test_any_lines_of_maps_give_segments(lines):
    assert all(path.startswith("/dev/shm/") for path, _ in shm_cleanup._segments(lines))


def test_of_the_files_of_daemons_only_those_of_this_job_go(tmp_path, monkeypatch):
    """The daemon that ends has `own` open; of those that nobody has open, one is from before this job."""
    monkeypatch.setattr(shm_cleanup, "_DAEMONS_FILES", f"{tmp_path}/hydra_*")
    paths = {name: tmp_path / f"hydra_{name}" for name in ("own", "running", "killed", "before")}
    daemons = []
    for name, path in paths.items():
        path.touch()
        wait = f"import sys; file = open({str(path)!r}); print(flush=True); sys.stdin.read()"
        if name in ("own", "running"):
            daemons.append(subprocess.Popen([sys.executable, "-c", wait], stdin=PIPE, stdout=PIPE))
            daemons[-1].stdout.readline()
    os.utime(paths["before"], (1000, 1000))
    log = tmp_path / "log"
    log.touch()
    try:
        shm_cleanup.remove_daemons_files(daemons[0].pid, since_s=2000)
        assert set(tmp_path.iterdir()) == {paths["running"], paths["before"], log}
    finally:
        for daemon in daemons:
            daemon.communicate()
    shm_cleanup.remove_daemons_files(daemons[0].pid, since_s=2000)
    assert set(tmp_path.iterdir()) == {paths["before"], log}


def test_the_session_directory_of_a_killed_daemon_goes_and_no_other(tmp_path):
    daemon = subprocess.Popen([sys.executable, "-c", "input()"], stdin=PIPE, stderr=PIPE)
    own, other, linked = (tmp_path / f"prted.{name}" for name in (daemon.pid, f"{daemon.pid}0", "elsewhere"))
    for folder in (own, other, linked):
        (folder / "1").mkdir(parents=True)
    remove = shm_cleanup.remove_session_directory
    remove(daemon.pid, {"PMIX_SERVER_TMPDIR": str(own)})
    assert own.exists()
    daemon.kill()
    daemon.communicate()
    for environ in ({}, {"PMIX_SERVER_TMPDIR": str(other)}, {"PMIX_SERVER_TMPDIR": str(tmp_path)}):
        remove(daemon.pid, environ)
    assert own.exists()
    remove(daemon.pid, {"PMIX_SERVER_TMPDIR": str(own)})
    assert set(tmp_path.iterdir()) == {other, linked}
    own.symlink_to(linked)
    remove(daemon.pid, {"PMIX_SERVER_TMPDIR": str(own)})
    assert (linked / "1").exists()
