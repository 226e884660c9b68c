"""Whether a host that somebody names is this one."""

import contextlib
import socket

from .host import Host

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_here(host: Host, own_name: str | None = None) -> bool:
    """Return whether this is the host called `own_name`, by default this one, or an address of this one.

    Domains count where both names have one: n1.rack1 is not n1.rack2.
    """
    if host.name in LOOPBACK or _is_same_name(host.name, own_name or socket.gethostname()):
        return True
    return _is_own_address(host.name)


def _is_same_name(name: str, own_name: str) -> bool:
    first, dot, domain = name.lower().partition(".")
    own_first, own_dot, own_domain = own_name.lower().partition(".")
    if first != own_first:
        return False
    if dot and not own_dot:  # a host name without its domain is usual; the resolver may know the domain
        own_domain = socket.getfqdn(own_name).lower().removeprefix(own_first).removeprefix(".")
    return not (domain and own_domain) or domain == own_domain


def _is_own_address(text: str) -> bool:
    """Return whether `text` is an address of this host: whether a socket can be bound to it."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, text)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((text, 0))
                return True
    return False
