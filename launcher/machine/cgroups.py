"""Where the kernel shows a process's cgroups, of both versions, from /proc/PID/cgroup and /proc/PID/mounts. Pure."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class Cgroup(NamedTuple):
    """A cgroup: its `name`, its version, and the folder of its files, behind it those of the cgroups above it.

    In a container without a cgroup namespace the name is the host's, and the mount shows the container's own: then the
    first of the folders that exists is its own.
    """

    name: str
    is_unified: bool
    folders: list[Path]


def cgroups_of(groups: str, mounts: str, controller: str) -> Iterator[Cgroup]:
    """Yield the cgroups with this controller that the texts of the two files lead to."""
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        unified = line.startswith("0::")
        if not unified and controller not in controllers.split(","):
            continue
        path = PurePosixPath("/", *(part for part in PurePosixPath(name).parts if part not in ("/", "..")))
        for top in _mounted(mounts, controller, unified):
            yield Cgroup(name, unified, [top / str(each).lstrip("/") for each in (path, *path.parents)])


def _mounted(mounts: str, controller: str, unified: bool) -> Iterator[Path]:
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        path, kind, options = fields[1:4]
        if kind == ("cgroup2" if unified else "cgroup") and (unified or controller in options.split(",")):
            yield Path(path.replace("\\040", " "))
