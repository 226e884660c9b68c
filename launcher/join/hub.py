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
from typing import NoReturn

from ..connection import wire
from ..connection.link import Gone
from ..connection.listener import Listener
from ..connection.queued import QueuedLink
from ..hosts.host import LOOPBACK
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
_WITHOUT_A_WORD = "ringrun on the head has ended without a word"
_LATE_S = 10.0
"""For nodes that come after the job has failed: they would look for the head for as long as --join-timeout says."""
_TOO_LATE = "the job has ended before this node came; see what ringrun has written on the head"
_LOOK_S = 0.05


class Hub:
    """All nodes of a job, this one (`own`) among them, and what runs on them."""

    def __init__(self, listener: Listener, directory: str, own: wire.Node, departures: socket.socket) -> None:
        """departures: gets the name of each node that leaves, a datagram each."""
        self._departures = departures
        self._came = {own.host}
        self._listener = listener
        # there is no link to the head itself
        self._nodes: dict[str, tuple[wire.Node, QueuedLink | None]] = {own.host: (own, None)}
        self.programs: dict[int, Program] = {}
        """Those that nodes have been asked to run, and somebody still waits for."""
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
                nodes = sorted(self._nodes.copy().values(), key=lambda each: (each[0].number < 0, *each[0]))
                address = next((link.own_address for _, link in nodes if link), "")
                print(json.dumps([[node for node, _ in nodes], address]), file=lines, flush=True)
            # ringrun waits for the lifeline's end: with the first process of a container, this one would be killed
            self.release(code, why, late)

    def release(self, code: int, why: str, count: int = 0) -> None:
        """Let all nodes go, and wait for them a while; one that has sent its name, and is not taken yet, goes, too.

        count: wait a while until so many have come, and let those go.
        """
        self._release = wire.Release(code, why)
        for _, link in self._nodes.copy().values():
            if link:
                link.send(self._release)
        until_s = time.monotonic() + _LATE_S
        while len(self._came) < count and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        self._listener.close(_RELEASE_S)

    def admit(self, node: wire.Node, link: QueuedLink) -> str:
        """Take a node; returns why not, if so. One that has come again takes its own place."""
        before, link_before = self._nodes.get(node.host, (node, link))
        namesake = next((each.host for each, _ in self._nodes.values() if each.number == node.number >= 0), node.host)
        if link_before is None or before.number != node.number:
            return f"a node called {node.host} has already joined; give each host a name of its own"
        if node.host in LOOPBACK:
            return f"its host name is {node.host}; give it one of its own"
        if namesake != node.host:
            return f"node {node.number} has already joined, as host {namesake}"
        if link_before is not link:
            link_before.end()
        self._nodes[node.host] = node, link
        if self._release:  # looked at last: another thread lets go those that it finds
            why = self._release.why or _TOO_LATE * bool(self._release.code)
            link.send(self._release._replace(why=why))
        self._came.add(node.host)
        return ""

    def left(self, host: str, link: QueuedLink) -> None:
        """A node's connection has ended, and what ran there."""
        if host in self._nodes and self._nodes[host][1] is link:
            del self._nodes[host]
            with contextlib.suppress(OSError):  # ringrun has ended
                self._departures.send(host.encode(), socket.MSG_DONTWAIT)
            for program in list(self.programs.values()):
                if program.host == host:
                    program.inbox.put(Gone(EOFError()))

    def _serve_call(self, caller: socket.socket) -> None:
        """Have a command run for a caller, to which its three streams belong, and say how it has ended."""
        request, streams, _, _ = socket.recv_fds(caller, _REQUEST_BYTES, 3)
        host, _, command = os.fsdecode(request).partition("\0")
        number, code = next(self._numbers), NOT_RUN
        self.programs[number] = program = Program(host)
        try:
            _, link = self._nodes.get(host, (None, None))
            if link:
                link.send(wire.Run(number, wire.portable(command)))
                code = program.run(caller, streams)
            else:
                os.write(streams[2], f"host {host} has left the job\n".encode())
        except (OSError, EOFError, IndexError):
            pass  # the node, or the caller, has gone
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

    def __init__(self, host: str) -> None:
        self.host = host
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
        self._host = ""
        self._program: Program | None = None

    def handle(self, message: wire.Message | Gone) -> bool:
        """See `Reader.handle`."""
        if self._program:
            self._program.inbox.put(message)
            return isinstance(message, wire.Output)
        if self._host:  # nothing but its end is to come
            self._hub.left(self._host, self.link)
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
        self._host = message.host
        return True


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def start(listener: Listener, directory: str, own: wire.Node) -> tuple[socket.socket, socket.socket]:
    """Start the process; returns the lifeline, and what the names of nodes that leave come over."""
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
