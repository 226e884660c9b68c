"""No rank dies alone: an uncaught exception on one rank ends the job, and is told to the launcher.

Without this, MPI would wait in its finalization for the other ranks, and they for this one.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from types import TracebackType
from typing import Any

from ringreduce import mpi
from ringreduce.errors import PeerLostError
from ringreduce.log import LOGGER

EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130

_previous_hook: Any = None


def install(error_file: str) -> None:
    """Have uncaught exceptions end the job; for a process that is alone they end only that, as ever.

    Before init(), and for scripts without ringreduce, launcher/hook/sitecustomize.py does the like under ringrun.

    error_file: set by ringrun: the report goes there, and this process ends at once; the launcher ends the others.
                Empty: MPI_Abort ends them.
    """
    global _previous_hook
    uninstall()
    previous, alone = sys.excepthook, mpi.is_alone()

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        if not (interrupted and error_file):  # ringrun says once that it was interrupted
            previous(kind, exc, trace)
        if error_file:
            write_report(error_file, kind, exc, trace)
        flush()
        code = INTERRUPTED_EXIT_CODE if interrupted else EXIT_CODE
        if error_file:
            os._exit(code)
        mpi.abort(code)

    if error_file or not alone:
        _previous_hook = previous
        sys.excepthook = hook


def uninstall() -> None:
    """Put the previous hook back."""
    global _previous_hook
    if _previous_hook is not None:
        sys.excepthook = _previous_hook
        _previous_hook = None


def write_report(path: str, kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
    """Write what went wrong as JSON: exception, message, traceback, and the ranks that it blames."""
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
        LOGGER.error(f"the report of this failure could not be written to {path}: {error}")


def flush() -> None:
    """Let nothing that was printed be lost by the hard exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
