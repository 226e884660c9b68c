"""What is new or wrong in a process set, decided on its first rank, as a state machine without messages.

    announce(rank, ...)   a rank has submitted tensors that are not cached, as records; or it joins, or leaves
    decide()              the response to all ranks: which tensors are ready, which fail, what is cached from now on

Cached tensors are counted by id, elsewhere (leader.py). As soon as anything about one is odd, its id is forgotten, and
the ranks that have submitted it announce records: a rank has submitted another shape, a rank has joined, some ranks
have not submitted it for long. So all that needs the ranks' lines and signatures is decided here, by records alone.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ringreduce.collectives.ops import NEUTRAL_UNSCALED, ReduceOp
from ringreduce.execution.signature import Signature, SubmissionRecord, mismatch_message, ranks_text
from ringreduce.negotiation.cache import Cache, Ids
from ringreduce.negotiation.protocol import Announcement, Failure, Response

UNNAMED_WAIT_S = 0.05
"""How long unnamed tensors that may differ wait for each other; then all are negotiated by records, which show it."""
JOINABLE = "allreduce"  # the only kind of operation that joined ranks can take part in


@dataclasses.dataclass(slots=True)
class Entry:
    """A tensor that some ranks have submitted, by records."""

    signature: Signature  # the first rank's
    since_s: float
    records: dict[int, SubmissionRecord] = dataclasses.field(default_factory=dict)
    differs: bool = False  # true: another rank's signature is another one

    def add(self, rank: int, record: SubmissionRecord, since_s: float) -> None:
        """Add a rank's record."""
        self.records[rank] = record
        self.differs |= record.signature is not self.signature and record.signature != self.signature
        self.since_s = min(self.since_s, since_s)


class Waiting(NamedTuple):
    """A tensor that some ranks have not submitted."""

    signature: Signature
    since_s: float
    submitted: dict[int, str]  # by rank: the line that submitted it
    missing: list[int]
    step: int = -1  # see Submission


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
        self._cache = Cache()
        self.ids = Ids(cache_capacity)
        self._forgotten: list[int] = []  # ids that the next response forgets
        self._entries: dict[str, Entry] = {}
        self._keys_by_name: defaultdict[str, set[str]] = defaultdict(set)
        self._touched: dict[str, None] = {}  # those that may be complete, or that have a rival of the same name
        self._joined: dict[int, bool] = {}
        self._abandoned: dict[str, int] = {}
        """Tensors that stalled too long, with the number of the response that fails them. For good: a record from
        before may come when its rank has read that, since only messages on one way keep their order."""
        self._closing: tuple[int, str] | None = None  # the rank that has left, -1 for none, and why the set ends
        self.closed = False
        self.has_news = False  # true when something was announced since the last decision

    # Announcements

    def announce(self, rank: int, announcement: Announcement) -> None:
        """Add what a rank has submitted."""
        self.has_news = True
        now = self._clock()
        for record in announcement.records:
            key = record.signature.key
            # a rank that had not read the tensor's failure when it announced it will fail it then
            if announcement.seen >= self._abandoned.get(key, 0):
                self._add_record(key, rank, record, now - record.waited_s)
        if announcement.join is not None:
            self._joined[rank] = announcement.join
            self._touched.update(dict.fromkeys(self._entries))
            self.forget(list(self._cache))
        if announcement.leave:
            self.close(f"rank {rank} has left the job: {announcement.leave}", rank)

    def close(self, why: str, leaver: int = -1) -> None:
        """Let the next response be the last: nothing that is not ready runs any more, on any rank."""
        self.has_news = True
        self._closing = self._closing or (leaver, why)

    @property
    def _live(self) -> int:
        """How many ranks have not joined."""
        return len(self._members) - len(self._joined)

    def _add_record(self, key: str, rank: int, record: SubmissionRecord, since_s: float) -> None:
        entry, signature = self._entries.get(key), record.signature
        if entry is None:
            known = self._cache.id_of_key(signature.unnumbered)
            if known is not None:  # other ranks may have submitted it by its id
                self.forget([known])
            entry = self._entries[key] = Entry(signature, since_s)
            self._keys_by_name[signature.name].add(key)
        entry.add(rank, record, since_s)
        if len(entry.records) >= self._live or len(self._keys_by_name[signature.name]) > 1:
            self._touched[key] = None

    def forget(self, ids: Iterable[int]) -> None:
        """Let the next response forget these ids: ranks that have submitted one will announce a record instead."""
        for number in ids:
            if number in self._cache:
                self._cache.forget(number)
                self._forgotten.append(number)
                self.has_news = True

    def check(self, now_s: float, overdue_s: float = math.inf) -> None:
        """Now and then: other ranks may have counted an unnamed tensor by an id, and wait for one that is a record.

        overdue_s: when one has waited for so long, a report will be of all that wait.
        """
        waiting = self._entries.values()
        if any(now_s - each.since_s >= overdue_s for each in waiting):
            self.forget(list(self._cache))
        elif any(each.signature.numbered and now_s - each.since_s >= UNNAMED_WAIT_S for each in waiting):
            self.forget([number for number in self._cache if self._cache[number].numbered])

    # Responses

    def decide(self) -> Response | None:
        """What all ranks do next; None for nothing new."""
        if self.closed or not self.has_news:
            return None
        self.has_news = False
        number = self._responses + 1
        leaver, closed = self._closing or (-1, "")
        ready, failures = self._ready_entries()
        all_joined = not self._live
        if not (ready or failures or self._forgotten or all_joined or self._closing):
            return None
        learned = self._learn([entry.signature for entry in ready]) if ready and not self._joined else []
        response = Response(
            self._process_set,
            number,
            self._take_forgotten(number),
            tuple(entry.signature for entry in ready),
            tuple(learned),
            tuple(failures),
            tuple(sorted(self._joined)) if ready else (),
            bool(self._joined) and all(self._joined.values()),
            list(self._joined)[-1] if all_joined else -1,
            closed,
            leaver,
        )
        if all_joined:
            self._joined = {}
        self.closed = bool(closed)
        self._responses = number
        return response

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
        live = self._live
        return len(records) >= live and len(records) - sum(rank in records for rank in self._joined) == live

    def _failure(self, key: str, entry: Entry) -> Failure | None:
        """What is wrong with a tensor that all live ranks have submitted."""
        if entry.differs or entry.signature.refused:
            return Failure(key, "MismatchError", mismatch_message(entry.records, self._world_size))
        return self._join_failure(entry.signature) if self._joined else None

    def _rival(self, key: str, entry: Entry) -> str | None:
        """Another operation of the same name, when every rank waits in one of the two: neither can complete."""
        keys = self._keys_by_name[entry.signature.name]
        for other in keys - {key} if len(keys) > 1 else ():
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

    def _join_failure(self, signature: Signature) -> Failure | None:
        """Why joined ranks cannot take part."""
        details = dict(signature.details)
        scaled = details.get("prescale_factor", 1.0) != 1.0 and ReduceOp(details["op"]) in NEUTRAL_UNSCALED
        text = f"{signature.text}: {ranks_text(self._joined)} called join(), and "
        if signature.kind != JOINABLE:
            text += "a joined rank can take part in allreduce only; call other collectives before any rank joins"
            if signature.kind == "allgather":
                text += "; sparse gradients are also gathered: pass sparse_as_dense=True to the optimizer"
        elif scaled:
            text += f"op={details['op']} has no neutral element that prescale_factor={details['prescale_factor']} "
            text += "leaves unchanged; scale the array before the call"
        else:
            return None
        return Failure(signature.key, "CollectiveError", text)

    def _learn(self, ready: Sequence[Signature]) -> list[tuple[int, Signature]]:
        """Cache new signatures, and forget the least recently used ones to make room."""
        waiting = {each.signature.unnumbered for each in self._entries.values() if each.signature.numbered}
        new = {each.unnumbered: None for each in ready}
        # an unnamed tensor that some rank has announced as a record must be a record on all
        new = {each: None for each in new if each not in waiting}
        self.forget(self.ids.least_used(self._cache, len(new)))
        learned = []
        for signature in new:
            number = self.ids.allocate()
            if number is not None:
                self._cache.learn(number, signature)
                learned.append((number, signature))
        return learned

    def _take_forgotten(self, response: int) -> tuple[int, ...]:
        """What this response forgets: before it fails or runs any tensor that other ranks may have submitted by id."""
        forgotten, self._forgotten = self._forgotten, []
        self.ids.retire(forgotten, response)
        return tuple(forgotten)

    # Stalls

    def waiting(self, longer_than_s: float) -> list[Waiting]:
        """Tensors that have waited this long for some ranks, the longest first; none once the process set is closed."""
        if self.closed:
            return []
        now = self._clock()
        found = [self._waiting(entry) for entry in self._entries.values() if now - entry.since_s >= longer_than_s]
        return sorted((each for each in found if each.missing), key=lambda each: each.since_s)

    def _waiting(self, entry: Entry) -> Waiting:
        lines = {rank: each.line for rank, each in entry.records.items()}
        missing = [rank for rank in self._members if rank not in self._joined and rank not in lines]
        step = max(each.step for each in entry.records.values())
        return Waiting(entry.signature, entry.since_s, lines, missing, step)

    def abandon(self, failures: Sequence[Failure]) -> Response:
        """Fail stalled tensors; returns the response for all ranks."""
        for failure in failures:
            self._drop(failure.key)
        self._responses += 1
        self._abandoned.update({failure.key: self._responses for failure in failures})
        forgotten = self._take_forgotten(self._responses)
        return Response(self._process_set, self._responses, forgotten, failures=tuple(failures))
