"""The folder on this host in which ranks of an elastic job keep commits, in memory, for the job's next attempt.

ringrun chooses its name, which nobody can guess; the first agent makes it, and the agents of the last attempt remove
it, and no other folder. ringreduce writes and reads what is in it (ringreduce/elastic/kept.py).
"""

import contextlib
import os
import re
import secrets
import shutil
import stat

from .shm_cleanup import SHARED_MEMORY

_NAME = re.compile(rf"{SHARED_MEMORY}/ringrun-[0-9a-f]{{16}}\.commits")


def new_name() -> str:
    """Return the name of such a folder for one job."""
    return f"{SHARED_MEMORY}/ringrun-{secrets.token_hex(8)}.commits"


def prepared(folder: str) -> str:
    """Make the folder, for nobody but this user, and return its name; empty where none is wanted or possible."""
    if not _NAME.fullmatch(folder):
        return ""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):  # of another agent, or of the attempt before
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return folder
    return ""


def remove(folder: str) -> None:
    """Remove it and all commits; nothing but a folder of such a name."""
    if _NAME.fullmatch(folder):
        shutil.rmtree(folder, ignore_errors=True)
