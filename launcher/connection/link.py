"""The sockets between ringrun and its agents: a unix socket on ringrun's own host, TCP from the others.

Each side proves to the other that it knows the job's key, ringrun only after the agent has. What follows is not
encrypted, like the messages of MPI itself, but nobody else can change it or add to it: see frames.py.

A host that has gone silent is found by TCP: the kernel probes an idle connection, and a connection on which no
acknowledgement has come for `lost_after_s` has lost its other end. A ringrun that is stopped for a while (Ctrl-Z), or
whose reader is slow, still acknowledges: nothing is sent by a clock of our own.
"""

import contextlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from ..network import keepalive
from .frames import FrameReader, FrameWriter
from .wire import Address, Message, decode, encode

SOCKET = "socket"
"""The name of ringrun's socket in its private folder."""
LOOK_S = 2.0
"""How often silence is looked for."""
_CONNECT_TIMEOUT_S = 4.0
_PAUSE_S = 0.2
HANDSHAKE_TIMEOUT_S = 20.0
NONCE_BYTES = PROOF_BYTES = 32
_CHUNK_BYTES = 1 << 16
_TCP_INFO_BYTES = 60
_LAST_ACKNOWLEDGEMENT_AT = 56  # tcp_info.tcpi_last_ack_recv, in ms


class HostSilentError(OSError):
    """The host at the other end does not answer any more."""


class Gone(NamedTuple):
    """Nothing more can come over a connection; `error`: see `Link.receive`."""

    error: Exception


def is_listening(directory: str) -> bool:
    """Whether ringrun, on this host, still takes connections, at its private folder's socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(f"{directory}/{SOCKET}") == 0


class Link:
    """One connection. `send` may be called from several threads, `receive` from one, or `arrived` and no `receive`.

    This is an agent's end, where who sends waits until the socket takes it; queued.py has ringrun's.
    """

    def __init__(self, sock: socket.socket, lost_after_s: float, sends: bytes, receives: bytes) -> None:
        """sock: connected, and each end has shown that it knows the job's key. OSError where it is gone already.

        sends, receives: the keys of both directions, see `keys`.
        """
        self.is_local = sock.family == socket.AF_UNIX
        self.lost_after_s = lost_after_s
        self._socket = sock
        self._send_lock = threading.Lock()
        self._writer, self._reader = FrameWriter(sends), FrameReader(receives)
        self._arrival = select.poll()
        self._arrival.register(sock, select.POLLIN)
        if not self.is_local:
            _keep_alive(sock, lost_after_s)
            self.own_address: str = sock.getsockname()[0]
            self.peer_address: str = sock.getpeername()[0]

    def send(self, message: Message) -> None:
        """Send `message`; OSError when the other end is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, encoded: bytes) -> None:
        """Send what `encode` has made of a message; OSError when the other end is gone."""
        with self._send_lock:
            self._socket.sendall(self._writer.frame(encoded))

    def await_room(self) -> None:
        """Wait until the other end takes more, for who sends much: here `send` has waited."""

    def receive(self) -> Message:
        """Return the next message.

        Raises: EOFError or OSError when the other end is gone, HostSilentError when its host is; ValueError for what
                is no message of the other end's: nothing that follows can be understood.
        """
        while (message := self._reader.next()) is None:
            self._await_arrival()
            self._read(self._reader.missing)  # no more: a descriptor may follow
        return decode(message)

    def arrived(self) -> Iterator[Message | Gone]:
        """Yield the messages that have come, without waiting for more; last of all Gone, if nothing can follow."""
        try:
            self._read(_CHUNK_BYTES)
            while (message := self._reader.next()) is not None:
                yield decode(message)
        except BlockingIOError:
            return
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

    def receive_descriptor(self) -> int:
        """Return the descriptor that the other end gives; OSError where none comes."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not descriptors:
            raise ConnectionResetError("ringrun is gone")
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]

    def end(self) -> None:
        """End the connection; who reads it sees that, and closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` sees it."""
        self.end()
        self._socket.close()

    def _read(self, most: int) -> None:
        try:
            piece = self._socket.recv(most)
        except TimeoutError as error:  # the kernel's own probes found it first
            raise HostSilentError from error
        if not piece:
            raise EOFError
        self._reader.feed(piece)

    def _await_arrival(self) -> None:
        while not self.is_local and not self._arrival.poll(LOOK_S * 1000):
            if self.is_silent():
                raise HostSilentError


def proof(authkey: bytes, role: bytes, nonces: bytes) -> bytes:
    """Return what shows that `role` (`agent` or `ringrun`) knows the key; nonces: those of both, ringrun's first."""
    return hmac.digest(authkey, role + nonces, "sha256")


def keys(authkey: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the keys of a connection for what the agent sends, and for what ringrun does."""
    return proof(authkey, b"messages of agent", nonces), proof(authkey, b"messages of ringrun", nonces)


def introduce(sock: socket.socket, authkey: bytes, lost_after_s: float) -> Link:
    """Prove to ringrun that this end knows the key, and have it prove the same; the agent begins.

    Raises: OSError if ringrun does not know it, or is gone; then `sock` is closed.
    """
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        nonce = os.urandom(NONCE_BYTES)
        sock.sendall(nonce)
        nonces = _exactly(sock, NONCE_BYTES) + nonce
        sock.sendall(proof(authkey, b"agent", nonces))
        if not hmac.compare_digest(_exactly(sock, PROOF_BYTES), proof(authkey, b"ringrun", nonces)):
            raise PermissionError("what listens there has not shown that it knows this job's key")
        sock.settimeout(None)
        return Link(sock, lost_after_s, *keys(authkey, nonces))
    except BaseException:
        sock.close()
        raise


def _exactly(sock: socket.socket, count: int) -> bytes:
    """Return the next `count` bytes; fewer at the end."""
    data = piece = sock.recv(count)
    while piece and len(data) < count:
        piece = sock.recv(count - len(data))
        data += piece
    return data


def connect(address: Address, authkey: bytes) -> Link:
    """Connect to ringrun; OSError, with all that was tried, when it cannot be reached.

    Where nothing answers it is tried again, for `address.connect_s`: ringrun's host may have too many at once.
    """
    if address.host == socket.gethostname() and os.path.exists(address.path):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.path)
        return introduce(sock, authkey, address.lost_after_s)
    until_s = time.monotonic() + address.connect_s
    while True:
        failures: dict[str, Exception] = {}
        for host in address.addresses:
            try:
                return connect_to(host, address.port, authkey, address.lost_after_s)
            except (OSError, EOFError) as error:  # perhaps another host that has the same address
                failures[host] = error
        may_come = any(isinstance(error, (TimeoutError, ConnectionResetError)) for error in failures.values())
        if not may_come or time.monotonic() > until_s:
            texts = [f"{host} port {address.port}: {error}" for host, error in failures.items()]
            raise OSError("; ".join(texts) or f"no address of {address.host} is known")
        time.sleep(_PAUSE_S)


def connect_to(host: str, port: int, authkey: bytes, lost_after_s: float) -> Link:
    """Connect to what listens at a TCP port of `host`; OSError, as `introduce`."""
    sock = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
    return introduce(sock, authkey, lost_after_s)


def _keep_alive(sock: socket.socket, lost_after_s: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    for option, value in zip(options, keepalive(lost_after_s), strict=True):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
