"""The process that answers the MPI of all ranks, and tells them who is lost. It ends with the last of them."""

import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from ..connection import wire
from ..connection.link import HANDSHAKE_TIMEOUT_S, Gone
from ..connection.listener import Listener
from ..connection.queued import QueuedLink
from ..errors import MachineError
from ..network import own_addresses
from .answers import Answers

LATE_S = 10.0
"""How long ranks wait for others before they are told, every time, who has not come."""
_LOOK_S = 0.5
_NOBODY_S = 60.0  # for the first rank to come, after who started this process has ended
_LINE_BYTES = 1 << 14
_NAME_BYTES = 8


class Server:
    """One world of `size` ranks."""

    def __init__(self, size: int, folder: str) -> None:
        """folder: for a unix socket."""
        self.size = size
        self._members: dict[int, Member] = {}
        self._came = self._left = 0
        self._changed = threading.Condition()
        self._name = f"ring_{secrets.token_hex(_NAME_BYTES)}"
        self._answers: Answers | None = None  # once all ranks are there
        self._talking: dict[int, socket.socket] = {}  # by rank, with its MPI
        self._is_over = False  # one is lost while MPI starts
        self._broken = ""  # why nothing is heard of any rank any more
        addresses: tuple[str, ...] = ("127.0.0.1",)
        with contextlib.suppress(MachineError):  # a host without a network
            addresses = (*own_addresses((), ()), *addresses)
        self._listener = Listener(folder, addresses, backlog=size)
        self._for_mpi = socket.create_server(("", 0))
        self._listener.listen(self._for_mpi, self._talk, size)
        where = self._listener.address
        self.address = json.dumps([str(where), self._listener.authkey.hex()])

    def serve(self, starter: int) -> None:
        """Be there until all ranks have gone. starter: a descriptor that ends when who started this process does."""
        self._listener.start(lambda link: Member(self, link), broken=self._break)
        orphaned, told_s = threading.Event(), time.monotonic()
        threading.Thread(target=_await_end, args=(starter, orphaned.set), daemon=True).start()
        alone_s = 0.0
        while True:
            with self._changed:
                self._changed.wait(_LOOK_S)
                all_left = self._came and self._left == self._came
                if self._broken or (all_left and (self._answers or orphaned.is_set())):
                    break
                alone_s = alone_s + _LOOK_S if orphaned.is_set() and not self._came else 0.0
                if alone_s > _NOBODY_S:
                    break
                if not self._answers and time.monotonic() - told_s > LATE_S:
                    told_s = time.monotonic()
                    self._tell(wire.Awaited(tuple(sorted({*range(self.size)} - self._members.keys()))))
        self._listener.close()

    def admit(self, member: "Member", said: wire.Joining) -> str:
        """Take a rank; returns why not, if so. With the last one all are told."""
        with self._changed:
            other = self._members.get(said.rank)
            if said.size != self.size:
                return f"rank {said.rank} is one of {said.size} ranks, and the rank that came first one of {self.size}"
            if not 0 <= said.rank < self.size:
                return f"rank {said.rank} of {self.size}: expected one from 0 to {self.size - 1}"
            if other is not None or self._answers:
                who = f", process {other.said.pid} on {other.said.host}" if other and other.said else ""
                return f"there is a rank {said.rank} of {self.size} already{who}"
            member.said = said
            self._members[said.rank] = member
            self._came += 1
            if len(self._members) == self.size:
                places = [self._members[rank].place for rank in range(self.size)]
                self._answers = Answers(self._name, places)
                self._tell(wire.Joined(self._name, self._for_mpi.getsockname()[1]))
            return ""

    def gone(self, member: "Member") -> None:
        """A rank's connection has ended: it has left, or it is lost, and the others are told."""
        said = member.said
        with self._changed:
            if said is None:
                return
            self._left += 1
            self._changed.notify()
            del self._members[said.rank]
            if member.has_left:
                return
            self._tell(
                wire.Lost(said.rank, f"rank {said.rank} of {self.size}, process {said.pid} on {said.host}, has ended")
            )
            if not self._answers:  # it may come again
                self._came -= 1
                self._left -= 1
            elif not self._answers.has_started:  # the others wait in MPI_Init, where no thread of theirs runs
                self._is_over = True
                for each in self._talking.values():
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

    def _break(self, why: str) -> None:
        """Nothing is read any more: this process's end tells all ranks."""
        print(f"the process that tells MPI of the ranks ends: {why}", file=sys.stderr)
        with self._changed:
            self._broken = why
            self._changed.notify()

    def _tell(self, message: wire.Message) -> None:
        for each in self._members.values():
            with contextlib.suppress(OSError):  # it is gone
                each.link.send(message)

    def _talk(self, sock: socket.socket) -> None:
        """Answer one rank's MPI, once it has shown that it is that rank."""
        with contextlib.suppress(OSError, ValueError), sock, sock.makefile("rwb", 0) as lines:
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            rank, shown = lines.readline(_LINE_BYTES).decode().split()
            key = self._listener.authkey
            if not hmac.compare_digest(shown, shows(key, self._name, int(rank))):
                return
            sock.settimeout(None)
            with self._changed:
                if self._is_over or int(rank) in self._talking:
                    return
                self._talking[int(rank)] = sock
            while line := lines.readline(_LINE_BYTES):
                with self._changed:
                    if self._answers:
                        self._answers.answer(int(rank), line.decode(), lambda text: _write(lines, text))


class Member:
    """A rank's link."""

    def __init__(self, server: Server, link: QueuedLink) -> None:
        self.link = link
        self.said: wire.Joining | None = None
        self.has_left = False
        self._server = server

    @property
    def place(self) -> str:
        """Ranks of the same place share memory."""
        return f"{self.said.host} {self.said.boot}" if self.said else ""

    def handle(self, message: wire.Message | Gone) -> bool:
        """See listener.Reader."""
        if isinstance(message, wire.Joining) and not self.said:
            if why := self._server.admit(self, message):
                self.link.send(wire.Refused(why))
        elif isinstance(message, wire.Leaving):
            self.has_left = True
        else:
            self._server.gone(self)
            return False
        return True


def shows(key: bytes, name: str, rank: int) -> str:
    """What a rank's MPI begins with: that it is this rank of the world called `name`."""
    return hmac.digest(key, f"MPI of rank {rank} in {name}".encode(), "sha256").hex()


def _await_end(descriptor: int, then: Callable[[], object]) -> None:
    os.read(descriptor, 1)
    then()


def _write(lines: "socket.SocketIO", text: str) -> None:
    with contextlib.suppress(OSError):  # it is gone
        lines.write(text.encode())


def main(size: int) -> None:
    """Write the address to stdout, and serve; stdin ends when who started this does."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with tempfile.TemporaryDirectory(prefix="ringrun-pmi-") as folder:
        server = Server(size, folder)
        print(server.address, flush=True)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # who reads it is to see its end
        server.serve(sys.stdin.fileno())
    os._exit(0)  # whatever thread still waits
