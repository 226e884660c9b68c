"""The machines behind the names of hosts, as far as they have been asked: one may have several names.

A host's name is how it is reached. What the machine calls itself may differ: node7 is ip-10-0-0-7.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address, ip_interface
from typing import NamedTuple

from ..text import listed
from .host import Host, is_here, merge


class Interface(NamedTuple):
    """A network interface other than a loopback."""

    name: str
    is_running: bool
    """Packets can leave it: it is up, and something is at its other end."""
    networks: tuple[str, ...] = ()
    """Its addresses with their prefixes, as in 10.0.0.7/24; without link-local ones of IPv6."""

    @property
    def addresses(self) -> list[str]:
        """Its addresses alone."""
        return [str(ip_interface(network).ip) for network in self.networks]


class Machine(NamedTuple):
    """What a host has said of itself."""

    name: str
    """What it calls itself: the host name that its kernel has."""
    identity: str = ""
    """Which boot of a kernel, which root folder and which namespaces; empty where that is not known."""
    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[str, ...] = ()
    """Ports of its RDMA devices, as in mlx5_0:1."""
    reached: str = ""
    """The address at which it has reached ringrun's host."""

    @property
    def proof(self) -> object:
        """What is equal for two names only if they lead to one place; None where that is not known.

        Containers of one machine may share a host name, addresses or namespaces, and clones of a running machine have
        one identity: only all of it together is proof.
        """
        return (self.name, self.identity, frozenset(self.addresses)) if self.identity else None

    @property
    def addresses(self) -> list[str]:
        """Those of all its interfaces, each once."""
        return list(dict.fromkeys(address for each in self.interfaces for address in each.addresses))


class Machines:
    """Those of one job's hosts, by name; what was said last counts."""

    def __init__(self, known: Mapping[str, Machine] | None = None) -> None:
        self._known: dict[str, Machine] = dict(known or {})

    def learn(self, known: Mapping[str, Machine]) -> None:
        """Take what hosts have said."""
        self._known.update(known)

    def own_name(self, host: str) -> str:
        """Return what the host of this name calls itself; empty where it has not been asked."""
        return self._known[host].name if host in self._known else ""

    def boot(self, host: str) -> str:
        """Return which boot of a kernel the host of this name runs on; empty where that is not known."""
        return self._known[host].identity.partition(" ")[0] if host in self._known else ""

    def rdma(self, host: str) -> Sequence[str]:
        """Return the ports of a host's RDMA devices."""
        return self._known[host].rdma if host in self._known else ()

    def address(self, hosts: Iterable[str]) -> str:
        """Return the address of ringrun's host at which all `hosts` have reached it; empty if there is no such one."""
        found = {self._known[host].reached if host in self._known else "" for host in hosts}
        return found.pop() if len(found) == 1 else ""

    def equal_addresses(self) -> set[str]:
        """Return the addresses that several machines have, as their bridges for containers do."""
        owners = {machine.proof or name: machine for name, machine in self._known.items()}
        counts = Counter(address for machine in owners.values() for address in machine.addresses)
        return {address for address, count in counts.items() if count > 1}

    def interfaces(self, host: str) -> list[str]:
        """Return the interfaces of a host by which others can be reached; none where all can, or nothing is known.

        Left out are those that packets cannot leave, and those with no other address than one that other hosts
        have, too, or that a host without a network gives itself.
        """
        machine, equal = self._known.get(host), self.equal_addresses()
        candidates = [each for each in machine.interfaces if each.networks] if machine else []
        found = [
            each
            for each in candidates
            if each.is_running and any(it not in equal and not ip_address(it).is_link_local for it in each.addresses)
        ]
        return [each.name for each in found] if len(found) < len(candidates) else []

    def networks(self, hosts: Iterable[str]) -> list[str]:
        """Return the networks of the hosts, those that most have first, as in `eth0 10.0.0.0/24`."""
        equal = self.equal_addresses()
        counts: Counter[tuple[bool, str]] = Counter()
        for machine in [self._known[host] for host in hosts if host in self._known]:
            for each in machine.interfaces:
                useless = not each.is_running or equal.issuperset(each.addresses)
                counts.update((useless, f"{each.name} {ip_interface(it).network}") for it in each.networks)
        ordered = sorted(counts, key=lambda each: (each[0], -counts[each]))
        return list(dict.fromkeys(text for _, text in ordered))

    def merged(self, hosts: Sequence[Host]) -> list[Host]:
        """Return each machine once, with the slots of all its names, as for one name that is repeated.

        Its name is the first that is known to be this host's, or else the first.
        """
        names = {host.name: _chosen(group).name for group in self._groups(hosts) for host in group}
        renamed = [replace(host, name=names[host.name]) for host in hosts]
        return merge(renamed) if renamed != list(hosts) else renamed

    def notices(self, hosts: Sequence[Host]) -> list[str]:
        """Return a line for each machine that has several names in `hosts`."""
        merged = {host.name: host for host in self.merged(hosts)}
        lines = []
        for group in self._groups(hosts):
            if len(group) > 1:
                names, own_name = listed([host.name for host in group]), self.own_name(group[0].name)
                one = merged[_chosen(group).name]
                lines.append(f"{names} are one machine, which calls itself {own_name}: treated as one host, {one}")
        return lines

    def _groups(self, hosts: Iterable[Host]) -> Iterable[Sequence[Host]]:
        """Return the names of each machine."""
        groups: dict[object, list[Host]] = {}
        for host in hosts:
            machine = self._known.get(host.name)
            groups.setdefault((machine and machine.proof) or host.name, []).append(host)
        return groups.values()


def _chosen(group: Sequence[Host]) -> Host:
    return next(filter(is_here, group), group[0]) if len(group) > 1 else group[0]
