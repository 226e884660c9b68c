"""The choice of a process set's all-reduce algorithms: which are usable, and which the cost model prefers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from ringreduce.collectives import hierarchical, shared
from ringreduce.collectives.cost_model import (
    ALGORITHMS,
    BUCKETS,
    LARGE_BYTES,
    SEGMENT_BYTES,
    Constants,
    best_units,
    choose,
    segment_bytes,
)
from ringreduce.collectives.ops import Reduction
from ringreduce.compression import Quantized
from ringreduce.errors import SettingsError
from ringreduce.execution.signature import Signature
from ringreduce.settings import Settings
from ringreduce.transport.base import Steps, Transport
from ringreduce.transport.subset import SubsetTransport
from ringreduce.transport.window import Flags, Region
from ringreduce.transport.world import first_ranks

LONGER_INSIDE = 8
"""Factor for segments inside a host, where messages overlap no wire, and cost more in Python than in MPI."""
LONGEST = 48  # the table of choices has a row for each power of two bytes, up to 2**48


def usable_algorithms(hosts: Sequence[int], shares_memory: bool) -> list[str]:
    """The algorithms usable for host arrays; shares_memory: the ranks of a host have shared memory."""
    usable = ["ring", "halving", "direct", "doubling"]
    if shares_memory and len(set(hosts)) == 1:
        usable.append("shared")
    elif shares_memory and len(set(hosts)) < len(hosts):
        usable.append("hierarchical")
    return usable


def candidates(settings: Settings, usable: list[str]) -> list[str]:
    """The algorithms that the cost model may choose from, under the settings."""
    if settings.algorithm in usable and not settings.deterministic:
        return [settings.algorithm]
    if "shared" in usable and not (settings.deterministic and settings.algorithm == "direct"):
        return ["shared"]  # inside a host, messages go through shared memory too
    return ["direct"] if settings.deterministic else usable


class Algorithms:
    """The algorithms of one process set, on one of its ranks; all members choose the same.

    hosts:     host number of each member.
    order:     the members' indices, as they stand around a ring.
    region:    the set's part of the host's shared memory; None on all ranks where a host has none.
    gpu_flags: flags for GPU arrays; None as for the region.
    abandon:   see `InFlight.abandon`, for all messages of the set.
    """

    def __init__(
        self,
        channels: Sequence[Transport],
        hosts: Sequence[int],
        order: Sequence[int],
        region: Region | None,
        settings: Settings,
        constants: Constants,
        gpu_flags: Flags | None = None,
        abandon: Callable[[], object] = lambda: None,
    ) -> None:
        self.channels, self.abandon = channels, abandon
        self.ring_channels = channels
        """For all-reduces alone, since who owns which chunk differs."""
        if list(order) != sorted(order):
            self.ring_channels = [SubsetTransport(each, order, 0) for each in channels]
        self.region, self.gpu_flags = region, gpu_flags
        self.hierarchy, self.across = None, ""
        self.first_ranks = first_ranks(hosts)
        self._is_deterministic = settings.deterministic
        self.one_host = one_host = len(set(hosts)) == 1
        is_free = settings.algorithm == "auto" and not settings.deterministic
        self.short_bytes = constants.short_bytes if is_free and not one_host else 0
        """The largest all-reduce whose elements travel with what the ranks agree on by messages."""
        self.segment_bytes = settings.ring_segment_bytes * (LONGER_INSIDE if one_host else 1)
        if not one_host and settings.ring_segment_bytes == SEGMENT_BYTES:  # the default
            self.segment_bytes = segment_bytes(constants)
        self.unit_bytes, halved_bytes = best_units("hierarchical", tuple(hosts), constants)
        self.usable = usable_algorithms(hosts, region is not None)
        if region is not None and "hierarchical" in self.usable:
            self.hierarchy = hierarchical.Hierarchy(channels, hosts, region.rank, halved_bytes, order)
            across = f"halving below {halved_bytes + 1} B, then ring" if 0 < halved_bytes < math.inf else "ring"
            across = "halving" if halved_bytes == math.inf else across
            self.across = f" (between hosts: {across}, {self.unit_bytes >> 20} MiB at a time)"
        chosen_from = candidates(settings, self.usable)
        through_window = chosen_from == ["shared"] and region is not None and region.holds_a_piece_of_each
        self.shared_region = region if through_window else None
        """The region, where all data goes through it: all-reduces, reduce-scatters, allgathers and broadcasts."""
        self._why = _why(settings, self.usable)
        self._narrow, self._wide = (_table(tuple(hosts), tuple(chosen_from), constants, wider) for wider in (1, 2))

    def wire(self, signature: Signature) -> Quantized | None:
        """The format in which an all-reduce of this signature sends its elements; None: as they are."""
        asked: Quantized | None = signature.detail("compression")
        if asked is None or self.channels[0].size == 1:
            return None
        return asked if asked.is_everywhere or not self.one_host else None

    def choose(self, nbytes: int, reduction: Reduction) -> str:
        """The algorithm for host arrays of `nbytes` in total."""
        if reduction.wire is not None:  # by two hops between the ranks that it names: the cost model has no others
            in_hosts = self.hierarchy is not None and not (reduction.wire.is_everywhere or self._is_deterministic)
            return "hierarchical" if in_hosts else "direct"
        wide = self.on_wire("", reduction).sum_type.itemsize > reduction.element.itemsize
        table = self._wide if wide else self._narrow
        return table[min(nbytes.bit_length(), LONGEST)]

    def on_wire(self, algorithm: str, reduction: Reduction) -> Reduction:
        """The reduction as this algorithm does it: see `Reduction.on_wire`. `direct` sends no partial results."""
        return reduction if self.one_host or algorithm == "direct" else reduction.on_wire()

    def through_window(
        self,
        slots: Sequence[Sequence[shared.BufferPair]],
        reduction: Reduction,
        watch: shared.OnPhase = lambda *_: None,
    ) -> Steps[None]:
        """The all-reduce through the region: `shared`, or `hierarchical` among several hosts."""
        if self.region is None:
            raise AssertionError("the algorithm needs shared memory, but there is none")
        if self.hierarchy is None:
            yield from shared.allreduce(slots, self.region, reduction, watch)
        else:
            yield from hierarchical.allreduce(slots, self.region, self.hierarchy, reduction, self.segment_bytes, watch)

    @property
    def stores(self) -> str:
        """Such as `plain; from 16 MiB on streaming`: see transport/stores.py; empty without shared memory."""
        return "" if self.region is None else str(self.region.stores)

    def text(self) -> str:
        """The choice in words, such as `doubling below 32768 B, then ring`."""
        below = [f"{algorithm} below {nbytes} B" for nbytes, algorithm, _ in self.table()[:-1]]
        return ", then ".join([*below, self._narrow[LONGEST]])

    def table(self) -> list[tuple[int, str, str]]:
        """Below how many bytes each algorithm is chosen, and why."""
        last = [at for at in range(LONGEST + 1) if at == LONGEST or self._narrow[at + 1] != self._narrow[at]]
        return [(1 << at, self._narrow[at], self._why) for at in last]


def _why(settings: Settings, usable: Sequence[str]) -> str:
    """Why these are the candidates."""
    if settings.algorithm in usable:
        return f"RINGREDUCE_ALGORITHM={settings.algorithm}"
    if settings.deterministic:
        return "RINGREDUCE_DETERMINISTIC=1"
    return "all ranks share memory" if "shared" in usable else "the cost model's choice"


@functools.lru_cache(maxsize=64)  # 500 predictions, some milliseconds: the same for every process set of this layout
def _table(hosts: tuple[int, ...], candidates: tuple[str, ...], constants: Constants, wider: int) -> tuple[str, ...]:
    """The algorithm by the bit length of the size in bytes; `wider`: factor from element size to sum size."""
    if len(candidates) == 1:
        return candidates * (LONGEST + 1)
    sizes = [(1 << power) * 3 // 4 for power in range(LONGEST + 1)]
    return tuple([choose(nbytes, wider * nbytes, hosts, candidates, constants) for nbytes in sizes])


def tuned(settings: Settings, hosts: Sequence[int], usable: list[str], constants: Constants) -> Settings:
    """Settings whose buckets, and so batches, are as long as is best for large data; the user's own values stay."""
    if len(set(hosts)) == 1 or settings.fusion_slot_bytes != Settings.fusion_slot_bytes:
        return settings
    algorithm = choose(LARGE_BYTES, LARGE_BYTES, hosts, candidates(settings, usable), constants)
    unit_bytes = best_units(algorithm, tuple(hosts), constants).unit_bytes
    bucket = max(settings.fusion_slot_bytes, min(unit_bytes, BUCKETS[-1]))
    buffer = max(settings.fusion_buffer_bytes, 8 * bucket)
    return dataclasses.replace(settings, fusion_slot_bytes=bucket, fusion_buffer_bytes=buffer)


def check(settings: Settings, usable: Sequence[str], hosts: Sequence[int], why_not: str) -> None:
    """Raise SettingsError for an algorithm that all ranks together cannot use; why_not: reason for no shared memory."""
    asked = settings.algorithm
    if asked not in ("auto", *ALGORITHMS):
        raise SettingsError(f"RINGREDUCE_ALGORITHM={asked!r}: expected auto or one of {', '.join(ALGORITHMS)}")
    if asked == "auto" or len(hosts) == 1:
        return
    if asked not in (*usable, "nccl"):  # with nccl, host arrays are reduced as with auto
        num_hosts = len(set(hosts))
        needs = {
            "shared": "all ranks on one host, and shared memory",
            "hierarchical": "several hosts, one of them with several ranks, and shared memory",
        }[asked]
        raise SettingsError(
            f"RINGREDUCE_ALGORITHM={asked}: needs {needs}; there are {len(hosts)} ranks on {num_hosts} host"
            f"{'s' if num_hosts > 1 else ''}{f', and {why_not}' if why_not else ''}; usable: {', '.join(usable)}"
        )
    if settings.deterministic and asked not in ("shared", "direct"):
        raise SettingsError(
            f"RINGREDUCE_ALGORITHM={asked} and RINGREDUCE_DETERMINISTIC=1: its results depend on how tensors are fused"
            "; unset one of them, or use shared or direct"
        )
