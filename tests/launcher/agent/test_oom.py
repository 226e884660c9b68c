"""Whether it was the kernel's OOM killer: the parsers, the verdict, and a real one in a cgroup with little memory."""

import signal
import subprocess
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from ringrun.agent.oom import Counter, OomWatch, counters, judge
from tests.support.cgroups import cgroup_below
from tests.support.loops import in_a_loop
from tests.support.patience import patient

KILL = -signal.SIGKILL
V1, V2 = Counter(Path("/x/memory.oom_control"), "/job/7"), Counter(Path("/y/memory.events"), "/")
LINES = (
    "6,1,2,-;Memory cgroup out of memory: Killed process 41 (python) total-vm:699900kB, anon-rss:319856kB",
    "3,1,2,-;Out of memory: Killed process 42 (python) total-vm:1kB",
)
DID_IT = "killed by the kernel's OOM killer: out of memory (cgroup /job/7)"
LOGGED = "killed by the kernel's OOM killer: out of memory (as the kernel's log says)"
ONE_OF_ITS = "the kernel's OOM killer killed one of its processes: out of memory (cgroup /job/7)"
NOTHING = "there is no sign of the kernel's OOM killer"


@in_a_loop(
    ("code", "pids", "log", "before", "after", "verdict"),
    [
        (KILL, [7], None, {V1: 0}, {V1: 1}, DID_IT),
        (137, [7], None, {V1: 3}, {V1: 4}, DID_IT),
        (KILL, [7], None, {V1: 3}, {V1: 3}, NOTHING),
        (KILL, [7], LINES, {}, {}, NOTHING),
        (KILL, [7, 41], LINES, {}, {}, LOGGED),
        (137, [42], LINES, {V1: 1}, {V1: 1}, LOGGED),
        (1, [7], None, {V1: 0}, {V1: 2}, ONE_OF_ITS),
        (1, [7], LINES, {V1: 0}, {V1: 0}, ""),
        (0, [7], None, {}, {}, ""),
        (KILL, [7], (), {V2: 5}, {}, NOTHING),
    ],
)
def test_the_verdict(code, pids, log, before, after, verdict):
    assert judge(code, pids, log or (), before, after, log_is_readable=log is not None) == verdict


def make_cgroups(root):
    """A cgroup tree of both versions in `root`; return the mounts."""
    for folder, file, text in (
        ("memory/slurm/job7", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ("unified/user/app", "memory.events", "low 0\nhigh 0\nmax 9\noom 1\noom_kill 5\noom_group_kill 0\n"),
        ("memory", "memory.oom_control", "oom_kill 0\n"),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / file).write_text(text)
    return (
        f"tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup {root}/memory cgroup rw,relatime,memory 0 0\n"
        f"cgroup {root}/cpu cgroup rw,cpu 0 0\ncgroup2 {root}/unified cgroup2 rw 0 0\n"
    )


def test_the_counters_of_both_versions_are_found(tmp_path):
    mounts = make_cgroups(tmp_path)
    assert list(counters("9:name=systemd:/\n4:memory:/slurm/job7\n1:cpu:/\n0::/user/app\n", mounts)) == [
        Counter(tmp_path / "memory/slurm/job7/memory.oom_control", "/slurm/job7"),
        Counter(tmp_path / "unified/user/app/memory.events", "/user/app"),
    ]
    in_a_container = list(counters("4:cpu,memory:/docker/0123456789\n", mounts))
    assert in_a_container == [Counter(tmp_path / "memory/memory.oom_control", "/docker/0123456789")], "the mount"


def test_a_watch_compares_before_and_after(tmp_path):
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "mounts").write_text(make_cgroups(tmp_path))
    (proc / "cgroup").write_text("0::/user/app\n")
    watch = OomWatch(proc, str(tmp_path / "no log"))
    assert watch.verdict(KILL, [7]) == NOTHING
    (tmp_path / "unified/user/app/memory.events").write_text("oom 2\noom_kill 6\n")
    assert watch.verdict(KILL, [7]) == "killed by the kernel's OOM killer: out of memory (cgroup /user/app)"
    assert OomWatch(tmp_path / "nothing", str(tmp_path / "no log")).verdict(KILL, [7]).endswith("can be read")


@hypothesis.given(st.text(), st.text())
@hypothesis.example("0::/../../x\n", "cgroup2 / cgroup2 rw\n")
@hypothesis.example("0::relative\n0::", "a b cgroup2\n a  cgroup2 c\n")
def test_any_text_gives_counters_or_none(groups, mounts):
    assert isinstance(list(counters(groups, mounts)), list)


def memory_group(limit):
    """A memory cgroup below our own with so much memory."""
    groups, mounts = Path("/proc/self/cgroup").read_text(), Path("/proc/self/mounts").read_text()
    own = next(iter(counters(groups, mounts)), None)
    if own is None:
        pytest.skip("no memory cgroup here that counts OOM kills")

    def set_up(group):
        [name] = [name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists()]
        (group / name).write_text(limit)
        subprocess.run(["true"], check=True, preexec_fn=lambda: (group / "cgroup.procs").write_text("0"))

    return cgroup_below(own.file.parent, "memory", set_up)


FILL_MEMORY = "import itertools; [bytearray(b'x') * (1 << 24) for _ in itertools.count()]"


@pytest.mark.parametrize("around", [[], ["bash", "-c", '"$@"; exit $?', "bash"]], ids=["python", "in a shell"])
def test_a_rank_that_the_oom_killer_ends(start, program, around, wait_until_gone):
    with memory_group("300M") as group:
        command = [*around, *program("fails"), FILL_MEMORY]
        job = start("-np", 3, *command, preexec_fn=lambda: (group / "cgroup.procs").write_text("0"))
        _, told = job.communicate(timeout=patient(50))
        wait_until_gone()
    assert job.returncode == 137, told
    card = told[told.index("-- ringrun: rank 1 of 3 failed first") :].splitlines()
    assert "SIGKILL" in card[1]
    assert card[2].startswith("            killed by the kernel's OOM killer: out of memory (cgroup")
