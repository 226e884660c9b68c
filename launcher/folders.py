"""The current folder, and private ones of a job, for its sockets and small files."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import MachineError
from .text import quoted

_LONGEST = 60  # characters; what is put there has long names, and a socket's path has room for about 100
_PLAIN = re.compile(r"[\w./+@,-]*", re.ASCII)  # a letter is a byte


def current_folder() -> str:
    """Return it; MachineError where it has been deleted, in which no mpirun starts."""
    try:
        return os.getcwd()
    except OSError as error:
        raise MachineError("the current folder has been deleted; go to one that exists (cd), and try again") from error


def absolute(path: str) -> str:
    """Return `path`, which may begin in the current folder, as os.path.abspath does."""
    return os.path.normpath(os.path.join(current_folder(), path))


def make_private_folder(prefix: str = "ringrun-") -> str:
    """Make one and return its name; MachineError where that is not possible.

    It is in the usual place, or in /tmp if a socket's path would be too long there; also where its name has a space or
    the like: MPI's launchers take a command of ssh's, with a file in it, as words between spaces.
    """
    import tempfile  # an agent beside ringrun makes none

    cure = "make room, or set TMPDIR"
    try:
        usual = tempfile.gettempdir()
        is_fit = len(usual) <= _LONGEST and _PLAIN.fullmatch(usual)
        if not is_fit:
            cure += f" to a path of at most {_LONGEST} characters, without spaces and the like, unlike {quoted(usual)}"
        return tempfile.mkdtemp(prefix=prefix, dir=usual if is_fit else "/tmp")  # noqa: S108 - mkdtemp is safe there
    except OSError as error:
        raise MachineError(f"no folder for temporary files can be made: {error}; {cure}") from error


@contextmanager
def private_folder(prefix: str = "ringrun-") -> Iterator[str]:
    """Have one for as long as the block runs."""
    folder = make_private_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
