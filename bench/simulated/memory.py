"""What simulated ranks wait for, and the memory that those of a host share, in virtual time; see cluster.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringreduce.transport.base import Work
from ringreduce.transport.window import SLOTS, Region, Window

if TYPE_CHECKING:
    from .cluster import Cluster


class Leaf(Work):
    """What a rank waits for: a message, or flags. `at_us`: when it is done, once that is known."""

    __slots__ = ("at_us", "cluster", "peer", "rank", "waiter")

    def __init__(self, cluster: Cluster, rank: int, peer: int) -> None:
        self.cluster, self.rank, self.peer = cluster, rank, peer
        self.at_us: float | None = None
        self.waiter: int | None = None  # the turn of the rank that waits

    def done(self) -> bool:
        """See `Work.done`; False, too, where the rank is ahead of what has happened elsewhere, so that it yields."""
        return self.at_us is not None and self.at_us <= self.cluster.clocks_us[self.rank] <= self.cluster.now_us


class SimulatedRegion(Region):
    """See `Region`; its flags have times, its copies take some."""

    can_be_compiled = False  # type: ignore[assignment]

    def __init__(
        self,
        cluster: Cluster,
        rank: int,
        members: Sequence[int],
        slot_bytes: int,
        memory: list[Any],
        board: dict[Any, list[Any]],
    ) -> None:
        index, count = members.index(rank), len(members) * cluster.mirrors
        window = Window(memory, fence=lambda: None)
        super().__init__(window, 0, slot_bytes, range(count), range(count), index)
        self._cluster, self._world_rank, self._needed, self._board = cluster, rank, len(members), board

    def write(self, source: Any, target: Any) -> None:
        """See `Region.write`, and `read`."""
        self._cluster.charge(source.nbytes)
        if self._cluster.carries:
            target[...] = source

    read = write

    def publish(self, flag: int, sequence: int) -> None:
        """See `Flags.publish`."""
        entry = self._entry(flag, sequence)
        entry[0] += 1
        entry[1] = max(entry[1], self._cluster.clocks_us[self._world_rank])
        if entry[0] == self._needed:
            for leaf in entry[2]:
                self._cluster.finish(leaf, entry[1])
        self._board.pop((flag, sequence - 4 * SLOTS), None)

    def arrived(self, flag: int, sequence: int) -> bool:
        """See `Flags.arrived`."""
        count, at_us, _ = self._entry(flag, sequence)
        clock_us = self._cluster.clocks_us[self._world_rank]
        return bool(count == self._needed and at_us <= clock_us <= self._cluster.now_us)  # as in Leaf.done

    def arrival(self, flag: int, sequence: int) -> Leaf:  # type: ignore[override]
        """See `Flags.arrival`."""
        leaf = Leaf(self._cluster, self._world_rank, self._world_rank)
        entry = self._entry(flag, sequence)
        if entry[0] == self._needed:
            leaf.at_us = entry[1]
        else:
            entry[2].append(leaf)
        return leaf

    def _entry(self, flag: int, sequence: int) -> list[Any]:
        """How many have published, when the last one did, and who waits."""
        return self._board.setdefault((flag, sequence), [0, 0.0, []])
