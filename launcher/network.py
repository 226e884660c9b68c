"""This host's own addresses, where agents on other hosts may reach ringrun; and when a host counts as lost."""

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .errors import MachineError, UsageError

LOST_AFTER_S = 30.0
"""A host that is silent for longer is lost; --lost-after sets another time."""

_LONGEST_KEEPALIVE_S = 32767
_PROBES = 6

_SIOCGIFADDR = 0x8915
_INTERFACE_NAME_BYTES = 15
_ANY_PORT = 9  # discard: nothing is sent there
_IPV6_TABLE = "/proc/net/if_inet6"
_IPV6_GLOBAL = "00"
_IPV6_NOT_YET = 0x48  # tentative, or a duplicate: nothing can listen there
_MOST_LOOKUPS = 8  # one after the other, and a slow resolver takes seconds for each


def keepalive(lost_after_s: float) -> tuple[int, int, int]:
    """Return TCP's keepalive that finds a host lost after so many seconds: when it probes an idle connection first,
    how many seconds lie between probes, and how many may fail.

    >>> keepalive(8), keepalive(30)
    ((2, 1, 6), (7, 3, 6))
    """
    idle_s, interval_s = (min(max(1, int(lost_after_s / parts)), _LONGEST_KEEPALIVE_S) for parts in (4, 8))
    return idle_s, interval_s, _PROBES


def parse_interfaces(text: str | None, flag: str = "--network-interfaces") -> tuple[str, ...]:
    """Return the names in `eth0,ib0`, each an interface of this host; UsageError for any other."""
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    there = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in there:
            raise UsageError(f"{flag} {text}: there is no interface {name!r} here; there are {', '.join(there)}")
    return names


def own_addresses(hosts: Iterable[str], interfaces: Sequence[str]) -> tuple[str, ...]:
    """Return this host's addresses for the others, the likeliest first: those that the system would use to reach them.

    Then come all the others, for names that only ssh understands, and hosts behind another network. With `interfaces`
    only theirs. Only a sample of the hosts' names is looked up, however many there are. MachineError if there is none.
    """
    names = list(dict.fromkeys(hosts))
    sample = names[:: -(-len(names) // _MOST_LOOKUPS) or 1]
    ours = list(_interface_addresses(interfaces or [name for _, name in socket.if_nameindex()]))
    routed = [] if interfaces else [_address_towards(host) for host in sample]
    found = tuple(address for address in dict.fromkeys([*routed, *ours]) if address and not _is_of_no_use(address))
    if not found:
        where = f"the interfaces {', '.join(interfaces)} have" if interfaces else "this host has"
        raise MachineError(f"{where} no address that other hosts could reach; see `ip address`")
    return found


def addresses_or_loopback() -> tuple[str, ...]:
    """As own_addresses, for any host; that of the loopback where there is no network, as on some laptops."""
    try:
        return own_addresses((), ())
    except MachineError:
        return ("127.0.0.1",)


def listen_everywhere(backlog: int) -> socket.socket:
    """Return a socket that takes connections at a free port of all addresses of this host, IPv6 included."""
    six = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if six else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=six, backlog=backlog)


def _address_towards(host: str) -> str | None:
    """Return the address of this host from which packets to `host` would go; None where its name is unknown."""
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            name: str = probe.getsockname()[0]
            return name
    return None


def _interface_addresses(names: Iterable[str]) -> Iterator[str]:
    """Yield the IPv4 address of each interface, then the global IPv6 ones."""
    names = list(names)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name in names:
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:_INTERFACE_NAME_BYTES])
                yield socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])
    with contextlib.suppress(OSError):
        for line in Path(_IPV6_TABLE).read_text().splitlines():
            digits, _, _, scope, flags, name = line.split()
            if scope == _IPV6_GLOBAL and name in names and not int(flags, 16) & _IPV6_NOT_YET:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _is_of_no_use(address: str) -> bool:
    """Return whether it is a loopback's, or one that needs the name of an interface beside it."""
    return address == "::1" or address.startswith(("127.", "fe80:"))
