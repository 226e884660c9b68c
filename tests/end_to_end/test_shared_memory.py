"""Shared memory where a user's machine has little of it, after a crash, and where processes may not read each other."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import PROGRAMS, run

pytestmark = pytest.mark.timeout(900)  # the first use makes the environment for MPICH


def cannot_mount():
    """Why there can be no /dev/shm of the test's own, or nothing."""
    if os.geteuid() != 0:
        return "a /dev/shm of the test's own needs root"
    if shutil.which("unshare") is None:
        return "a /dev/shm of the test's own needs the command unshare (util-linux)"
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True)
    return tried.stderr.decode().strip() if tried.returncode else ""


WHY_NOT = cannot_mount()
own_shm = pytest.mark.skipif(bool(WHY_NOT), reason=f"no /dev/shm of the test's own: {WHY_NOT}")
IN_OWN_SHM = 'mount -t tmpfs -o size=$0 tmpfs /dev/shm && "$@"; code=$?; '
TELL_SHM = "stat -c 'left: %b blocks %n' /dev/shm/* 2> /dev/null; exit $code"


def ringrun(python, ranks, *happening, shm=None, **variables):
    """Runs programs/reduces.py, with a /dev/shm of that size; what is left there is told at the end."""
    command = [python.parent / "ringrun", "-np", ranks, python, PROGRAMS / "reduces.py", *happening]
    if shm:
        command = ["unshare", "-m", "bash", "-c", IN_OWN_SHM + TELL_SHM, shm, *command]
    return run(command, timeout_s=90, **variables)


@pytest.mark.adapters
@own_shm
@pytest.mark.parametrize("mebibytes", [8, 20])
def test_where_there_is_little_of_it_messages_are_used_and_a_line_says_why(python, mebibytes):
    finished = ringrun(python, 2, shm=f"{mebibytes}m", returncode=0)
    assert finished.stdout.count("right; False 0") == 2, finished.stdout
    said = [line for line in finished.stdout.splitlines() if "right" not in line and "left:" not in line]
    assert len(said) == 1, finished.stdout
    assert re.fullmatch(
        r"^ringreduce: no shared memory between the ranks of a host, so messages are used: rank [01]: "
        rf"/dev/shm, {mebibytes} MiB, has no room for 2 × 10 MiB \(No space left on device\); enlarge it "
        r"\(docker run --shm-size=…\), or lower RINGREDUCE_FUSION_BUFFER_BYTES and RINGREDUCE_SHARED_SLOT_BYTES",
        said[0],
    )


@own_shm
def test_memory_that_another_job_takes_meanwhile_ends_no_rank_and_hangs_none(python):
    finished = ringrun(python, 2, "taken_meanwhile", shm="27m", returncode=0)
    assert finished.stdout.count("right; False 0") == 2, finished.stdout
    assert re.search(r"so messages are used: rank \d: /dev/shm, 27 MiB, has no room for 2 × 10 MiB", finished.stdout)
    left = re.findall(r"^left: (\d+) blocks (.*)$", finished.stdout, re.MULTILINE)
    assert [name for _, name in left] == ["/dev/shm/another_jobs"]


@own_shm
def test_ranks_of_one_host_that_do_not_share_it_use_messages():
    """As in two containers: processes have other numbers there. MPICH itself waits for ever, in MPI_Init."""
    finished = ringrun(Path(sys.executable), 2, "in_a_container", returncode=0)
    assert finished.stdout.count("right; False 0") == 2, finished.stdout
    said = (
        r"messages are used: rank 0: /proc/1/fd/\d+, the memory of a rank on this host, cannot be opened here: "
        r"containers must share process numbers"
    )
    assert re.search(said, finished.stdout), finished.stdout


@own_shm
def test_lower_settings_make_it_fit(python):
    settings = {"FUSION_BUFFER_BYTES": "2097152", "SHARED_SLOT_BYTES": "262144", "FUSION_SLOT_BYTES": "524288"}
    finished = ringrun(python, 2, shm="12m", **{f"RINGREDUCE_{name}": value for name, value in settings.items()})
    assert finished.returncode == 0, finished.stdout
    nbytes = [int(each) for each in re.findall(r"right; True ([0-9]+)", finished.stdout)]
    assert len(nbytes) == 2, finished.stdout
    assert 4 * 262144 < min(nbytes) <= max(nbytes) < 5 * 262144, finished.stdout  # four slots, counters and flags
    assert "no shared memory" not in finished.stdout


MPIS_OWN = re.compile(r"/dev/shm/(sm_segment\..*|mpich_shm_.*)")


@own_shm
@pytest.mark.parametrize("seconds", [0.05, 0.21, 0.5])
def test_of_a_rank_that_is_killed_nothing_of_ours_is_left(python, seconds):
    """What MPI made for itself may stay (MPICH's mpich_shm_… does); the window, 24 MiB, must not."""
    finished = ringrun(python, 3, "killed", seconds, shm="256m", RINGREDUCE_ALGORITHM="shared", returncode=137)
    assert "rank 1 of 3 failed first" in finished.stdout
    left = re.findall(r"^left: (\d+) blocks (.*)$", finished.stdout, re.MULTILINE)
    assert all(MPIS_OWN.fullmatch(name) for _, name in left), left
    assert sum(int(blocks) * 512 for blocks, _ in left) < 8 << 20, left


@pytest.mark.adapters
@own_shm
def test_of_a_job_that_ends_nothing_at_all_is_left(python):
    finished = ringrun(python, 3, shm="256m")
    assert (finished.returncode, finished.stdout.count("right; True")) == (0, 3), finished.stdout
    assert "left:" not in finished.stdout


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter is written with x86-64's system call numbers")
@pytest.mark.parametrize("algorithm", ["auto", "shared"])
def test_it_works_where_processes_may_not_read_each_other(python, algorithm):
    """Open MPI finds out; MPICH does not, and is told by init() so that its own messages work."""
    finished = ringrun(python, 2, "forbidden", RINGREDUCE_ALGORITHM=algorithm)
    assert (finished.returncode, finished.stdout.count("right; True")) == (0, 2), finished.stdout


def test_it_works_without_open_mpis_single_copy():
    finished = ringrun(Path(sys.executable), 2, OMPI_MCA_smsc="^cma,xpmem,knem")
    assert (finished.returncode, finished.stdout.count("right; True")) == (0, 2), finished.stdout
