"""Whether a host that somebody names is this one."""

import contextlib
import socket

from .host import Host

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_here(host: Host, own_name: str | None = None) -> bool:
    """Return whether this is the host called `own_name`, by default this one, or an address of this one.

    Of names the part before the first dot counts.
    """
    own_name = own_name or socket.gethostname()
    if host.name in LOOPBACK or host.name.partition(".")[0] == own_name.partition(".")[0]:
        return True
    return _is_own_address(host.name)


def _is_own_address(text: str) -> bool:
    """Return whether `text` is an address of this host: whether a socket can be bound to it."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, text)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((text, 0))
                return True
    return False
