"""ringrun across four hosts with a real sshd each, on both MPIs."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.cluster.hosts import PROGRAMS, ROOT
from tests.support.patience import patient, wait_until
from tests.support.tiers import extended

STEPS, WHERE = PROGRAMS / "steps.py", PROGRAMS / "where.py"
ALL = ("-np", "4", "-H", "h0:1,h1:1,h2:1,h3:1")
CUT_OFF_WITHIN_S = 25  # 15 are meant


def test_a_training_example_on_four_hosts(hosts, python):
    done = hosts.ringrun(python, *ALL, python, ROOT / "examples" / "train_digits.py", timeout=120, returncode=0)
    assert "[0] parameters are identical on all 4 ranks" in done.stdout
    assert float(re.search(r"test accuracy: ([\d.]+)", done.stdout).group(1)) > 0.97
    hosts.assert_nothing_is_left()


@pytest.mark.adapters
@pytest.mark.parametrize(
    ("where", "lines"),
    [
        pytest.param(
            ("-H", "h0:3,h1:1"), ["h0 0 3 0 2 4", "h0 1 3 0 1 4", "h0 2 3 0 1 4", "h1 0 1 1 2 4"], marks=extended
        ),
        (("-np", "4", "-H", "h2:1,h0:2,h3:4"), ["h2 0 1 0 3 4", "h0 0 2 1 3 4", "h0 1 2 0 1 4", "h3 0 1 2 3 4"]),
    ],
)
def test_uneven_slots(hosts, python, where, lines):
    done = hosts.ringrun(python, *where, python, WHERE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", returncode=0)
    told = [f"[{rank}] {rank} {line} {999.0 * 10} {line[3:6]}" for rank, line in enumerate(lines)]
    assert sorted(done.stdout.splitlines()) == told
    hosts.assert_nothing_is_left()


def test_hosts_that_are_not_this_one(hosts, python, script):
    """Rank 0 is elsewhere, and still reads ringrun's stdin."""
    source = "import os, socket, sys\nprint(socket.gethostname(), os.environ['RANK'], repr(sys.stdin.read()))"
    (hosts.folder / "input").write_text("a line")
    with (hosts.folder / "input").open() as stdin:
        done = hosts.ringrun(python, "-H", "h1:1,h3:1", python, script(source), stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] h1 0 'a line'", "[1] h3 1 ''"]


@pytest.mark.adapters
def test_variables_reach_all_hosts_and_secrets_stay(hosts, python, script):
    """Command lines, which all users can read, have no value and no key; what stays is in no process elsewhere."""
    source = """
        import os, time
        print(*(os.environ.get(name) for name in ("COLOUR", "WANDB_API_KEY", "HF_TOKEN")))
        open(f"ready {os.environ['RANK']}", "w").close()
        while not os.path.exists("seen"):
            time.sleep(0.01)
    """
    secrets = {"COLOUR": "red wine", "WANDB_API_KEY": "hunter2", "HF_TOKEN": "swordfish"}
    command = [python.parent / "ringrun", "-H", "h1:1,h2:1", "--env", "HF_TOKEN", python, script(source)]
    job = hosts.start(0, command, env=secrets, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines, environments = set(), set()

    def look():
        """From the start on: what asks the hosts has ended when the ranks begin."""
        found = [(k, pid, line) for k in range(3) for pid, line in hosts.processes(k).items()]
        lines.update(line for _, _, line in found)
        for k, pid, _ in found:
            with contextlib.suppress(OSError):  # it has ended
                environments.add((k, Path(f"/proc/{pid}/environ").read_text(errors="replace")))
        return job.poll() is not None or all((hosts.folder / f"ready {rank}").exists() for rank in range(2))

    wait_until(look)
    look()
    (hosts.folder / "seen").touch()
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == ["[0] red wine None swordfish", "[1] red wine None swordfish"]
    keys = {key for _, each in environments for key in re.findall("RINGRUN_AUTHKEY=([0-9a-f]{64})", each)}
    assert len(keys) == 1
    hidden = {*secrets.values(), *keys}
    assert [line for line in lines for secret in hidden if secret in line] == []
    assert {k for k, each in environments if "hunter2" in each} == {0}
    assert {k for k, each in environments if "swordfish" in each} == {0, 1, 2}


@pytest.mark.adapters
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("kill", 137, ["killed by signal 9 (SIGKILL)"]),
        pytest.param("raise", 1, ["exit code 1", "ValueError: boom"], marks=extended),
        pytest.param("exit", 7, ["exit code 7"], marks=extended),
    ],
)
def test_a_rank_that_dies_on_another_host(hosts, python, how, code, words):
    done = hosts.ringrun(python, *ALL, python, STEPS, 0, how, returncode=code)
    hosts.assert_nothing_is_left()
    report = done.stderr[done.stderr.index("rank 2 ") :]
    for each in ("h2", *words):
        assert each in report


LEAVES = {
    "sys.exit(7)": (7, "exit code 7"),
    "raise SystemExit(7)": (7, "exit code 7"),
    "argparse.ArgumentParser().error('x')": (2, "exit code 2"),
    "os._exit(7)": (7, "exit code 7"),
    "concurrent.futures.ThreadPoolExecutor().submit(fail).result()": (1, "exit code 1"),
    "threading.Thread(target=time.sleep, args=[99]).start(); fail()": (1, "exit code 1"),
    "threading.Thread(target=time.sleep, args=[99]).start(); sys.exit(7)": (7, "exit code 7"),
    "others_wait = True; it = threading.Thread(target=fail); it.start(); it.join(); sys.exit()": (
        1,
        "its script ended",
    ),
    "os.kill(os.getpid(), signal.SIGTERM)": (143, "signal 15"),
    "os.kill(os.getpid(), signal.SIGSEGV)": (139, "signal 11"),
    "signal.setitimer(signal.ITIMER_REAL, 0.1); time.sleep(99)": (142, "signal 14"),
}
LEAVING = """
import argparse, concurrent.futures, os, signal, sys, threading, time
import ringreduce as rr

def fail():
    raise ValueError("boom")

others_wait = {others_wait}
rr.init()
rr.allreduce(1.0)
if rr.rank() == {rank}:
    open("leaves", "w").write(str(time.time()))
    {way}
if others_wait:
    rr.allreduce(1.0)
time.sleep(99)
"""


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("way", LEAVES)
def test_whatever_way_a_rank_leaves_the_job_is_over_within_seconds(hosts, python, script, way, rank):
    """On either host, while the others compute for long: with its code, and named."""
    code, how = LEAVES[way]
    path = script(LEAVING.format(rank=rank, way=way, others_wait="others_wait" in way))
    done = hosts.ringrun(python, "-np", 4, "-H", "h0:2,h1:2", python, path, returncode=code)
    took_s = time.time() - float((hosts.folder / "leaves").read_text())
    assert re.search(rf"rank {rank} of 4 (failed|left) first", done.stderr), done.stderr
    assert how in done.stderr
    assert took_s < patient(5), f"{took_s:.1f} s, with {done.stderr}"
    hosts.assert_nothing_is_left()


def test_a_rank_that_dies_as_soon_as_mpi_is_up_leaves_no_shared_memory(hosts, python, script):
    source = "import ringreduce as rr\nrr.init()\nif rr.rank() == 1:\n    raise ValueError('boom')\n"
    hosts.ringrun(python, *ALL, python, script(source), returncode=1)
    hosts.assert_nothing_is_left()


def test_the_own_address_needs_no_ssh(own_hosts, python):
    """An IPv6 address has another name for the MPI's launcher, which cannot tell that it is this host's."""
    for k in (0, 1):
        own_hosts.check(k, ["ip", "-6", "addr", "add", f"fd00::{k + 1}/64", "dev", "eth0", "nodad"])
    known = own_hosts.home / ".ssh" / "known_hosts"
    key = next(line.partition(" ")[2] for line in known.read_text().splitlines() if line.startswith("h1,"))
    known.write_text(f"{known.read_text()}fd00::2 {key}\n")  # but not fd00::1
    done = own_hosts.ringrun(python, "-H", "[fd00::1]:1,[fd00::2]:1", python, WHERE, returncode=0)
    assert sorted(done.stdout.splitlines()) == [f"[{k}] {k} h{k} 0 1 {k} 2 2 {999.0 * 3}" for k in (0, 1)]


def wait_for_training(hosts, job):
    wait_until(lambda: job.poll() is not None or (hosts.folder / "training").exists())
    assert job.poll() is None, job.communicate()


def test_a_folder_for_temporary_files_whose_name_has_a_space(hosts, python, script):
    """MPI's launchers are told a file there, among words between spaces."""
    folder = hosts.folder / "my files"
    folder.mkdir()
    command = ["env", f"TMPDIR={folder}", python.parent / "ringrun", *ALL, python, script("print('here')")]
    done = hosts.run(0, command, returncode=0)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] here" for rank in range(4)]
    hosts.assert_nothing_is_left()


UNTIL_TOLD = """
    import os
    import numpy as np
    import ringreduce as rr
    rr.init()
    while not rr.allreduce(np.ones(1) * os.path.exists("end"), name="end", op=rr.Max)[0]:
        open("training", "w").close()
    print("through")
"""


def test_a_network_that_is_gone_for_less_than_lost_after_ends_nothing(own_hosts, python, script):
    job = own_hosts.start_ringrun(python, *ALL, python, script(UNTIL_TOLD))
    wait_for_training(own_hosts, job)
    own_hosts.link_down(2)
    time.sleep(12)
    own_hosts.link_up(2)
    (own_hosts.folder / "end").touch()
    out, err = job.communicate(timeout=90)
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] through" for rank in range(4)]
    own_hosts.assert_nothing_is_left()


@pytest.mark.adapters
def test_a_host_whose_link_goes_down(own_hosts, python):
    job = own_hosts.start_ringrun(python, "--lost-after", "8", *ALL, python, STEPS, 0, "pass")
    wait_for_training(own_hosts, job)
    own_hosts.link_down(2)
    _, err = job.communicate(timeout=CUT_OFF_WITHIN_S)
    assert job.returncode not in (0, 2), err
    assert "h2" in err.strip().splitlines()[-1] or re.search(r"rank 2\b.*h2", err, re.DOTALL), err
    own_hosts.wait_until_gone(0, 1, 3)
    wait_until(lambda: own_hosts.only_ssh_sessions(2))
    assert [own_hosts.left_behind(k) for k in range(4)] == [[], [], [], []]


@pytest.mark.adapters
def test_a_daemon_of_mpi_s_that_is_killed(hosts, python):
    """It leaves files that only ringrun's agents there can remove. Open MPI ends the job, with MPICH it goes on."""
    job = hosts.start_ringrun(python, *ALL, python, STEPS, 0, "pass")
    wait_for_training(hosts, job)
    for pid, line in hosts.processes(2).items():
        if re.search(r"/(prted|hydra_pmi_proxy) ", line):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(5)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode not in (0, 2), err
    hosts.assert_nothing_is_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_ringrun_ends_and_so_does_every_host(hosts, python, number, code):
    job = hosts.start_ringrun(python, *ALL, python, STEPS, 0, "pass")
    wait_for_training(hosts, job)
    job.send_signal(number)
    _, err = job.communicate(timeout=60)
    assert job.returncode == code, err
    hosts.assert_nothing_is_left(within_s=10)


NEVER = "open('started', 'w').close()"


def assert_not_started(hosts, python, script, *words, where=ALL):
    """A job on all hosts ends with exit code 3 and says these words, before any rank has begun."""
    begin = time.monotonic()
    done = hosts.ringrun(python, *where, python, script(NEVER), returncode=3)
    assert time.monotonic() - begin < patient(20)
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not (hosts.folder / "started").exists()
    hosts.assert_nothing_is_left()


def test_a_host_that_cannot_be_reached(own_hosts, python, script):
    own_hosts.link_down(3)
    assert_not_started(own_hosts, python, script, "h3", where=("--start-timeout", "5", *ALL))


def test_a_wrong_key_and_the_right_one(own_hosts, python, script):
    key = own_hosts.home / ".ssh" / "id_ed25519"
    elsewhere = key.rename(own_hosts.home / "another name")
    assert_not_started(own_hosts, python, script, "Permission denied")
    own_hosts.ringrun(python, "-i", elsewhere, *ALL, python, script("print(1)"), returncode=0)
