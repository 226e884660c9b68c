"""What is ready on all ranks of a process set? Decided on the set's first rank, as a state machine without messages.

    announce(rank, ...)   a rank has submitted something; kept as bits (seen before) or as records (new, or contested)
    decide()              the response to all ranks: what all have given is run; what differs fails; nothing else yet

A tensor that one rank announces by its bit and another by a full signature (its shape has changed there) is
contested: its bits become records, so that both kinds are compared.

How many ranks have given what, and how far all have read, is counted (tally.py) as they tell it: what an announcement
costs grows with the logarithm of their number. Only what becomes ready or fails costs a look at all of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ringreduce.engine.cache import Cache, Register, numbers
from ringreduce.engine.protocol import Announcement, Failure, Response
from ringreduce.engine.signature import Signature, SubmissionRecord, mismatch_message, ranks_text
from ringreduce.engine.tally import Counts, Lines, Progress

JOINABLE = "allreduce"
"""The kind of operation in which ranks that have joined can take part."""


class Entry(NamedTuple):
    """A tensor that some ranks have given, by records."""

    since_s: float
    records: dict[int, SubmissionRecord]

    @property
    def signature(self) -> Signature:
        """The first that came."""
        return next(iter(self.records.values())).signature

    def add(self, rank: int, record: SubmissionRecord) -> None:
        """Note a rank's call; an equal signature is kept once, so that ranks are compared by identity."""
        first = self.signature if self.records else record.signature
        self.records[rank] = SubmissionRecord(first, record.line, record.waits) if record.signature == first else record


class Waiting(NamedTuple):
    """A tensor that some ranks have given and others not."""

    signature: Signature
    since_s: float
    given: dict[int, str]
    """By rank: the line that submitted it."""
    missing: list[int]


class Coordinator:
    """One process set's; `members` are ranks of the world, which has `world_size` ranks."""

    def __init__(
        self,
        process_set: int,
        members: Sequence[int],
        world_size: int,
        cache_capacity: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process_set = process_set
        self._members = tuple(members)
        self._world_size = world_size
        self._clock = clock
        self._responses = 0
        self._progress = Progress(members)
        """Of the ranks that have not joined: the others announce nothing until all have."""
        self._cache = Cache()
        self._register = Register(cache_capacity)
        self._lines: dict[int, Lines] = {}
        """By number in the cache."""
        self._bits = dict.fromkeys(members, 0)
        self._counts = Counts()
        """Of the bits of ranks that have not joined."""
        self._pending = 0
        """The bits of any rank."""
        self._bits_since: list[tuple[float, int]] = []
        """When bits were first announced: to tell how long a tensor waits."""
        self._contested = 0
        self._entries: dict[str, Entry] = {}
        self._keys_by_name: defaultdict[str, set[str]] = defaultdict(set)
        self._touched: dict[str, None] = {}
        self._joined: dict[int, bool] = {}
        self._given_up: dict[str, int] = {}
        """Tensors that waited too long, with the number of the response that says so, until all have read it."""
        self._leaver: tuple[int, str] | None = None
        self.closed = False
        self._news = False
        """Something was announced since the last decision."""

    # What ranks tell

    def announce(self, rank: int, announcement: Announcement) -> None:
        """Note what a rank has submitted."""
        self._news = True
        self._progress.read(rank, announcement.seen)
        self._register.seen_by_all(self._progress.lowest)
        bits = announcement.bits
        if self._given_up:
            lowest = self._progress.lowest
            self._given_up = {key: told for key, told in self._given_up.items() if told > lowest}
        for record in announcement.records:
            if not self._is_given_up(record.signature.key, announcement):
                self._contest(record.signature.key)
                self._enter(rank, record)
        if self._given_up:
            bits = sum(
                1 << number
                for number in numbers(bits)
                if not self._is_given_up(self.signature(number).key, announcement)
            )
        odd = bits & (self._contested | self._register.former_bits)
        for number in numbers(odd):
            self._enter(rank, self._record(rank, number))
        if bits & ~odd:
            self._give(rank, bits & ~odd & ~self._bits[rank])
        if announcement.join is not None:
            self._joined[rank] = announcement.join
            self._progress.leave(rank)
            self._counts.subtract(self._bits[rank])
            self._touched.update(dict.fromkeys(self._entries))
        if announcement.leave and self._leaver is None:
            self._leaver = (rank, announcement.leave)

    def _give(self, rank: int, bits: int) -> None:
        self._bits[rank] |= bits
        self._counts.add(bits)
        if bits & ~self._pending:
            self._bits_since.append((self._clock(), bits & ~self._pending))
            self._pending |= bits

    def _is_given_up(self, key: str, announcement: Announcement) -> bool:
        """The rank will read that this tensor has failed, and fails it then: it had not when it announced it."""
        return announcement.seen < self._given_up.get(key, 0)

    def _enter(self, rank: int, record: SubmissionRecord) -> None:
        key = record.signature.key
        if key not in self._entries:
            self._entries[key] = Entry(self._clock(), {})
            self._keys_by_name[record.signature.name].add(key)
        self._entries[key].add(rank, record)
        self._touched[key] = None

    def _contest(self, key: str) -> None:
        """From now on the tensor is compared by records; bits that came already become such."""
        number = self._cache.number_of_key(key)
        if number is None or self._contested >> number & 1:
            return
        self._contested |= 1 << number
        given = [rank for rank in self._members if self._bits[rank] >> number & 1]
        self._clear(1 << number)
        for rank in given:
            self._enter(rank, self._record(rank, number))

    def signature(self, number: int) -> Signature:
        """What a number in the cache means, or meant when it was announced."""
        return self._register.former.get(number) or self._cache[number]

    def _record(self, rank: int, number: int) -> SubmissionRecord:
        lines = self._lines[number]
        return SubmissionRecord(self.signature(number), lines.others.get(rank, lines.common))

    # What all are told

    def decide(self) -> Response | None:
        """What all ranks do next; None when nothing new is known."""
        if self.closed or not self._news:
            return None
        self._news = False
        number = self._responses + 1
        bits = self._ready_bits()
        ready, failures = self._ready_entries()
        all_joined = len(self._joined) == len(self._members)
        if not (bits or ready or failures or all_joined or self._leaver):
            return None
        if bits and self._joined:
            bits, more = self._without_what_cannot_join(bits)
            failures += more
        self._clear(bits)
        self._register.use(bits)
        learned, forgotten = self._remember(ready, number)
        response = Response(
            self._process_set,
            number,
            bits,
            tuple(entry.signature for entry in ready),
            tuple(learned),
            tuple(forgotten),
            tuple(failures),
            tuple(sorted(self._joined)) if bits or ready else (),
            bool(self._joined) and all(self._joined.values()),
            list(self._joined)[-1] if all_joined else -1,
            f"rank {self._leaver[0]} has left the job: {self._leaver[1]}" if self._leaver else "",
            self._leaver[0] if self._leaver else -1,
        )
        if all_joined:
            self._joined = {}
            self._progress = Progress(
                self._members, number
            )  # what they announce next, they do when they have read this
        self.closed = self._leaver is not None
        self._responses = number
        return response

    def _ready_bits(self) -> int:
        live = len(self._members) - len(self._joined)
        # what a rank gave before it joined is run by all when all have, with the others' neutral elements
        return self._counts.equal(live) if live else self._pending

    def _ready_entries(self) -> tuple[list[Entry], list[Failure]]:
        ready, failures = [], []
        touched, self._touched = self._touched, {}
        for key in touched:
            entry = self._entries.get(key)
            if entry is None:
                continue
            if self._is_complete(entry.records):
                self._drop(key)
                failure = self._failure(key, entry)
                if failure is None:
                    ready.append(entry)
                else:
                    failures.append(failure)
            elif (rival := self._rival(key, entry)) is not None:
                message = mismatch_message({**entry.records, **self._entries[rival].records}, self._world_size)
                for each in (key, rival):
                    self._drop(each)
                    failures.append(Failure(each, "MismatchError", message))
        return ready, failures

    def _is_complete(self, records: Mapping[int, SubmissionRecord]) -> bool:
        """All live ranks have given it; those that have joined may have, before."""
        live = len(self._members) - len(self._joined)
        return len(records) >= live and len(records) - sum(rank in records for rank in self._joined) == live

    def _live(self) -> list[int]:
        return [rank for rank in self._members if rank not in self._joined]

    def _failure(self, key: str, entry: Entry) -> Failure | None:
        """What is wrong with a tensor that all live ranks have given."""
        records = entry.records
        if len({id(record.signature) for record in records.values()}) > 1:
            return Failure(key, "MismatchError", mismatch_message(records, self._world_size))
        signature = entry.signature
        if self._joined and signature.kind != JOINABLE:
            return Failure(key, "CollectiveError", _cannot_join(signature, self._joined))
        return None

    def _rival(self, key: str, entry: Entry) -> str | None:
        """Another operation under the same name, when every rank waits in one of the two: neither can be complete."""
        for other in self._keys_by_name[entry.signature.name] - {key}:
            rival = self._entries[other].records
            records = {**entry.records, **rival}
            apart = len(records) == len(entry.records) + len(rival)
            if apart and self._is_complete(records) and all(record.waits for record in records.values()):
                return other
        return None

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            keys = self._keys_by_name[entry.signature.name]
            keys.discard(key)
            if not keys:
                del self._keys_by_name[entry.signature.name]
        number = self._cache.number_of_key(key)
        if number is not None:
            self._contested &= ~(1 << number)

    def _without_what_cannot_join(self, bits: int) -> tuple[int, list[Failure]]:
        wrong = [number for number in numbers(bits) if self._cache[number].kind != JOINABLE]
        failures = [
            Failure(self._cache[number].key, "CollectiveError", _cannot_join(self._cache[number], self._joined))
            for number in wrong
        ]
        self._clear(sum(1 << number for number in wrong))
        return bits & ~sum(1 << number for number in wrong), failures

    def _clear(self, bits: int) -> None:
        if bits:
            self._bits = {rank: mine & ~bits for rank, mine in self._bits.items()}
            self._counts.clear(bits)
            self._pending &= ~bits
            self._bits_since = [(since, mask & ~bits) for since, mask in self._bits_since if mask & ~bits]

    def _remember(self, ready: Iterable[Entry], response: int) -> tuple[list[tuple[int, Signature]], list[int]]:
        """Give numbers to what was new, and take some back when there are too many."""
        learned = []
        new = []
        for entry in ready:
            if entry.signature.numbered or self._register.capacity == 0:
                continue
            number = self._cache.number_of_key(entry.signature.key)
            if number is None:
                new.append(entry)
            else:
                learned.append((number, entry.signature))
                self._lines[number] = Lines.of(entry.records)
        new = new[: self._register.capacity]
        busy = self._pending | self._contested | sum(1 << number for number, _ in learned)
        too_many = len(self._register) + len(new) - self._register.capacity
        forgotten = self._register.take_back(max(0, too_many), busy, response, self._cache)
        for number in forgotten:
            self._cache.forget(number)
        for entry in new:
            number = self._register.give()
            self._lines[number] = Lines.of(entry.records)
            learned.append((number, entry.signature))
        for number, signature in learned:
            self._cache.learn(number, signature)
        return learned, forgotten

    # What waits

    def waiting(self, longer_than_s: float) -> list[Waiting]:
        """Tensors that have waited so long for some ranks, the longest first."""
        now = self._clock()
        found = [
            Waiting(
                entry.signature,
                entry.since_s,
                {rank: record.line for rank, record in entry.records.items()},
                [rank for rank in self._live() if rank not in entry.records],
            )
            for entry in self._entries.values()
            if now - entry.since_s >= longer_than_s
        ]
        old: dict[int, float] = {}
        for since, mask in self._bits_since:
            if now - since >= longer_than_s:
                for number in numbers(mask):
                    old.setdefault(number, since)
        for number, since in old.items():
            given = {rank: self._record(rank, number).line for rank, bits in self._bits.items() if bits >> number & 1}
            missing = [rank for rank in self._live() if rank not in given]
            found.append(Waiting(self._cache[number], since, given, missing))
        return sorted(found, key=lambda each: each.since_s)

    def oldest_s(self) -> float | None:
        """When the tensor that waits for longest was first announced; None when none waits."""
        times = [entry.since_s for entry in self._entries.values()]
        times += [since for since, _ in self._bits_since[:1]]
        return min(times, default=None)

    def has_waited(self, waited_s: float) -> None:
        """A rank has waited so long, although this coordinator heard of it just now: it was not listening."""
        since_s = self._clock() - waited_s
        self._entries = {
            key: entry._replace(since_s=min(entry.since_s, since_s)) for key, entry in self._entries.items()
        }
        self._bits_since = [(min(since, since_s), bits) for since, bits in self._bits_since]

    def give_up(self, failures: Sequence[Failure]) -> Response:
        """Fail tensors for another reason than those that are found here."""
        for failure in failures:
            number = self._cache.number_of_key(failure.key)
            if number is not None:
                self._clear(1 << number)
            self._drop(failure.key)
        self._responses += 1
        self._given_up.update({failure.key: self._responses for failure in failures})
        return Response(self._process_set, self._responses, failures=tuple(failures))


def _cannot_join(signature: Signature, joined: Iterable[int]) -> str:
    return (
        f"{signature.kind} {signature.name!r}: {ranks_text(joined)} called join(), and a joined rank can take "
        "part in allreduce only; call other collectives before any rank joins"
    )
