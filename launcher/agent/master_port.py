"""The TCP port at which rank 0's script may listen: found, and kept from other programs until the script begins.

Nothing can be kept while the script, which imports much before it listens, binds the port itself. From then on a name
keeps other jobs of ringrun away: that of a socket without a path, which exists once in each network namespace.
"""

import contextlib
import os
import socket

_PORTS, _TRIES = range(20000, 30000), 20
"""Below those that Linux gives to connections: another program's could get the port before the script listens there."""


class MasterPort:
    """A port of this host; its `number` is 0 where the one that was `wanted` cannot be used."""

    def __init__(self, wanted: int = 0) -> None:
        self._name: socket.socket | None = None
        self._held = _listening(wanted) if wanted else self._found()
        self.number = int(self._held.getsockname()[1]) if self._held else 0

    def release(self) -> None:
        """Let rank 0's script listen there."""
        if self._held:
            self._held.close()

    def close(self) -> None:
        """Let other jobs have it."""
        self.release()
        if self._name:
            self._name.close()

    def _found(self) -> socket.socket | None:
        """Return a socket at a port that nobody has, and that no other job has found; at any port if that fails."""
        for _ in range(_TRIES):
            port = _PORTS[int.from_bytes(os.urandom(4), "big") % len(_PORTS)]
            name = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):
                name.bind(f"\0ringrun-port-{port}")  # fails where another job has it
                if held := _listening(port):
                    self._name = name
                    return held
            name.close()
        return _listening(0)


def _listening(port: int) -> socket.socket | None:
    """Return a socket that listens at this port of all addresses (0: any port); None where that cannot be."""
    made = socket.socket()
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("", port))
        made.listen()
    except OSError:
        made.close()
        return None
    return made


def free_port() -> int:
    """Return a TCP port of this host that nothing listens on just now."""
    with contextlib.closing(MasterPort()) as found:
        return found.number
