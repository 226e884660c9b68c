"""ringrun's end of a connection: nobody who sends waits, whatever the other end does.

    send ── what the socket does not take at once ── a queue ── the listener's thread, when the socket takes more

A link whose queue has not moved for `lost_after_s` has lost its other end: an agent that is stopped, though its host
still answers. So there is one time limit for all that is sent, and whoever decides never needs one of its own.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import threading
import time
from collections import deque

from .link import Link

_ROOM_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")  # ucred: pid, uid, gid


class NotReadError(OSError):
    """The other end does not read what is sent, for too long."""


class QueuedLink(Link):
    """A Link whose `send` never waits, and drops what is for an end that is gone: see `Reader`, which hears of that."""

    def __init__(
        self, sock: socket.socket, lost_after_s: float, sends: bytes, receives: bytes, poll: select.epoll
    ) -> None:
        """poll: the listener's, where `sock` is registered; it calls `flush` when that takes more. See Link."""
        sock.setblocking(False)
        super().__init__(sock, lost_after_s, sends, receives)
        self._poll = poll
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._unsent_bytes = 0
        self._moved_s = 0.0  # when the socket took something last, on the monotonic clock
        self._moved = threading.Condition(self._send_lock)

    def send_encoded(self, encoded: bytes) -> None:
        """Send what `encode` has made of a message, now or later."""
        with self._send_lock:
            self._put(self._writer.frame(encoded))

    def send_descriptor(self, descriptor: int) -> None:
        """Give the other end a descriptor of this process, which stays open; local links only."""
        with self._send_lock:
            self._put(b"\0", (descriptor,))

    def await_room(self) -> None:
        """Wait until little is left to be sent, for who sends much; OSError where the other end is gone."""
        with self._moved:
            self._moved.wait_for(lambda: self._unsent_bytes < _ROOM_BYTES or self.fileno() < 0)
            if self.fileno() < 0:
                raise ConnectionResetError

    def flush(self) -> None:
        """Send what the socket takes; called by the listener."""
        with self._send_lock:
            self._flush()

    def is_stuck(self) -> bool:
        """Return whether nothing has been taken for too long."""
        with self._send_lock:
            return bool(self._unsent) and time.monotonic() - self._moved_s > self.lost_after_s

    def close(self) -> None:
        """End the connection; what is not sent is dropped. A process of this host that is stopped goes on to see it."""
        with self._send_lock:
            if self.is_local:
                self._wake_up()
            super().close()
            self._unsent.clear()
            self._moved.notify_all()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it has ended, or this end is closed already
            credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if pid := _CREDENTIALS.unpack(credentials)[0]:  # 0: of a PID namespace that is not seen from here
                os.kill(pid, signal.SIGCONT)

    def _put(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        if self.fileno() < 0:
            return
        self._unsent.append((memoryview(data), descriptors))
        self._unsent_bytes += len(data)
        if len(self._unsent) == 1:  # else it waits for the listener already
            self._moved_s = time.monotonic()
            self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # it takes no more just now, or is gone, which its Reader hears of
            while self._unsent:
                data, descriptors = self._unsent[0]
                sent = socket.send_fds(self._socket, [data], descriptors)
                self._unsent_bytes -= sent
                self._moved_s = time.monotonic()
                if sent < len(data):
                    self._unsent[0] = (data[sent:], ())
                else:
                    self._unsent.popleft()
            self._moved.notify_all()
        with contextlib.suppress(OSError, ValueError):  # the listener has ended
            self._poll.modify(self._socket, select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0))
