"""The measured links as text: a matrix for a few hosts, of many what is typical. Pure.

Gbit/s     n1     n2     n3
n1          ·   9.41   1.02*
n2       9.41      ·   9.38
n3       1.02*  9.38      ·
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..text import counted
from .links import Link, Links

WIDTH = 100
_CELL = 8
_LONGEST_NAME = 24
_LEAST_GBIT_S = 0.001
_MOST_US = 999_999

_Figure = Callable[[Link], str]


def matrix(links: Links) -> str:
    """Return both figures of all links, what is slow or late marked with `*`."""

    def gbit_s(link: Link) -> str:
        return f"{_gbit_s(link.gbit_s)}{'*' if links.is_slow(link) else ' '}" if link.is_measured else "- "

    def latency_us(link: Link) -> str:
        return f"{_latency_us(link.latency_us)}{'*' if links.is_late(link) else ' '}" if link.is_measured else "- "

    if _name_width(links.hosts) + _CELL * len(links.hosts) > WIDTH:
        return _summary(links)
    tables = (_matrix("Gbit/s", links, gbit_s), _matrix("µs", links, latency_us))
    return "\n\n".join("\n".join(lines) for lines in tables)


def _name_width(hosts: Sequence[str]) -> int:
    return max(len("Gbit/s"), *(len(_cut(host, _LONGEST_NAME)) for host in hosts))


def _matrix(unit: str, links: Links, figure: _Figure) -> Iterator[str]:
    hosts, width = links.hosts, _name_width(links.hosts)
    yield (f"{unit:<{width}}" + "".join(f"{_cut(host, _CELL - 2) + ' ':>{_CELL}}" for host in hosts)).rstrip()
    for row, host in enumerate(hosts):
        cells = ("· " if row == at else figure(links.between(row, at)) for at in range(len(hosts)))
        yield (f"{_cut(host, _LONGEST_NAME):<{width}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)).rstrip()


def _summary(links: Links) -> str:
    if not links.measured:
        return "no link was measured to its end"
    typical = f"{_gbit_s(links.typical_gbit_s)} Gbit/s and {_latency_us(links.typical_latency_us)} µs"
    return f"{counted(len(links.measured), 'link')} measured; typical are {typical}"


def _gbit_s(value: float) -> str:
    return f"{value:.3g}" if value >= _LEAST_GBIT_S else f"<{_LEAST_GBIT_S:g}"


def _latency_us(value: float) -> str:
    return f"{value:.0f}" if value < _MOST_US else ">1 s"


def _cut(name: str, length: int) -> str:
    """Return `name` without its domain; its end where it is too long: that is what differs (a number)."""
    short = name if name[:1].isdigit() else name.partition(".")[0]
    return short if len(short) <= length else "…" + short[1 - length :]
