"""An uncaught exception on one rank ends the job, and is reported to the launcher.

Otherwise this rank would wait in MPI_Finalize for the other ranks, and they for it. The same for any exit code but 0,
which the launcher's hook (launcher/hook/sitecustomize.py) knows.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from ringreduce.errors import NanError, PeerLostError, RingreduceError, described, message
from ringreduce.settings.log import LOGGER
from ringreduce.transport import mpi

EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")

_previous_hook: Any = None
_end: Callable[[BaseException], object] | None = None  # this process, while the hook is installed


@functools.cache
def import_launchers_hook() -> None:
    """Have it here, too, where a wrapper, as torchrun, was the rank's first Python; else it has run already."""
    if _launchers_hook() is None:
        importlib.import_module("ringrun.hook.sitecustomize")
    # runs before threads are joined, of which one may wait for other ranks
    getattr(threading, "_register_atexit", atexit.register)(_end_if_uncaught)


def _launchers_hook() -> Any:
    return sys.modules.get("_ringrun_hook")


def exit_code() -> int:
    """The code with which the script ends, at interpreter exit; 0 where nobody knows, as without ringrun."""
    hook = _launchers_hook()
    return int(hook.exit_code()) if hook else 0


def _end_if_uncaught() -> None:
    """Do what the hook does where the script has set another one since, which has printed the exception."""
    if _end is not None and (error := _launchers_hook().uncaught()) is not None:
        _end(error)


def install(error_file: str, at_end: Callable[[], object] = lambda: None) -> None:
    """Let uncaught exceptions end the job. No effect in a job of one rank without `error_file`.

    Before init(), and for scripts without ringreduce, launcher/hook/sitecustomize.py does this under ringrun.

    error_file: where the report is written for ringrun, which then ends the other ranks; empty: MPI_Abort ends them.
    at_end: is called before this process ends so; it does not raise.
    """
    global _previous_hook, _end
    uninstall()
    previous, alone = sys.excepthook, mpi.is_alone()

    def end(exc: BaseException) -> None:
        if error_file:
            write_report(error_file, exc)
        at_end()
        flush()
        code = INTERRUPTED_EXIT_CODE if isinstance(exc, KeyboardInterrupt) else EXIT_CODE
        if error_file:
            os._exit(code)
        mpi.abort(code)

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        # ringrun reports an interrupt once, and of ranks that have lost another only what came first
        if not (error_file and issubclass(kind, (KeyboardInterrupt, PeerLostError))):
            previous(kind, exc, trace)
        end(exc)

    if error_file or not alone:
        _previous_hook, _end = previous, end
        sys.excepthook = hook


def uninstall() -> None:
    """Restore the previous hook."""
    global _previous_hook, _end
    if _previous_hook is not None:
        sys.excepthook = _previous_hook
        _previous_hook = _end = None


def write_report(path: str, exc: BaseException) -> None:
    """Write the exception as JSON: its type, message, traceback, and the ranks it lost, or what led to it did."""
    lost = next((each for each in _chain(exc) if isinstance(each, PeerLostError)), None)
    report = {
        "exception": type(exc).__name__,
        "message": message(exc),
        "traceback": "".join(_without_own_frames(exc).format()),
        "lost_ranks": list(lost.lost_ranks) if lost else [],
        "culprit": exc.rank if isinstance(exc, NanError) else -1,
    }
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(report, file)
        os.replace(partial, path)
    except OSError as error:
        LOGGER.error(f"the report of this failure could not be written to {path}: {error}; it was {described(exc)}")


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """The exception, and those from which, or while which were handled, it was raised."""
    seen = set[int]()
    error: BaseException | None = exc
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _without_own_frames(exc: BaseException) -> traceback.TracebackException:
    """Its traceback; where an error is this package's own, and says what is wrong, without the frames of it."""
    formatted = traceback.TracebackException.from_exception(exc)
    part: traceback.TracebackException | None = formatted
    for error in _chain(exc):
        if part is None:
            break
        if isinstance(error, RingreduceError):
            part.stack = traceback.StackSummary.from_list(
                [frame for frame in part.stack if not frame.filename.startswith(_PACKAGE)] or part.stack
            )
        part = part.__cause__ or part.__context__
    return formatted


def flush() -> None:
    """Flush stdout and stderr, which os._exit() and MPI_Abort do not."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, None, or an object of the user's own
            stream.flush()
