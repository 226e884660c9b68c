"""The links between hosts: what the worker has measured, which are slow, and what to do about it. Pure."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

SLOW_SHARE = 0.5
"""A link with less than this part of the typical bandwidth is slow."""
SLOW_GBIT_S = 0.7
"""So is one with less than this: a wire of 1 Gbit/s carries 0.94."""
LATE_TIMES = 4.0
LATE_US = 500.0
"""A link with more than so many times the typical latency, and more than that, is late."""

_PREFIX = re.compile(r"\[ *[0-9]+\] ?")


@dataclass(frozen=True)
class Link:
    """Two hosts, by number, and what was measured between them; NaN where nothing came of it."""

    one: int
    other: int
    gbit_s: float = math.nan
    latency_us: float = math.nan

    @property
    def is_measured(self) -> bool:
        """Whether both figures are there."""
        return math.isfinite(self.gbit_s) and math.isfinite(self.latency_us)


@dataclass(frozen=True)
class Links:
    """All links between `hosts` that were begun."""

    hosts: Sequence[str]
    links: Sequence[Link]

    @cached_property
    def measured(self) -> list[Link]:
        """Those with figures."""
        return [link for link in self.links if link.is_measured]

    @cached_property
    def measured_of(self) -> dict[int, list[Link]]:
        """The measured links of each host that has any."""
        return _by_host(self.measured)

    @cached_property
    def typical_gbit_s(self) -> float:
        """What most hosts can do: the median of each one's best link, which one bad host of three does not spoil."""
        best = [max(link.gbit_s for link in own) for own in self.measured_of.values()]
        return statistics.median_high(best or [math.nan])

    @cached_property
    def typical_latency_us(self) -> float:
        """The same."""
        best = [min(link.latency_us for link in own) for own in self.measured_of.values()]
        return statistics.median_low(best or [math.nan])

    def is_slow(self, link: Link) -> bool:
        """Whether its bandwidth is far below the others', or below any network of these days."""
        return link.gbit_s < max(SLOW_SHARE * self.typical_gbit_s, SLOW_GBIT_S)

    def is_late(self, link: Link) -> bool:
        """Whether its latency is far above the others'."""
        return link.latency_us > max(LATE_TIMES * self.typical_latency_us, LATE_US)

    def between(self, one: int, other: int) -> Link:
        """Return the link between two hosts, without figures if none was begun."""
        pair = (min(one, other), max(one, other))
        return self._by_pair.get(pair, Link(*pair))

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], Link]:
        return {(link.one, link.other): link for link in self.links}


def _by_host(links: Iterable[Link]) -> dict[int, list[Link]]:
    found: dict[int, list[Link]] = {}
    for link in links:
        found.setdefault(link.one, []).append(link)
        found.setdefault(link.other, []).append(link)
    return found


def read_links(lines: Iterable[str], hosts: Sequence[str]) -> Links:
    """Return the links in the worker's lines, each behind its rank's prefix; what else stands there is passed over."""
    found: dict[tuple[int, int], Link] = {}
    for line in lines:
        try:
            measured = json.loads(_PREFIX.sub("", line, count=1))
            one, other = (int(number) for number in measured["link"])
            link = Link(one, other, float(measured.get("gbit_s", "nan")), float(measured.get("latency_us", "nan")))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            continue
        if 0 <= one < other < len(hosts):
            found[one, other] = link
    return Links(hosts, [found[pair] for pair in sorted(found)])


def findings(links: Links) -> list[str]:
    """Return a line for each slow, late or unfinished link, those that share a host as one; each with what to do."""
    hosts = links.hosts
    lines = []
    for bad, value, what, cure in (
        ([link for link in links.measured if links.is_slow(link)], lambda link: link.gbit_s, _slow, _SLOW_CURE),
        ([link for link in links.measured if links.is_late(link)], lambda link: -link.latency_us, _late, _LATE_CURE),
        ([link for link in links.links if not link.is_measured], lambda _: 0, _unfinished, _UNFINISHED_CURE),
    ):
        reported: set[Link] = set()
        # where all links are bad, the host whose best link is worst is told first, with all its links
        for host, of_host in sorted(_by_host(bad).items(), key=lambda each: (max(map(value, each[1])), each[0])):
            if len(hosts) > 2 and len(of_host) == len(hosts) - 1:  # of two hosts both would share it
                own = [link for link in of_host if link not in reported]
                reported.update(own)
                lines += [f"{hosts[host]}: all its links are {what(links, own)}; {cure['host']}"] if own else []
        for link in bad:
            if link not in reported:
                lines.append(f"{hosts[link.one]} – {hosts[link.other]}: {what(links, [link])}; {cure['link']}")
    return lines


_SLOW_CURE = {
    "host": "see its network: the negotiated speed (ethtool eth0), cable and switch port, other traffic, CPU load; "
    "or another network: --network-interfaces",
    "link": "see what lies between the two: switch ports, uplinks, other traffic; both may use another network: "
    "--network-interfaces",
}
_LATE_CURE = {
    "host": "see its load (uptime), the power saving of its network card and processor, and its route there: ping",
    "link": "see the route between the two (ping, traceroute), and whether one of them is busy",
}
_UNFINISHED_CURE = {
    kind: f"see that no firewall stops TCP between {where} on any port; "
    "with several networks, name the one that all share: --network-interfaces eth0"
    for kind, where in (("host", "it and the others"), ("link", "the two"))
}


def _slow(links: Links, bad: Sequence[Link]) -> str:
    return f"slow: {_span([link.gbit_s for link in bad])} Gbit/s (typical here: {links.typical_gbit_s:.3g})"


def _late(links: Links, bad: Sequence[Link]) -> str:
    return f"late: {_span([link.latency_us for link in bad])} µs (typical here: {links.typical_latency_us:.3g})"


def _unfinished(*_: object) -> str:
    return "begun and not finished"


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"
