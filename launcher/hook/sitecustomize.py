"""Runs when a rank's Python starts: lets an uncaught exception end a rank that has initialised MPI.

Without it such a rank prints its traceback and then waits in MPI_Finalize, at interpreter exit, for ranks that
wait for it elsewhere; the job hangs. With it the interpreter leaves after the last atexit function, and does not
reach MPI_Finalize. Scripts that end in any other way are not touched.
"""

import atexit
import contextlib
import importlib
import os
import signal
import sys
from types import TracebackType
from typing import Any

_uncaught: list[type[BaseException]] = []


def _excepthook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
    _uncaught.append(kind)
    sys.__excepthook__(kind, value, traceback)


def _leave() -> None:
    """Exit as Python would, short of MPI_Finalize, if an exception was uncaught and MPI is up."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if not _uncaught or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if issubclass(_uncaught[-1], KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(1)


def _forget_this_folder() -> None:
    """Take this folder off the path, for the rank's own subprocesses and for the sitecustomize it hides."""
    folder = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    kept = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != folder]
    if any(kept):
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        os.environ.pop("PYTHONPATH", None)


_forget_this_folder()
sys.excepthook = _excepthook
atexit.register(_leave)  # registered first, so it runs last

_this = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")  # the interpreter's own, which ours has hidden
except ImportError:
    if _this is not None:
        sys.modules["sitecustomize"] = _this
