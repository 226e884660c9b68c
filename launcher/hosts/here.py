"""Whether a host that somebody names is this one."""

import socket

from .host import Host

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_here(host: Host, own_name: str | None = None) -> bool:
    """Return whether this is the host called `own_name`, by default this one: the names before the first dot count."""
    own_name = own_name or socket.gethostname()
    return host.name in LOOPBACK or host.name.partition(".")[0] == own_name.partition(".")[0]
