"""A thread that takes the connections of a socket, for those that are few: each gets a thread of its own.

It ends with the socket alone. Where no descriptor is free a connection waits; where no thread can be started it is
closed, and the next one is taken.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

_PAUSE_S = 0.2


def accept_all(listening: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Begin to take connections, and to `serve` each, until `stop`."""
    threading.Thread(target=_run, args=(listening, serve), daemon=True).start()


def stop(listening: socket.socket) -> None:
    """Take no more connections."""
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
    listening.close()


def _run(listening: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    while listening.fileno() >= 0:
        try:
            connection, _ = listening.accept()
        except OSError:  # closed, or as where no descriptor is free
            time.sleep(_PAUSE_S)
            continue
        try:
            threading.Thread(target=serve, args=(connection,), daemon=True).start()
        except RuntimeError:  # too many threads
            connection.close()
            time.sleep(_PAUSE_S)
