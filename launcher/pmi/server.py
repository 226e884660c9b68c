"""The process that answers the MPI of all ranks, and tells them who is lost. It ends with the last of them."""

import dataclasses
import json
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence

from ..connection import wire
from ..connection.link import Gone
from ..connection.listener import Listener
from ..connection.queued import QueuedLink
from ..folders import private_folder
from ..network import addresses_or_loopback, listen_everywhere
from . import pmix
from .answers import Answers

LATE_S = 10.0
"""How long ranks wait for others before they are told, every time, who has not come."""
_LOOK_S = 0.5
_UNUSED_S = 660.0  # how long it stays without a rank: more than ringreduce.transport.joining.TIMEOUT_S
_NOBODY_S = 60.0  # the same, where who started this process has ended
_NOBODY = wire.Joining(-1, 0, "", "", 0)


class Server:
    """One world of `size` ranks."""

    def __init__(self, size: int, folder: str) -> None:
        """folder: for a unix socket, and files of PMIx, until MPI has started."""
        self.size, self._folder = size, folder
        self._members: dict[int, Member] = {}
        self._changed = threading.Condition()
        self._name = f"ring_{secrets.token_hex(8)}"
        self._are_complete = False  # all ranks have come
        self._has_begun = False  # the MPI of all ranks
        self._broken = ""  # why this process ends before the ranks do
        addresses = dict.fromkeys([*addresses_or_loopback(), "127.0.0.1"])
        self._listener = Listener(folder, tuple(addresses), backlog=size)
        self.address = json.dumps([str(self._listener.address), self._listener.authkey.hex()])

    def serve(self, starter: int) -> None:
        """Be there until all ranks have gone.  starter: the process that has started this one."""
        self._listener.start(lambda link: Member(self, link), broken=self._break)
        told_s, alone_s, most_s = time.monotonic(), 0.0, _UNUSED_S
        with self._changed:
            while not self._broken and (self._members or not self._are_complete) and alone_s < most_s:
                self._changed.wait(_LOOK_S)
                most_s = _UNUSED_S if os.getppid() == starter else _NOBODY_S
                alone_s = 0.0 if self._members else alone_s + _LOOK_S
                if not self._are_complete and time.monotonic() - told_s > LATE_S:
                    told_s = time.monotonic()
                    self._tell(wire.Awaited(tuple(sorted({*range(self.size)} - self._members.keys()))))
        self._listener.close()

    def handle(self, member: "Member", message: wire.Message | Gone) -> bool:
        """Handle what a rank says, see listener.Reader."""
        with self._changed:
            match message:
                case wire.Joining() if member.said is _NOBODY:
                    if why := self._admit(member, message):
                        member.link.send(wire.Refused(why))
                    return True
                case wire.Begun():
                    self._has_begun = True
                    shutil.rmtree(self._folder, ignore_errors=True)  # needed no more; an engine may kill this process
                    return True
                case wire.Leaving():
                    member.has_left = True  # its link stays: a thread that wakes up while Python ends may crash
                    return True
            if self._members.get(member.said.rank) is member:
                del self._members[member.said.rank]
                self._changed.notify()
                if not member.has_left:
                    self._lose(member.said)
            return False

    def _admit(self, member: "Member", said: wire.Joining) -> str:
        """Take a rank; returns why not, if so. With the last one all are told."""
        if said.size != self.size:
            return f"rank {said.rank} expects {said.size} ranks, but the rank that joined first expects {self.size}"
        if not 0 <= said.rank < self.size:
            return f"rank {said.rank} of {self.size}: expected one from 0 to {self.size - 1}"
        other = self._members.get(said.rank)
        if other or self._are_complete:
            who = f", process {other.said.pid} on {other.said.host}" if other else ""
            return f"there is a rank {said.rank} of {self.size} already{who}"
        member.said = said
        self._members[said.rank] = member
        if len(self._members) == self.size:
            self._complete([self._members[rank].said for rank in range(self.size)])
        return ""

    def _complete(self, ranks: Sequence[wire.Joining]) -> None:
        """All are there: have their MPI answered, and tell them by what; or why not."""
        try:
            if any(each.pmix for each in ranks):
                variables, port = pmix.serve(ranks, self._name, self._folder), 0
            else:
                answers = Answers(self._name, [f"{of.host} {of.boot}" for of in ranks], self._listener.authkey)
                sock = listen_everywhere(self.size)
                self._listener.listen(sock, answers.serve, self.size)
                variables = [{"PMI_RANK": str(rank), "PMI_SIZE": str(self.size)} for rank in range(self.size)]
                port = sock.getsockname()[1]
        except OSError as error:
            self._tell(wire.Refused(str(error)))
            return
        self._are_complete = True
        for rank, member in self._members.items():
            member.link.send(wire.Joined(self._name, variables[rank], port))

    def _lose(self, said: wire.Joining) -> None:
        """A rank ended without a message: the others are told."""
        how = f"rank {said.rank} of {self.size}, process {said.pid} on {said.host}, has ended"
        self._tell(wire.Lost(said.rank, how))
        if self._are_complete and not self._has_begun:  # the others wait in MPI_Init, where no thread of theirs runs
            self._break(f"{how} before the MPI of all ranks had started")

    def _break(self, why: str) -> None:
        """Have this process end, which tells all ranks and their MPI."""
        print(f"the PMI server ends: {why}", file=sys.stderr)
        with self._changed:
            self._broken = why
            self._changed.notify()

    def _tell(self, message: wire.Message) -> None:
        for each in self._members.values():
            each.link.send(message)


@dataclasses.dataclass(eq=False)
class Member:
    """A rank's link."""

    server: Server
    link: QueuedLink
    said: wire.Joining = _NOBODY  # until it has been admitted
    has_left: bool = False

    def handle(self, message: wire.Message | Gone) -> bool:
        """See listener.Reader."""
        return self.server.handle(self, message)


def main(size: int, starter: int) -> None:
    """Write the address to stdout, and serve; see Server.serve."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with private_folder("ringrun-pmi-") as folder:
        server = Server(size, folder)
        print(server.address, flush=True)
        server.serve(starter)
    os._exit(0)  # whatever thread still waits
