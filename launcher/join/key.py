"""The key of a job whose nodes join: the same text on all of them, which nobody else knows."""

import hashlib
import os
import stat
from collections.abc import MutableMapping

from ..errors import UsageError

KEY_VARIABLE = "RINGRUN_KEY"
_LEAST = 32
_MAKE_ONE = "make one for all nodes, as with: (umask 077; openssl rand -hex 32 > ringrun.key)"


def read_key(path: str | None, environ: MutableMapping[str, str]) -> bytes:
    """Return the key in the file `path` (-: standard input), by default in a variable, which is then removed.

    UsageError where there is none, or others could know it.
    """
    variable = environ.pop(KEY_VARIABLE, "")
    if path is None and not variable:
        raise UsageError(f"a job's nodes need a key: --key-file FILE, or the variable {KEY_VARIABLE}; {_MAKE_ONE}")
    where = KEY_VARIABLE if path is None else f"--key-file {path}"
    text = (variable if path is None else _line() if path == "-" else _file(path, where)).strip()
    if len(text) < _LEAST:
        raise UsageError(f"{where}: expected a key of at least {_LEAST} characters, got {len(text)}; {_MAKE_ONE}")
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _line() -> str:
    """Return a line of standard input, and leave what follows to rank 0."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        return stdin.readline().decode(errors="surrogateescape")


def _file(path: str, where: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (0, os.geteuid()):
                cure = f"make a copy that is yours: (umask 077; cat {path} > my.key)"
                raise UsageError(f"{where}: it belongs to user {found.st_uid}, who can read it; {cure}")
            # a Secret's file is root's, and its group is the pod's: fsGroup
            foreign = stat.S_IRWXO | (stat.S_IRWXG if found.st_uid == os.geteuid() else 0)
            if found.st_mode & foreign:
                mode = stat.S_IMODE(found.st_mode)
                raise UsageError(
                    f"{where}: others can read it (mode {mode:04o}); make it yours alone: chmod 600 {path}"
                )
            return file.read()
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}; {_MAKE_ONE}") from None
