"""What is ready on all ranks of a process set? Decided on the set's first rank, as a state machine without messages.

    announce(rank, ...)   a rank has submitted tensors, as bits (cached) or as records (new, or contested)
    decide()              the response to all ranks: which tensors are ready, and which fail by a mismatch

A tensor is contested when one rank announces its bit and another a record, after its shape has changed there. Then its
bits become records, so that both are compared.

Submissions and read responses are counted incrementally (tally.py): an announcement costs O(log ranks). Only a tensor
that becomes ready or fails costs O(ranks).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ringreduce.execution.signature import Signature, SubmissionRecord, mismatch_message, ranks_text
from ringreduce.negotiation.cache import Cache, NumberAllocator, numbers
from ringreduce.negotiation.protocol import Announcement, Failure, Response
from ringreduce.negotiation.tally import Counts, Lines, Progress

JOINABLE = "allreduce"  # the only kind of operation that joined ranks can take part in


class Entry(NamedTuple):
    """A tensor that some ranks have submitted, by records."""

    since_s: float
    records: dict[int, SubmissionRecord]

    @property
    def signature(self) -> Signature:
        """The first rank's signature."""
        return next(iter(self.records.values())).signature

    def add(self, rank: int, record: SubmissionRecord) -> None:
        """Add a rank's record; equal signatures become one object, so that ranks are compared by identity."""
        first = self.signature if self.records else record.signature
        self.records[rank] = SubmissionRecord(first, record.line, record.waits) if record.signature == first else record


class Waiting(NamedTuple):
    """A tensor that some ranks have not submitted."""

    signature: Signature
    since_s: float
    submitted: dict[int, str]  # by rank: the line that submitted it
    missing: list[int]


class Coordinator:
    """The coordinator of one process set; `members` are ranks of the world, which has `world_size` ranks."""

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
        self._progress = Progress(members)  # without joined ranks: they announce nothing until all have joined
        self._cache = Cache()
        self._numbers = NumberAllocator(cache_capacity)
        self._lines: dict[int, Lines] = {}  # by number in the cache
        self._bits = dict.fromkeys(members, 0)
        self._counts = Counts()  # counts the bits of ranks that have not joined
        self._pending = 0  # the bits of any rank
        self._bits_since: list[tuple[float, int]] = []  # when bits were first announced
        self._contested = 0
        self._entries: dict[str, Entry] = {}
        self._keys_by_name: defaultdict[str, set[str]] = defaultdict(set)
        self._touched: dict[str, None] = {}
        self._joined: dict[int, bool] = {}
        self._abandoned: dict[str, int] = {}
        """Tensors that stalled too long, with the number of the response that fails them, until all have read it."""
        self._leaver: tuple[int, str] | None = None
        self.closed = False
        self._news = False  # true when something was announced since the last decision

    # Announcements

    def announce(self, rank: int, announcement: Announcement) -> None:
        """Add what a rank has submitted."""
        self._news = True
        self._progress.read(rank, announcement.seen)
        lowest = self._progress.lowest
        self._numbers.seen_by_all(lowest)
        bits = announcement.bits
        if self._abandoned:
            self._abandoned = {key: response for key, response in self._abandoned.items() if response > lowest}
        for record in announcement.records:
            if not self._is_abandoned(record.signature.key, announcement):
                self._contest(record.signature.key)
                self._add_record(rank, record)
        if self._abandoned:
            for number in numbers(bits):
                if self._is_abandoned(self.signature(number).key, announcement):
                    bits &= ~(1 << number)
        by_record = bits & (self._contested | self._numbers.former_bits)
        for number in numbers(by_record):
            self._add_record(rank, self._record(rank, number))
        if bits & ~by_record:
            self._add_bits(rank, bits & ~by_record & ~self._bits[rank])
        if announcement.join is not None:
            self._joined[rank] = announcement.join
            self._progress.leave(rank)
            self._counts.subtract(self._bits[rank])
            self._touched.update(dict.fromkeys(self._entries))
        if announcement.leave and self._leaver is None:
            self._leaver = (rank, announcement.leave)

    def _add_bits(self, rank: int, bits: int) -> None:
        self._bits[rank] |= bits
        self._counts.add(bits)
        if bits & ~self._pending:
            self._bits_since.append((self._clock(), bits & ~self._pending))
            self._pending |= bits

    def _is_abandoned(self, key: str, announcement: Announcement) -> bool:
        """True when the rank had not read the tensor's failure when it announced it: it will fail it then."""
        return announcement.seen < self._abandoned.get(key, 0)

    def _add_record(self, rank: int, record: SubmissionRecord) -> None:
        key = record.signature.key
        if key not in self._entries:
            self._entries[key] = Entry(self._clock(), {})
            self._keys_by_name[record.signature.name].add(key)
        self._entries[key].add(rank, record)
        self._touched[key] = None

    def _contest(self, key: str) -> None:
        """Compare the tensor by records from now on, and turn its bits into records."""
        number = self._cache.number_of_key(key)
        if number is None or self._contested >> number & 1:
            return
        self._contested |= 1 << number
        announced = [rank for rank in self._members if self._bits[rank] >> number & 1]
        self._clear(1 << number)
        for rank in announced:
            self._add_record(rank, self._record(rank, number))

    def signature(self, number: int) -> Signature:
        """The signature that a number in the cache stands for, or stood for when it was announced."""
        return self._numbers.former.get(number) or self._cache[number]

    def _record(self, rank: int, number: int) -> SubmissionRecord:
        lines = self._lines[number]
        return SubmissionRecord(self.signature(number), lines.others.get(rank, lines.common))

    # Responses

    def decide(self) -> Response | None:
        """What all ranks do next; None for nothing new."""
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
        self._numbers.use(bits)
        learned, forgotten = self._update_cache(ready, number)
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
            self._progress = Progress(self._members, number)  # they read this response before they announce more
        self.closed = self._leaver is not None
        self._responses = number
        return response

    def _ready_bits(self) -> int:
        live = len(self._members) - len(self._joined)
        # when all ranks have joined, they run what some submitted before, with the others' neutral elements
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
        """True when all live ranks have submitted it; joined ranks may have, before."""
        live = len(self._members) - len(self._joined)
        return len(records) >= live and len(records) - sum(rank in records for rank in self._joined) == live

    def _failure(self, key: str, entry: Entry) -> Failure | None:
        """What is wrong with a tensor that all live ranks have submitted."""
        records = entry.records
        if len({id(record.signature) for record in records.values()}) > 1:
            return Failure(key, "MismatchError", mismatch_message(records, self._world_size))
        return self._join_failure(entry.signature) if self._joined and entry.signature.kind != JOINABLE else None

    def _rival(self, key: str, entry: Entry) -> str | None:
        """Another operation of the same name, when every rank waits in one of the two: neither can complete."""
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
        wrong_bits = sum(1 << number for number in wrong)
        self._clear(wrong_bits)
        return bits & ~wrong_bits, [self._join_failure(self._cache[number]) for number in wrong]

    def _join_failure(self, signature: Signature) -> Failure:
        text = f"{signature.kind} {signature.name!r}: {ranks_text(self._joined)} called join(), and a joined rank can "
        text += "take part in allreduce only; call other collectives before any rank joins"
        return Failure(signature.key, "CollectiveError", text)

    def _clear(self, bits: int) -> None:
        if bits:
            self._bits = {rank: mine & ~bits for rank, mine in self._bits.items()}
            self._counts.clear(bits)
            self._pending &= ~bits
            self._bits_since = [(since, mask & ~bits) for since, mask in self._bits_since if mask & ~bits]

    def _update_cache(self, ready: Iterable[Entry], response: int) -> tuple[list[tuple[int, Signature]], list[int]]:
        """Cache new signatures, and evict the least recently used beyond the capacity."""
        capacity = self._numbers.capacity
        entries = [entry for entry in ready if capacity and not entry.signature.numbered]
        known = [(self._cache.number_of_key(entry.signature.key), entry) for entry in entries]
        cached = [(number, entry) for number, entry in known if number is not None]
        new = [entry for number, entry in known if number is None][:capacity]
        busy = self._pending | self._contested | sum(1 << number for number, _ in cached)
        forgotten = self._numbers.evict(max(0, len(self._numbers) + len(new) - capacity), busy, response, self._cache)
        for number in forgotten:
            self._cache.forget(number)
        cached += [(self._numbers.allocate(), entry) for entry in new]
        for number, entry in cached:
            self._lines[number] = Lines.of(entry.records)
            self._cache.learn(number, entry.signature)
        return [(number, entry.signature) for number, entry in cached], forgotten

    # Stalls

    def waiting(self, longer_than_s: float) -> list[Waiting]:
        """Tensors that have waited this long for some ranks, the longest first."""
        now = self._clock()
        found = [
            self._waiting(entry.signature, entry.since_s, {rank: each.line for rank, each in entry.records.items()})
            for entry in self._entries.values()
            if now - entry.since_s >= longer_than_s
        ]
        old: dict[int, float] = {}
        for since, mask in self._bits_since:
            if now - since >= longer_than_s:
                for number in numbers(mask):
                    old.setdefault(number, since)
        for number, since in old.items():
            lines = {rank: self._record(rank, number).line for rank, bits in self._bits.items() if bits >> number & 1}
            found.append(self._waiting(self._cache[number], since, lines))
        return sorted(found, key=lambda each: each.since_s)

    def _waiting(self, signature: Signature, since_s: float, lines: dict[int, str]) -> Waiting:
        missing = [rank for rank in self._members if rank not in self._joined and rank not in lines]
        return Waiting(signature, since_s, lines, missing)

    def oldest_s(self) -> float | None:
        """When the oldest waiting tensor was first announced; None when none waits."""
        times = [entry.since_s for entry in self._entries.values()]
        times += [since for since, _ in self._bits_since[:1]]
        return min(times, default=None)

    def backdate(self, waited_s: float) -> None:
        """Let all tensors have waited `waited_s`, as a rank says: this idle coordinator read the announcements late."""
        since_s = self._clock() - waited_s
        for key, entry in self._entries.items():
            self._entries[key] = entry._replace(since_s=min(entry.since_s, since_s))
        self._bits_since = [(min(since, since_s), bits) for since, bits in self._bits_since]

    def abandon(self, failures: Sequence[Failure]) -> Response:
        """Fail stalled tensors; returns the response for all ranks."""
        for failure in failures:
            number = self._cache.number_of_key(failure.key)
            if number is not None:
                self._clear(1 << number)
            self._drop(failure.key)
        self._responses += 1
        self._abandoned.update({failure.key: self._responses for failure in failures})
        return Response(self._process_set, self._responses, failures=tuple(failures))
