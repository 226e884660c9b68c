"""A host and its slots, the notation `name:slots` that every source of hosts shares, and whether it is this host."""

import contextlib
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..arguments import whole
from ..errors import UsageError
from ..text import quoted

_LOOPBACK = (
    *("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"),
    *("127.0.0.1", "::1"),
)

MAX_SLOTS = 999_999
"""More slots on one host are a typing error."""

_ANY_PORT = 9

# what ssh takes for a host and a shell for a word; a leading dash would be an option
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Host:
    """A host that may run `slots` ranks; None where the source of its name does not say how many.

    An IPv6 address stands in `name` without its brackets. `str` gives the host as a command line takes it.
    """

    name: str
    slots: int | None = None
    lenders: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """Of `ringrun join`, where parts of a host are lent: the number of each lender, and its slots, in their order."""

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.slots is None else f"{name}:{self.slots}"


@dataclass(frozen=True)
class Allocation:
    """The hosts that a batch system has given to this job."""

    kind: str  # slurm, lsf, pbs, kubernetes or hostfile
    hosts: tuple[Host, ...]
    why: str  # which variables say so


def parse_host(text: str, where: str) -> Host:
    """Return the host in `h1`, `h1:4`, `[fe80::1]` or `[fe80::1]:4`; `where` begins the message of an error."""
    if text.startswith("["):
        match = _BRACKETED.fullmatch(text)
        if match is None or not _is_ipv6(match[1]):
            raise UsageError(f"{where}: expected an IPv6 address in brackets, as in [fe80::1]:4, got {quoted(text)}")
        name, slots = match[1], match[2]
    elif text.count(":") > 1 and _ADDRESS.fullmatch(text):
        raise UsageError(f"{where}: an IPv6 address must be in brackets, as in [fe80::1]:4, got {quoted(text)}")
    else:
        name, colon, number = text.partition(":")
        slots = number if colon else None
        check_name(name, where)
    return Host(name, None if slots is None else parse_slots(slots, f"{where}: slots"))


def check_name(name: str, where: str) -> None:
    """Raise UsageError unless `name` can be a host's name or IPv4 address."""
    if not name:
        raise UsageError(f"{where}: expected a host name, found nothing")
    if not _NAME.fullmatch(name):
        user = " (the user of a host belongs in ~/.ssh/config)" if "@" in name else ""
        raise UsageError(
            f"{where}: expected a host name of letters, digits, '.', '-' and '_', got {quoted(name)}{user}"
        )


def parse_slots(text: str, where: str) -> int:
    """Return the number in `text`, of slots or of what stands for them."""
    return whole(text, where, 1, MAX_SLOTS)


def parse_host_list(text: str, flag: str = "-H") -> list[Host]:
    """Return the hosts of `h1:4,h2,[fe80::1]:2`, each once; UsageError, which names `flag`, if an item is no host.

    A name without slots leaves them unsaid (None), unless one is repeated: `h1,h1,h2` is 2 slots and 1.
    """
    items = [item.strip() for item in text.split(",")]
    return merge([parse_host(item, f"{flag}, item {number}, {quoted(item)}") for number, item in enumerate(items, 1)])


def merge(mentions: Sequence[Host]) -> list[Host]:
    """Return each host once, in the order of their first mention, with its slots added up.

    Where a bare name is repeated, every bare name is one slot, as in the nodefile of PBS (`h1 h1 h2`: 2 and 1).
    """
    times = Counter(host.name for host in mentions)
    bare_is_a_slot = any(host.slots is None and times[host.name] > 1 for host in mentions)
    totals: dict[str, int | None] = {}
    for host in mentions:
        slots = 1 if host.slots is None and bare_is_a_slot else host.slots
        totals[host.name] = None if slots is None else (totals.get(host.name) or 0) + slots
    return [Host(name, slots) for name, slots in totals.items()]


def _is_ipv6(text: str) -> bool:
    if not _ADDRESS.fullmatch(text):
        return False
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Return whether `name` means this host on each."""
    return name.lower().removesuffix(".") in _LOOPBACK


def is_here(host: Host, own_name: str | None = None) -> bool:
    """Return whether this is the host called `own_name`, by default this one, or an address of this one.

    Domains count where both names have one: n1.rack1 is not n1.rack2.
    """
    if is_loopback(host.name) or _is_same_name(host.name, own_name or socket.gethostname()):
        return True
    return _is_own_address(host.name)


def _is_same_name(name: str, own_name: str) -> bool:
    first, dot, domain = name.lower().removesuffix(".").partition(".")  # DNS ends a whole name with a dot
    own_first, own_dot, own_domain = own_name.lower().partition(".")
    if first != own_first:
        return False
    if dot and not own_dot:  # a host name without its domain is usual; the resolver may know the domain
        own_domain = socket.getfqdn(own_name).lower().removeprefix(own_first).removeprefix(".")
    return not (domain and own_domain) or domain == own_domain


def _is_own_address(text: str) -> bool:
    """Return whether `text` is an address of this host: whether packets to it would come from itself.

    That a socket can be bound to it says nothing where ip_nonlocal_bind is set: then it can be to any.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            address = socket.inet_pton(family, text)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                if family == socket.AF_INET:  # else packets to an interface's second address come from the first one
                    probe.bind((text, 0))
                probe.connect((text, _ANY_PORT))  # sends nothing; fails where it is bound to another host's address
                return socket.inet_pton(family, probe.getsockname()[0]) == address
    return False
