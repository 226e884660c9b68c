"""The head: ringrun's end of the hub, and how it and an MPI's launcher reach the nodes."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..cli import say
from ..connection import wire
from ..connection.listener import Listener
from ..errors import MachineError
from ..hosts import Found, Host
from ..remote import Problem, Reach, Ssh
from ..remote.parallel import Outcome
from ..text import listed
from . import hub, rsh

_SCRIPT = "rsh"
_LOOK_S = 0.1
_PROGRESS_S = 3.0


class Nodes:
    """The nodes of the job, as the hub knows them. Several threads may ask."""

    def __init__(self, listener: Listener, directory: str, own: wire.Node) -> None:
        """Start the hub. Called before there are threads."""
        self._lifeline, self.departures = hub.start(listener, directory, own)
        self._lines = self._lifeline.makefile("r")
        self._lock = threading.Lock()

    def there(self) -> tuple[list[wire.Node], str]:
        """Return those that are there, this one first, and this host's address that another has reached."""
        found, address = self._ask()
        return [node for node, _ in found], address

    def _ask(self) -> tuple[list[tuple[wire.Node, tuple[tuple[int, int], ...]]], str]:
        """Return the same, and with each node the numbers and slots of those that lend a part of it."""
        with self._lock:
            try:
                self._lifeline.sendall(hub.ASK.encode())
                nodes, address = json.loads(self._lines.readline())
            except (OSError, ValueError) as error:
                raise MachineError("the process that holds the nodes' connections has ended") from error
        return [(wire.Node(*node), tuple(map(tuple, lenders))) for node, lenders in nodes], address

    def await_all(self, count: int, timeout_s: float, what: str = "nodes") -> int:
        """Wait until `count` nodes, or slots, are there, or for so long; return how many are."""
        begin_s = time.monotonic()
        say_s = begin_s + _PROGRESS_S
        while True:
            there = self.there()[0]
            found = len(there) if what == "nodes" else sum(node.slots for node in there)
            if found >= count or (now_s := time.monotonic()) >= begin_s + timeout_s:
                return found
            if now_s >= say_s:
                say_s = now_s + (now_s - begin_s)
                missing = _missing(there, count) if what == "nodes" else ""
                say(f"ringrun: {found} of {count} {what} have joined{missing}")
            time.sleep(_LOOK_S)

    def found(self, *, with_slots: bool) -> Found:
        """Return the nodes that have slots as hosts."""
        hosts = [
            Host(node.host, node.slots if with_slots or node.machine else None, lenders)
            for node, lenders in self._ask()[0]
            if node.slots
        ]
        return Found(hosts, "the nodes that have joined", in_slurm=False)

    def release(self, code: int, count: int = 0) -> None:
        """Let all nodes go, since the job has ended with `code`; return when they have gone, or soon after.

        count: how many to expect for some seconds, this one too, and to let go, where not so many have come.
        """
        with contextlib.suppress(OSError):
            self._lifeline.sendall(f"{code} {count}\n".encode())
            self._lifeline.shutdown(socket.SHUT_WR)
            self._lines.read()


def _missing(there: Sequence[wire.Node], count: int) -> str:
    """Return which are not there, if that is known."""
    missing = sorted(set(range(count)) - {node.number for node in there})
    return (
        f", waiting for {listed([f'node {index}' for index in missing])}" if len(missing) == count - len(there) else ""
    )


class _Joined(Ssh):
    """Runs programs on nodes."""

    def _problem(self, name: str, outcome: Outcome, said: str) -> Problem:
        why = said.strip() or f"its connection was lost (exit code {outcome.code})"
        return Problem(f"it did not run the command: {why}", f"see what ringrun has written on {name}")


@dataclass(frozen=True)
class OverJoin(Reach):
    """Through the hub, whose socket is in `hub_directory`."""

    hub_directory: str
    timeout_s: float
    find_address: Callable[[], str] = str
    departures: socket.socket | None = None
    sends_environment: bool = True
    gpus_are_chosen = True
    _runner = _Joined

    @property
    def address(self) -> str:  # type: ignore[override]
        """See `Reach`. An elastic job may begin before the first node is there that knows it."""
        return self.find_address()

    def rsh(self, directory: str) -> Sequence[str]:
        """See `Reach`: words without a space, whatever is in the name of this Python."""
        return ["sh", f"{directory}/{_SCRIPT}"]

    def files(self, aliases: Mapping[str, str]) -> Mapping[str, str]:
        """See `Reach`."""
        python = [sys.executable, "-I", "-S", rsh.__file__, f"{self.hub_directory}/{hub.RSH_SOCKET}"]
        return {_SCRIPT: f'exec {shlex.join(python)} "$@"\n'}
