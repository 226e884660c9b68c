"""Which cores and which GPU each rank of a host gets: a pure function of what the host has and how many ranks it runs.

    2 nodes of 4 cores and 2 GPUs each                      the same without GPUs
    4 ranks: rank 0  GPU 0  cores 0-1  ┐ node 0             3 ranks: rank 0  cores 0-1
             rank 1  GPU 1  cores 2-3  ┘                             rank 1  cores 2-4
             rank 2  GPU 2  cores 4-5  ┐ node 1                      rank 2  cores 5-7
             rank 3  GPU 3  cores 6-7  ┘

The unit is the physical core: its hardware threads stay together. Each agent computes the whole and takes its rank's.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ..text import counted, numbered
from .cpus import limited
from .topology import Core, Gpu, Topology

_SHOWN = 8


class Share(NamedTuple):
    """What one rank gets: its cores, at least one, and its GPU, if the host has any."""

    cores: tuple[Core, ...]
    gpu: Gpu | None = None

    @property
    def cpus(self) -> frozenset[int]:
        """All hardware threads of its cores."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def node(self) -> int | None:
        """The NUMA node of its cores; None if they are on several, or the node is unknown."""
        nodes = {core.node for core in self.cores}
        return nodes.pop() if len(nodes) == 1 else None


def automatic_size(topology: Topology) -> int:
    """Return how many ranks a host runs if nobody says: one per GPU, else one per physical core that has its time."""
    return len(topology.gpus) or limited(len(topology.cores), topology.quota)


def threads_of(share: Share, topology: Topology, local_size: int, *, bound: bool) -> int:
    """Return for how many threads one of `local_size` ranks has cores: those of its `share` if it is bound to them."""
    cpus = sum(len(core.cpus) for core in topology.cores)
    return limited(len(share.cores) if bound else cpus // local_size, topology.quota / local_size)


def crowd(topology: Topology, local_size: int, host: str, noun: str = "rank") -> str:
    """Return a line where `local_size` ranks that compute on cores are more than have their time; else nothing."""
    cores = limited(len(topology.cores), topology.quota)
    if topology.gpus or local_size <= cores:
        return ""
    who = f"{counted(local_size, noun)} on {host} share {counted(cores, 'core')}"
    return f"ringrun: {who}, which rarely pays off; ringrun scaling measures how many pay off"


def place(topology: Topology, local_size: int) -> list[Share]:
    """Return the share of each of `local_size` ranks, by local rank.

    GPUs: local rank r gets the r-th, in turn if ranks outnumber them. The ranks whose GPUs are near the same cores
    share these; if there are not enough of them, or nothing is known of a GPU, all ranks share all cores.
    """
    gpus = [topology.gpus[rank % len(topology.gpus)] if topology.gpus else None for rank in range(local_size)]
    shares: dict[int, Share] = {}
    for cores, ranks in _neighbourhoods(topology.cores, gpus):
        for rank, own in zip(ranks, share_out(cores, len(ranks)), strict=True):
            shares[rank] = Share(own, gpus[rank])
    return [shares[rank] for rank in range(local_size)]


def _neighbourhoods(cores: tuple[Core, ...], gpus: Sequence[Gpu | None]) -> list[tuple[tuple[Core, ...], list[int]]]:
    """Return sets of cores without a common one, and with each the ranks that share it."""
    ranks: dict[tuple[Core, ...], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        near = tuple(core for core in cores if gpu and gpu.near.intersection(core.cpus))
        ranks.setdefault(near or cores, []).append(rank)
    listed = [core for near in ranks for core in near]
    overlap = len(set(listed)) < len(listed)
    too_few = any(len(near) < len(sharers) for near, sharers in ranks.items()) and len(cores) >= len(gpus)
    return [(cores, list(range(len(gpus))))] if overlap or too_few else list(ranks.items())


def share_out(cores: Sequence[Core], ranks: int) -> list[tuple[Core, ...]]:
    """Return each rank's part of `cores`: contiguous, their lengths differing by at most one.

    More ranks than cores get one each, in turn, so that no core has more than one rank more than another.
    """
    if ranks > len(cores):
        return [(cores[rank % len(cores)],) for rank in range(ranks)]
    # where the longer parts come early, or late: whichever lets fewer ranks lie across two nodes
    down = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    up = [-(-rank * len(cores) // ranks) for rank in range(ranks + 1)]
    cuts = [[tuple(cores[begin:end]) for begin, end in itertools.pairwise(at)] for at in (down, up)]
    return min(cuts, key=lambda parts: sum(len({core.node for core in part}) for part in parts))


def describe(shares: Sequence[Share], host: str, *, bound: bool, noun: str = "rank") -> str:
    """Return one line: which GPU and, if `bound` to them, which cores each rank has; of many the first ranks."""

    def of(rank: int, share: Share) -> str:
        gpu = f" GPU {share.gpu.name}" if share.gpu else ""
        return f"{noun} {rank}{gpu}{' ' + numbered('core', share.cpus) if bound else ''}"

    texts = [of(rank, share) for rank, share in enumerate(shares[:_SHOWN])]
    more = [f"and {len(shares) - _SHOWN} more"] if len(shares) > _SHOWN else []
    return f"ringrun: {counted(len(shares), noun)} on {host}: {'; '.join([*texts, *more])}"
