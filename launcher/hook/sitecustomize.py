"""Runs when a rank's Python starts: lets a failure end a rank that has initialised MPI; offers its stacks; says at its
end whether it has joined other ranks.

Without it a rank with an uncaught exception prints its traceback and then waits in MPI_Finalize, at interpreter exit,
for ranks that wait for it elsewhere; the job hangs, or MPI ends the rank with an exit code of its own. With it the
interpreter leaves after the last atexit function, and does not reach MPI_Finalize. The same for a SystemExit with
another code than 0. Scripts that end in any other way are not touched.

faulthandler writes the stacks when a crash ends the process, to stderr, and when the rank's agent asks by a signal, to
a file next to the rank's error file, even while the main thread is stuck in C code. Only this process is asked, not
those that it starts: they do not find this folder, and one that is forked has no file of its own.

N ranks that never join train N models: front ends do so by default without a GPU, where each rank takes itself for the
only one. ringrun, which hears of all ranks, can tell.

Where a rank's first Python is a wrapper, as torchrun, and a process that it starts calls init(), ringreduce imports
this file there.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

_STACKS_SIGNAL = signal.SIGRTMAX - 5  # not the C library's, which has the lowest two; nor the JVMs' or valgrind's
_exit_codes: list[int] = []  # with which a SystemExit ends the interpreter
_TELL_S = 1.0  # for an agent that is slow to read
_pid = os.getpid()
_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
_COMPUTES = (*_LIGHTNING, "transformers.trainer", "accelerate", "torch", "jax", "tensorflow", "numpy")
"""What a rank that computes has imported, front ends first."""
torch_groups: int | None = None
"""How many process groups torch has made; None where nobody counts them: frameworks/torch_backend.py does."""
torch_started_mpi = False
"""Whether MPI was started for one of them, and not by the program."""
torch_trained_alone: Callable[[], bool] = bool
"""Whether torch's optimizers have stepped on this rank, and nothing as large as that was reduced; counted likewise."""


def _exit(status: Any = None, /) -> NoReturn:
    """Do what sys.exit() does. Up to Python 3.11 that makes no exception whose code the interpreter would read."""
    raise SystemExit(status)


def _hear_of_exit_codes() -> None:
    """Let _exits_with() hear of the code of a SystemExit that nobody has caught, whoever raised it.

    Before it ends, and waits for threads and children, the interpreter reads that: as only C code does, from no frame.
    """
    member = SystemExit.__dict__["code"]

    def read(error: SystemExit) -> Any:
        code = member.__get__(error)
        if sys._getframe().f_back is None:
            _exits_with(code)
        return code

    # the class is immutable; its dictionary is not
    attributes = gc.get_referents(SystemExit.__dict__)[0]
    attributes["code"] = property(read, member.__set__, member.__delete__, member.__doc__)


def _exits_with(code: Any) -> None:
    """Tell the agent, which reports this code whatever ends the process now: MPI may, when the others leave."""
    _exit_codes[:] = [code & 0xFF if isinstance(code, int) else int(code is not None)]
    if _exit_codes[0]:
        _tell(f'{{"exits": {_exit_codes[0]}, "pid": {os.getpid()}}}')


def _excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """As Python's own; and tell the agent, before the interpreter waits for threads. From init() on see
    ringreduce/monitor/excepthook.py.
    """
    sys.__excepthook__(kind, value, trace)
    if uncaught() is value and not isinstance(value, KeyboardInterrupt):  # programs call this, too, and go on
        _exits_with(1)


def uncaught() -> BaseException | None:
    """Return the exception that has ended the script, whoever has set sys.excepthook.

    Consoles, IPython and debuggers set sys.last_value, too, for what began in a frame of theirs.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    trace = error.__traceback__ if error else None
    return error if trace and trace.tb_frame.f_back is None else None


def exit_code() -> int:
    """Return the code with which the interpreter ends just now; 0 if it does not, or nothing has failed."""
    return _exit_codes[0] if _exit_codes else int(uncaught() is not None)


def _tell(said: str) -> None:
    """Send the rank's agent a JSON object, if it is there."""
    import _socket

    with contextlib.suppress(OSError, KeyError):
        own = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
        own.connect(f"{os.environ['RINGREDUCE_ERROR_FILE']}.agent")  # first: else it would poll for room
        own.settimeout(_TELL_S)
        own.send(said.encode())
        own.close()


def say_if_alone(*, ends: bool) -> None:
    """Tell ringrun when this process, which `ends` or goes on, has computed and joined no other rank."""
    imported = next((name for name in _COMPUTES if name in sys.modules), None)
    if not imported or os.environ.get("WORLD_SIZE") == "1" or os.getpid() != _pid:
        return
    trained_alone = ends and torch_trained_alone()
    in_vain = trained_alone or _reduces_nothing()
    if in_vain or not _may_have_joined():
        imported = "torch" if trained_alone else imported
        _tell(f'{{"alone": "{imported}", "ends": {int(ends)}, "in_vain": {int(in_vain)}}}')


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
    code = exit_code()
    if not code:
        with contextlib.suppress(Exception):
            say_if_alone(ends=True)
    if not code or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if not _exit_codes and isinstance(uncaught(), KeyboardInterrupt):
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
for _name, _ours in (("excepthook", _excepthook), ("exit", _exit)):  # pickled by name, for processes without this file
    _ours.__module__, _ours.__name__, _ours.__qualname__ = "sys", _name, _name
atexit.register(_leave)  # registered first, so it runs last
with contextlib.suppress(Exception):  # a Python that nobody knows yet: codes of sys.exit() are seen at the end only
    _hear_of_exit_codes()
with contextlib.suppress(Exception):  # no stderr, or no room for a file: a rank runs without, too
    _offer_stacks()

sys.modules["_ringrun_hook"] = _this = sys.modules[__name__]  # for ringreduce
if __name__ == "sitecustomize":
    del sys.modules["sitecustomize"]
    try:
        importlib.import_module("sitecustomize")  # the interpreter's own, which ours has hidden
    except ImportError:
        sys.modules["sitecustomize"] = _this
