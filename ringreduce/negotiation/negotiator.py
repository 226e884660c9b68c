"""One rank's part in the negotiation of one process set: it counts or announces, may lead or coordinate, and follows.

announce(submissions)   cached ones are counted in shared memory; of the others, the coordinator gets records
receive(rank, message)  another rank's control message
poll()                  a leader's work, and the coordinator's
next()                  what all ranks do next, in one order: run a batch, or apply a response
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.execution.signature import SubmissionRecord
from ringreduce.execution.submission import Submission
from ringreduce.kernels import native
from ringreduce.negotiation.cache import Cache
from ringreduce.negotiation.coordinator import UNNAMED_WAIT_S, Coordinator
from ringreduce.negotiation.leader import Leader, children_of, parent_of
from ringreduce.negotiation.protocol import Announcement, Overdue, Ready, Response, Scheduled
from ringreduce.negotiation.short import Short
from ringreduce.transport.counters import Counters, GroupBlock, Held, group_bytes

Message = Announcement | Response | Ready | Scheduled | Overdue


class Group:
    """The ranks of a process set that share memory."""

    def __init__(self, members: Sequence[int], memories: Sequence[int], rank: int) -> None:
        """memories: by member, equal numbers for those that share memory;  rank: a member."""
        by_memory: dict[int, list[int]] = {}
        for member, memory in zip(members, memories, strict=True):
            by_memory.setdefault(memory, []).append(member)
        groups = list(by_memory.values())
        number = next(number for number, ranks in enumerate(groups) if rank in ranks)
        self.ranks = groups[number]  # the first one leads
        self.above = groups[parent_of(number)][0] if number else None  # the leader above
        self.below = [groups[child][0] for child in children_of(number, len(groups))]


class Negotiator:
    """See above."""

    def __init__(
        self,
        process_set: int,
        members: Sequence[int],
        rank: int,
        world_size: int,
        group: Group,
        blocks: Sequence[Any] | None,
        capacity: int,
        *,
        fence: Callable[[], None],
        send: Callable[[Any, Sequence[int]], None],
        resubmit: Callable[[Sequence[Submission]], None],
        short: Short | None = None,
    ) -> None:
        """blocks: the group's memory, by rank, each `group_bytes(capacity)` long; None for a group of one.

        send:     sends a control message to ranks, but not to this one.
        resubmit: called with submissions that are to be announced again, unless they have failed.
        short:    None where no elements travel with the negotiation.
        """
        self.process_set = process_set
        self.coordinator_rank = members[0]
        self._members = members
        self.cache = Cache()
        self.applied = 0  # the number of the last response
        self.coordinator = Coordinator(process_set, members, world_size, capacity) if rank == members[0] else None
        self._group = group
        self._send = send
        self._resubmit = resubmit
        own = blocks or [np.zeros(group_bytes(capacity), np.uint8)]
        self._views = views = [GroupBlock(each, capacity) for each in own]
        self._counters = Counters(views, group.ranks.index(rank), fence)
        self._leader: Leader | None = None
        self._read = self._counters.read
        if rank == group.ranks[0]:
            self._leader = Leader(process_set, views, capacity, fence, group.below, group.above is None)
            self._read = self._leader.read
        self._counted: defaultdict[int, deque[Submission]] = defaultdict(deque)
        self._left = False  # it has sent its last announcement
        self._joins: Submission | None = None  # announced when nothing is counted that is not ready
        self._unnamed: dict[str, int | None] = {}
        """The unnamed submissions that are not ready, in their order: the id by which each was counted, if it was."""
        self._responses: dict[int, Response] = {}
        self._awaits_response = False
        self._rank = rank
        self._short, self._held = short, [Held(each, fence) for each in views[1:]]

    def announce(self, submissions: Sequence[Submission], join: Submission | None = None, leave: str = "") -> int:
        """Count the submissions that are cached, and send the coordinator records of the others; returns the count.

        join: this rank joins, with averages as its payload says, as soon as the coordinator has records of all that
            waits here: nobody waits for a joined rank's, so later ones would miss their tensors, or the join's end.
        """
        if self._left:  # these would come after its last message to the coordinator, and fail when the set is closed
            return 0
        self._left = bool(leave)
        now, ids, records, elements = time.monotonic(), [], [], None
        for each in submissions:
            signature, number = each.signature, each.plan.id
            if number is None:
                number = self.cache.id(each.plan, signature)
            if signature.numbered:
                number = self._unnamed_id(each.key, number)
            if number is None:
                waited_s = int(now - each.submitted_s)
                records.append(SubmissionRecord(signature, each.line, each.waits, waited_s, each.step))
            else:
                ids.append(number)
                self._counted[number].append(each)
        if ids:
            if self._short is not None and self._leader is None and len(ids) == 1:
                elements = self._short.elements(self._counted[ids[0]][-1])
            self._counters.submit(ids, elements)
        if join is not None and (counted := self._counted_ids()):
            self._joins, join = join, None
            self._forget(counted)
        if records or join is not None or leave:
            joined = None if join is None else join.payload
            announcement = Announcement(self.process_set, self.applied, tuple(records), joined, leave)
            if self.coordinator is None:
                self._send(announcement, self._members[:1])
            else:
                self._lead()  # what was counted before a rank joined or left is scheduled before
                self.coordinator.announce(self.coordinator_rank, announcement)
        return len(ids)

    # For engine/express.py, which counts and follows by itself

    @functools.cached_property
    def compiled(self) -> Any | None:
        """The compiled module's view of this group's memory; None where that is not all of the negotiation."""
        ranks = self._group.ranks
        if native.module is None or not 1 < len(self._members) == len(ranks) <= native.MOST_PARTS:
            return None
        passed = None if self._leader is None else self._leader.passed
        return native.module.Group([each.block for each in self._views], ranks.index(self._rank), passed)

    @property
    def is_idle(self) -> bool:
        """Where nothing is pending: no entry is left that this rank has to follow first, as far as it knows."""
        return not self._awaits_response and (self._leader is None or self._leader.is_idle)

    def counted(self, number: int, submission: Submission) -> None:
        """Note that this submission was counted, and is to be followed."""
        self._counted[number].append(submission)
        if submission.signature.numbered:
            self._unnamed[submission.key] = number

    def _counted_ids(self) -> list[int]:
        """The ids of this rank's submissions that are not ready."""
        return [number for number, submissions in self._counted.items() if submissions]

    def _unnamed_id(self, key: str, number: int | None) -> int | None:
        """The id to count an unnamed submission by: only if all of this rank's that are not ready have this id.

        So unnamed submissions with different signatures are matched by their numbers, in the program's order.
        """
        if key in self._unnamed or (self._unnamed and number != next(reversed(self._unnamed.values()))):
            number = None
        self._unnamed[key] = number
        return number

    def receive(self, rank: int, message: Message) -> None:
        """Handle another rank's control message."""
        if isinstance(message, Response):
            self._responses[message.number] = message
        elif isinstance(message, Scheduled):
            self._schedule(message.entries, message.reduced)
        elif isinstance(message, Ready) and self._leader is not None:
            self._leader.receive(rank, message)
            if self._short is not None:
                self._short.receive(rank, message)
        elif isinstance(message, Announcement) and self.coordinator is not None:
            self._lead()
            self.coordinator.announce(rank, message)
        elif isinstance(message, Overdue) and self.coordinator is not None:
            self.coordinator.forget(message.ids)

    # Leaders

    @property
    def ended(self) -> bool:
        """True when the process set is closed, and no rank sends this one any more of it."""
        return self._leader is None or self._leader.ended

    def poll(self) -> bool:
        """Schedule or report what is ready, and decide; True for news."""
        if self._leader is None:
            return False
        moved = self._lead()
        coordinator = self.coordinator
        if coordinator is not None and coordinator.has_news:
            coordinator.ids.read(self._leader.applied())
            response = coordinator.decide()
            if response is not None:
                self.respond(response)
                moved = True
        return moved

    def _lead(self) -> bool:
        if self._leader is None:
            return False
        ids = self._leader.poll()
        partial = b""
        if ids and self._short is not None:
            first, times = ids[0], self._leader.times(ids[0])
            partial = self._short.partial(ids, self._counted[first], times, self._held)
        if self._group.above is not None:
            report = self._leader.report(ids, partial)
            if report is not None:
                self._send(report, [self._group.above])
        elif ids and self.coordinator is not None and not self.coordinator.closed:
            self.coordinator.ids.use(ids)
            self._schedule([ids], partial)
        return bool(ids)

    def respond(self, response: Response) -> None:
        """Send a response of this rank's coordinator to all members; it takes effect at its place in the schedule."""
        if self._leader is None:
            raise AssertionError("the coordinator's rank leads a group")
        self._send(response, self._members)
        self._responses[response.number] = response
        self._change(self._leader, response)
        self._schedule([[]])

    @staticmethod
    def _change(leader: Leader, response: Response) -> None:
        learned = [number for number, _ in response.learned]
        leader.change(response.number, response.forgotten, learned, bool(response.closed))

    def _schedule(self, entries: list[list[int]], reduced: bytes = b"") -> None:
        if self._leader is None:
            raise AssertionError("a schedule was sent to a rank that does not lead a group")
        message = self._leader.schedule(entries, reduced)
        if message is not None:
            self._send(message, self._group.below)

    def check(self, now_s: float, overdue_s: float) -> None:
        """Forget ids that some ranks have not submitted for this long. Called occasionally.

        Those of unnamed tensors soon, where ranks wait for each other in different ones: all with a rank's call of that
        number are the same call. Where one waits alone, ranks are late. Of groups whose ranks differ, the lowest leader
        sees two ids, or the coordinator has records.
        """
        if self.coordinator is not None:
            self.coordinator.check(now_s, overdue_s)
        if self._leader is None:
            return
        waiting = self._leader.waiting(now_s)
        unnamed = [number for number in waiting if number in self.cache and self.cache[number].numbered]
        longest_s = dict.fromkeys(unnamed, min(overdue_s, UNNAMED_WAIT_S)) if len(unnamed) > 1 else {}
        overdue = [number for number, since_s in waiting.items() if now_s - since_s >= longest_s.get(number, overdue_s)]
        if overdue:
            self._forget(overdue)

    def _forget(self, ids: list[int]) -> None:
        if self.coordinator is not None:
            self.coordinator.forget(ids)
        elif not self._left:
            self._send(Overdue(self.process_set, ids), self._members[:1])

    # The schedule

    def next(self) -> list[Submission] | Response | None:
        """What all ranks do next: run these submissions together, or apply a response; None when there is nothing."""
        if not self._awaits_response:
            entry = self._read()
            if entry is not None and entry[0]:
                ids, reduced = entry
                batch = [self._counted[number].popleft() for number in ids]
                if reduced:
                    batch[0].reduced = np.frombuffer(reduced, batch[0].inputs[0].element.storage)
                for each in batch if self._unnamed else ():
                    self._unnamed.pop(each.signature.key, None)
                if self._joins is not None:
                    self._announce_again([])
                return batch
            self._awaits_response = entry is not None
        response = self._responses.pop(self.applied + 1, None) if self._awaits_response else None
        if response is not None:
            self._awaits_response = False
            self._follow(response)
        return response

    def _follow(self, response: Response) -> None:
        withdrawn: list[Submission] = []
        for number in response.forgotten:
            lost = self._counted.pop(number, ())
            self._counters.withdraw(number, len(lost))
            self.cache.forget(number)
            withdrawn += lost
        for key in [*(each.key for each in response.new), *(each.key for each in response.failures)]:
            self._unnamed.pop(key, None)
        for number, signature in response.learned:
            self.cache.learn(number, signature)
        if self._leader is not None and self.coordinator is None:
            self._change(self._leader, response)
        self.applied = response.number
        self._counters.applied(response.number)
        self._announce_again(withdrawn)

    def _announce_again(self, submissions: list[Submission]) -> None:
        """Announce these again, and with the last of what was counted the join that waits for it."""
        if self._joins is not None and not self._counted_ids():
            submissions.append(self._joins)
            self._joins = None
        if submissions:
            self._resubmit(submissions)
