"""By which algorithm a process set's all-reduces go: what can be used there, and what the cost model prefers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.collectives.choose import ALGORITHMS, Constants, choose
from ringreduce.collectives.hierarchical import Hierarchy
from ringreduce.engine.gpu_routes import GpuRoutes
from ringreduce.errors import SettingsError
from ringreduce.ops import Reduction
from ringreduce.settings import Settings
from ringreduce.transport.base import Transport
from ringreduce.transport.window import Flags, Region

LONGER_INSIDE = 8
"""Inside a host a message has no wire to fill, and costs Python more than MPI: there segments are so much longer."""
LONGEST = 48
"""The table of choices has a row for each power of two bytes up to this one."""


class Routes:
    """One process set's, on one of its ranks; all members choose alike.

    hosts:  of each member;  region: the set's part of the host's shared memory, None where there is none on some host;
    gpu_flags: flags for GPU arrays, None as for the region;
    mpi:    the transport below, where that is MPI's;  whole: all ranks are members.
    """

    def __init__(
        self,
        channels: Sequence[Transport],
        hosts: Sequence[int],
        region: Region | None,
        settings: Settings,
        constants: Constants,
        gpu_flags: Flags | None = None,
        mpi: Any = None,
        whole: bool = True,
    ) -> None:
        self.channels = channels
        self.region = region
        self.gpu = GpuRoutes(channels, hosts, gpu_flags, settings, mpi, whole)
        self.hierarchy = None
        one_host = len(set(hosts)) == 1
        self.segment_bytes = settings.ring_segment_bytes * (LONGER_INSIDE if one_host else 1)
        self.usable = ["ring", "direct", "doubling"]
        if region is not None and one_host:
            self.usable.append("shared")
        elif region is not None and len(set(hosts)) < len(hosts):
            self.hierarchy = Hierarchy(channels, hosts, region.rank)
            self.usable.append("hierarchical")
        self.candidates = self._candidates(settings)
        """What the cost model may choose from: what is usable, unless the settings ask for less."""
        self._narrow = _table(hosts, self.candidates, constants, 1)
        self._wide = _table(hosts, self.candidates, constants, 2)

    def _candidates(self, settings: Settings) -> list[str]:
        usable = self.usable
        if settings.deterministic:  # both sum in rank order, whatever the pieces
            usable = ["shared"] if "shared" in usable and settings.algorithm != "direct" else ["direct"]
        return [settings.algorithm] if settings.algorithm in usable else usable

    def choice(self, nbytes: int, reduction: Reduction) -> str:
        """The algorithm for host arrays of `nbytes` together."""
        table = self._wide if reduction.sum_type.itemsize > reduction.element.itemsize else self._narrow
        return table[min(nbytes.bit_length(), LONGEST)]

    def text(self) -> str:
        """Such as `doubling below 32768 B, then ring`."""
        parts = []
        for power, algorithm in enumerate(self._narrow):
            if power == LONGEST or self._narrow[power + 1] != algorithm:
                parts.append(algorithm if power == LONGEST else f"{algorithm} below {1 << power} B")
        return ", then ".join(parts)


def _table(hosts: Sequence[int], candidates: Sequence[str], constants: Constants, wider: int) -> list[str]:
    """By the number of bits that a size in bytes has; `wider`: how much longer sums are than elements."""
    if len(candidates) == 1:
        return [candidates[0]] * (LONGEST + 1)
    sizes = [(1 << power) * 3 // 4 for power in range(LONGEST + 1)]
    return [choose(nbytes, wider * nbytes, hosts, candidates, constants) for nbytes in sizes]


def check(settings: Settings, routes: Routes, hosts: Sequence[int], why_not: str) -> None:
    """Raise SettingsError for a demand that the set of all ranks cannot meet; why_not: there is no shared memory."""
    asked = settings.algorithm
    if asked not in ("auto", *ALGORITHMS):
        raise SettingsError(f"RINGREDUCE_ALGORITHM={asked!r}: expected auto or one of {', '.join(ALGORITHMS)}")
    if asked == "auto" or len(hosts) == 1:
        return
    if asked not in (*routes.usable, "nccl"):  # that is for GPU arrays; host arrays go as with auto
        places = len(set(hosts))
        needs = {
            "shared": "all ranks on one host, and shared memory",
            "hierarchical": "several hosts, one of them with several ranks, and shared memory",
        }[asked]
        raise SettingsError(
            f"RINGREDUCE_ALGORITHM={asked}: needs {needs}; there are {len(hosts)} ranks on {places} host"
            f"{'s' if places > 1 else ''}{f', and {why_not}' if why_not else ''}; usable are {', '.join(routes.usable)}"
        )
    if settings.deterministic and asked not in ("shared", "direct"):
        raise SettingsError(
            f"RINGREDUCE_ALGORITHM={asked} and RINGREDUCE_DETERMINISTIC=1: its bits depend on how tensors are fused; "
            "unset one of them, or take shared or direct"
        )
