"""Processes: ending them, also with their parent; their limits; what /proc says about them."""

import contextlib
import ctypes
import errno
import os
import pwd
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import MachineError
from .text import format_spans, quoted

_PR_SET_PDEATHSIG = 1
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_PR_SET_CHILD_SUBREAPER = 36
_SHELLS = ("sh", "ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "tcsh", "zsh")
_LOOK_S = 0.01
_PATIENCE_S = 2.0  # with what SIGTERM or SIGKILL is to end


# what start_with_parent runs beside other threads, where a fork may run no Python
_BEFORE_EXEC = """
import ctypes, errno, os, signal, sys
parent, number, ignored, found, *argv = sys.argv[1:]
ctypes.CDLL(None).prctl(1, int(number))
if os.getppid() != int(parent):
    os.kill(os.getpid(), signal.SIGKILL)
for each in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
    signal.signal(each, signal.SIG_DFL)
for each in filter(None, ignored.split(",")):
    signal.signal(int(each), signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
try:
    os.execv(found, argv)
except OSError as error:
    if error.errno != errno.ENOEXEC:
        raise
    os.execv("/bin/sh", ["sh", found, *argv[1:]])
"""


def start_with_parent(
    argv: Sequence[str], number: int, ignored: Collection[int] = (), **options: Any
) -> "subprocess.Popen[bytes]":
    """Start `argv`, which gets signal `number` when this thread ends, and ignores the signals `ignored`; SIGINT is not
    blocked there. `options` are Popen's. A script that names no interpreter is one of sh, as in a shell. OSError where
    `argv` cannot be executed.
    """

    def arm() -> None:
        for each in ignored:
            signal.signal(each, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    path = (options.get("env") or os.environ).get("PATH", os.defpath)
    found = shutil.which(argv[0], path=path)
    if threading.active_count() == 1:
        options["preexec_fn"] = before_exec(die_with_parent(number), arm)
        try:
            return subprocess.Popen(argv, **options)
        except OSError as error:
            if error.errno != errno.ENOEXEC or found is None:
                raise
            return subprocess.Popen(["/bin/sh", found, *argv[1:]], **options)
    if found is None:
        number = errno.EACCES if os.sep in argv[0] and os.path.exists(argv[0]) else errno.ENOENT
        raise OSError(number, os.strerror(number), argv[0])
    helper = [sys.executable, "-I", "-S", "-c", _BEFORE_EXEC, str(os.getpid()), str(int(number))]
    return subprocess.Popen([*helper, ",".join(map(str, map(int, ignored))), found, *argv], **options)


def why_not_started(error: OSError, program: str) -> str:
    """Return why `program` does not run; of a script the kernel says neither what is missing nor where."""
    why = f"{error.strerror or error} ({error.filename or program})"
    if error.errno == errno.ENOEXEC:
        first = "a script's first line must name its interpreter, such as #!/usr/bin/env python3"
        interpreter = "sh" if program.endswith(".sh") else "python"
        return f"{why}: {first}; or start it with ringrun … {interpreter} {program}"
    if error.errno == errno.ENOENT and error.filename in (None, program):
        found = shutil.which(program)
        if found is None and os.sep not in program and os.path.exists(program):
            return f"{why}; to run the file here: ./{program}"
        with contextlib.suppress(OSError), open(found or program, "rb") as file:
            first = file.readline().decode(errors="replace").rstrip("\n")
            if first.startswith("#!") and first.endswith("\r"):
                windows = f"it has Windows line endings, so the system looks for {quoted(first[2:])}"
                return f"{why}: {windows}; to change them: sed -i 's/\\r$//' {program}"
            if first.startswith("#!"):
                return f"{why}: its first line, {quoted(first)}, names an interpreter that does not exist there"
    return why


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait: it could come when a child runs already, and nobody knows yet that it must be ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(number: int) -> Callable[[], None]:
    """Return what a child runs before exec to get signal `number` when its parent dies.

    The parent is the thread that starts the child: start it from one that lives as long as the process.
    """
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return arm


def open_standard_streams() -> None:
    """Open /dev/null as each of stdin, stdout and stderr that is closed, so that no other file becomes one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def home() -> str:
    """Return this user's home by the system's table, for who has no HOME, as a service has none: Open MPI needs one."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container's user need not have a name
        return "/"


def show_as(argv: Sequence[str]) -> None:
    """Let `ps` and `top` show these words as what this process runs, if the kernel can; otherwise the old ones stay.

    Called before there are threads: another one could move the end of the heap, which is passed along.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    try:
        stat = [0, 0, 0, *Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()]  # numbered as in proc(5)
    except OSError:
        return
    address = libc.malloc(ctypes.c_size_t(len(words)))  # for as long as the process lives
    ctypes.memmove(address, words, len(words))
    code, data_and_heap, stack, environment = stat[26:28], stat[45:48], stat[28], stat[50:52]
    ends = [*map(int, (*code, *data_and_heap, 0, stack, address, address + len(words), *environment))]
    nothing_else = 0xFFFFFFFF << 32  # no auxiliary vector, and no other executable
    memory_map = (ctypes.c_uint64 * 13)(*ends, 0, nothing_else)
    size = ctypes.c_ulong(ctypes.sizeof(memory_map))
    memory_map[5] = libc.sbrk(0)  # last of all, as what is made before may need a larger heap
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, memory_map, size, ctypes.c_ulong(0))


def adopt_orphans() -> None:
    """Become the parent of each process that descends from this one and loses its own."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(after_s: float = 0.0) -> None:
    """Kill all that descends from this process, and what it adopts by that; one that the kernel holds may stay.

    after_s: how long they may take to end by themselves.
    """
    until_s = time.monotonic() + after_s
    while time.monotonic() < until_s and _descendants():
        time.sleep(_LOOK_S)
    until_s = time.monotonic() + _PATIENCE_S
    while (descendants := _descendants()) and time.monotonic() < until_s:
        for pid in descendants:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _descendants() -> list[int]:
    """Return this process's children, their children and so on, but those that have ended.

    A child that the kernel still holds, to free its memory, keeps its own children from being adopted.
    """
    children: dict[int, list[int]] = {}
    for pid in all_processes():
        children.setdefault(int(_status(pid).get("PPid", "0")), []).append(pid)
    found = [os.getpid()]
    for parent in found:
        found += children.get(parent, ())
    return [pid for pid in found[1:] if state_of(pid) != "X"]


def bind_to(cpus: Collection[int]) -> Callable[[], None]:
    """Return what a child runs before exec to run on `cpus` only, with all it starts.

    Where it is forbidden (by a sandbox, or a CPU has just been taken away) the child runs where it did, and says so
    on its stderr.
    """

    def bind() -> None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            os.write(2, f"ringrun: not bound to CPUs {format_spans(cpus)}: {error.strerror}\n".encode())

    return bind


def raise_open_files(wanted: int, needed: int) -> int:
    """Raise this process's limit of open files to `wanted` more than it has, if it is lower; return what it was.

    Raises: MachineError where even `needed` more are not allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = len(os.listdir("/proc/self/fd"))
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if is_open + needed > most:
        raise MachineError(
            f"this job needs {is_open + needed} open files here (about one for each rank, and three with "
            f"--output-filename), and no more than {most} are allowed; raise the limit: `ulimit -Hn "
            f"{is_open + wanted}`, or "
            "in /etc/security/limits.conf, or as LimitNOFILE= of the service that starts ringrun"
        )
    if soft != resource.RLIM_INFINITY and soft < min(is_open + wanted, most):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(is_open + wanted, most), hard))
    return soft


def limit_open_files(soft: int) -> Callable[[], None] | None:
    """Return what a child runs before exec to have the limit `soft` as ringrun had it; None for 0."""
    if not soft:
        return None

    def limit() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return limit


def before_exec(*steps: Callable[[], None] | None) -> Callable[[], None]:
    """Return what runs those of `steps` that there are, in this order, in a child before exec."""

    def run() -> None:
        for step in steps:
            if step is not None:
                step()

    return run


def how_ended(code: int) -> str:
    """Return how a process has ended, after its name."""
    if code >= 0:
        return f"ended with exit code {code}"
    has_name = -code in signal.valid_signals() and -code < signal.SIGRTMIN
    return f"was killed by {signal.Signals(-code).name if has_name else f'signal {-code}'}"


def signal_group(leader: int, number: int) -> None:
    """Send signal `number` to the process group that `leader` leads, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def signal_main_thread(pid: int, number: int) -> None:
    """Send signal `number` to the main thread of process `pid`, if it is there."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is not None:
        tgkill(pid, pid, number)
    else:  # another C library than glibc: Linux prefers the main thread by itself
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def signals_caught(pid: int) -> set[int]:
    """Return the signals for which process `pid` has handlers; none if it is gone."""
    mask = int(_status(pid).get("SigCgt", "0"), 16)
    return {bit + 1 for bit in range(mask.bit_length()) if mask >> bit & 1}


def state_of(pid: int) -> str:
    """Return the letter of proc(5) for what process `pid` does: R, S, D, T …; X if it has ended.

    Z: its main thread has ended, and others of its threads have not. Until they have, nobody adopts its children.
    """
    status = _status(pid)
    state = status.get("State", "X")[:1]
    return "X" if state == "Z" and int(status.get("Threads", "0")) <= 1 else state


def starter() -> str:
    """Return the name of the program that has started this one, behind the shells in between; empty where none is.

    It is "ringrun" where this is the command of a rank, which an agent starts.
    """
    pid = os.getppid()
    while pid and (status := _status(pid)).get("Name") in _SHELLS:
        pid = int(status["PPid"])
    return "ringrun" if _is_agent(pid) else _status(pid).get("Name", "")


def _is_agent(pid: int) -> bool:
    try:
        return b"ringrun.agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def in_session(session: int) -> list[int]:
    """Return the processes of a session, as which a rank's command is started; those that it left too."""
    return [pid for pid in all_processes() if _session_of(pid) == session]


def wake_up(session: int) -> list[int]:
    """Let the processes of a session that are stopped go on; return which were."""
    stopped = [pid for pid in in_session(session) if state_of(pid) == "T"]
    for pid in stopped:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
    return stopped


def all_processes() -> list[int]:
    """Return the processes of this host."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _session_of(pid: int) -> int:
    """Asked of the kernel: to read /proc/PID/stat takes thirty times as long, and each agent of a host asks for all."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def end_daemon(pid: int, names: Collection[str]) -> None:
    """End process `pid` if it is a program of one of these `names`: with SIGTERM, then with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() not in names:
                return
            os.kill(pid, number)
        except OSError:
            return  # it is gone, or was never ours
        until_s = time.monotonic() + _PATIENCE_S
        while state_of(pid) != "X" and time.monotonic() < until_s:
            time.sleep(_LOOK_S)


def boot() -> str:
    """Return which boot of the kernel this is, as preflight/probe.py does; empty where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
