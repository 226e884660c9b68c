"""A rank's part: start the server, join it, and hear who is lost."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from subprocess import DEVNULL, PIPE, Popen

from ..agent.shm_cleanup import mapped
from ..connection import wire
from ..connection.link import Link, connect
from ..engines.openmpi import OpenMPI
from ..processes import boot, how_ended
from ..text import numbered
from .answers import shows

START_S = 60.0
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from ringrun.pmi.server import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_STARTED: list[Popen[str]] = []


class NotJoinedError(Exception):
    """There will be no world with this rank."""


class NobodyThereError(NotJoinedError):
    """Nothing answers at that address."""


def start(size: int) -> str:
    """Start the process that answers `size` ranks; returns its address, with a key, for `join` on each of them.

    Raises: NotJoinedError where it does not start.
    """
    command = [sys.executable, "-c", _PROGRAM, str(size), str(os.getpid()), json.dumps(sys.path)]
    server = Popen(command, stdin=DEVNULL, stdout=PIPE, text=True, start_new_session=True)
    # kept, else Python warns that it outlives its object; poll(), else one that has ended stays a zombie
    _STARTED[:] = [each for each in _STARTED if each.poll() is None] + [server]
    assert server.stdout
    with server.stdout as said:
        if not (address := said.readline().strip()):
            raise NotJoinedError(f"the PMI server {how_ended(server.wait())}")
    return address


class Membership:
    """This process is a rank: what `join` returns. Its link ends with the process, by which the others hear of that."""

    def __init__(self, link: Link, address: str, rank: int, size: int, joined: wire.Joined) -> None:
        self.address, self.rank, self.size, self.name = address, rank, size, joined.name
        self.variables = joined.variables
        """By which MPI knows that it is this rank."""
        self.lost = ""
        """Who is lost, and how."""
        self.lost_ranks: list[int] = []
        self._link = link
        self._heard: Callable[[Sequence[int], str], object] | None = None
        self._has_left = False
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._drop)
        threading.Thread(target=self._listen, name="ringreduce-members", daemon=True).start()

    def has_begun(self, when_lost: Callable[[Sequence[int], str], object]) -> None:
        """All ranks have started MPI. From now on have `when_lost` called, in another thread, with who is lost and how.

        Removes the files through which this rank's MPI shares memory: the ranks map them, and need their names no more;
        MPI would leave them behind where a rank is killed.
        """
        with self._lock:
            self._heard = when_lost
            if self.lost_ranks:
                when_lost(self.lost_ranks, self.lost)
        self._say(wire.Begun())
        for path, _ in mapped(os.getpid()):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def leave(self) -> None:
        """Say that this rank's MPI has ended, or will not be used any more."""
        self._has_left = True
        self._say(wire.Leaving())

    def _say(self, message: wire.Message) -> None:
        with contextlib.suppress(OSError):  # `_listen` hears of that
            self._link.send(message)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                message = self._link.receive()
                if isinstance(message, wire.Lost):
                    self._lose([message.rank], message.how)
        if not self._has_left:  # as when the host of who started it is gone; no loss would be heard of any more
            ranks = [0] if self.rank else [*range(1, self.size)]
            self._lose(ranks, "the PMI server that rank 0 started cannot be reached")

    def _lose(self, ranks: Sequence[int], how: str) -> None:
        with self._lock:
            self.lost_ranks += ranks
            self.lost = "; ".join(filter(None, [self.lost, how]))
            if self._heard:
                self._heard(self.lost_ranks, self.lost)

    def _drop(self) -> None:
        """In a forked child: else the rank would not seem to end before it."""
        with contextlib.suppress(OSError):
            os.close(self._link.fileno())


def join(
    address: str, rank: int, size: int, timeout_s: float, say: Callable[[str], object], pmix: str = ""
) -> Membership:
    """Wait for all ranks, and let the MPI that starts next in this process be `rank` of `size`.

    timeout_s: for the others.  say: gets a sentence every LATE_S when some have not come.
    pmix:      the file of PMIx that this process's MPI has loaded, if that is Open MPI.
    Raises:    NotJoinedError, with the reason.
    """
    where, key = json.loads(address)
    authkey = bytes.fromhex(key)
    until_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as at_failure:
        try:
            link = connect(wire.Address.parse(where), authkey)
            at_failure.callback(link.close)
            link.send(wire.Joining(rank, size, socket.gethostname(), boot(), os.getpid(), pmix))
            while not isinstance(message := link.receive(), wire.Joined):
                _look_at(message, rank, until_s, timeout_s, say)
            variables = message.variables
            if message.port:
                host = "127.0.0.1" if link.is_local else link.peer_address
                sock = at_failure.enter_context(socket.create_connection((host, message.port), timeout=START_S))
                sock.settimeout(None)
                sock.sendall(f"{rank} {shows(authkey, message.name, rank)}\n".encode())
                variables["PMI_FD"] = str(sock.detach())
        except (OSError, EOFError, ValueError) as error:
            raise NobodyThereError(f"the PMI server cannot be reached: {error}") from error
        at_failure.pop_all()
    settings = OpenMPI().environment("") if pmix else {}
    os.environ.update({name: settings[name] for name in settings.keys() - os.environ.keys()} | variables)
    return Membership(link, address, rank, size, message)


def _look_at(message: wire.Message, rank: int, until_s: float, timeout_s: float, say: Callable[[str], object]) -> None:
    match message:
        case wire.Refused(why):
            raise NotJoinedError(why)
        case wire.Lost(_, how):
            raise NotJoinedError(f"{how} before all were there")
        case wire.Awaited(ranks):
            who = numbered("rank", ranks)
            if time.monotonic() > until_s:
                raise NotJoinedError(f"{who} did not come within {timeout_s:g} s")
            if rank == min({*range(len(ranks) + 1)} - {*ranks}):  # the first that is there
                say(f"waiting for {who}, not started yet or still on the way to init()")
