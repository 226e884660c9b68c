"""How many CPUs a process may use: its affinity, and the quotas of cgroups of both versions, also in a real one."""

import json
import math
from pathlib import Path

import pytest

from ringrun.machine.cpus import cpu_quota, limited
from ringrun.machine.placement import automatic_size, place, threads_of
from ringrun.machine.topology import Core, Topology
from tests.support.cgroups import cgroup_below
from tests.support.fake_machines import write
from tests.support.loops import in_a_loop

V1 = "9:name=systemd:/\n4:memory:/a/b\n3:cpu,cpuacct:{}\n0::/\n"
V2 = "0::{}\n"
MOUNTS = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /cg/memory cgroup rw,memory 0 0\n"
MOUNTS_1 = MOUNTS + "cgroup /cg/cpu cgroup rw,nosuid,cpu,cpuacct 0 0\ncgroup2 /cg/unified cgroup2 rw 0 0\n"
MOUNTS_2 = "cgroup2 /cg cgroup2 rw,nsdelegate 0 0\n"


def quota_1(quota, period=100000):
    return {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": f"{period}\n"}


def quota_2(quota, period=100000):
    return {"cpu.max": f"{quota} {period}\n"}


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "quota"),
    [
        (V2.format("/"), MOUNTS_2, {}, math.inf),
        (V2.format("/a/b"), MOUNTS_2, {"cg/a/b": quota_2("max")}, math.inf),
        (V2.format("/a/b"), MOUNTS_2, {"cg/a/b": quota_2(150000)}, 1.5),
        (V2.format("/a/b"), MOUNTS_2, {"cg/a/b": quota_2(400000), "cg/a": quota_2(50000, 25000), "cg": {}}, 2.0),
        (V2.format("/a/b"), MOUNTS_2, {"cg/a/b": quota_2("max"), "cg/a/b/c": quota_2(100000)}, math.inf),
        (V2.format("/host/docker/7"), MOUNTS_2, {"cg": quota_2(300000)}, 3.0),
        (V2.format("/../a"), MOUNTS_2, {"cg": quota_2(300000), "a": quota_2(100000)}, 3.0),
        (V1.format("/a"), MOUNTS_1, {"cg/cpu/a": quota_1(-1), "cg/cpu": quota_1(-1)}, math.inf),
        (V1.format("/a/b"), MOUNTS_1, {"cg/cpu/a/b": quota_1(-1), "cg/cpu/a": quota_1(250000)}, 2.5),
        (V1.format("/kube/pod/7"), MOUNTS_1, {"cg/cpu": quota_1(20000, 10000)}, 2.0),
        (V1.format("/a"), MOUNTS_1, {"cg/memory/a": quota_1(100000)}, math.inf),
        (V1.format("/a"), MOUNTS_1, {"cg/cpu/a": {"cpu.cfs_quota_us": "x", "cpu.cfs_period_us": ""}}, math.inf),
        (V1.format("/a"), MOUNTS_1, {"cg/cpu/a": quota_1(100000, 0)}, math.inf),
        ("", "", {}, math.inf),
    ],
)
def test_the_smallest_quota_of_a_cgroup_and_of_those_above_it(groups, mounts, files, quota, tmp_path):
    write(tmp_path / "proc/self/cgroup", groups)
    write(tmp_path / "proc/self/mounts", mounts)
    for folder, texts in files.items():
        for name, text in texts.items():
            write(tmp_path / folder / name, text)
    assert cpu_quota(tmp_path) == quota


@in_a_loop(
    ("quota", "ranks", "automatic", "bound", "threads"),
    [
        (math.inf, 4, 8, True, 2),
        (math.inf, 4, 8, False, 4),
        (3.7, 1, 3, True, 3),
        (3.7, 3, 3, True, 1),
        (0.5, 1, 1, True, 1),
        (6.0, 2, 6, True, 3),
        (12.0, 2, 8, False, 6),
    ],
)
def test_ranks_and_their_threads_are_no_more_than_a_limit_has_cpus(quota, ranks, automatic, bound, threads):
    topology = Topology(tuple(Core((cpu, cpu + 8)) for cpu in range(8)), quota=quota)
    assert automatic_size(topology) == automatic
    assert threads_of(place(topology, ranks)[0], topology, ranks, bound=bound) == threads
    assert limited(8, quota) == automatic


def cpu_group(quota):
    """A cgroup with a quota, in which a process may put itself."""
    top = next(each for each in map(Path, ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup")) if (each / "cgroup.procs").exists())

    def set_up(group):
        name, text = (
            ("cpu.max", f"{quota} 100000") if (group / "cpu.max").exists() else ("cpu.cfs_quota_us", str(quota))
        )
        (group / name).write_text(text)

    return cgroup_below(top, "CPU time", set_up)


SHOW = "import json, os; print(json.dumps([os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS']]))"


@pytest.mark.without_mpi
def test_a_container_s_limit(start, python):
    with cpu_group(100000) as group:
        for flags in ([], ["-np", 1], ["-np", 1, "--no-bind"]):
            enter = {"preexec_fn": lambda: (group / "cgroup.procs").write_text("0")}
            process = start(*flags, python, "-c", SHOW, **enter)
            assert json.loads(process.stdout.readline().removeprefix("[0] ")) == ["1", "1"]
            assert process.wait(30) == 0
