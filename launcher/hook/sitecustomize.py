"""Runs when a rank's Python starts: lets an uncaught exception end a rank that has initialised MPI; offers its stacks.

Without it such a rank prints its traceback and then waits in MPI_Finalize, at interpreter exit, for ranks that
wait for it elsewhere; the job hangs. With it the interpreter leaves after the last atexit function, and does not
reach MPI_Finalize. Scripts that end in any other way are not touched.

faulthandler writes the stacks when a crash ends the process, to stderr, and when the rank's agent asks by a signal, to
a file beside the rank's error file, even while the main thread is stuck in C code. Only this process is asked, not
those that it starts: they do not find this folder, and one that is forked has no file of its own.
"""

import atexit
import contextlib
import faulthandler
import importlib
import os
import signal
import sys
from types import TracebackType
from typing import Any

_STACKS_SIGNAL = signal.SIGRTMAX - 5  # not the C library's, which has the lowest two; nor the JVMs' or valgrind's
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


def _offer_stacks() -> None:
    """Have faulthandler write a thread's stack: at a crash to stderr, at a signal to a file of this process's own.

    The file's first line tells the agent which signal that is. To show all threads is not safe while they run.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(all_threads=False)
    error_file = os.environ.get("RINGREDUCE_ERROR_FILE")
    if error_file:
        path = f"{error_file}.stacks.{os.getpid()}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        faulthandler.register(_STACKS_SIGNAL, file, all_threads=False)
        os.write(file, b"%d\n" % _STACKS_SIGNAL)


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
with contextlib.suppress(Exception):  # no stderr, or no room for a file: a rank runs without, too
    _offer_stacks()

_this = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")  # the interpreter's own, which ours has hidden
except ImportError:
    if _this is not None:
        sys.modules["sitecustomize"] = _this
