"""An uncaught exception on one rank ends the job, and is reported to the launcher.

Otherwise this rank would wait in MPI_Finalize for the other ranks, and they for it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ringreduce import mpi
from ringreduce.errors import PeerLostError
from ringreduce.log import LOGGER

EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130

_previous_hook: Any = None


def install(error_file: str, at_end: Callable[[], object] = lambda: None) -> None:
    """Let uncaught exceptions end the job. No effect in a job of one rank without `error_file`.

    Before init(), and for scripts without ringreduce, launcher/hook/sitecustomize.py does this under ringrun.

    error_file: where the report is written for ringrun, which then ends the other ranks; empty: MPI_Abort ends them.
    at_end: is called before this process ends so; it does not raise.
    """
    global _previous_hook
    uninstall()
    previous, alone = sys.excepthook, mpi.is_alone()

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        # ringrun reports an interrupt once, and of ranks that have lost another only what came first
        if not (error_file and issubclass(kind, (KeyboardInterrupt, PeerLostError))):
            previous(kind, exc, trace)
        if error_file:
            write_report(error_file, kind, exc, trace)
        at_end()
        flush()
        code = INTERRUPTED_EXIT_CODE if interrupted else EXIT_CODE
        if error_file:
            os._exit(code)
        mpi.abort(code)

    if error_file or not alone:
        _previous_hook = previous
        sys.excepthook = hook


def uninstall() -> None:
    """Restore the previous hook."""
    global _previous_hook
    if _previous_hook is not None:
        sys.excepthook = _previous_hook
        _previous_hook = None


def write_report(path: str, kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
    """Write the exception as JSON: its type, message, traceback, and the lost ranks."""
    report = {
        "exception": kind.__name__,
        "message": str(exc),
        "traceback": "".join(traceback.format_exception(kind, exc, trace)),
        "lost_ranks": list(exc.lost_ranks) if isinstance(exc, PeerLostError) else [],
    }
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(report, file)
        os.replace(partial, path)
    except OSError as error:
        what = f"{kind.__name__}: {exc}"
        LOGGER.error(f"the report of this failure could not be written to {path}: {error}; it was {what}")


def flush() -> None:
    """Flush stdout and stderr, which os._exit() and MPI_Abort do not."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
