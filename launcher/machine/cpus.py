"""How many CPUs this process may use: those that it may run on, and the time that its cgroups give it on them.

A container's limit (docker --cpus, a pod's limits, systemd's CPUQuota=) is a quota: so much time in each period, on any
CPUs. The smallest quota counts, of the process's own cgroup and of those above it.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst, cpu.max; Documentation/scheduler/sched-bwc.rst for version 1.
"""

import contextlib
import math
import os
from pathlib import Path

from .cgroups import cgroups_of


def usable_cpus() -> frozenset[int]:
    """Return the CPUs that this process may run on: its affinity, of which a cpuset is a part."""
    return frozenset(os.sched_getaffinity(0))


def usable_count() -> int:
    """Return how many CPUs' time this process may use."""
    return limited(len(usable_cpus()), cpu_quota())


def limited(count: float, quota: float) -> int:
    """Return how many of `count` CPUs a quota leaves: whole ones, at least 1.

    >>> limited(8, 2.5), limited(8, 0.5), limited(8, math.inf)
    (2, 1, 8)
    """
    return max(1, int(min(count, quota)))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many CPUs' time this process's cgroups give it, by files below `root`; infinite without a limit."""
    groups, mounts = (_read(root / "proc/self" / name) for name in ("cgroup", "mounts"))
    found = [folder for cgroup in cgroups_of(groups, mounts, "cpu") for folder in cgroup.folders]
    return min((_quota(root / str(folder).lstrip("/")) for folder in found), default=math.inf)


def _quota(folder: Path) -> float:
    """Return the quota of one cgroup; infinite where it has none, as -1 and max say."""
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    quota, period = quota or _read(folder / "cpu.cfs_quota_us"), period or _read(folder / "cpu.cfs_period_us")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if int(quota) > 0:
            return int(quota) / int(period)
    return math.inf


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
