"""Any interleaving of what ranks announce, what the coordinator decides and when that arrives: all ranks run the same.

Ranks, their control messages and the coordinator are played by one thread, in an order that hypothesis chooses.
"""

import functools
import itertools
import math
import random as randomness
import time
from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import TABLE
from ringreduce.execution.signature import Signature, TensorSignature
from ringreduce.negotiation import leader, protocol
from ringreduce.negotiation.leader import FAN_OUT
from ringreduce.negotiation.negotiator import Group, Negotiator
from ringreduce.negotiation.protocol import Response
from ringreduce.negotiation.short import Short
from ringreduce.ops import Reduction, Sum
from ringreduce.transport.counters import group_bytes

ACTIONS = ["submit", "announce", "receive", "poll", "next", "check"]
MISMATCH = "MismatchError"
JOIN = SimpleNamespace(signature=Signature("join", "join"), payload=False)


def tensor(name, length, kind="allreduce", numbered=False):
    described = TensorSignature("noname" if numbered else name, "float32", (length,), "cpu")
    return Signature(kind, name, (described,), (("op", "Sum"),), numbered)


def reduction(submission):
    return Reduction(Sum, TABLE["int64"], 1) if submission.signature.kind == "allreduce" else None


class Submitted:
    """What the negotiator asks of a submission."""

    def __init__(self, signature, line, value, waits):
        self.signature, self.key = signature, signature.key
        self.line = line
        self.waits = waits
        self.submitted_s = time.monotonic()
        self.inputs = [Buffer(np.array([value], np.int64), TABLE["int64"], (1,), "cpu", np.int64)]
        self.partial = b""


class Rank:
    """What an engine does around its negotiator: submit in batches, run and fail what it is told."""

    def __init__(self, job, number):
        self.job = job
        self.number = number
        self.negotiator = None
        self.queues = {}
        """By key: the signatures that are still to be submitted, one after the other."""
        self.inbox = []
        self.pending = {}
        self.joins = False
        """It is to call join() when there is nothing left to submit."""
        self.joined = False
        self.waits = job.random.random() < 0.5
        """It waits for each tensor without a name before it submits the next one."""
        self.log = []
        """What happened to every tensor, in order."""

    def submit(self, random):
        """Submit any tensor whose name is not pending; when there are no more, join if that is wanted."""
        held = {"noname"} if self.waits and any(each.signature.numbered for each in self.pending.values()) else ()
        free = [key for key, queue in self.queues.items() if queue and key not in self.pending and key not in held]
        if free:
            signature = self.queues[random.choice(free)].popleft()
            # a power of two for each rank, so that a sum says whose elements it is made of, and of which submission
            value = (1 << self.number) + 1000 * self.job.times(self.number, signature.key)
            waits = value // 1000 % 4 > 0
            self.pending[signature.key] = Submitted(signature, f"line of {self.number}", value, waits)
            self.inbox.append(self.pending[signature.key])
        elif self.joins and not any(self.queues.values()):
            self.joins, self.joined = False, True
            self.inbox.append(JOIN)

    def announce(self):
        """Announce the inbox; True when there was anything in it."""
        inbox, self.inbox = self.inbox, []
        if inbox:
            self.negotiator.announce([each for each in inbox if each is not JOIN], JOIN if JOIN in inbox else None)
        return bool(inbox)

    def resubmit(self, submissions):
        self.inbox += [each for each in submissions if each is JOIN or self.pending.get(each.signature.key) is each]

    def next(self):
        """Run a batch, or apply a response; True when there was any."""
        entry = self.negotiator.next()
        if isinstance(entry, Response):
            self.apply(entry)
        elif entry:
            for each in entry:
                assert self.pending[each.signature.key] is each, "what is run was submitted and has not failed"
                self.end(each.signature.key, each.signature)
                self.check_sum(each)
        return entry is not None

    def check_sum(self, submission):
        """A sum that came with the schedule is that of all ranks' elements of this very submission."""
        sums = np.frombuffer(submission.partial, np.int64).tolist()
        size, (element,) = len(self.job.ranks), submission.inputs[0].flat.tolist()
        assert sums in ([], [(1 << size) - 1 + size * (element - (1 << self.number))])
        assert self.job.sums.setdefault(len(self.log), sums) == sums, "on all ranks or on none"

    def apply(self, response):
        for failure in response.failures:
            self.end(failure.key, failure.kind)
        for signature in response.new:
            given = self.pending.get(signature.key)
            assert self.joined if given is None else given.signature == signature, "what is run was submitted"
            self.end(signature.key, signature)
        if response.all_joined >= 0:
            assert self.joined
            assert not self.pending, "what was submitted before join() is settled when all have joined"
            self.joined = False
            self.log.append(("join", response.all_joined))

    def end(self, key, how):
        self.pending.pop(key, None)
        self.inbox = [each for each in self.inbox if each.signature.key != key]
        self.log.append((key, how))


class Job:
    """Ranks on hosts, and control messages under way between them; each pair's control messages keep their order.

    A rank's fence lets any other rank take a step, so shared memory changes between any two of its accesses.
    """

    def __init__(self, hosts, capacity, random, interrupts=0.1, overdue_s=0.0):
        self.overdue_s, self.now_s = overdue_s, time.monotonic()
        self.random, self.interrupts = random, interrupts
        self.ranks = [Rank(self, number) for number in range(len(hosts))]
        self.messages = defaultdict(deque)
        self.caches = {}
        self.last_to_join = -1
        self.submitted = Counter()
        self.sums = {}
        """By how much had happened before: the sum that came with the schedule, if one did."""
        self.running = []
        members = range(len(hosts))
        blocks = [np.zeros(group_bytes(capacity), np.uint8) for _ in hosts]
        for rank in self.ranks:
            group = Group(members, hosts, rank.number)
            rank.negotiator = Negotiator(
                0,
                members,
                rank.number,
                len(hosts),
                group,
                [blocks[each] for each in group.ranks],
                capacity,
                fence=self.fence,
                send=lambda message, ranks, source=rank.number: self.send(source, message, ranks),
                resubmit=rank.resubmit,
                short=Short(reduction, 8, group.below) if len(group.ranks) == 1 else None,
            )
        self.coordinator = self.ranks[0].negotiator.coordinator
        self.coordinator.announce = functools.partial(self.hear, self.coordinator.announce)

    def hear(self, announce, rank, announcement):
        """What the coordinator is told, which says who joins last."""
        if announcement.join is not None:
            self.last_to_join = rank
        announce(rank, announcement)

    def times(self, rank, key):
        """How often a rank has submitted this before."""
        self.submitted[rank, key] += 1
        return self.submitted[rank, key]

    def send(self, source, message, ranks):
        for rank in ranks:
            if rank != source:
                self.messages[source, rank].append(protocol.encode(message))

    def fence(self):
        if len(self.running) == 1 and self.random.random() < self.interrupts:
            others = [each for each in self.ranks if each not in self.running]
            if others:
                self.act(self.random.choice(ACTIONS), self.random.choice(others))

    def act(self, what, rank):
        """One small step of the job; True when something happened."""
        self.running.append(rank)
        try:
            return getattr(self, what)(rank)
        finally:
            self.running.pop()

    def submit(self, rank):
        before = len(rank.inbox), rank.joined
        rank.submit(self.random)
        return before != (len(rank.inbox), rank.joined)

    def announce(self, rank):
        return rank.announce()

    def receive(self, rank):
        full = [source for source in self.ranks if self.messages[source.number, rank.number]]
        if not full:
            return False
        source = self.random.choice(full).number
        message = protocol.decode(self.messages[source, rank.number].popleft())
        rank.negotiator.receive(source, message)
        return True

    def poll(self, rank):
        return rank.negotiator.poll()

    def check(self, rank):
        """What has waited since the last time has waited for a minute."""
        self.now_s += 60
        rank.negotiator.check(self.now_s, self.overdue_s)
        return False

    def next(self, rank):
        if not rank.next():
            return False
        held = dict(rank.negotiator.cache._by_id)
        applied = rank.negotiator.applied
        assert self.caches.setdefault(applied, held) == held, "caches are equal at equal response numbers"
        return True

    def run(self, steps):
        """Some random steps, then all that is left."""
        self.submitted.clear()
        self.sums.clear()
        slow = self.random.choice([None, *self.ranks])
        for _ in range(steps):
            rank = self.random.choice(self.ranks)
            if rank is not slow or self.random.random() < 0.2:
                self.act(self.random.choice(ACTIONS), rank)
        moved = True
        while moved:
            moved, before = False, self.progress()
            for what, rank in itertools.product(ACTIONS[:-1], self.ranks):
                moved |= self.act(what, rank)
            if not moved:  # what is odd, and waits, becomes records
                for rank in self.ranks * 2:
                    self.check(rank)
                moved = before != self.progress()

    def progress(self):
        """Changes when anything happens."""
        logged, sent = sum(len(rank.log) for rank in self.ranks), sum(map(len, self.messages.values()))
        return self.coordinator.has_news, sum(self.submitted.values()), logged, sent


def scripts(random, size, names, length, ragged):
    """By rank and key, what to submit; and by key and occurrence, what must become of it."""
    queues = [{} for _ in range(size)]
    expected = {}
    lengths = [random.randint(0, length) if ragged else length for _ in range(size)]
    for name in (f"t{number}" for number in range(names)):
        shape = 1
        for occurrence in range(max(lengths)):
            shape += random.random() < 0.2
            odd = random.randrange(size) if random.random() < 0.1 else None
            given = {
                rank: tensor(name, 100 if rank == odd else shape) for rank in range(size) if lengths[rank] > occurrence
            }
            for rank, signature in given.items():
                queues[rank].setdefault(signature.key, deque()).append(signature)
            alike = len(set(given.values())) == 1
            expected.setdefault(tensor(name, 1).key, []).append(next(iter(given.values())) if alike else MISMATCH)
    return queues, expected


def numbered(random, size, count):
    """Tensors without a name: their number is their key, whatever they are."""
    queues, expected, kinds = [{} for _ in range(size)], {}, ["allreduce", "allgather", "barrier"]
    for number in range(count):
        if random.random() < 0.3:
            random.shuffle(kinds)
        kind, another, *_ = kinds
        odd = random.randrange(size) if random.random() < 0.2 and size > 1 else None
        for rank in range(size):
            signature = tensor(f"noname.{number}", 3, another if rank == odd else kind, numbered=True)
            queues[rank].setdefault("noname", deque()).append(signature)  # in the program's order
        agreed = tensor(f"noname.{number}", 3, kind, numbered=True)
        expected[f"noname.{number}"] = [agreed if odd is None else MISMATCH]
    return queues, expected


def outcomes(log):
    """By key, what became of it, in order."""
    by_key = {}
    for key, how in log:
        by_key.setdefault(key, []).append(how)
    return by_key


RANDOMS = st.builds(randomness.Random, st.integers(0, 2**32))
"""An order. Drawn number by number it could be made shorter itself, but that takes minutes; what happens in it can."""
HOSTS = st.lists(st.integers(0, 3), min_size=1, max_size=6)
everything = settings(suppress_health_check=list(HealthCheck), deadline=None)


@everything
@given(
    *(HOSTS, st.integers(0, 6), RANDOMS, st.sampled_from([0.0, math.inf]), st.sampled_from([1, FAN_OUT])),
    *(st.integers(1, 8), st.integers(1, 12), st.integers(0, 8), st.integers(0, 1500)),
)
def test_every_rank_runs_everything_once_and_in_the_same_order(
    hosts, capacity, random, overdue_s, fan_out, names, times, unnamed, steps
):
    """fan_out: of the tree of leaders;  overdue_s: infinite: what differs is found however long ranks may be late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader, "FAN_OUT", fan_out)
        job = Job(hosts, capacity, random, overdue_s=overdue_s)
    queues, expected = scripts(random, len(hosts), names, times, ragged=False)
    of_number, of_unnamed = numbered(random, len(hosts), unnamed)
    for rank in job.ranks:
        rank.queues = queues[rank.number] | of_number[rank.number]
    job.run(steps)
    for rank in job.ranks:
        assert rank.log == job.ranks[0].log
        assert outcomes(rank.log) == expected | of_unnamed
        assert not rank.pending
    assert not job.coordinator.waiting(-1e9)


@everything
@given(HOSTS, st.integers(0, 6), RANDOMS)
# a tensor that a rank counted by id and then joined is another one on the others
@example([0, 0], 2, randomness.Random(13))
# all have joined when the id of such a tensor is forgotten
@example([0, 0], 2, randomness.Random(33))
def test_ranks_that_join_take_part_in_what_the_others_still_do(hosts, capacity, random):
    names = random.randint(1, 6)
    job = Job(hosts, capacity, random)
    for epoch in range(3):
        queues, expected = scripts(random, len(hosts), names, length=8, ragged=True)
        for rank in job.ranks:
            rank.queues, rank.log, rank.joins = queues[rank.number], [], True
        job.run(steps=random.randint(0, 800))
        for rank in job.ranks:
            assert outcomes(rank.log) == expected | {"join": [job.last_to_join]}, f"rank {rank.number}, epoch {epoch}"
            assert rank.log == job.ranks[0].log
            assert not rank.pending
