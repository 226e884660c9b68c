"""ringrun's end of all connections: takes them, reads them and writes to them, in one thread, however many there are.

a connection  ->  _Greeting: does the other end know the key?  ->  a Reader, which handles its messages

What a connection does not take at once is queued (queued.py) and goes out here. Where no descriptor is free, or no
thread can be started, connections wait a while.
"""

import contextlib
import hmac
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ..network import LOST_AFTER_S
from .link import (
    HANDSHAKE_TIMEOUT_S,
    LOOK_S,
    NONCE_BYTES,
    PROOF_BYTES,
    SOCKET,
    Gone,
    HostSilentError,
    keys,
    proof,
)
from .queued import NotReadError, QueuedLink
from .wire import CONNECT_S, Address, Message

_MOST_GREETINGS = 256  # more wait in the kernel's queue
_SILENT_S = 1.0  # when there are so many
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
_PAUSE_S = 0.2
_BIND_ATTEMPTS = 20
_BACKLOG = 4096
Arrived = Iterator[Message | Gone]
Serve = Callable[[socket.socket], object]


class Reader(Protocol):
    """What handles the messages of one connection, in their order, without waiting; the last one is Gone."""

    link: QueuedLink

    def handle(self, message: Message | Gone) -> bool:
        """Handle a message; return whether another one may come. If not, the connection is closed."""


class Listener:
    """Takes connections at a unix socket in `directory` and at one TCP port of `addresses`, this host's own."""

    def __init__(
        self,
        directory: str,
        addresses: Sequence[str],
        backlog: int,
        *,
        connect_s: float = CONNECT_S,
        lost_after_s: float = LOST_AFTER_S,
        port: int = 0,
        authkey: bytes = b"",
    ) -> None:
        """port, authkey: of one's own; by default a free port, and a new key. OSError where the port is taken."""
        path = str(Path(directory) / SOCKET)
        self.authkey = authkey or os.urandom(32)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(path)
        beyond = _bound(addresses, port)
        bound = beyond[0].getsockname()[1] if beyond else 0
        self.address = Address(socket.gethostname(), path, bound, tuple(addresses), connect_s, lost_after_s)
        self._greetings: dict[int, _Greeting] = {}  # by descriptor
        self._readers: dict[int, Reader] = {}
        self._removed = threading.Condition()
        self._poll = select.epoll()
        self._end, self._other_end = os.pipe()
        self._poll.register(self._end, select.EPOLLIN)
        self._sockets: dict[int, tuple[socket.socket, Serve | None]] = {}
        for each in (unix, *beyond):
            self.listen(each, None, backlog)
        self._pause_until_s = 0.0  # no connection is accepted before
        self._complaint = ""

    def listen(self, sock: socket.socket, serve: Serve | None, backlog: int = _BACKLOG) -> None:
        """Take connections at this socket, too, from `start` to `close`: `serve` gets each in a thread of its own."""
        sock.listen(backlog)
        sock.setblocking(False)
        self._sockets[sock.fileno()] = sock, serve
        self._poll.register(sock, select.EPOLLIN)

    def start(
        self,
        serve: Callable[[QueuedLink], Reader],
        complain: Callable[[str], None] = lambda _: None,
        broken: Callable[[str], None] | None = None,
    ) -> None:
        """Take connections; `serve` returns what handles one that knows the key.

        complain: called once with the reason why connections cannot be accepted now; they are tried again.
        broken:   called with the reason why nothing is read any more; by default it is said on stderr, and all
                  connections end, by which the other ends know.
        """
        self._serve, self._complain, self._broken = serve, complain, broken or self._end_all
        threading.Thread(target=self._run, daemon=True).start()

    def close(self, patience_s: float = 0.0) -> None:
        """Take no more connections, and end those that there are, when they have ended or after `patience_s`."""
        for each, _ in self._sockets.values():
            each.close()
        with self._removed:
            self._removed.wait_for(lambda: not self._readers, patience_s)
        os.close(self._other_end)
        for reader in list(self._readers.values()):
            reader.link.close()

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # as where no thread can be started
            self._broken(f"{type(error).__name__}: {error}")

    def _end_all(self, why: str) -> None:
        print(f"ringrun cannot read its connections any more, and ends them: {why}", file=sys.stderr)
        for sock, _ in self._sockets.values():
            sock.close()
        for reader in list(self._readers.values()):
            reader.link.end()

    def _read(self) -> None:
        look_at_s, accepts = 0.0, True
        while True:
            for descriptor, events in self._poll.poll(LOOK_S if accepts else _PAUSE_S):
                if descriptor == self._end:
                    return self._stop()
                self._attend_to(descriptor, events)
            now_s = time.monotonic()
            if now_s >= look_at_s:
                look_at_s = now_s + min(LOOK_S, HANDSHAKE_TIMEOUT_S)
                self._look_for_silence()
                self._drop_greetings(now_s, HANDSHAKE_TIMEOUT_S)
            if len(self._greetings) >= _MOST_GREETINGS:
                addresses = Counter(each.address for each in self._greetings.values() if each.address)  # of other hosts
                for address, _ in addresses.most_common(1):
                    self._drop_greetings(now_s, _SILENT_S, address)
            if accepts != (now_s >= self._pause_until_s and len(self._greetings) < _MOST_GREETINGS):
                accepts = not accepts
                for descriptor in self._sockets:
                    with contextlib.suppress(OSError):  # closed meanwhile
                        self._poll.modify(descriptor, select.EPOLLIN if accepts else 0)

    def _stop(self) -> None:
        self._poll.close()
        os.close(self._end)
        for greeting in self._greetings.values():
            greeting.socket.close()

    def _attend_to(self, descriptor: int, events: int) -> None:
        if descriptor in self._sockets:
            self._accept(*self._sockets[descriptor])
        elif descriptor in self._greetings:
            self._greet(descriptor)
        elif reader := self._readers.get(descriptor):
            if events & select.EPOLLOUT:
                reader.link.flush()
            if events & ~select.EPOLLOUT:
                self._handle(reader, reader.link.arrived())

    def _accept(self, listening: socket.socket, serve: Serve | None) -> None:
        try:
            sock, address = listening.accept()
        except BlockingIOError:
            return  # it has gone again
        except OSError as error:  # no descriptor is free
            self._pause_until_s = time.monotonic() + _PAUSE_S
            if listening.fileno() >= 0 and not self._complaint:
                self._complaint = f"a rank's connection cannot be accepted: {error}; trying again"
                self._complain(self._complaint)
            return
        try:
            if serve:
                threading.Thread(target=serve, args=(sock,), daemon=True).start()
                return
            sock.setblocking(False)
            self._greetings[sock.fileno()] = _Greeting(sock, address[:1], self.authkey)
            self._poll.register(sock, select.EPOLLIN)
        except RuntimeError:  # there are too many threads
            self._pause_until_s = time.monotonic() + _PAUSE_S
            sock.close()
        except OSError:  # it has gone again, too
            self._greetings.pop(sock.fileno(), None)
            sock.close()

    def _greet(self, descriptor: int) -> None:
        greeting = self._greetings[descriptor]
        with self._removed:  # from here on the other end may know that it is taken: `close` waits for it, too
            try:
                if not (nonces := greeting.proceed()):
                    return
                from_agent, to_agent = keys(self.authkey, nonces)
                link = QueuedLink(greeting.socket, self.address.lost_after_s, to_agent, from_agent, self._poll)
            except OSError:  # not one of our agents, or one that died
                self._greetings.pop(descriptor).socket.close()
                return
            del self._greetings[descriptor]
            self._readers[descriptor] = self._serve(link)

    def _drop_greetings(self, now_s: float, silent_s: float, address: object = None) -> None:
        """End the connections, of one address or of all, that have not shown for so long that they know the key.

        An agent that was only slow tries again: it sees a reset.
        """
        for descriptor, greeting in list(self._greetings.items()):
            if now_s > greeting.since_s + silent_s and address in (None, greeting.address):
                with self._greetings.pop(descriptor).socket as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)

    def _look_for_silence(self) -> None:
        for reader in list(self._readers.values()):
            with contextlib.suppress(OSError):  # closed meanwhile
                if reader.link.is_silent():
                    self._handle(reader, iter([Gone(HostSilentError())]))
                elif reader.link.is_stuck():
                    self._handle(reader, iter([Gone(NotReadError())]))

    def _handle(self, reader: Reader, messages: Arrived) -> None:
        for message in messages:
            if not reader.handle(message):
                self._remove(reader)
                return

    def _remove(self, reader: Reader) -> None:
        with self._removed:
            self._readers.pop(reader.link.fileno(), None)
            reader.link.close()  # not before: the next connection may get the descriptor
            self._removed.notify()


class _Greeting:
    """A connection whose other end has not shown yet that it knows the key; OSError where it cannot."""

    def __init__(self, sock: socket.socket, address: object, authkey: bytes) -> None:
        self.socket = sock
        self.address = address
        self.since_s = time.monotonic()
        self._authkey = authkey
        self._nonce = os.urandom(NONCE_BYTES)
        self._received = b""
        sock.sendall(self._nonce)

    def proceed(self) -> bytes:
        """Read what has come; return both nonces when the other end has shown it, then this end shows it, too."""
        piece = self.socket.recv(NONCE_BYTES + PROOF_BYTES - len(self._received), socket.MSG_DONTWAIT)
        self._received += piece
        if len(self._received) < NONCE_BYTES + PROOF_BYTES and piece:
            return b""
        nonces = self._nonce + self._received[:NONCE_BYTES]
        if not hmac.compare_digest(self._received[NONCE_BYTES:], proof(self._authkey, b"agent", nonces)):
            raise PermissionError
        self.socket.sendall(proof(self._authkey, b"ringrun", nonces))
        return nonces


def _bound(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Return TCP sockets at this `port`, or at one that is free, of each of `addresses`."""
    for attempts_left in reversed(range(_BIND_ATTEMPTS)):
        made: list[socket.socket] = []
        try:
            for address in addresses:
                made.append(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
                if port:  # connections that the last job at this port has closed are no reason to refuse it
                    made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                made[-1].bind((address, made[0].getsockname()[1] if len(made) > 1 else port))
        except OSError:  # the port is taken at another of them
            for sock in made:
                sock.close()
            if port or not attempts_left:
                raise
        else:
            return made
    raise AssertionError
