"""Runs when a rank's Python starts: lets a failure end a rank that has initialised MPI; offers its stacks; says at its
end whether it has joined other ranks.

Without it a rank with an uncaught exception prints its traceback and then waits in MPI_Finalize, at interpreter exit,
for ranks that wait for it elsewhere; the job hangs, or MPI ends the rank with an exit code of its own. With it the
interpreter leaves after the last atexit function, and does not reach MPI_Finalize. The same for sys.exit() with
another code than 0. Scripts that end in any other way are not touched.

faulthandler writes the stacks when a crash ends the process, to stderr, and when the rank's agent asks by a signal, to
a file next to the rank's error file, even while the main thread is stuck in C code. Only this process is asked, not
those that it starts: they do not find this folder, and one that is forked has no file of its own.

N ranks that never join train N models: front ends do so by default without a GPU, where each rank takes itself for the
only one. ringrun, which hears of all ranks, can tell.
"""

import _thread
import atexit
import contextlib
import faulthandler
import importlib
import opcode
import os
import signal
import sys
from types import TracebackType
from typing import Any, NoReturn

_STACKS_SIGNAL = signal.SIGRTMAX - 5  # not the C library's, which has the lowest two; nor the JVMs' or valgrind's
_uncaught: list[type[BaseException]] = []
_RAISING = ("RERAISE", "RAISE_VARARGS")
_LAST_KNOWN_PYTHON = (3, 14)  # in which these are the instructions that raise again
_main_thread = _thread.get_ident()
_exits: list[SystemExit] = []  # the last that sys.exit() has raised
_pid = os.getpid()
_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
_COMPUTES = (*_LIGHTNING, "transformers.trainer", "accelerate", "torch", "jax", "tensorflow", "numpy")
"""What a rank that computes has imported, front ends first."""
torch_groups: int | None = None
"""How many process groups torch has made; None where nobody counts them. launcher/torch_backend.py does."""
torch_started_mpi = False
"""Whether MPI was started for one of them, and not by the program."""


def _excepthook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
    """Note that the script has failed. From init() on, ringreduce/monitor/excepthook.py calls this one."""
    _uncaught.append(kind)
    sys.__excepthook__(kind, value, traceback)


def _exit(status: Any = None, /) -> NoReturn:
    """Do what sys.exit() does, and keep what it raises."""
    error = SystemExit(status)
    if _thread.get_ident() == _main_thread:  # in another it ends only that
        _exits[:] = [error]
        atexit.unregister(_leave_exit_code)
        atexit.register(_leave_exit_code)  # registered last, so it runs first
    raise error


def _exit_code() -> int:
    """Return the code with which sys.exit() ends the interpreter just now; 0 if it does not."""
    if not _exits or not _is_uncaught(_exits[0]):
        return 0
    code = _exits[0].code
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def _is_uncaught(error: SystemExit) -> bool:
    """Return whether `error` ends the interpreter, or was caught, and the script went on.

    Its traceback begins where it was handled last: not at all up to Python 3.11, or in a frame that has not gone on
    since, or has raised it again; one that is not the outermost may have raised another since. In a Python whose
    bytecode is not known, only the outermost frame counts as one that has not gone on.
    """
    trace = error.__traceback__
    if trace is None:
        return True
    frame = trace.tb_frame
    is_outermost = frame.f_back is None
    if sys.version_info[:2] > _LAST_KNOWN_PYTHON:
        return is_outermost
    if frame.f_lasti == trace.tb_lasti:
        return True
    with contextlib.suppress(IndexError):
        return opcode.opname[frame.f_code.co_code[frame.f_lasti]] in (_RAISING if is_outermost else _RAISING[:1])
    return is_outermost


def _leave_exit_code() -> None:
    """Leave the code for the agent: on the way out MPI may end this process with another, when the others leave."""
    error_file = os.environ.get("RINGREDUCE_ERROR_FILE")
    if error_file and (code := _exit_code()):
        with contextlib.suppress(OSError), open(f"{error_file}.exit", "w") as file:
            file.write(str(code))


def say_if_alone(*, ends: bool) -> None:
    """Tell ringrun when this process, which `ends` or goes on, has computed and joined no other rank."""
    error_file = os.environ.get("RINGREDUCE_ERROR_FILE")
    imported = next((name for name in _COMPUTES if name in sys.modules), None)
    if not error_file or not imported or os.environ.get("WORLD_SIZE") == "1" or os.getpid() != _pid:
        return
    in_vain = _reduces_nothing()
    if in_vain or not _may_have_joined():
        import _socket  # a program that computes has it

        said = f'{{"alone": "{imported}", "ends": {int(ends)}, "in_vain": {int(in_vain)}}}'
        own = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            own.sendto(said.encode(), _socket.MSG_DONTWAIT, f"{error_file}.agent")
        own.close()


def _may_have_joined() -> bool:
    """Return whether this process may communicate with other ranks; ringrun hears of ringreduce's init() itself.

    Lightning starts MPI only to ask how many ranks there are.
    """
    modules: dict[str, Any] = sys.modules
    jax = getattr(modules.get("jax._src.distributed"), "global_state", None)
    return bool(
        ("torch" in modules and torch_groups != 0)
        or getattr(modules.get("torch.distributed.rpc.api"), "_ALL_WORKER_NAMES", None)
        or getattr(jax, "num_processes", 1) not in (1, None)
        or "TF_CONFIG" in os.environ
        or (not any(name in modules for name in _LIGHTNING) and _maps_mpi())
    )


def _reduces_nothing() -> bool:
    """Return whether accelerate trains on this rank alone: without a GPU it makes a group, and does not use it."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    kind = getattr(state, "_shared_state", {}).get("distributed_type")
    return getattr(kind, "value", None) == "NO" and (torch_started_mpi or not _maps_mpi())


def _maps_mpi() -> bool:
    if "mpi4py.MPI" in sys.modules:
        return True
    with open("/proc/self/maps", "rb") as file:
        return b"/libmpi" in file.read()


def _leave() -> None:
    """Exit as Python would, short of MPI_Finalize, if there was a failure and MPI is up."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    code = 1 if _uncaught else _exit_code()
    if not code:
        with contextlib.suppress(Exception):
            say_if_alone(ends=True)
    if not code or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if _uncaught and issubclass(_uncaught[-1], KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _offer_stacks() -> None:
    """Have faulthandler write a thread's stack: at a crash to stderr, at a signal to a file of this process's own.

    The first line of the file names that signal for the agent. To show all threads is not safe while they run.
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
sys.exit = _exit
atexit.register(_leave)  # registered first, so it runs last
with contextlib.suppress(Exception):  # no stderr, or no room for a file: a rank runs without, too
    _offer_stacks()

_this = sys.modules.pop("sitecustomize", None)
if _this is not None:
    sys.modules["_ringrun_hook"] = _this  # for launcher/torch_backend.py
try:
    importlib.import_module("sitecustomize")  # the interpreter's own, which ours has hidden
except ImportError:
    if _this is not None:
        sys.modules["sitecustomize"] = _this
