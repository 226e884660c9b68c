"""The head's end of the nodes' connections: a process beside ringrun, which starts there what ringrun and MPI want.

    mpirun ── rsh.py ── unix socket ── Hub ── a link for each command ── node.py ── sh -c COMMAND, on another node
    ringrun ── lifeline: who is there? the job has ended ── Hub ── one link for each node: Run, Release
    ringrun ── departures: these have left ─────────────────┘

It is a process of its own since ringrun forks, beside which there must be no threads; and it ends when ringrun does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple, NoReturn

from ..connection import wire
from ..connection.link import Gone
from ..connection.listener import Listener
from ..connection.queued import QueuedLink
from ..hosts import is_loopback
from ..processes import raise_open_files

RSH_SOCKET = "nodes"
"""The name of the socket for rsh.py in ringrun's private folder."""

NOT_RUN = 255
_CHUNK_BYTES = 1 << 16
_REQUEST_BYTES = 1 << 18
_FILES = 1 << 16  # eight for each node, while it starts something
_RELEASE_S = 8.0  # longer than a node waits for what runs there, see node.py
ASK = "?\n"
"""What ringrun asks for the nodes with; a number instead is how the job has ended."""
_WITHOUT_A_WORD = "ringrun on the head ended without a message"
_LATE_S = 10.0
"""For nodes that come after the job has failed: they would look for the head for as long as --join-timeout says."""
_TOO_LATE = "the job ended before this node joined; see what ringrun has written on the head"
_LOOK_S = 0.05


class _Lent(NamedTuple):
    """A node, or what it lends of its host; there is no link to the head itself."""

    number: int
    node: wire.Node
    link: QueuedLink | None


class Hub:
    """All nodes of a job, this one (`own`) among them, and what runs on them.

    What several lend of one host is one host: the first of them runs all that is run there.
    """

    def __init__(self, listener: Listener, directory: str, own: wire.Node, departures: socket.socket) -> None:
        """departures: gets a datagram for each node that leaves."""
        self._departures = departures
        self._came = {own.host}
        self._listener = listener
        self._own = own
        self._hosts: dict[str, tuple[_Lent, ...]] = {own.host: (_Lent(0, own, None),)}
        self.programs: dict[int, Program] = {}
        """Those that nodes have been asked to run, and somebody still waits for."""
        self._cut: set[QueuedLink | None] = set()
        """Nodes that went while they ran something, as was seen at that first."""
        self._numbers = itertools.count()
        self._release: wire.Release | None = None  # the job has ended
        callers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        callers.bind(f"{directory}/{RSH_SOCKET}")
        listener.listen(callers, self._serve_call)

    def start(self) -> None:
        """Take nodes, and commands for them."""
        self._listener.start(lambda link: _Connection(link, self))

    def serve(self, lifeline: socket.socket) -> None:
        """Answer ringrun until it says how the job has ended, or is gone; then release all nodes."""
        code, late, why = 1, 0, _WITHOUT_A_WORD
        with lifeline, lifeline.makefile("rw") as lines:
            while line := lines.readline():
                if line != ASK:
                    code, late = map(int, line.split())
                    why = ""
                    break
                hosts = sorted(
                    self._hosts.copy().items(), key=lambda each: (each[1][0].node.number < 0, *each[1][0].node)
                )
                address = next((part.link.own_address for _, parts in hosts for part in parts if part.link), "")
                print(json.dumps([[_whole(*each) for each in hosts], address]), file=lines, flush=True)
            # ringrun waits for the lifeline's end: with the first process of a container, this one would be killed
            self.release(code, why, late)

    def release(self, code: int, why: str, count: int = 0) -> None:
        """Let all nodes go, and wait for them a while; one that has sent its name, and is not taken yet, goes, too.

        count: wait a while until so many have come, and let those go.
        """
        self._release = wire.Release(code, why)
        for part in [part for parts in self._hosts.copy().values() for part in parts]:
            if part.link:
                part.link.send(self._release)
        until_s = time.monotonic() + _LATE_S
        while len(self._came) < count and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        self._listener.close(_RELEASE_S)

    def admit(self, node: wire.Node, link: QueuedLink) -> str:
        """Take a node; returns why not, if so. One that has come again takes its own place.

        A part of the head's own host is a host of another name: what runs there is its lender's, not the head's.
        """
        lends_part = bool(node.machine)
        host = f"{node.host}-lent" if lends_part and node.host == self._own.host and not self._own.slots else node.host
        there = self._hosts.get(host, ())
        if is_loopback(node.host) and not lends_part:
            return f"its host name is {node.host}; give it one of its own"
        if there and not (lends_part and there[0].node.machine == node.machine):
            before = there[0]
            if before.link is None or before.node.number != node.number or lends_part or before.node.machine:
                return f"a node called {node.host} has already joined; give each host a name of its own"
            before.link.end()
            there = ()
        namesakes = [name for name, (part, *_) in self._hosts.items() if part.node.number == node.number >= 0]
        if namesakes and namesakes != [host]:
            return f"node {node.number} has already joined, as host {namesakes[0]}"
        self._hosts[host] = *there, _Lent(next(self._numbers), node, link)
        if self._release:  # looked at last: another thread lets go those that it finds
            why = self._release.why or _TOO_LATE * bool(self._release.code)
            link.send(self._release._replace(why=why))
        self._came.add(node.host)
        return ""

    def left(self, link: QueuedLink) -> None:
        """A node's connection has ended, and what it ran."""
        for host, parts in self._hosts.copy().items():
            for part in [each for each in parts if each.link is link]:
                programs = [each for each in self.programs.copy().values() if each.runs_on is link]
                if others := tuple(each for each in parts if each is not part):
                    self._hosts[host] = others
                else:  # other threads look at the first part of each
                    del self._hosts[host]
                ran = bool(programs) or link in self._cut
                self._cut.discard(link)
                lender = part.number if part.node.machine and not ran else -1
                with contextlib.suppress(OSError):  # ringrun has ended
                    self._departures.send(json.dumps([host, lender]).encode(), socket.MSG_DONTWAIT)
                for program in programs:
                    program.inbox.put(Gone(EOFError()))

    def _serve_call(self, caller: socket.socket) -> None:
        """Have a command run for a caller, to which its three streams belong, and say how it has ended."""
        request, streams, _, _ = socket.recv_fds(caller, _REQUEST_BYTES, 3)
        host, _, command = os.fsdecode(request).partition("\0")
        number, code = next(self._numbers), NOT_RUN
        parts = self._hosts.get(host, ())
        self.programs[number] = program = Program(parts[0].link if parts else None)
        try:
            if program.runs_on:
                gpus = ",".join(dict.fromkeys(gpu for each in parts for gpu in each.node.gpus.split(",") if gpu))
                program.runs_on.send(wire.Run(number, wire.portable(command), gpus))
                code = program.run(caller, streams)
            else:
                os.write(streams[2], f"host {host} has left the job\n".encode())
        except EOFError:  # the node has gone; before the program is, for `left`
            self._cut.add(program.runs_on)
        except (OSError, IndexError):
            pass  # the caller has gone
        except RuntimeError as error:  # there are too many threads
            os.write(streams[2], f"the head cannot run anything on {host}: {error}\n".encode())
        finally:
            del self.programs[number]
            for descriptor in streams:
                os.close(descriptor)
            with contextlib.suppress(OSError), caller:
                caller.send(str(code).encode())


class Program:
    """A command on another node, for rsh.py here."""

    def __init__(self, runs_on: QueuedLink | None) -> None:
        self.runs_on = runs_on
        self.inbox: SimpleQueue[QueuedLink | wire.Message | Gone] = SimpleQueue()
        """The connection that the node makes for it, then what comes over that."""

    def run(self, caller: socket.socket, streams: Sequence[int]) -> int:
        """Move its input and output; return its exit code. OSError or EOFError where somebody goes before its end."""
        link = self.inbox.get()
        if not isinstance(link, QueuedLink):
            raise EOFError
        feeds = threading.Thread(target=self._feed, args=(link, caller.fileno(), streams[0]), daemon=True)
        feeds.start()
        try:
            while not isinstance(message := self.inbox.get(), wire.Ended):
                if not isinstance(message, wire.Output):
                    raise EOFError
                _write(streams[1 + (message.stream == "stderr")], message.data)
            return message.code & 0xFF
        finally:
            link.end()  # the listener, which reads it, closes it
            with contextlib.suppress(OSError):  # the caller is gone
                caller.shutdown(socket.SHUT_RD)
            feeds.join()

    def _feed(self, link: QueuedLink, caller: int, stdin: int) -> None:
        """Send what the caller reads, until it is gone, or nobody listens to it any more."""
        poll = select.poll()
        for descriptor in (caller, stdin):
            poll.register(descriptor, select.POLLIN)
        with contextlib.suppress(OSError):
            while stdin in (descriptor for descriptor, _ in poll.poll()):
                link.await_room()
                link.send(wire.Input(data := os.read(stdin, _CHUNK_BYTES)))
                if not data:
                    poll.unregister(stdin)
        self.inbox.put(Gone(EOFError()))


class _Connection:
    """One of a node's connections, see `Reader`."""

    def __init__(self, link: QueuedLink, hub: Hub) -> None:
        self.link = link
        self._hub = hub
        self._is_node = False
        self._program: Program | None = None

    def handle(self, message: wire.Message | Gone) -> bool:
        """See `Reader.handle`."""
        if self._program:
            self._program.inbox.put(message)
            return isinstance(message, wire.Output)
        if self._is_node:  # nothing but its end is to come
            self._hub.left(self.link)
            return False
        if isinstance(message, wire.Running) and (program := self._hub.programs.get(message.number)):
            self._program = program
            program.inbox.put(self.link)
            return True
        if not isinstance(message, wire.Node):
            return False
        if why := self._hub.admit(message, self.link):
            self.link.send(wire.Release(2, why))
            return False
        self._is_node = True
        return True


def _whole(host: str, parts: Sequence[_Lent]) -> tuple[wire.Node, list[tuple[int, int]]]:
    """Return the parts of a host as one node, and the slots of each lender."""
    node, slots = parts[0].node, [(part.number, part.node.slots) for part in parts if part.node.machine]
    return node._replace(host=host, slots=sum(part.node.slots for part in parts)), slots


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def start(listener: Listener, directory: str, own: wire.Node) -> tuple[socket.socket, socket.socket]:
    """Start the process; returns the lifeline, and what news of nodes that leave comes over."""
    lifeline, other_end = socket.socketpair()
    departures, departed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hub = Hub(listener, directory, own, departed)
    if not os.fork():
        lifeline.close()
        departures.close()
        _run(hub, other_end)
    other_end.close()
    departed.close()
    listener.close()  # its sockets are the other process's now
    return lifeline, departures


def _run(hub: Hub, lifeline: socket.socket) -> NoReturn:
    """Be the hub's process, which outlives signals to all of a job."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        raise_open_files(_FILES, 0)
        hub.start()
        hub.serve(lifeline)
        code = 0
    finally:
        os._exit(code)
