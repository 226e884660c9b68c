"""What SECURITY.md says of other users of a host: they see that a job runs, and get at nothing of it."""

import contextlib
import json
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from ringrun.job.control_socket import find_jobs
from tests.support.jobs import run
from tests.support.patience import patient, wait_until

NOBODY = 65534
LISTEN = "0A"  # of /proc/net/tcp
TRIES = """
import json, os, socket, sys
from ringrun.job.control_socket import find_jobs
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
def reach(path):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as sock:
            sock.connect(path)
def read(path):
    with open(path, "rb") as file:
        file.read(1)
got = []
for how, path in json.loads(sys.argv[2]):
    try:
        {"list": os.listdir, "reach": reach, "read": read}[how](path)
    except PermissionError:
        continue
    except OSError as error:
        path += f": {error}"
    got.append(path)
print(json.dumps([got, [job.pid for job in find_jobs()]]))
"""


def memory_of(pid):
    """Its files in /dev/shm, by the paths through which other ranks map them."""
    files = [path for path in Path(f"/proc/{pid}/fd").iterdir() if os.path.realpath(path).startswith("/dev/shm/")]
    maps = Path(f"/proc/{pid}/map_files").iterdir()
    return [*files, *(path for path in maps if os.readlink(path).startswith("/dev/shm/"))]


def steady(find):
    """What is found, when it is the same twice: a job that begins opens files and closes them."""
    found = []

    def same():
        before = found[:]
        with contextlib.suppress(FileNotFoundError):
            found[:] = find()
            time.sleep(0.3)
            return found == before
        return False

    wait_until(same)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_gets_at_nothing_of_a_job(start, program, processes_of, tmp_path):
    job = start("-np", 2, "--elastic", "--restarts", 1, *program("steps"), tmp_path, 1)
    wait_until(lambda: (tmp_path / "trains").exists())
    folder = next(Path(each.socket).parent for each in find_jobs() if each.pid == job.pid)
    sockets = [path for path in folder.iterdir() if stat.S_ISSOCK(path.lstat().st_mode)]
    assert {"control", "socket", "rank0.json.agent", "rank1.json.ask"} <= {path.name for path in sockets}
    commits = [path for path in Path("/dev/shm").glob("ringrun-*.commits") if not path.stat().st_mode & 0o077]
    memory = steady(lambda: [path for pid in processes_of() for path in memory_of(pid)])
    assert len(memory) >= 4, "two ranks each map two"
    assert commits
    assert [path for path in memory if path.stat().st_mode & 0o077] == []
    tries = [
        *(("list", path) for path in (folder, *commits)),
        *(("reach", path) for path in sockets),
        *(("read", path) for path in (folder / "job.json", *memory)),
        *(("read", f"/proc/{pid}/{name}") for pid in processes_of() for name in ("environ", "mem")),
    ]
    asked = json.dumps([(how, str(path)) for how, path in tries])
    found = run([sys.executable, "-c", TRIES, NOBODY, asked], returncode=0, timeout_s=20)
    assert json.loads(found.stdout) == [[], []]
    (tmp_path / "stop").touch()
    assert job.wait(patient(20)) == 0, job.stderr.read()


def open_files(pids):
    return {os.readlink(path) for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()}


def test_on_one_host_ringrun_listens_at_no_port(start, program, processes_of, tmp_path):
    """Its MPI does."""
    job = start("-np", 2, *program("steps"), tmp_path, 1)
    wait_until(lambda: (tmp_path / "trains").exists())
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == LISTEN}
    found = {pid: line.partition(str(tmp_path))[0] for pid, line in processes_of().items()}
    ringruns = [pid for pid, line in found.items() if "python" in line.split()[0] and "ringrun" in line]
    assert len(ringruns) >= 3, "ringrun, and two agents"
    of_mpi = open_files([pid for pid, line in found.items() if "python" not in line.split()[0]])
    assert (open_files(ringruns) - of_mpi) & listening == set(), (
        "but what hydra's processes leave to all that they start"
    )
    (tmp_path / "stop").touch()
    assert job.wait(patient(20)) == 0, job.stderr.read()
