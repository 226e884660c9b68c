"""Which ranks make up the world of an elastic job, decided from what is heard of them. Pure; times on any one clock.

    world 0, ranks 0 … np-1 ── a rank is lost ── list 1, without it ── all in it say that their world works ── …

Ranks keep the numbers that they had in the first world. A list is a decision for all: each has a higher number than
the one before, so a rank that hears of several follows the last one. A loss is recovered from when a list without that
rank works on all that are in it; until then the job may still fail because of it. Where more ranks are lost before
that, it is recovered from if that list works on one: all have met then, and what ended them was something else.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ..connection import wire
from ..elastic import Elastic
from ..text import counted, numbered

SILENT_S = 3.0
"""A rank that waits for others in re-forming says so every second; after this time without a word it hangs."""


class Kill(NamedTuple):
    """These ranks, which keep others waiting, are to be killed."""

    ranks: frozenset[int]


class Wake(NamedTuple):
    """Others have left long ago, and these do not end: they may work, or be stopped."""

    ranks: frozenset[int]


class CannotGoOn(NamedTuple):
    """The job must end as one that is not elastic does."""

    why: str


class Members:
    """The members of one job's world; `spares` are the living ranks that wait for a place in it."""

    def __init__(self, size: int, elastic: Elastic) -> None:
        """size: how many ranks were started, spares included."""
        self._np = size - elastic.spares
        self._elastic = elastic
        self.number = 0
        self.ranks = tuple(range(self._np))
        self.spares = list(range(self._np, size))
        self._fresh: set[int] = set()  # members that were spares, and have no state yet
        self._late_s = math.inf  # when re-forming takes too long
        self._rest_s = math.inf  # when those that are there, where some have left, have had the time to end
        self._last_s = math.inf  # when it has taken so long that the job cannot go on
        self._met_s: dict[int, float] = {}
        """Members that wait for others to re-form, or for another list where this one works: when they last said so."""
        self._is_formed = False  # MPI works, so that ranks can go on without others
        self._dead: dict[int, str] = {}  # those that are gone, and how they have ended
        self._unsettled: dict[int, int] = {}  # of them, by the first list without them, until a list works on all
        self._works = 0  # the newest list that works on one of its members
        self._awaited: set[int] = set()  # members that are yet to say that the last list works
        self._suspects: set[int] = set()
        self._left: set[int] = set()  # those that have left the world in order
        self._ended: set[int] = set()  # those that have ended with 0
        self._rest = set(self.ranks)  # those that are none of these, nor spares
        self._present = set(self.ranks)  # members that are neither dead, nor have left or ended
        self._losses = 0

    @property
    def due_s(self) -> float:
        """When to ask `expired`."""
        return min(self._late_s, self._rest_s)

    @property
    def recovered_from(self) -> set[int]:
        """The ranks without which the job has gone on."""
        return self._dead.keys() - {rank for rank, first in self._unsettled.items() if first > self._works}

    @property
    def _waiting(self) -> set[int]:
        """Those that have left, and wait for the others to do so."""
        return self._left - self._ended - self._dead.keys()

    def initialized(self) -> None:
        """init() has returned on a rank: all have come so far that they share a world."""
        self._is_formed = True

    def lost(self, found: Mapping[int, str], now_s: float) -> wire.Membership | CannotGoOn | None:
        """These ranks have died, or their agents are gone, together; in words after their names, how."""
        new = {rank: how for rank, how in found.items() if rank not in self._dead}
        missed = [rank for rank in new if rank not in self.spares or not self._is_formed]
        self._dead |= new
        self._present.difference_update(new)
        self.spares = [rank for rank in self.spares if rank not in new]
        if not missed:
            return None
        self._rest.difference_update(new)
        self._unsettled |= dict.fromkeys(missed, self.number + 1)
        self._losses += len(missed)
        most = self._elastic.max_failures
        if not self._is_formed:
            return CannotGoOn(f"rank {missed[0]} was lost before init() returned")
        if most is not None and self._losses > most:
            return CannotGoOn(f"--max-failures {most}: {counted(self._losses, 'rank')} failed")
        return self._next(now_s)

    def ended(self, rank: int, now_s: float) -> wire.Membership | None:
        """`rank` has ended with exit code 0: those that have not left go on without it, where they are enough."""
        self._ended.add(rank)
        self._rest.discard(rank)
        self._present.discard(rank)
        if rank in self.spares:
            self.spares.remove(rank)
        self._settle(rank)
        waits = rank not in self._left and self._waiting  # those who have left wait for it to leave, too
        if not (self._present or waits) or rank not in self.ranks or rank in self._dead:
            return None
        only_spares = self._fresh.issuperset(self._present)
        if not self._is_formed or not (only_spares or self._are_enough(self._present)):
            return None
        self._dead[rank] = "ended with exit code 0"
        decision = self._release() if only_spares else self._next(now_s)
        return decision if isinstance(decision, wire.Membership) else None

    def left(self, rank: int, now_s: float) -> wire.Membership | None:
        """`rank` leaves its world in order, and will end; returns a list without it if others wait to form one with it.

        Leaving waits for others to leave; who ends before they do has left them alone.
        """
        self._left.add(rank)
        self._present.discard(rank)
        is_missed = rank in self._awaited and bool(self._unsettled)
        self._settle(rank)
        decision = self._next(now_s) if is_missed and self._unsettled else None
        return decision if isinstance(decision, wire.Membership) else None

    def reformed(self, rank: int, number: int) -> bool:
        """The world of list `number` works in `rank`; returns whether it works in all now, having been awaited."""
        self._works = max(self._works, number)
        if number == self.number:
            self._fresh.discard(rank)
            self._met_s.pop(rank, None)
        return number == self.number and self._settle(rank)

    def meets(self, rank: int, number: int, now_s: float) -> None:
        """`rank` waits for the others of list `number`, or for another list, where that one works on it already."""
        if number != self.number:
            return
        self._met_s[rank] = now_s
        if self._awaited and self._late_s == math.inf:
            self._limit(now_s)

    def another(self, now_s: float) -> wire.Membership | None:
        """Return a list for members that wait for one though their world works: others have left it in order.

        To be asked whenever a rank meets, leaves or works: their messages come in any order.
        """
        if self._awaited or not (self._met_s.keys() & self._present and self._left.intersection(self.ranks)):
            return None
        decision = self._next(now_s)
        return decision if isinstance(decision, wire.Membership) else None

    def suspected(self, by: int, ranks: Collection[int]) -> Kill | CannotGoOn | None:
        """`by` reports that `ranks`, perhaps itself, keep others waiting. What suspects report does not count."""
        if by in self._suspects or by not in self._present:
            return None
        if gone := set(ranks) & self._ended - self._dead.keys():
            return CannotGoOn(f"rank {by} waits for {numbered('rank', gone)}, which ended with exit code 0")
        found = frozenset(self._present.intersection(ranks) - self._suspects)
        self._suspects |= found
        return Kill(found) if found else None

    def blamed(self, rank: int) -> CannotGoOn | None:
        """`rank`, which is dead, ended by an error in which it says that it has lost others."""
        others = self._unsettled.keys() - {rank}
        if rank not in self._unsettled or not others:
            return None
        self._works = 0  # those are the cause
        return CannotGoOn(
            f"rank {rank} did not catch the loss of {numbered('rank', others)}; a script survives a loss only inside "
            "a function that ringreduce's elastic.run wraps"
        )

    def await_rest(self, now_s: float) -> None:
        """Where ranks have left, or ended with 0, begin to wait for the ends of the others."""
        waits = bool(self._rest and (self._left or self._ended))
        self._rest_s = min(self._rest_s, now_s + self._elastic.stalled_s) if waits else math.inf

    def expired(self, now_s: float) -> Kill | Wake | CannotGoOn | None:
        """Return the ranks that keep others waiting in re-forming, or at the end; later why the job cannot go on."""
        if now_s >= self._rest_s:
            self._rest_s = now_s + self._elastic.stalled_s
            self._late_s = max(self._late_s, now_s + SILENT_S)  # those that are woken have the time to say so
            return Wake(frozenset(self._rest))
        if now_s < self._late_s:
            return None
        if now_s < self._last_s:
            self._late_s = self._last_s
            silent = frozenset(each for each in self._awaited if self._met_s.get(each, -math.inf) < now_s - SILENT_S)
            if len(silent) == len(self.ranks):
                return None  # none waits: all may have to compute
            self._suspects |= silent
            return Kill(silent) if silent else None
        self._works = 0  # these losses are the cause after all
        return CannotGoOn(
            f"{numbered('rank', self._awaited)} did not continue within {self._elastic.recovery_s:g} s after the "
            f"loss of "
            f"{numbered('rank', (self._unsettled or self._dead).keys())}"
        )

    def _are_enough(self, present: Collection[int]) -> bool:
        """Whether they may go on; those that have left have done their work."""
        return len(present) + len(self._left) >= self._elastic.min_np

    def _next(self, now_s: float) -> wire.Membership | CannotGoOn | None:
        """Return the next list, with spares for those that are gone."""
        present = sorted(self._present)
        if not self._left:  # the job is not about to end
            while self.spares and len(present) < self._np:
                present.append(self.spares.pop(0))
                self._fresh.add(present[-1])
                self._rest.add(present[-1])
        if self._left and self._fresh.issuperset(present):
            return self._release()
        if not present or not self._are_enough(present):
            left = counted(len(present) + len(self._left), "rank")
            return CannotGoOn(f"{left} left, and --min-np is {self._elastic.min_np}")
        if self._fresh.issuperset(present):
            who = numbered("rank", present)
            return CannotGoOn(f"only spares ({who}) are left, which have no state to continue from")
        self.number += 1
        self.ranks = tuple(sorted(present))
        self._present, self._awaited = set(present), set(present)
        self._late_s = math.inf
        if self._unsettled:
            self._limit(now_s)  # where nobody is lost a member may have work to do alone: until another waits for it
        self._met_s.clear()
        return self._list(self.ranks)

    def _limit(self, now_s: float) -> None:
        """Begin to wait for all members to re-form."""
        self._late_s = now_s + self._elastic.stalled_s
        self._last_s = now_s + self._elastic.recovery_s

    def _release(self) -> wire.Membership | None:
        """Return a list of nobody, where ranks that leave still wait for one that is lost.

        Only spares are present, which the others have left, for whom they came.
        """
        self.spares += sorted(self._present)
        self._rest -= self._present
        self._present.clear()
        self._unsettled.clear()
        self._awaited.clear()
        self._late_s = math.inf
        if not self._waiting:
            return None
        self.number += 1
        self.ranks = tuple(sorted(self._waiting))
        return self._list(())

    def _list(self, ranks: tuple[int, ...]) -> wire.Membership:
        return wire.Membership(self.number, ranks, {str(rank): how for rank, how in sorted(self._dead.items())})

    def _settle(self, rank: int) -> bool:
        """`rank` is awaited no more; return whether it was the last one."""
        was_awaited = rank in self._awaited
        self._awaited.discard(rank)
        if self._awaited or not was_awaited:
            return False
        self._unsettled.clear()
        self._late_s = math.inf
        return True
