"""Stragglers: which ranks, hosts and links keep others waiting, why, for how long, and what to do. Pure functions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .analyse import Gains, Shares, average, delays, excess
from .collect import Rank

LEAST_SHARE = 0.02  # of a step: who is less late is not told
_LOADER = " (data loader)"
_MOST = 20

KINDS = {
    "core shared": (
        "another process runs on its core",
        "stop the other process on its core (top shows which)",
    ),
    "data loader": (
        "it waits for its data loader",
        "its data loader needs more workers (with --no-bind they may use idle cores), or a faster disk",
    ),
    "slow host": ("all ranks of this host compute longer", "look for other load, heat or a power limit there"),
    "slow link": ("it carries half of what others do, or less", "run ringrun doctor; compression=int4 sends an eighth"),
    "computes longer": ("it computes longer than others", "give it less to do, or find out what else it does"),
}
"""Kinds of stragglers: what each means, and what to do."""


@dataclass(frozen=True)
class Straggler:
    """What others wait for: seconds a step, `caused_s` those of all others together."""

    who: str
    kind: str
    delay_s: float
    caused_s: float
    where: str = ""
    ranks: tuple[int, ...] = ()


@dataclass
class Link:
    """What went from one host to another in the last minutes."""

    nbytes: float = 0.0
    busy_s: float = 0.0
    most_s: float = 0.0
    """Of one rank that sends there: seconds a step."""
    measured: float | None = None
    """Bytes a second that it can carry."""

    @property
    def rate(self) -> float:
        """Bytes a second while a rank has something under way there, which may wait for other links."""
        return self.nbytes / self.busy_s if self.busy_s else 0.0

    @property
    def capacity(self) -> float:
        """Bytes a second that it can carry, as far as that is known."""
        return self.measured or self.rate

    @property
    def share(self) -> float | None:
        """How much of what was measured is used; None: not known."""
        return min(1.0, self.rate / self.measured) if self.measured and self.busy_s else None


Links = Mapping[tuple[str, str], Link]
"""By the names of the hosts from which and to which they go."""


def host_names(ranks: Mapping[int, Rank]) -> dict[int, str]:
    """Return each rank's host; hosts with one name, as containers may be, get their number, too."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for rank in ranks.values():
        numbers[rank.host].add(rank.about.get("host_number", 0))
    return {
        origin: rank.host if len(numbers[rank.host]) < 2 else f"{rank.host} #{rank.about.get('host_number', 0)}"
        for origin, rank in ranks.items()
    }


def stragglers(shares: Mapping[int, Shares], gains: Gains, ranks: Mapping[int, Rank], links: Links) -> list[Straggler]:
    """Return them, those that others waited for the longest first."""
    hosts = host_names(ranks)
    mean = average(shares.values())
    least_s = LEAST_SHARE * mean.step_s
    late_hosts, late_ranks = delays(gains, lambda rank: hosts.get(rank, "")), delays(gains)
    found: list[tuple[str, tuple[int, ...], float]] = []
    for host in dict.fromkeys(hosts.values()):
        own = tuple(rank for rank in sorted(late_hosts) if hosts.get(rank) == host)
        late = sorted(late_hosts[rank] for rank in own)
        if 1 < len(own) < len(late_hosts) and late[0] >= max(least_s, late[-1] / 2):
            found.append((f"host {host}", own, late[len(late) // 2]))
    of_hosts = {rank for _, own, _ in found for rank in own}
    found += [
        (named(rank, hosts), (rank,), late_s)
        for rank, late_s in late_ranks.items()
        if late_s >= least_s and rank not in of_hosts
    ]
    made = [_straggler(who, own, late_s, shares, ranks) for who, own, late_s in found if late_s]
    made += [each for each in _slow_links(links, mean.exposed_s, len(shares)) if each.delay_s >= least_s]
    return sorted(made, key=lambda each: (-each.caused_s, -each.delay_s))[:_MOST]


def named(rank: int, hosts: Mapping[int, str]) -> str:
    """Return `rank 3 (host b)`; without the host, if there is only one."""
    return f"rank {rank} (host {hosts[rank]})" if len(set(hosts.values())) > 1 and rank in hosts else f"rank {rank}"


def _straggler(
    who: str, own: tuple[int, ...], late_s: float, shares: Mapping[int, Shares], ranks: Mapping[int, Rank]
) -> Straggler:
    others = [each for rank, each in shares.items() if rank not in own]
    caused_s = sum(each.waiting[rank] for each in others for rank in own if rank in each.waiting)
    lines = {rank: _seconds_at_lines(each) for rank, each in ranks.items()}
    loading = {rank: sum(s for line, s in own.items() if line.endswith(_LOADER)) for rank, own in lines.items()}
    core_wait = {rank: each.core_wait_s(shares[rank].step_s if rank in shares else 0.0) for rank, each in ranks.items()}
    known = sorted({line for rank in own for line in lines.get(rank, ())})
    more = {line: excess({rank: each.get(line, 0.0) for rank, each in lines.items()}, own) for line in known}
    where = max(more, key=lambda line: more[line], default="")
    kind = "slow host" if len(own) > 1 else "computes longer"
    if excess(core_wait, own) >= late_s / 2:
        kind, where = "core shared", ""
    elif excess(loading, own) >= late_s / 2:
        kind, where = "data loader", max(known, key=lambda line: (line.endswith(_LOADER), more[line]))
    elif kind == "slow host" or more.get(where, 0.0) < late_s / 4:
        where = ""
    return Straggler(who, kind, late_s, caused_s, where.removesuffix(_LOADER), own)


def _seconds_at_lines(rank: Rank) -> dict[str, float]:
    """Return how long in each step the rank's main thread was at each line."""
    each_s = rank.recent("step_s") / max(1.0, rank.recent("step") * rank.recent("samples"))
    return {line: samples * each_s for line, samples in rank.recent_each("lines").items()}


def links(ranks: Mapping[int, Rank]) -> Links:
    """Return what goes over the links between hosts."""
    hosts = host_names(ranks)
    of_world = {rank.about.get("rank", origin): hosts[origin] for origin, rank in ranks.items()}
    of_number = {rank.about.get("host_number"): hosts[origin] for origin, rank in ranks.items()}
    found: dict[tuple[str, str], Link] = defaultdict(Link)
    for origin, rank in ranks.items():
        seconds = rank.recent_each("send_s")
        for to, nbytes in rank.recent_each("sent").items():
            there = of_world.get(int(to), "")
            if nbytes and there and there != hosts[origin]:
                link, busy_s = found[hosts[origin], there], seconds.get(to, 0.0)
                link.nbytes, link.busy_s = link.nbytes + nbytes, link.busy_s + busy_s
                link.most_s = max(link.most_s, busy_s / max(1.0, rank.recent("step")))
        for from_host, to_host, measured in rank.about.get("links") or ():
            found[of_number.get(from_host, from_host), of_number.get(to_host, to_host)].measured = measured
    return found


def _slow_links(found: Links, exposed_s: float, size: int) -> Sequence[Straggler]:
    """Return the links that carry half of what most can, or less: their delay is what sending takes longer there.

    In a ring all links wait for the slowest, and seem to be as slow; but one that has room for twice as much is not.
    A host all of whose links are slow has most of them where there are few hosts: so most is the upper quarter.
    """
    slow, capacities = [], sorted(each.capacity for each in found.values() if each.capacity)
    usual = capacities[len(capacities) * 3 // 4] if capacities else 0.0
    for (from_host, to_host), link in found.items():
        if link.nbytes and usual and link.capacity <= min(usual, 4 * link.rate) / 2:
            delay_s = min(exposed_s, link.most_s * (1 - link.capacity / usual))
            who = f"link from {from_host} to {to_host}"
            slow.append(Straggler(who, "slow link", delay_s, delay_s * size))
    return slow
