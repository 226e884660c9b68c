"""The folder on this host in which ranks of an elastic job keep commits, in memory, for the job's next attempt.

ringrun chooses its name, which nobody can guess; the first agent makes it, and the agents of the last attempt remove
it, and no other folder. ringreduce writes and reads what is in it (ringreduce/elastic/kept.py).

    agents, and ringrun on its own host, hold a lock ── a pause before the next attempt: on other hosts nobody does ── …

Where ringrun is killed in such a pause the folder stays; the next job there, whoever starts it, sweeps it away.
"""

import contextlib
import fcntl
import glob
import os
import re
import shutil
import stat
import time

from .shm_cleanup import SHARED_MEMORY

_NAME = re.compile(rf"{SHARED_MEMORY}/ringrun-[0-9a-f]{{16}}\.commits")

_locked: dict[str, int] = {}  # a descriptor of each folder that this process has prepared

_ABANDONED_S = 3600.0
"""A folder that has not been written for so long, and is not locked, belongs to no job: no pause is longer."""


def new_name() -> str:
    """Return the name of such a folder for one job."""
    return f"{SHARED_MEMORY}/ringrun-{os.urandom(8).hex()}.commits"


def prepared(folder: str) -> str:
    """Make the folder, for nobody but this user, and return its name; empty where none is wanted or possible.

    It is locked until this process ends.
    """
    if not _NAME.fullmatch(folder):
        return ""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):  # of another agent, or of the attempt before
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            _locked[folder] = os.open(folder, os.O_RDONLY)
            fcntl.flock(_locked[folder], fcntl.LOCK_SH)
            return folder
    return ""


def keep(folder: str, *, is_locked: bool) -> None:
    """Leave it for the job's next attempt; if ringrun has it locked, nobody need wait after the lock is gone."""
    if _NAME.fullmatch(folder):
        with contextlib.suppress(OSError):
            os.utime(folder, (0.0, 0.0) if is_locked else None)


def remove_if_last(folder: str) -> None:
    """Remove it unless another process of the job has it locked: commits of a host are all its ranks'."""
    if folder in _locked:
        with contextlib.suppress(OSError):  # where that fails this process has no lock any more
            fcntl.flock(_locked[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)


def sweep() -> None:
    """Remove such folders of this user that belong to no job any more."""
    for folder in filter(_NAME.fullmatch, glob.glob(f"{SHARED_MEMORY}/ringrun-*.commits")):
        with contextlib.suppress(OSError):  # it is gone, another user's, or locked
            if os.lstat(folder).st_mtime < time.time() - _ABANDONED_S:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(folder)
                finally:
                    os.close(descriptor)


def remove(folder: str) -> None:
    """Remove it and all commits; nothing but a folder of such a name."""
    if _NAME.fullmatch(folder):
        shutil.rmtree(folder, ignore_errors=True)
