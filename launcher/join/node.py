"""A node that lends itself: it connects to the head, and runs there what the head asks for, until the job ends.

Each command has a connection of its own, with its input, output and end, as over ssh.
"""

import contextlib
import math
import os
import pwd
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from .. import processes
from ..cli import say
from ..connection import wire
from ..connection.link import HostSilentError, Link, connect_to
from ..connection.wire import CONNECT_S
from ..errors import MachineError, UsageError
from ..machine.topology import VISIBLE_VARIABLE
from .platforms import NodeRank

MORE_TIME = "allow more time: --join-timeout; in Ray's or Dask's run() timeout_s, in Spark's start_timeout"
_PAUSE_S = 0.5
_PROGRESS_S = 3.0
_OTHER_KEY_S = 5.0
"""The last job's head may still listen there, or another one's."""
_SIGNALLED_S = 5.0
"""For the head to end the job, after a signal to this node, which all nodes may have got."""
_LEFT_S = 3.0
"""For what runs here, once the job has ended."""
_LAST_WORDS_S = 1.0
_CHUNK_BYTES = 1 << 16
_NOT_RUN = 126
_NO_LOGIN = ("nologin", "false")  # of which some systems' /etc/shells has the first
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class _SignalledError(Exception):
    """A signal ends this node."""


class Lender:
    """This node, as the head at `node_rank` sees it."""

    def __init__(self, node_rank: NodeRank, authkey: bytes, lost_after_s: float) -> None:
        self._node_rank = node_rank
        self._authkey = authkey
        self._lost_after_s = lost_after_s
        self.is_node = False
        """The head has taken it."""

    def run(self, node: wire.Node, timeout_s: float) -> int:
        """Be this node; return the exit code of the job. MachineError where no head is found."""
        with contextlib.closing(self._find_head(timeout_s)) as link:
            link.send(node)
            self.is_node = True
            say(f"ringrun: {node.host} has joined the job of {self._node_rank.head}")
            released = self._serve(link)
        if released.why:
            say(f"ringrun: error: {released.why}")
        return released.code

    def _serve(self, link: Link) -> wire.Release:
        """Run what the head asks for, until the job has ended or the head is lost."""
        try:
            while not isinstance(message := link.receive(), wire.Release):
                if isinstance(message, wire.Run):
                    try:
                        threading.Thread(target=self._start, args=(message,), daemon=True).start()
                    except RuntimeError as error:  # there are too many
                        self._start(message, error)
        except (OSError, EOFError, ValueError) as error:
            silent = f"it has not answered for {self._lost_after_s:g} s (--lost-after)"
            why = silent if isinstance(error, HostSilentError) else str(error) or "it ended without a message"
            return wire.Release(1, f"the connection to the head, {self._node_rank.head}, is lost: {why}")
        return message

    def _find_head(self, timeout_s: float) -> Link:
        """Connect to the head, which may start later than this node."""
        begin_s = time.monotonic()
        say_s = begin_s + _PROGRESS_S
        where = f"{self._node_rank.head} port {self._node_rank.port}"
        while True:
            try:
                return connect_to(self._node_rank.head, self._node_rank.port, self._authkey, self._lost_after_s)
            except UnicodeError as error:  # nor will it be one later
                what = f"that is no host's name ({error}); is a variable in it not set?"
                raise UsageError(f"{where}: {what} ({self._node_rank.why})") from None
            except OSError as error:
                is_other = isinstance(error, PermissionError)
                until_s = begin_s + (min(timeout_s, _OTHER_KEY_S) if is_other else timeout_s)
                if (now_s := time.monotonic()) > until_s:
                    raise MachineError(_why_no_head(where, error, timeout_s, self._node_rank.why)) from None
                if now_s >= say_s:
                    say_s = now_s + (now_s - begin_s)
                    why, left_s = error.strerror or error, until_s - now_s
                    say(f"ringrun: {where}: no head has answered yet ({why}); trying for another {left_s:.0f} s")
            time.sleep(_PAUSE_S)

    def _call_back(self, run: wire.Run) -> Link:
        """Return a connection to the head for a command; OSError where it cannot be had."""
        try:
            link = self._find_head(CONNECT_S)
        except MachineError as error:
            say(f"ringrun: error: {error}")
            raise ConnectionError from error
        link.send(wire.Running(run.number))
        return link

    def _start(self, run: wire.Run, refused: Exception | None = None) -> None:
        """Run a command for the head, or say why it is `refused`; end it when nobody waits for it any more."""
        child = None
        with contextlib.suppress(OSError, EOFError, ValueError), contextlib.closing(self._call_back(run)) as link:
            try:
                if refused:
                    raise refused
                child = _started(wire.native(run.command), link, run.gpus)
            except (OSError, RuntimeError) as error:
                link.send(wire.Output("stderr", f"{socket.gethostname()} cannot run it: {error}\n".encode()))
                link.send(wire.Ended(_NOT_RUN, time.time()))
            while isinstance(message := link.receive(), wire.Input):
                with contextlib.suppress(OSError):  # it does not read
                    if child and child.stdin and message.data:
                        child.stdin.write(message.data)
                    elif child and child.stdin:
                        child.stdin.close()
        if child and child.stdin:
            child.stdin.close()
            if child.poll() is None:
                processes.signal_group(child.pid, signal.SIGTERM)
            child.wait()


def _started(command: str, link: Link, gpus: str) -> "subprocess.Popen[bytes]":
    """Start a command, to which these GPUs are visible, and a thread that sends what it writes.

    Raises: OSError where there is no shell or no room for it, RuntimeError where there are too many threads.
    """
    pipe, argv = subprocess.PIPE, [_shell(), "-c", command]
    variables = {**os.environ, **({VISIBLE_VARIABLE: gpus} if gpus else {})}
    child = subprocess.Popen(argv, 0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=variables)
    try:
        threading.Thread(target=_pump, args=(child, link), daemon=True).start()
    except RuntimeError:
        processes.signal_group(child.pid, signal.SIGKILL)
        with child:  # closes its pipes
            raise
    return child


def _pump(child: "subprocess.Popen[bytes]", link: Link) -> None:
    """Send what a command writes, and how it ends; what it has left behind may hold its pipes open."""
    assert child.stdout
    assert child.stderr
    until_s = math.inf
    with contextlib.suppress(OSError), child.stdout, child.stderr, selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ, "stdout")
        selector.register(child.stderr, selectors.EVENT_READ, "stderr")
        while selector.get_map() and time.monotonic() < until_s:
            for key, _ in selector.select(_LAST_WORDS_S):
                if data := os.read(key.fd, _CHUNK_BYTES):
                    link.send(wire.Output(key.data, data))
                else:
                    selector.unregister(key.fileobj)
            if until_s == math.inf and child.poll() is not None:
                until_s = time.monotonic() + _LAST_WORDS_S
        code = child.wait()
        link.send(wire.Ended(code if code >= 0 else 128 - code, time.time()))


def _shell() -> str:
    """Return the user's, as sshd does: an MPI's launcher writes its commands for that.

    Where it lets nobody in, or is not there, as in many containers, it is /bin/sh: there is no login here.
    """
    with contextlib.suppress(KeyError, OSError):  # a container's user need not have a name
        own = pwd.getpwuid(os.getuid()).pw_shell
        allowed = Path("/etc/shells").read_text(errors="replace").split()
        if own in allowed and Path(own).name not in _NO_LOGIN and os.access(own, os.X_OK):
            return own
    return "/bin/sh"


def own_node(number: int, slots: int, *, lends_part: bool) -> wire.Node:
    """Return what this host is to the head: a whole node, or one of its parts, with the GPUs that are visible here."""
    machine, gpus = "", ""
    if lends_part:
        with contextlib.suppress(OSError):
            root, boot = os.stat("/"), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "ipc")]
            machine = " ".join([boot, f"{root.st_dev}:{root.st_ino}", *namespaces])
        machine, gpus = machine or secrets.token_hex(), os.environ.get(VISIBLE_VARIABLE, "")
    return wire.Node(number, socket.gethostname(), slots, machine, gpus)


def lend(node_rank: NodeRank, authkey: bytes, node: wire.Node, timeout_s: float, lost_after_s: float) -> int:
    """Be this node until the job ends, and leave nothing of it behind; return its exit code.

    The first SIGINT or SIGTERM waits a while for the head to end the job, since all nodes may have got it.
    """
    lender = Lender(node_rank, authkey, lost_after_s)

    got: list[int] = []

    def end(number: int, _: object) -> None:
        got.append(number)
        if len(got) > 1 or not lender.is_node:
            raise _SignalledError(got[0])
        signal.setitimer(signal.ITIMER_REAL, _SIGNALLED_S)

    processes.adopt_orphans()
    for number in _ENDING:
        signal.signal(number, end)
    try:
        return lender.run(node, timeout_s)
    except _SignalledError as signalled:
        return 128 + int(signalled.args[0])
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        processes.kill_descendants(after_s=_LEFT_S)


def _why_no_head(where: str, error: OSError, timeout_s: float, why: str) -> str:
    if isinstance(error, PermissionError):
        return f"{where}: what listens there does not know this job's key; give all nodes the same key"
    cure = f"see that the head runs, and that its name and port are right; or {MORE_TIME}"
    return f"{where}: no head has answered for {timeout_s:g} s ({error}); {cure} ({why})"
