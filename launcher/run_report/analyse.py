"""Who waits for whom in a step, and how late each rank is: pure functions on the steps that ranks have sent.

A wait is split where the last rank submits the operation: before that it is *waiting* for that rank, from then on
*exposed* communication. What is left of a step is *computing*; communication under it is *hidden*.

    rank 0  ── computing ──┤ submits, waits ······ for rank 1 ······├── exposed ──┤
    rank 1  ──────────────── computing ─────────────────────────────┤ submits ────┤

A rank's delay is how much longer it takes than others between a result and its next submission that others wait for.
So it is measured by the rank's own clock, is found where others do not wait because they are still communicating, and a
moment counts once, though all later buckets of the step are late by it, too.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median_low

from ..records import Operation
from .collect import Said

Key = tuple[str, int]
"""An operation's name, and its how-manieth of the step it is."""
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Step:
    """One step of one rank, by rank 0's clock."""

    from_s: float
    to_s: float
    operations: dict[Key, Operation]
    """In the order in which they were submitted."""
    waits: list[tuple[Key, float, float]]
    """One after the other."""


NOTHING = Step(0.0, 0.0, {}, [])


@dataclass
class Shares:
    """What one rank's time went to: seconds a step; `waiting` by the rank that was waited for."""

    step_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    waiting: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def waiting_s(self) -> float:
        """For all of them."""
        return math.fsum(self.waiting.values())

    @property
    def computing_s(self) -> float:
        """The rest."""
        return self.step_s - self.exposed_s - self.waiting_s


Gains = Mapping[tuple[Key | None, Key], Mapping[int, float]]
"""How long ranks take from the results of an operation, or of the step before, to the next one after which some rank
waits; only ranks that have waited for the same can be compared."""


def parsed(said: Said, ahead_s: float) -> Step:
    """Return a step that a rank has sent whose clock is `ahead_s` of rank 0's."""
    operations: dict[Key, Operation] = {}
    submitted: dict[str, list[float]] = defaultdict(list)
    for name, kind, nbytes, *times_s, algorithm in sorted(said["operations"], key=itemgetter(3)):
        submitted_s, ready_s, begun_s, ended_s = (each - ahead_s for each in times_s)
        own = Operation(name, kind, nbytes, submitted_s, ready_s, begun_s, ended_s, algorithm)
        operations[name, len(submitted[name])] = own
        submitted[name].append(own.submitted_s)
    waits, free_s = [], -math.inf
    for name, since_s, until_s in sorted(said["waits"], key=itemgetter(1)):
        from_s, to_s = max(free_s, since_s - ahead_s), until_s - ahead_s
        if to_s > from_s:
            waits.append(((name, bisect.bisect(submitted[name], since_s - ahead_s) - 1), from_s, to_s))
            free_s = to_s
    return Step(said["from_s"] - ahead_s, said["to_s"] - ahead_s, operations, waits)


def in_common(said: Mapping[int, Iterable[Said]], ahead_s: Mapping[int, float]) -> dict[int, dict[int, Step]]:
    """Return the steps that most ranks have sent, by number and rank; the first one has all before training in it."""
    found: dict[int, dict[int, Step]] = defaultdict(dict)
    for rank, steps in said.items():
        for each in steps:
            found[each["number"]][rank] = parsed(each, ahead_s[rank])
    later = {number: found[number] for number in sorted(found) if number} or found
    most = max(map(len, later.values()), default=0)
    return {number: by_rank for number, by_rank in later.items() if len(by_rank) == most}


def behind(rank: int, steps: Iterable[Mapping[int, Step]]) -> float:
    """Return how much the clock of `rank` is behind, where its steps say so: 0 where what was measured may be right.

    No sum is complete before all have submitted; if it seems so, the clocks have run apart since they were
    measured. What they end together then tells by how much.
    """
    seems_wrong, apart_s = False, []
    for by_rank in steps:
        first, own = by_rank[min(by_rank)], by_rank.get(rank, NOTHING)
        for key in first.operations.keys() & own.operations.keys():
            here, there = first.operations[key], own.operations[key]
            if here.kind == "allreduce":
                seems_wrong |= here.ended_s < there.submitted_s or there.ended_s < here.submitted_s
                apart_s.append(here.ended_s - there.ended_s)
    return median_low(apart_s) if seems_wrong else 0.0


def usual(steps: dict[int, dict[int, Step]]) -> dict[int, dict[int, Step]]:
    """Return `steps` without the few that took more than twice as long as most: a checkpoint, or a test."""
    lengths = {number: max(each.to_s - each.from_s for each in by_rank.values()) for number, by_rank in steps.items()}
    longest = sorted(lengths, key=lambda number: lengths[number])[len(lengths) - len(lengths) // 20 :]
    odd = {number for number in longest if lengths[number] > 2 * median_low(lengths.values())}
    return {number: by_rank for number, by_rank in steps.items() if number not in odd}


def shares(steps: Collection[Mapping[int, Step]]) -> dict[int, Shares]:
    """Return what each rank's time went to, on average over `steps`."""
    found: dict[int, Shares] = defaultdict(Shares)
    for by_rank in steps:
        last = _last(by_rank)
        for rank, step in by_rank.items():
            own = found[rank]
            own.step_s += (step.to_s - step.from_s) / len(steps)
            for key, from_s, to_s in step.waits:
                late_rank, submitted_s = last.get(key, (rank, from_s))
                split_s = from_s if late_rank == rank else min(max(from_s, submitted_s), to_s)
                own.waiting[late_rank] += (split_s - from_s) / len(steps)
                own.exposed_s += (to_s - split_s) / len(steps)
            moving = [(each.ready_s, each.ended_s) for each in step.operations.values()]
            waited = [(from_s, to_s) for _, from_s, to_s in step.waits]
            own.hidden_s += (_length(moving + waited) - _length(waited)) / len(steps)
    return dict(found)


def average(each: Collection[Shares]) -> Shares:
    """Return what the time of all ranks went to."""
    count = max(1, len(each))
    found = Shares(*(sum(getattr(one, name) for one in each) / count for name in ("step_s", "exposed_s", "hidden_s")))
    for one in each:
        for rank, waiting_s in one.waiting.items():
            found.waiting[rank] += waiting_s / count
    return found


def _last(by_rank: Mapping[int, Step]) -> dict[Key, tuple[int, float]]:
    """Return which rank submits each operation last, and when."""
    last: dict[Key, tuple[int, float]] = {}
    for rank, step in by_rank.items():
        for key, each in step.operations.items():
            if key not in last or each.submitted_s > last[key][1]:
                last[key] = rank, each.submitted_s
    return last


def _length(spans: Spans) -> float:
    """Return how long at least one of the spans lasts."""
    total, end_s = 0.0, -math.inf
    for from_s, to_s in sorted(spans):
        total += max(0.0, to_s - max(from_s, end_s))
        end_s = max(end_s, to_s)
    return total


def gains(steps: Mapping[int, Mapping[int, Step]]) -> Gains:
    """Return them, as the average over `steps`, which are given by number and rank."""
    found: dict[tuple[Key | None, Key], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    results_s: dict[tuple[int, int], float] = {}  # when a rank had all that it needed of a step
    for number, by_rank in steps.items():
        waited = {key for step in by_rank.values() for key, _, _ in step.waits}
        closing = {key for step in by_rank.values() for key in _closing(step)}
        for rank, step in by_rank.items():
            result_s = next_s = results_s.get((number - 1, rank), step.from_s)
            before: Key | None = None
            for key, each in step.operations.items():
                if key in waited:
                    next_s = max(next_s, each.ended_s)
                if key in closing:
                    found[before, key][rank] += (each.submitted_s - result_s) / len(steps)
                    result_s, before = next_s, key
            results_s[number, rank] = next_s
    return found


def _closing(step: Step) -> Iterable[Key]:
    """Yield what the rank submitted last before each of its waits."""
    keys = list(step.operations)
    submitted = [each.submitted_s for each in step.operations.values()]
    for _, from_s, _ in step.waits:
        if at := bisect.bisect(submitted, from_s):
            yield keys[at - 1]


def delays(found: Gains, group: Callable[[int], object] = lambda rank: rank) -> dict[int, float]:
    """Return how much longer each rank takes in a step than ranks of other groups usually do."""
    late: dict[int, float] = defaultdict(float)
    for by_rank in found.values():
        others = {
            mine: [gain for rank, gain in by_rank.items() if group(rank) != mine] for mine in set(map(group, by_rank))
        }
        usual = {mine: median_low(theirs) for mine, theirs in others.items() if theirs}
        for rank, gain in by_rank.items():
            late[rank] += max(0.0, gain - usual.get(group(rank), gain))
    return dict(late)


def excess(amounts: Mapping[int, float], ranks: Collection[int]) -> float:
    """Return how much more than usual the average of `ranks` is: the middle one of all other ranks."""
    own = [amount for rank, amount in amounts.items() if rank in ranks]
    others = [amount for rank, amount in amounts.items() if rank not in ranks]
    return sum(own) / len(own) - median_low(others) if own and others else 0.0
