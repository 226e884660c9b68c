"""Keeps what every rank writes in files of its own: DIR/rank.N/stdout and DIR/rank.N/stderr, as Horovod names them.

They hold the bytes as the rank wrote them: no prefixes, and progress bars with all their frames.
"""

import errno
import os
import threading
from io import FileIO
from pathlib import Path

from ..errors import LauncherError, MachineError, UsageError

_STREAMS = ("stdout", "stderr")
_BLOCK_BYTES = 4096
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_THE_PATH = {*_FULL, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}


class OutputFiles:
    """The open files of all ranks. Files of an earlier run are overwritten.

    size:    how many ranks there are at first.
    most:    how many there may be, for the width of their numbers; 0: nobody knows.
    appends: what an earlier run has left stays in front.

    Raises: UsageError where the folder or a file cannot be made; MachineError if that is not because of its path.
    """

    def __init__(self, directory: str, size: int, most: int = 0, *, appends: bool = False) -> None:
        if not directory:
            raise UsageError("--output-filename '': expected a folder for the ranks' output")
        self._directory = Path(directory)
        self._width = len(str(max(size, most) - 1))
        self._mode = "ab" if appends else "wb"
        self._files: dict[tuple[int, str], FileIO] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self._has_complained = False
        try:
            for rank in range(size):
                self._open(rank)
            try_to_write(self._files[0, "stdout"], directory)
        except OSError as error:
            self.close()
            raise refusal("--output-filename", directory, error) from error

    def write(self, rank: int, stream: str, data: bytes) -> str | None:
        """Keep `data`. The first time that a file cannot be written, return the line that says so; never raises.

        That file ends there: it would otherwise hide a gap. A rank that came later gets its files here.
        """
        try:
            self._open(rank)
            _write_all(self._files[rank, stream], data)
        except ValueError:  # closed: the disk was full before, or the job is over
            return None
        except OSError as error:
            file = self._files.get((rank, stream))
            if file:
                file.close()
            with self._lock:
                is_first, self._has_complained = not self._has_complained, True
            if is_first:
                where = file.name if file else error.filename or self._directory
                return f"{where} cannot be written any more: {error.strerror}; it ends here, but the job continues"
        return None

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._is_closed = True
            for file in self._files.values():
                file.close()

    def _open(self, rank: int) -> None:
        """Make the files of a rank that has none yet; OSError where that fails, ValueError once all are closed."""
        with self._lock:
            if self._is_closed:
                raise ValueError
            folder = self._directory / f"rank.{rank:0{self._width}}"
            for stream in _STREAMS:
                if (rank, stream) not in self._files:
                    folder.mkdir(parents=True, exist_ok=True)
                    self._files[rank, stream] = FileIO(folder / stream, self._mode, opener=_open_at_once)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file. A pipe that nobody reads is an error, and not waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def refusal(flag: str, path: str, error: OSError, what: str = "folder") -> LauncherError:
    """Return what says that the folder, or file, given by `flag` cannot be used."""
    kind = MachineError if error.errno in _NOT_THE_PATH else UsageError
    where = f"{error.filename or path} cannot be made or written: {error.strerror}"
    if error.errno == errno.EEXIST:
        where = f"{error.filename} is a file, not a folder"
    room = f"make room there, or give another {what}"
    cure = room if error.errno in _FULL else f"give a {what} that this user can write to"
    return kind(f"{flag} {path}: {where}; {cure}")


def try_to_write(file: FileIO, directory: str) -> None:
    """Raise OSError if the disk is full: an empty file can be made there all the same."""
    try:
        size = file.seek(0, os.SEEK_END)
        _write_all(file, bytes(_BLOCK_BYTES))
        file.truncate(size)
        file.seek(size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, directory) from error


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
