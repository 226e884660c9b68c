"""The sockets between ringrun and its agents: a unix socket on ringrun's own host, TCP from the others.

Both sides must know a key, which is checked both ways as multiprocessing does it; what follows is not encrypted, like
the messages of MPI itself. A host that has gone silent is found by TCP: the kernel probes an idle connection, and a
connection on which no acknowledgement has come for SILENT_S has lost its other end. A ringrun that is stopped for a
while (Ctrl-Z), or whose reader is slow, still acknowledges: nothing is sent by a clock of our own.
"""

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from .wire import Message, decode, encode

SILENT_S = 8.0
"""A connection without an acknowledgement for so long has lost its other end."""

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 6))  # seconds, and a number
_LOOK_S = 2.0
_CONNECT_TIMEOUT_S = 4.0
_HANDSHAKE_TIMEOUT_S = 20
_TCP_INFO_BYTES = 60
_LAST_ACKNOWLEDGEMENT_AT = 56  # tcp_info.tcpi_last_ack_recv, in ms


class HostSilentError(OSError):
    """The host at the other end does not answer any more."""


@dataclass(frozen=True)
class Address:
    """Where ringrun listens: at a socket's `path` on its own `host`, and at a TCP port of `addresses`, if any."""

    host: str
    path: str
    port: int = 0
    addresses: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ";".join([self.host, str(self.port), ",".join(self.addresses), self.path])

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Return the address that `str` gave; ValueError for anything else."""
        host, port, addresses, path = text.split(";", 3)
        return cls(host, path, int(port), tuple(filter(None, addresses.split(","))))


class Link:
    """One connection. `send` may be called from several threads, `receive` from one."""

    def __init__(self, sock: socket.socket, authkey: bytes, *, is_server: bool) -> None:
        """Raises AuthenticationError, or OSError, if the other end does not know the key or is gone."""
        self.is_local = sock.family == socket.AF_UNIX
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self._send_lock = threading.Lock()
        if not self.is_local:
            _keep_alive(sock)
        try:
            _limit_wait(sock, _HANDSHAKE_TIMEOUT_S)
            steps = (deliver_challenge, answer_challenge)
            for step in steps if is_server else reversed(steps):
                step(self._connection, authkey)
            _limit_wait(sock, 0)
        except BaseException:
            self.close()
            raise

    @property
    def own_address(self) -> str:
        """The address of this end; TCP only."""
        return _plain(self._socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """The address of the other end; TCP only."""
        return _plain(self._socket.getpeername()[0])

    def send(self, message: Message) -> None:
        """Send `message`; OSError when the other end is gone."""
        with self._send_lock:
            self._connection.send_bytes(encode(message))

    def receive(self) -> Message:
        """Return the next message; EOFError or OSError when the other end is gone, HostSilentError when its host is."""
        while not self._connection.poll(None if self.is_local else _LOOK_S):
            if self._is_silent():
                raise HostSilentError
        try:
            return decode(self._connection.recv_bytes())
        except TimeoutError as error:  # the kernel's own probes found it first
            raise HostSilentError from error

    def send_descriptor(self, descriptor: int) -> None:
        """Give the other end a descriptor of this process; local links only."""
        send_handle(self._connection, descriptor, None)

    def receive_descriptor(self) -> int:
        """Return the descriptor that the other end gives."""
        return recv_handle(self._connection)

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` sees it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._connection.close()

    def _is_silent(self) -> bool:
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (last_ms,) = struct.unpack_from("I", info, _LAST_ACKNOWLEDGEMENT_AT)
        return bool(last_ms > SILENT_S * 1000)


class Listener:
    """Takes connections at a unix socket in `directory` and, if `addresses` are given, at one TCP port."""

    def __init__(self, directory: str, addresses: Sequence[str], backlog: int) -> None:
        path = str(Path(directory) / "socket")
        self.authkey = secrets.token_bytes(32)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(path)
        self._sockets = [unix]
        port = 0
        if addresses:
            self._sockets.append(_any_address())
            port = self._sockets[-1].getsockname()[1]
        for each in self._sockets:
            each.listen(backlog)
        self.address = Address(socket.gethostname(), path, port, tuple(addresses))

    def start(self, serve: Callable[[Link], None]) -> None:
        """Call `serve` with each connection that knows the key, in a thread of its own."""
        for each in self._sockets:
            threading.Thread(target=self._accept, args=(each, serve), daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # close() alone does not wake the thread in accept()
            each.close()

    def _accept(self, listening: socket.socket, serve: Callable[[Link], None]) -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(sock, serve), daemon=True).start()

    def _greet(self, sock: socket.socket, serve: Callable[[Link], None]) -> None:
        try:
            link = Link(sock, self.authkey, is_server=True)
        except (AuthenticationError, EOFError, OSError, ValueError):
            return  # not one of our agents, or one that died
        serve(link)


def connect(address: Address, authkey: bytes) -> Link:
    """Connect to ringrun; OSError, with all that was tried, when it cannot be reached."""
    if address.host == socket.gethostname() and os.path.exists(address.path):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.path)
        return Link(sock, authkey, is_server=False)
    failures = []
    for host in address.addresses:
        try:
            sock = socket.create_connection((host, address.port), timeout=_CONNECT_TIMEOUT_S)
            sock.settimeout(None)
            return Link(sock, authkey, is_server=False)
        except (OSError, EOFError, AuthenticationError) as error:  # perhaps another host that has the same address
            failures.append(f"{host} port {address.port}: {error}")
    raise OSError("; ".join(failures) or f"no address of {address.host} is known")


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


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _limit_wait(sock: socket.socket, seconds: int) -> None:
    """Let a read or write of `sock` fail that takes longer; 0: never."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _plain(address: str) -> str:
    """Return an IPv4 address that a socket for both shows as IPv6's as what it is."""
    return address.removeprefix("::ffff:")
