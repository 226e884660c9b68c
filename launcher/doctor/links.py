"""The links between hosts: which pairs are measured together, what came of it, what is slow, and all as text. Pure.

Gbit/s     n1     n2     n3
n1          ·   9.41   1.02*
n2       9.41      ·   9.38
n3       1.02*  9.38      ·
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..text import counted

SLOW_SHARE = 0.5
"""A link with less than this part of the typical bandwidth is slow."""
SLOW_GBIT_S = 0.7
"""So is one with less than this: a wire of 1 Gbit/s carries 0.94."""
LATE_TIMES = 4.0
LATE_US = 500.0
"""A link with more than so many times the typical latency, and more than that, is late."""
WIDTH = 100
_CELL = 8
_LONGEST_NAME = 24
_PREFIX = re.compile(r"\[ *[0-9]+\] ?")


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of `count` hosts, as rounds in which no host is in two pairs: the circle method.

    One host stays, the others go around it, and who stands opposite is the pair. With an odd number one pauses.

        0 1 2      0 5 1      0 4 5
        5 4 3      4 3 2      3 2 1      …    6 hosts: 5 rounds of 3 pairs

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    circle = list(range(count + count % 2))  # the last is nobody where the number is odd
    found = []
    for _ in range(len(circle) - 1):
        opposite = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        pairs = sorted((min(pair), max(pair)) for pair in opposite)
        found.append([pair for pair in pairs if pair[1] < count])
        circle.insert(1, circle.pop())
    return found


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
    def typical_gbit_s(self) -> float:
        """What most hosts can do: the median of each one's best link, which one bad host of three does not spoil."""
        best = [max(link.gbit_s for link in own) for own in _by_host(self.measured).values()]
        return statistics.median_high(best or [math.nan])

    @cached_property
    def typical_latency_us(self) -> float:
        """The same."""
        best = [min(link.latency_us for link in own) for own in _by_host(self.measured).values()]
        return statistics.median_low(best or [math.nan])

    def is_slow(self, link: Link) -> bool:
        """Whether its bandwidth is far below the others', or below any network of these days."""
        return link.gbit_s < max(SLOW_SHARE * self.typical_gbit_s, SLOW_GBIT_S)

    def is_late(self, link: Link) -> bool:
        """Whether its latency is far above the others'."""
        return link.latency_us > max(LATE_TIMES * self.typical_latency_us, LATE_US)


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


# what to do about a host of which all links are bad, and about a link
_SLOW_CURES = (
    "check its network: the negotiated speed (ethtool eth0), cable and switch port, other traffic, CPU load; "
    "or another network: --network-interfaces",
    "check what lies between the two: switch ports, uplinks, other traffic; both may use another network: "
    "--network-interfaces",
)
_LATE_CURES = (
    "check its load (uptime), the power saving of its network card and processor, and its route there: ping",
    "check the route between the two (ping, traceroute), and whether one of them is busy",
)
_UNFINISHED_CURE = (
    "check that no firewall blocks TCP between {} on any port; "
    "with several networks, name the one that all share: --network-interfaces eth0"
)


def findings(links: Links) -> list[str]:
    """Return a line for each slow, late or unfinished link, those that share a host as one; each with what to do."""
    slow = {link: link.gbit_s for link in links.measured if links.is_slow(link)}
    late = {link: link.latency_us for link in links.measured if links.is_late(link)}
    unfinished = {link: 0.0 for link in links.links if not link.is_measured}
    unfinished_cures = [_UNFINISHED_CURE.format(between) for between in ("it and the others", "the two")]
    gbit_s = f"slow: {{}} Gbit/s (typical here: {links.typical_gbit_s:.3g})"
    latency_us = f"high-latency: {{}} µs (typical here: {links.typical_latency_us:.3g})"
    return [
        *_told(links.hosts, slow, gbit_s, _SLOW_CURES),
        *_told(links.hosts, late, latency_us, _LATE_CURES, more_is_worse=True),
        *_told(links.hosts, unfinished, "not measured completely", unfinished_cures),
    ]


def _told(
    hosts: Sequence[str], bad: Mapping[Link, float], what: str, cures: Sequence[str], more_is_worse: bool = False
) -> Iterator[str]:
    """Tell of each bad link once. Where all are, the host whose best link is worst comes first, with all its links."""

    def best(host: int) -> float:
        values = [bad[link] for link in of_hosts[host]]
        return -min(values) if more_is_worse else max(values)

    left, of_hosts = dict(bad), _by_host(bad)
    for host in sorted(of_hosts, key=lambda host: (best(host), host)):
        own = [link for link in of_hosts[host] if link in left]
        if own and len(of_hosts[host]) == len(hosts) - 1 > 1:  # of two hosts both would share it
            yield f"{hosts[host]}: all its links are {what.format(_span([left.pop(link) for link in own]))}; {cures[0]}"
    for link, value in left.items():
        yield f"{hosts[link.one]} – {hosts[link.other]}: {what.format(_span([value]))}; {cures[1]}"


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def matrix(links: Links) -> str:
    """Return both figures of all links, what is slow or late marked with `*`; of many what is typical."""
    width = max(len("Gbit/s"), *(len(_cut(host, _LONGEST_NAME)) for host in links.hosts))
    if width + _CELL * len(links.hosts) > WIDTH:
        if not links.measured:
            return "no link could be measured completely"
        typical = f"{_gbit_s(links.typical_gbit_s)} Gbit/s and {_latency_us(links.typical_latency_us)} µs"
        return f"{counted(len(links.measured), 'link')} measured; typical are {typical}"
    by_pair = {pair: link for link in links.measured for pair in ((link.one, link.other), (link.other, link.one))}
    gbit_s = {pair: _gbit_s(link.gbit_s) + " *"[links.is_slow(link)] for pair, link in by_pair.items()}
    latency_us = {pair: _latency_us(link.latency_us) + " *"[links.is_late(link)] for pair, link in by_pair.items()}
    lines = []
    for unit, cells in (("Gbit/s", gbit_s), ("µs", latency_us)):
        lines += [f"{unit:<{width}}" + "".join(f"{_cut(host, _CELL - 2) + ' ':>{_CELL}}" for host in links.hosts)]
        for row, host in enumerate(links.hosts):
            figures = (cells.get((row, at), "- ") if row != at else "· " for at in range(len(links.hosts)))
            lines += [f"{_cut(host, _LONGEST_NAME):<{width}}" + "".join(f"{figure:>{_CELL}}" for figure in figures)]
        lines += [""]
    return "\n".join(line.rstrip() for line in lines[:-1])


def _gbit_s(value: float) -> str:
    return f"{value:.3g}" if value >= 0.001 else "<0.001"


def _latency_us(value: float) -> str:
    return f"{value:.0f}" if value < 999_999 else ">1 s"


def _cut(name: str, length: int) -> str:
    """Return `name` without its domain; its end where it is too long: that is what differs (a number)."""
    short = name if name[:1].isdigit() else name.partition(".")[0]
    return short if len(short) <= length else "…" + short[1 - length :]
