"""A host and its slots, and the notation `name:slots` that every source of hosts shares."""

import ipaddress
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError

MAX_SLOTS = 999_999
"""More slots on one host are a typing error."""

_MAX_SHOWN = 80
_NUMBER = re.compile(r"0*[1-9][0-9]{0,5}")
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

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.slots is None else f"{name}:{self.slots}"


@dataclass(frozen=True)
class Allocation:
    """The hosts that a batch system has given to this job."""

    kind: str  # slurm, lsf, pbs, kubernetes or hostfile
    hosts: tuple[Host, ...]
    why: str  # which variables say so


def shown(text: str) -> str:
    """Return `text` for a message: quoted, and not longer than a line."""
    return repr(text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…")


def parse_host(text: str, where: str) -> Host:
    """Return the host in `h1`, `h1:4`, `[fe80::1]` or `[fe80::1]:4`; `where` begins the message of an error."""
    if text.startswith("["):
        match = _BRACKETED.fullmatch(text)
        if match is None or not _is_ipv6(match[1]):
            raise UsageError(f"{where}: expected an IPv6 address in brackets, as in [fe80::1]:4, not {shown(text)}")
        name, slots = match[1], match[2]
    elif text.count(":") > 1 and _ADDRESS.fullmatch(text):
        raise UsageError(f"{where}: an IPv6 address stands in brackets, as in [fe80::1]:4, not {shown(text)}")
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
        user = " (the user of a host belongs into ~/.ssh/config)" if "@" in name else ""
        raise UsageError(f"{where}: expected a host name of letters, digits, '.', '-' and '_', not {shown(name)}{user}")


def parse_slots(text: str, where: str) -> int:
    """Return the number in `text`, of slots or of what stands for them."""
    if not _NUMBER.fullmatch(text):
        raise UsageError(f"{where}: expected a whole number from 1 to {MAX_SLOTS}, not {shown(text)}")
    return int(text)


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
