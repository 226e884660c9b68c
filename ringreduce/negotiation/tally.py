"""Incremental counts over many ranks, so that a coordinator need not walk over all of them for each announcement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ringreduce.execution.signature import SubmissionRecord


class Lines(NamedTuple):
    """The line that submitted a tensor on each rank: mostly the same."""

    common: str
    others: dict[int, str]

    @classmethod
    def of(cls, records: Mapping[int, SubmissionRecord]) -> Lines:
        """The lines of these records."""
        common = next(iter(records.values())).line
        return cls(common, {rank: record.line for rank, record in records.items() if record.line != common})


class Counts:
    """How many ranks have announced each number: plane k holds bit k of all counts, so one addition updates all."""

    def __init__(self) -> None:
        self._planes: list[int] = []

    def add(self, bits: int) -> None:
        """Add 1 to the count of each of these numbers."""
        for k, plane in enumerate(self._planes):
            self._planes[k], bits = plane ^ bits, plane & bits
        if bits:
            self._planes.append(bits)

    def subtract(self, bits: int) -> None:
        """Subtract 1 from the count of each."""
        for k, plane in enumerate(self._planes):
            self._planes[k], bits = plane ^ bits, ~plane & bits

    def clear(self, bits: int) -> None:
        """Set their counts to 0."""
        self._planes = [plane & ~bits for plane in self._planes]

    def equal(self, count: int) -> int:
        """The numbers whose count is `count`, which is at least 1."""
        found = -1
        for k, plane in enumerate(self._planes):
            found &= plane if count >> k & 1 else ~plane
        return 0 if count >> len(self._planes) else found


class Progress:
    """The last response that all `ranks` have read: `lowest`."""

    def __init__(self, ranks: Iterable[int], response: int = 0) -> None:
        self._of = dict.fromkeys(ranks, response)
        self._ranks_at = Counter(self._of.values())
        self.lowest = response

    def read(self, rank: int, response: int) -> None:
        """A rank has read up to this response."""
        if rank in self._of:
            self._ranks_at[self._of[rank]] -= 1
            self._of[rank] = response = max(response, self.lowest)
            self._ranks_at[response] += 1
            self._rise()

    def leave(self, rank: int) -> None:
        """Do not count this rank any more."""
        self._ranks_at[self._of.pop(rank)] -= 1
        self._rise()

    def _rise(self) -> None:
        while self._of and not self._ranks_at[self.lowest]:
            del self._ranks_at[self.lowest]
            self.lowest += 1
