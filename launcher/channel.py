"""ringrun's end of the socket: takes the agents' connections, prints what ranks write, passes on what happens.

One thread a rank reads its connection and prints, so that a slow reader of ringrun's output slows the ranks down
and fills no memory. All else goes, as events, to the one thread that decides (supervise.py).
"""

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from multiprocessing.reduction import send_handle
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

from .lines import LineSplitter
from .outcome import RankEnd
from .output import Output as Printer
from .output import StreamName
from .wire import (
    End,
    Ended,
    Hello,
    Message,
    Note,
    NotStarted,
    Output,
    Stalled,
    Started,
    State,
    decode,
    encode,
    unix_address,
)

_TAIL_LINES = 200
_TAIL_LINE_CHARACTERS = 2000
_JOIN_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Arrived:
    """The agent of `rank` is connected."""

    rank: int
    host: str = ""


@dataclass(frozen=True)
class RankEnded:
    """A rank has ended, or its agent was lost."""

    end: RankEnd


@dataclass(frozen=True)
class RankNotStarted:
    """The command could not be executed as `rank`."""

    rank: int
    host: str
    reason: str


@dataclass(frozen=True)
class LauncherEnded:
    """mpirun has ended."""


@dataclass(frozen=True)
class Signalled:
    """ringrun got signal `number`."""

    number: int


@dataclass(frozen=True)
class OutputClosed:
    """Nobody reads ringrun's stdout any more."""


@dataclass(frozen=True)
class RankState:
    """A rank's answer to a question."""

    rank: int
    state: State


@dataclass(frozen=True)
class RankStalled:
    """ringreduce in a rank reports a stall."""

    rank: int
    report: str


@dataclass(frozen=True)
class StacksWanted:
    """Somebody wants all ranks' stacks; `deliver` takes the lines, in the thread that decides, and must not block."""

    deliver: Callable[[list[str]], None]


Event: TypeAlias = (
    Arrived
    | RankEnded
    | RankNotStarted
    | LauncherEnded
    | Signalled
    | OutputClosed
    | RankState
    | RankStalled
    | StacksWanted
)
Events: TypeAlias = "SimpleQueue[Event]"


class Channel:
    """The connections to all agents. Rank 0 is given the descriptor `stdin`."""

    def __init__(self, directory: str, size: int, stdin: int | None, printer: Printer, events: Events) -> None:
        path = str(Path(directory) / "socket")
        self.address = unix_address(path)
        self.authkey = secrets.token_bytes(32)
        self._listener = Listener(path, "AF_UNIX", backlog=size, authkey=self.authkey)
        self._stdin = stdin
        self._printer = printer
        self._events = events
        self._connections: dict[int, Connection] = {}
        self._readers: list[threading.Thread] = []
        self._ending = False

    def start(self) -> None:
        """Begin to take connections. Called after mpirun was started, since threads and fork do not mix."""
        threading.Thread(target=self._accept, daemon=True).start()

    def send(self, rank: int, message: Message) -> None:
        """Send `message` to the agent of `rank`, if it is still there."""
        with contextlib.suppress(OSError, KeyError):
            self._connections[rank].send_bytes(encode(message))

    def broadcast(self, message: Message) -> None:
        """Send `message` to every agent that is there."""
        for rank in list(self._connections):
            self.send(rank, message)

    def end_agents(self) -> None:
        """Tell every agent to end, those that connect later included."""
        self._ending = True
        self.broadcast(End())

    def close(self) -> None:
        """Stop listening, and print what has come so far; agents that are still there see the end."""
        self._listener.close()
        for reader in self._readers:
            reader.join(_JOIN_TIMEOUT_S / len(self._readers))
        for connection in self._connections.values():
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, ConnectionResetError):
                continue  # not one of our agents, or one that died
            except OSError:
                return  # closed
            reader = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._readers.append(reader)
            reader.start()

    def _serve(self, connection: Connection) -> None:
        try:
            hello = decode(connection.recv_bytes())
        except (EOFError, OSError):
            return
        assert isinstance(hello, Hello)
        if hello.rank == 0 and self._stdin is not None:
            send_handle(connection, self._stdin, None)
        self._connections[hello.rank] = connection
        self._events.put(Arrived(hello.rank, hello.host))
        if self._ending:
            self.send(hello.rank, End())
        _RankReader(hello, connection, self._printer, self._events).run()


class _RankReader:
    """Reads one agent's connection to its end."""

    def __init__(self, hello: Hello, connection: Connection, printer: Printer, events: Events) -> None:
        self._hello = hello
        self._connection = connection
        self._printer = printer
        self._events = events
        self._splitters: dict[StreamName, LineSplitter] = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._pid = 0
        self._device = ""
        self._done = False

    def run(self) -> None:
        """Print output and put events until the agent is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._handle(decode(self._connection.recv_bytes()))
        self._flush()
        if not self._done:
            self._end(None, 0.0)

    def _handle(self, message: Message) -> None:
        match message:
            case Output(stream, data):
                self._printer.keep(self._hello.rank, stream, data)
                self._print(stream, self._splitters[stream].feed(data))
            case Note(text):
                self._printer.message([text])
            case Started(pid, device):
                self._pid, self._device = pid, device
            case State():
                self._events.put(RankState(self._hello.rank, message))
            case Stalled(report):
                self._events.put(RankStalled(self._hello.rank, report))
            case NotStarted(reason):
                self._done = True
                self._events.put(RankNotStarted(self._hello.rank, self._hello.host, reason))
            case Ended():
                self._flush()
                self._end(message, message.at_s)
            case _:
                raise ValueError(f"an agent does not send {message!r}")

    def _print(self, stream: StreamName, lines: list[bytes]) -> None:
        if stream == "stderr":
            self._tail.extend(line.decode(errors="replace")[:_TAIL_LINE_CHARACTERS] for line in lines)
        self._printer.write(self._hello.rank, stream, lines, self._splitters[stream].frame)
        if self._printer.closed:
            self._events.put(OutputClosed())

    def _flush(self) -> None:
        for stream, splitter in self._splitters.items():
            if splitter.pending:
                self._print(stream, splitter.flush())

    def _end(self, ended: Ended | None, at_s: float) -> None:
        self._done = True
        self._printer.rank_ended(self._hello.rank)
        end = RankEnd(
            rank=self._hello.rank,
            host=self._hello.host,
            pid=self._pid,
            code=ended.code if ended else None,
            at_s=at_s,
            sent=ended.sent if ended else (),
            error=ended.error if ended else None,
            tail=tuple(self._tail),
            device=self._device,
            ran_s=ended.ran_s if ended else None,
            oom=ended.oom if ended else "",
        )
        self._events.put(RankEnded(end))
