"""Every exception that ringreduce raises on purpose.

    RingreduceError
    ├── InputError (ValueError, RuntimeError) an argument that this rank alone can see is wrong
    │   ├── UnsupportedArrayError            an array whose type or layout cannot be communicated
    │   └── SettingsError                    a RINGREDUCE_… variable that does not parse
    ├── NotInitializedError (ValueError)     a call before init()
    ├── StartupError (RuntimeError)          init() cannot form a world
    │   ├── MpiMissingError (ImportError)    no MPI library
    │   └── LauncherMismatchError            started by another MPI's launcher: every rank would be 0 of 1
    ├── JobFailedError (RuntimeError)         run(): a rank of the job failed; the text is ringrun's report
    ├── MissingExtraError (ImportError)      an optional package is needed; the message says how to install it
    ├── NanError (FloatingPointError)        check=nan:raise: a NaN or an infinity; on all ranks, in the same step
    ├── BackwardError (AssertionError, RuntimeError)  backward() or zero_grad() while a gradient is being reduced
    └── CollectiveError (RuntimeError)       a collective failed; Horovod's name is HorovodInternalError
        ├── MismatchError                    ranks called with different shapes, dtypes, ops …; the job can go on
        ├── StalledError                     waited longer than `stall_abort_s` for other ranks
        └── PeerLostError                    a rank that this one waits for has left; `lost_ranks` names it

HostsUpdatedInterrupt (RuntimeError) stands beside it: it is no failure.

A message names the place, the expected and the actual value, and the remedy.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

__all__ = ["CollectiveError", "HorovodInternalError", "HostsUpdatedInterrupt", "InputError", "JobFailedError"]
__all__ += [
    "LauncherMismatchError",
    "MismatchError",
    "MissingExtraError",
    "MpiMissingError",
    "NanError",
    "NotInitializedError",
    "PeerLostError",
    "RingreduceError",
]
__all__ += ["SettingsError", "StalledError", "StartupError", "UnsupportedArrayError"]


class RingreduceError(Exception):
    """The base class of all errors that ringreduce raises deliberately."""


class InputError(RingreduceError, ValueError, RuntimeError):
    """An argument that is wrong on this rank. Horovod raises either ValueError or RuntimeError."""

    at: int | None = None  # of which array, by its place; None: the text says so, or it is of none


class UnsupportedArrayError(InputError):
    """An array whose element type, memory layout or kind cannot be communicated."""


class SettingsError(InputError):
    """A RINGREDUCE_… variable holds a value that does not parse."""


class NotInitializedError(RingreduceError, ValueError):
    """A function that needs the world was called before `init()` or after `shutdown()`."""


class StartupError(RingreduceError, RuntimeError):
    """`init()` cannot form a world."""


class MpiMissingError(StartupError, ImportError):
    """mpi4py finds no MPI library."""


class LauncherMismatchError(StartupError):
    """The launcher belongs to a different MPI from the one that mpi4py loads."""


class JobFailedError(RingreduceError, RuntimeError):
    """A rank of a job that `run()` started has failed, or the job was ended; the text is ringrun's report."""


class MissingExtraError(RingreduceError, ImportError):
    """An optional package is missing, or cannot be used; the message says how to install one that can."""

    @classmethod
    def of(cls, needs: str, module: str, error: ImportError, install: str = "") -> MissingExtraError:
        """The error for a module that is not installed, or is, and lacks something itself.

        needs: who needs what, as in "ringreduce.jax needs JAX".  install: what pip installs it by, if not by `module`.
        A folder of that name from which something is imported is no module either: it has no file.
        """
        if error.name == module and error.path is None:
            return cls(f"{needs}; install it with: pip install {install or module}")
        return cls(f"{needs}, which is installed but cannot be imported: {error}")


class NanError(RingreduceError, FloatingPointError):
    """With `check("nan:raise")`, on all ranks in the same step: which `rank` has a NaN or an infinity, and in what."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class BackwardError(RingreduceError, AssertionError, RuntimeError):
    """A gradient was computed again, or cleared, while it was being reduced. Horovod raises an AssertionError."""


class CollectiveError(RingreduceError, RuntimeError):
    """A collective operation failed."""


HorovodInternalError = CollectiveError


class MismatchError(CollectiveError):
    """The ranks did not call the same operation on equal shapes; raised on every rank, and the job can continue."""


class StalledError(CollectiveError):
    """Other ranks did not submit a tensor, or made no progress, for longer than the setting `stall_abort_s`.

    If the operation had begun, its array may still change: a message that has begun to arrive cannot be cancelled.
    """


class PeerLostError(CollectiveError):
    """A rank that this one waits for has left the job; `lost_ranks` contains it."""

    def __init__(self, message: str, lost_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.lost_ranks = tuple(lost_ranks)


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The ranks of an elastic job have changed, between two steps; `elastic.run` begins again with the current ones.

    skip_sync: all ranks have the same state, so none needs another's. In an elastic job `elastic.run` finds out itself.
    Source: Horovod's.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks of this job have changed; elastic.run catches this, and begins again with them")
        self.skip_sync = skip_sync


def message(error: BaseException) -> str:
    """Its text, also where a class of the user's own raises in `__str__`."""
    return str(traceback.TracebackException.from_exception(error, limit=0))


def described(error: BaseException) -> str:
    """Its class and its text."""
    return f"{type(error).__name__}: {message(error)}"
