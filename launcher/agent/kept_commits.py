"""The folder on this host in which ranks of an elastic job keep commits, in memory, for the job's next attempt.

ringrun chooses its name, which nobody can guess; the first agent makes it, and the agents of the last attempt remove
it. ringreduce writes and reads what is in it (ringreduce/elastic/kept.py).
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Mapping

from ..environment import COMMITS_VARIABLE


def prepared(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's variables, having made the folder that they name; without it where that is not possible."""
    if (folder := variables.get(COMMITS_VARIABLE)) and not _make(folder):
        return {name: value for name, value in variables.items() if name != COMMITS_VARIABLE}
    return dict(variables)


def _make(folder: str) -> bool:
    """Have the folder, for nobody but this user."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):  # of another agent, or of the attempt before
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return False


def remove(folder: str) -> None:
    """Remove it and all commits; an empty name means none."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
