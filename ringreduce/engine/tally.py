"""What a coordinator counts of many ranks as they tell it, so that it need not walk over all of them each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ringreduce.engine.signature import SubmissionRecord


class Lines(NamedTuple):
    """Which line each rank submitted a tensor in: mostly the same."""

    common: str
    others: dict[int, str]

    @classmethod
    def of(cls, records: Mapping[int, SubmissionRecord]) -> Lines:
        """Those of records."""
        common = next(iter(records.values())).line
        return cls(common, {rank: record.line for rank, record in records.items() if record.line != common})


class Counts:
    """How many ranks have given each number: plane k holds bit k of every number's count, so all count at once."""

    def __init__(self) -> None:
        self._planes: list[int] = []

    def add(self, bits: int) -> None:
        """Count one more of each of these numbers."""
        for k, plane in enumerate(self._planes):
            self._planes[k], bits = plane ^ bits, plane & bits
        if bits:
            self._planes.append(bits)

    def subtract(self, bits: int) -> None:
        """Count one less of each."""
        for k, plane in enumerate(self._planes):
            self._planes[k], bits = plane ^ bits, ~plane & bits

    def clear(self, bits: int) -> None:
        """Begin again from 0."""
        self._planes = [plane & ~bits for plane in self._planes]

    def equal(self, count: int) -> int:
        """The numbers that were counted so often, at least once."""
        found = -1
        for k, plane in enumerate(self._planes):
            found &= plane if count >> k & 1 else ~plane
        return 0 if count >> len(self._planes) else found


class Progress:
    """The last response that all of some ranks have read."""

    def __init__(self, ranks: Iterable[int], response: int = 0) -> None:
        self._of = dict.fromkeys(ranks, response)
        self._ranks_at = Counter(self._of.values())
        self.lowest = response

    def read(self, rank: int, response: int) -> None:
        """A rank has read up to this one."""
        if rank in self._of:
            self._ranks_at[self._of[rank]] -= 1
            self._of[rank] = response = max(response, self.lowest)
            self._ranks_at[response] += 1
            self._rise()

    def leave(self, rank: int) -> None:
        """A rank counts no more."""
        self._ranks_at[self._of.pop(rank)] -= 1
        self._rise()

    def _rise(self) -> None:
        while self._of and not self._ranks_at[self.lowest]:
            del self._ranks_at[self.lowest]
            self.lowest += 1
