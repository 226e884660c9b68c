"""ringrun's end of the agents' connections: accepts them, has printed what ranks write, passes on what happens.

One thread reads all connections (connection/listener.py) and another one prints (output/). A slow reader of ringrun's
output slows the ranks down, whose agents hear late what is Taken; all else is heard at once, and goes, as events, to
the one thread that decides (supervise.py).
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..connection import wire
from ..connection.link import Gone, HostSilentError
from ..connection.listener import Listener
from ..connection.queued import NotReadError, QueuedLink
from ..machine.cpus import usable_cpus
from ..output.display import Output
from ..output.lines import LineSplitter
from ..report.outcome import APPLICATION_ABORT, RankEnd
from ..text import format_spans
from .events import Aborted, Arrived, Deaf, Events, OutputClosed, RankDied, RankEnded, RankNotStarted, Refused, Reported
from .misplaced import misplaced
from .plan import Job

_TAIL_LINES = 200
_TAIL_LINE_CHARACTERS = 2000
_PATIENCE_S = 1.0
_LOOPBACK = "127.0.0.1"
_INPUT_BYTES = 1 << 16


@dataclass(frozen=True)
class RankSetup:
    """What the agents receive when all have connected: for the ranks on this host, and for those on others."""

    folder: str = ""
    local: dict[str, str] = field(default_factory=dict)
    """Variables in addition to those that mpirun sets."""
    remote: dict[str, str] = field(default_factory=dict)
    stdin: int | None = None
    """A descriptor, for the job's `stdin_rank`."""
    of_hosts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """More variables, by the names of hosts."""


class Agents:
    """The connections to the agents of a job."""

    def __init__(self, listener: Listener, job: Job, setup: RankSetup, printer: Output, events: Events) -> None:
        self._listener = listener
        self._job = job
        self._setup = setup
        self._printer = printer
        self._events = events
        self._links: dict[int, QueuedLink] = {}
        self._ports: dict[int, int] = {}
        self._ending: wire.End | None = None
        self.gone: set[int] = set()
        """The ranks whose agents are gone, whether or not the ranks had ended before."""
        # by host: the first agent's; on ringrun's own, of which its launchers' children are a part, ringrun's
        self._cpus = {} if job.hosts else {job.host_of(0): format_spans(usable_cpus())}
        self._cut: dict[int, str] = {}  # why, of the ranks whose connections ringrun has ended

    def start(self) -> None:
        """Begin to take connections. Called after mpirun was started, since threads and fork do not mix."""
        self._printer.on_closed = lambda: self._events.put(OutputClosed())
        needs = f"ringrun needs an open file for each of the {self._job.size} ranks; raise `ulimit -n`"
        self._listener.start(
            lambda link: _Agent(link, self),
            lambda why: self._printer.message([f"ringrun: {why}; {needs}"]),
            lambda why: self._events.put(Deaf(why)),
        )

    def send(self, rank: int, message: wire.Message) -> None:
        """Send `message` to the agent of `rank`, if it is still there."""
        with contextlib.suppress(KeyError):
            self._links[rank].send(message)

    def cut(self, rank: int, why: str) -> None:
        """End the connection to the agent of `rank`, which ends the rank, and itself. `why`: the rank is lost."""
        self._cut.setdefault(rank, why)
        with contextlib.suppress(KeyError):
            self._links[rank].end()

    def broadcast(self, message: wire.Message) -> None:
        """Send `message` to every agent that is there."""
        encoded = wire.encode(message)  # once: it may be long, and there may be thousands
        for link in list(self._links.values()):
            link.send_encoded(encoded)

    def set_up(self) -> None:
        """Let all agents, which are there, start their commands."""
        job, setup = self._job, self._setup
        what = (tuple(job.command), self._master_address(), self._ports[0], setup.folder)
        hosts = [host.name for host, _ in job.hosts] or [job.host_of(0)]
        for rank, link in self._links.items():
            gives_stdin = rank == job.stdin_rank and setup.stdin is not None
            variables, open_files = (setup.local, job.open_files) if link.is_local else (setup.remote, 0)
            host = job.host_of(rank)
            group = {"GROUP_RANK": hosts.index(host), "GROUP_WORLD_SIZE": len(hosts)}  # torchrun's words for hosts
            variables = {**variables, **setup.of_hosts.get(host, {}), **{name: str(at) for name, at in group.items()}}
            message = wire.Setup(*what, variables, gives_stdin, open_files, job.commits_folder)
            self.send(rank, message.mapped(wire.portable))
            if gives_stdin and link.is_local and setup.stdin is not None:
                link.send_descriptor(setup.stdin)

    def _master_address(self) -> str:
        """Return where the other ranks reach rank 0's host."""
        if not self._links[0].is_local:
            return self._links[0].peer_address
        beyond = next((link for link in self._links.values() if not link.is_local), None)
        return beyond.own_address if beyond else _LOOPBACK

    def end_agents(self, end: wire.End) -> None:
        """Make every agent end, also those that connect later."""
        self._ending = end
        self.broadcast(end)

    def close(self) -> None:
        """Stop listening, and print what has come so far; agents that are still there see the end."""
        self._listener.close(_PATIENCE_S)

    def admit(self, hello: wire.Message | Gone, link: QueuedLink) -> "_RankReader | None":
        """Return what handles the messages of an agent that begins with `hello`; None if it is not let in."""
        if isinstance(hello, Gone):
            if isinstance(hello.error, ValueError):
                self._events.put(Refused(f"an agent's first message is not valid: {hello.error}"))
            return None
        refusal = self._refusal(hello)
        if not isinstance(hello, wire.Hello) or refusal:
            self._events.put(Refused(refusal))
            return None
        self._links[hello.rank], self._ports[hello.rank] = link, hello.port
        self._events.put(Arrived(hello.rank, hello.host, hello.port))
        if self._ending:
            self.send(hello.rank, self._ending)
        stdin = self._setup.stdin if hello.rank == self._job.stdin_rank else None
        return _RankReader(hello, link, self._printer, self._events, stdin, self.gone, self._cut)

    def _refusal(self, hello: wire.Message) -> str:
        """Return why an agent that begins with `hello` is none that this job awaits; nothing if it is one."""
        if not isinstance(hello, wire.Hello):
            return f"expected Hello as an agent's first message, got {type(hello).__name__}"
        if hello.size != self._job.size or not 0 <= hello.rank < hello.size:
            return (
                f"a process on host {hello.host} was started as rank {hello.rank} of {hello.size}, but this job has "
                f"{self._job.size}: perhaps another MPI's launcher started it; see ringrun --verbose"
            )
        if hello.rank in self._links:
            return f"rank {hello.rank} was started twice, again on host {hello.host}"
        cpus = self._cpus.setdefault(self._job.host_of(hello.rank), hello.cpus)
        return misplaced(self._job, hello, os.environ, cpus)


class _Agent:
    """An agent's connection; see `Reader`."""

    def __init__(self, link: QueuedLink, agents: Agents) -> None:
        self.link = link
        self._agents = agents
        self._rank: _RankReader | None = None  # once it has said which it is

    def handle(self, message: wire.Message | Gone) -> bool:
        if self._rank is not None:
            return self._rank.handle(message)
        self._rank = self._agents.admit(message, self.link)
        return self._rank is not None


class _RankReader:
    """Handles one agent's messages: has output printed and puts events until the agent is gone."""

    def __init__(
        self,
        hello: wire.Hello,
        link: QueuedLink,
        printer: Output,
        events: Events,
        stdin: int | None,
        gone: set[int],
        cut: Mapping[int, str],
    ) -> None:
        self._gone, self._cut = gone, cut
        self._link = link
        self._hello = hello
        self._stdin = _Stdin(stdin, link)
        self._shows_prompts = stdin is not None and os.isatty(stdin)
        self._printer = printer
        self._events = events
        self._splitters: dict[wire.StreamName, LineSplitter] = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._pid = 0
        self._device = ""
        self._taken = 0
        self._done = False

    def handle(self, message: wire.Message | Gone) -> bool:
        """See `Reader.handle`."""
        try:
            if not isinstance(message, Gone):
                self._handle(message)
                return True
            error = message.error
        except ValueError as unexpected:
            error = unexpected
        self._gone.add(self._hello.rank)
        self._stdin.end()
        self._flush()
        if not self._done:
            self._end(code=None, at_s=0.0, lost=self._how_lost(error))
        return False

    def _how_lost(self, error: Exception) -> str:
        if why := self._cut.get(self._hello.rank):
            return why
        if isinstance(error, HostSilentError):
            return f"its host has not answered for {self._link.lost_after_s:g} s (--lost-after)"
        if isinstance(error, NotReadError):
            return f"its agent has not read what ringrun sends for {self._link.lost_after_s:g} s (--lost-after)"
        return f"its connection is broken: {error}" if isinstance(error, ValueError) else RankEnd.lost

    def _handle(self, message: wire.Message) -> None:
        match message:
            case wire.Output(stream, data):
                self._print(stream, self._splitters[stream].feed(data))
                self._printer.keep(self._hello.rank, stream, data, partial(self._take, len(data)))
            case wire.Note(text):
                self._printer.message([text])
            case wire.Started(pid, device):
                self._pid, self._device = pid, device
            case wire.Died(code):
                self._events.put(RankDied(self._hello.rank, code))
            case wire.NotStarted(reason):
                self._done = True
                self._events.put(RankNotStarted(self._hello.rank, self._hello.host, reason))
            case wire.InputWanted():
                self._stdin.feed()
            case wire.Ended():
                self._flush()
                at_s = message.at_s if self._link.is_local else time.time()  # the clocks of other hosts are not ours
                self._end(**{**message._asdict(), "at_s": at_s})
            case _ if isinstance(message, wire.Report):
                self._events.put(Reported(self._hello.rank, message))
            case _:
                raise ValueError(f"an agent does not send {type(message).__name__}")

    def _print(self, stream: wire.StreamName, lines: list[bytes]) -> None:
        if stream == "stderr":
            texts = [line.decode(errors="replace")[:_TAIL_LINE_CHARACTERS] for line in lines]
            self._tail.extend(texts)
            if said := next(filter(APPLICATION_ABORT.match, texts), None):
                self._events.put(Aborted(self._hello.rank, said.rstrip()))
        splitter = self._splitters[stream]
        frame = splitter.pending if self._shows_prompts else splitter.frame
        self._printer.write(self._hello.rank, stream, lines, frame)

    def _take(self, nbytes: int) -> None:
        """Let the agent send more, now that so much is printed."""
        self._taken += nbytes
        if self._taken >= wire.TAKEN_BYTES:
            self._link.send(wire.Taken(self._taken))
            self._taken = 0

    def _flush(self) -> None:
        for stream, splitter in self._splitters.items():
            if splitter.pending:
                self._print(stream, splitter.flush())

    def _end(self, **how: Any) -> None:
        """how: what RankEnd is to say beside which rank it is of."""
        self._done = True
        self._printer.rank_ended(self._hello.rank)
        tail = tuple(self._tail)
        end = RankEnd(self._hello.rank, self._hello.host, self._pid, tail=tail, device=self._device, **how)
        self._events.put(RankEnded(end))


class _Stdin:
    """Gives ringrun's stdin to a rank on another host, a piece whenever its agent asks for one."""

    def __init__(self, descriptor: int | None, link: QueuedLink) -> None:
        self._descriptor = descriptor
        self._link = link
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._ending: socket.socket | None = None  # of the thread that reads

    def feed(self) -> None:
        """Send the next piece when it is there; does not wait for it."""
        self._wanted.put(True)
        if self._ending is None:
            self._ending, ended = socket.socketpair()
            threading.Thread(target=self._feed, args=(ended,), daemon=True).start()

    def end(self) -> None:
        """Read no more: what comes is for the rank of the next start, or for the next program."""
        if self._ending is not None:
            self._ending.close()
            self._wanted.put(False)

    def _feed(self, ended: socket.socket) -> None:
        with ended:
            while self._wanted.get() and (data := self._read(ended.fileno())) is not None:
                self._link.send(wire.Input(data))
                if not data:
                    break

    def _read(self, ended: int) -> bytes | None:
        """Return the next piece, nothing at the end of the input; None where nobody wants it any more."""
        if self._descriptor is None:
            return b""
        poll = select.poll()
        for descriptor in (self._descriptor, ended):
            poll.register(descriptor, select.POLLIN)
        if ended in (descriptor for descriptor, _ in poll.poll()):
            return None
        try:
            return os.read(self._descriptor, _INPUT_BYTES)
        except OSError:
            return b""
