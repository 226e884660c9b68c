"""Files in shared memory that MPI leaves when a rank is killed: found while the rank runs, removed after its end.

MPI libraries share memory between a host's ranks through files in /dev/shm, and delete them when they finalize, which
a killed rank does not. Where an MPI lets one choose the folder (engines: `shared_memory`) the rank gets one of its own,
which its agent removes. Of the others the agent notes which files of MPI's its rank has mapped, and removes those that
are still there when no process maps them any more: the last agent of a host to look does it. Never another job's: that
one's ranks map it, and a file that no rank of this job has mapped is not touched.
"""

import contextlib
import glob
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..engines import Engine
from ..processes import all_processes, in_session, state_of

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where Linux has it; folders there have random names
_NAMES = re.compile(r"(mpich_shm_|sm_segment\.|vader_segment\.|osc_sm|osc_rdma)[\w.-]*")
_DAEMONS_FILES = "/tmp/hydra_hwloc_xmlfile_*"  # noqa: S108 - only our own are removed
_LOOKS_S = (0.2, 0.1, 0.1, 0.1, 0.2, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""After the start, one after the other: all ranks of a host may be killed at once, too late to look, or die young.

When ringreduce has started MPI it says what it has mapped.
"""
_REST = 50
"""A look takes longer on a host with many processes, and every rank's agent takes one: at least so often its time lies
between two."""
_PAUSES_S = (0.02, 0.04, 0.08, 0.16, 0.2)


class ShmCleanup:
    """One agent's, for the processes of its rank. `directory` is where the rank's files are, which nobody else has."""

    def __init__(self, directory: str, rank: int) -> None:
        self._name = f"{_prefix(directory)}{rank}"
        self._folder: str | None = None
        self._mapped: set[tuple[str, int]] = set()

    def variables(self, engine: Engine, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make MPI in the rank use a folder of its own; none if the user has chosen one."""
        if not engine.shared_memory("") or any(name.endswith("_backing_directory") for name in environ):
            return {}
        folder = os.path.join(SHARED_MEMORY, self._name)
        try:
            os.mkdir(folder, 0o700)
        except OSError:
            return {}
        self._folder = folder
        return engine.shared_memory(folder)

    def watch(self, session: int) -> None:
        """Look a few times, in the background, at what the processes of `session` have mapped."""

        def look() -> None:
            took_s = 0.0
            for wait_s in _LOOKS_S:
                time.sleep(max(wait_s, _REST * took_s))
                began_s = time.monotonic()
                self.look(session)
                took_s = time.monotonic() - began_s

        threading.Thread(target=look, daemon=True).start()

    def note(self, lines: Iterable[str]) -> None:
        """Note what the rank says that it has mapped, in lines of /proc/PID/maps."""
        self._mapped |= set(_segments(map(str, lines)))

    def look(self, session: int) -> None:
        """Note what the processes of `session` have mapped, if they can be read; called before they are ended."""
        with contextlib.suppress(OSError):  # as where no descriptor is free
            for pid in in_session(session):
                self._mapped |= mapped(pid)

    def remove(self) -> None:
        """Remove what is left and no process maps; waits a moment for those that have just been killed."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for pause_s in _PAUSES_S:
            left = {(path, inode) for path, inode in self._mapped if _is_still(path, inode)}
            used = set().union(*(mapped(pid) for pid in all_processes())) if left else set()
            for path, _ in left - used:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            if not left & used:
                return
            time.sleep(pause_s)


def remove_folders(directory: str) -> None:
    """Remove the folders of agents that were killed themselves; ringrun calls it for those of its own host."""
    for folder in glob.glob(f"{os.path.join(SHARED_MEMORY, _prefix(directory))}*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_daemons_files(daemon: int, since_s: float) -> None:
    """Remove the files of the MPI's daemon, process `daemon`, at the end of the job, when nothing needs them.

    They are those that it has open; and if it has been killed by now, those made `since_s` that nobody has open: a
    daemon that runs keeps its own open.
    """
    own = _open_files([daemon])
    made = {path: found for path in glob.glob(_DAEMONS_FILES) if (found := _lstat(path))}
    mine = {path for path, found in made.items() if _key(found) in own}
    if left := {path for path, found in made.items() if found.st_mtime >= since_s} - mine:
        used = _open_files(all_processes())
        mine |= {path for path in left if _key(made[path]) not in used}
    for path in mine:
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_session_directory(daemon: int, environ: Mapping[str, str]) -> None:
    """Remove the session directory of Open MPI's daemon, process `daemon`, which was killed and could not do it."""
    path = environ.get("PMIX_SERVER_TMPDIR", "")
    if os.path.basename(path) == f"prted.{daemon}" and state_of(daemon) == "X":
        shutil.rmtree(path, ignore_errors=True)


def _open_files(pids: Iterable[int]) -> set[tuple[int, int]]:
    """Return the keys of the files that these processes have open, as far as that may be seen."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it is gone, or another user's
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(_key(os.stat(descriptor.path)))
    return found


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _lstat(path: str) -> os.stat_result | None:
    """Return what is known of a file of ours; None if it is gone or another user's."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return found if found.st_uid == os.geteuid() else None
    return None


def _prefix(directory: str) -> str:
    return f"{os.path.basename(directory)}.rank"


def mapped(pid: int) -> set[tuple[str, int]]:
    """Return path and inode of the files of MPI's in shared memory that process `pid` has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # it is gone, or another user's: that one cannot have mapped what only we may open
        return set()
    return set(_segments(lines))


def _segments(lines: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield path and inode of each line of /proc/PID/maps that names such a file."""
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4].isdecimal():
            folder, name = os.path.split(fields[5])
            if folder == SHARED_MEMORY and _NAMES.fullmatch(name):
                yield fields[5], int(fields[4])


def _is_still(path: str, inode: int) -> bool:
    found = _lstat(path)
    return found is not None and found.st_ino == inode
