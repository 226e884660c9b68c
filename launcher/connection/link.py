"""The sockets between ringrun and its agents: a unix socket on ringrun's own host, TCP from the others.

Each side proves to the other that it knows the job's key, ringrun only after the agent has; what follows is not
encrypted, like the messages of MPI itself. A message travels behind its length, four bytes.

A host that has gone silent is found by TCP: the kernel probes an idle connection, and a connection on which no
acknowledgement has come for `lost_after_s` has lost its other end. A ringrun that is stopped for a while (Ctrl-Z), or
whose reader is slow, still acknowledges: nothing is sent by a clock of our own.
"""

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..network import LOST_AFTER_S, keepalive
from .wire import Message, decode, encode

CONNECT_S = 15.0
LOOK_S = 2.0
"""How often silence is looked for."""
_CONNECT_TIMEOUT_S = 4.0
_PAUSE_S = 0.2
_HANDSHAKE_TIMEOUT_S = 20.0
_MOST_HANDSHAKES = 256
_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH = struct.Struct("!I")
_LONGEST_FRAME = 1 << 30
_CHUNK_BYTES = 1 << 16
_TCP_INFO_BYTES = 60
_LAST_ACKNOWLEDGEMENT_AT = 56  # tcp_info.tcpi_last_ack_recv, in ms
_BIND_ATTEMPTS = 20


class HostSilentError(OSError):
    """The host at the other end does not answer any more."""


class Gone(NamedTuple):
    """Nothing more can come over a connection; `error`: see `Link.receive`."""

    error: Exception


class Address(NamedTuple):
    """Where ringrun listens: at a socket's `path` on its own `host`, and at a TCP port of `addresses`, if any.

    connect_s:     how long an agent goes on trying to connect
    lost_after_s:  how long either end may be silent
    """

    host: str
    path: str
    port: int = 0
    addresses: tuple[str, ...] = ()
    connect_s: float = CONNECT_S
    lost_after_s: float = LOST_AFTER_S

    def __str__(self) -> str:
        times = f"{self.connect_s!r};{self.lost_after_s!r}"
        return ";".join([self.host, str(self.port), ",".join(self.addresses), times, self.path])

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Return the address that `str` gave; ValueError for anything else."""
        host, port, addresses, connect_s, lost_after_s, path = text.split(";", 5)
        found = tuple(filter(None, addresses.split(",")))
        return cls(host, path, int(port), found, float(connect_s), float(lost_after_s))


class Link:
    """One connection. `send` may be called from several threads, `receive` from one, or `arrived` and no `receive`."""

    def __init__(self, sock: socket.socket, authkey: bytes, lost_after_s: float, *, is_server: bool) -> None:
        """Raises OSError if the other end does not know the key, or EOFError if it is gone; then `sock` is closed."""
        self.is_local = sock.family == socket.AF_UNIX
        self.lost_after_s = lost_after_s
        self._socket = sock
        self._send_lock = threading.Lock()
        self._arrival = select.poll()
        self._arrival.register(sock, select.POLLIN)
        self._unread = bytearray()  # of a message that has not come completely
        try:
            if not self.is_local:
                _keep_alive(sock, lost_after_s)
                self.own_address, self.peer_address = _plain(sock.getsockname()[0]), _plain(sock.getpeername()[0])
            self._shake_hands(authkey, is_server)
        except BaseException:
            self.close()
            raise

    def send(self, message: Message) -> None:
        """Send `message`; OSError when the other end is gone."""
        frame = encode(message)
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self) -> Message:
        """Return the next message.

        Raises: EOFError or OSError when the other end is gone, HostSilentError when its host is; ValueError for what
                is no message: nothing that follows can be understood.
        """
        try:
            return decode(self._read(_length(self._read(_LENGTH.size))))
        except TimeoutError as error:  # the kernel's own probes found it first
            raise HostSilentError from error

    def arrived(self) -> Iterator[Message | Gone]:
        """Yield the messages that have come, without waiting for more; last of all Gone, if nothing can follow."""
        try:
            piece = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
            if not piece:
                raise EOFError
            self._unread += piece
            while len(self._unread) >= _LENGTH.size:
                end = _LENGTH.size + _length(self._unread)
                if len(self._unread) < end:
                    return
                frame = bytes(self._unread[_LENGTH.size : end])
                del self._unread[:end]
                yield decode(frame)
        except BlockingIOError:
            return
        except TimeoutError:
            yield Gone(HostSilentError())
        except (EOFError, OSError, ValueError) as error:
            yield Gone(error)

    def is_silent(self) -> bool:
        """Return whether the host at the other end has not acknowledged anything for too long."""
        if self.is_local:
            return False
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (silent_ms,) = struct.unpack_from("I", info, _LAST_ACKNOWLEDGEMENT_AT)
        return bool(silent_ms > self.lost_after_s * 1000)

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def send_descriptor(self, descriptor: int) -> None:
        """Give the other end a descriptor of this process; local links only."""
        with self._send_lock:
            socket.send_fds(self._socket, [b"\0"], [descriptor])

    def receive_descriptor(self) -> int:
        """Return the descriptor that the other end gives; OSError where none comes."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not descriptors:
            raise ConnectionResetError("ringrun is gone")
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` sees it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int, until_s: float | None = None) -> bytes:
        """Return the next `count` bytes; TimeoutError if they have not come by `until_s`."""
        data = bytearray()
        while len(data) < count:
            if until_s is not None:
                self._socket.settimeout(max(0.001, until_s - time.monotonic()))
            elif not self.is_local:
                self._await_arrival()
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _await_arrival(self) -> None:
        while not self._arrival.poll(LOOK_S * 1000):
            if self.is_silent():
                raise HostSilentError

    def _shake_hands(self, authkey: bytes, is_server: bool) -> None:
        """Prove that this end knows the key, and have the other prove it; the agent begins."""
        until_s = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._socket.sendall(nonce)
        theirs = self._read(_NONCE_BYTES, until_s)
        nonces = nonce + theirs if is_server else theirs + nonce

        def prove(role: bytes) -> None:
            self._socket.sendall(hmac.digest(authkey, role + nonces, "sha256"))

        def check(role: bytes) -> None:
            try:
                proof = self._read(_PROOF_BYTES, until_s)
            except EOFError:
                proof = b""
            if not hmac.compare_digest(proof, hmac.digest(authkey, role + nonces, "sha256")):
                raise PermissionError("what listens there has not shown that it knows this job's key")

        steps = ((check, b"agent"), (prove, b"ringrun")) if is_server else ((prove, b"agent"), (check, b"ringrun"))
        for step, role in steps:
            step(role)
        self._socket.settimeout(None)


class Listener:
    """Takes connections at a unix socket in `directory` and, if `addresses` are given, at one TCP port."""

    def __init__(
        self,
        directory: str,
        addresses: Sequence[str],
        backlog: int,
        *,
        only_these: bool = False,
        connect_s: float = CONNECT_S,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        """only_these: listen at these addresses, at no other of this host."""
        path = str(Path(directory) / "socket")
        self.authkey = secrets.token_bytes(32)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(path)
        beyond = [] if not addresses else _bound(addresses) if only_these else [_any_address()]
        self._sockets = [unix, *beyond]
        self._handshakes = threading.BoundedSemaphore(_MOST_HANDSHAKES)
        self._is_closed = threading.Event()
        self._has_complained = False
        for each in self._sockets:
            each.listen(backlog)
        port = beyond[0].getsockname()[1] if beyond else 0
        self.address = Address(socket.gethostname(), path, port, tuple(addresses), connect_s, lost_after_s)

    def start(self, serve: Callable[[Link], None], complain: Callable[[str], None] = lambda _: None) -> None:
        """Call `serve`, which must not take long, with each connection that knows the key, in a thread of its own.

        complain: called once with the reason why connections cannot be accepted now; they are tried again.
        """
        for each in self._sockets:
            threading.Thread(target=self._accept, args=(each, serve, complain), daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._is_closed.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # close() alone does not wake the thread in accept()
            each.close()

    def _accept(self, listening: socket.socket, serve: Callable[[Link], None], complain: Callable[[str], None]) -> None:
        while not self._is_closed.is_set():
            self._handshakes.acquire()  # the others wait in the kernel's queue
            try:
                sock, _ = listening.accept()
                threading.Thread(target=self._greet, args=(sock, serve), daemon=True).start()
            except (OSError, RuntimeError) as error:  # no descriptor is free, or no thread can be started
                self._handshakes.release()
                if not self._is_closed.wait(_PAUSE_S) and not self._has_complained:
                    self._has_complained = True
                    complain(f"a rank's connection cannot be taken: {error}; trying again")

    def _greet(self, sock: socket.socket, serve: Callable[[Link], None]) -> None:
        try:
            link = Link(sock, self.authkey, self.address.lost_after_s, is_server=True)
        except (EOFError, OSError):
            return  # not one of our agents, or one that died
        finally:
            self._handshakes.release()
        serve(link)


def connect(address: Address, authkey: bytes) -> Link:
    """Connect to ringrun; OSError, with all that was tried, when it cannot be reached.

    Where nothing answers it is tried again, for `address.connect_s`: ringrun's host may have too many at once.
    """
    if address.host == socket.gethostname() and os.path.exists(address.path):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.path)
        return Link(sock, authkey, address.lost_after_s, is_server=False)
    until_s = time.monotonic() + address.connect_s
    while True:
        failures: dict[str, Exception] = {}
        for host in address.addresses:
            try:
                return _connect(host, address, authkey)
            except (OSError, EOFError) as error:  # perhaps another host that has the same address
                failures[host] = error
        may_come = any(isinstance(error, (TimeoutError, ConnectionResetError)) for error in failures.values())
        if not may_come or time.monotonic() > until_s:
            texts = [f"{host} port {address.port}: {error}" for host, error in failures.items()]
            raise OSError("; ".join(texts) or f"no address of {address.host} is known")
        time.sleep(_PAUSE_S)


def _connect(host: str, address: Address, authkey: bytes) -> Link:
    sock = socket.create_connection((host, address.port), timeout=_CONNECT_TIMEOUT_S)
    return Link(sock, authkey, address.lost_after_s, is_server=False)


def _length(data: bytes | bytearray) -> int:
    """Return the length of the message that follows; ValueError for one that nobody sends."""
    (length,) = _LENGTH.unpack_from(data)
    if length > _LONGEST_FRAME:
        raise ValueError(f"a message of {length} bytes")
    return int(length)


def _bound(addresses: Sequence[str]) -> list[socket.socket]:
    """Return TCP sockets at one free port of each of `addresses`."""
    for attempts_left in reversed(range(_BIND_ATTEMPTS)):
        made: list[socket.socket] = []
        try:
            for address in addresses:
                made.append(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
                made[-1].bind((address, made[0].getsockname()[1] if len(made) > 1 else 0))
        except OSError:  # the port is taken at another of them
            for sock in made:
                sock.close()
            if not attempts_left:
                raise
        else:
            return made
    raise AssertionError


def _any_address() -> socket.socket:
    """Return a TCP socket at a free port of all addresses, IPv6's too where there is IPv6."""
    if socket.has_ipv6:
        with contextlib.suppress(OSError):
            sock = socket.socket(socket.AF_INET6)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind(("::", 0))
            return sock
    sock = socket.socket(socket.AF_INET)
    sock.bind(("0.0.0.0", 0))  # noqa: S104 - agents come from other hosts, and must know the key
    return sock


def _keep_alive(sock: socket.socket, lost_after_s: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    for option, value in zip(options, keepalive(lost_after_s), strict=True):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _plain(address: str) -> str:
    """Return an IPv4 address that a socket for both shows as IPv6's as what it is."""
    return address.removeprefix("::ffff:")
