"""Any interleaving of what ranks announce, what the coordinator decides and when that arrives: all ranks run the same.

Ranks, their control messages and the coordinator are played by one thread, in an order that hypothesis chooses.
"""

import itertools
import random as randomness
from collections import deque

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringreduce.execution.signature import Signature, SubmissionRecord, TensorSignature
from ringreduce.negotiation.cache import Cache, numbers
from ringreduce.negotiation.coordinator import Coordinator
from ringreduce.negotiation.protocol import Announcement

MISMATCH = "MismatchError"
JOIN = Signature("join", "join")


def tensor(name, length, kind="allreduce", numbered=False):
    return Signature(kind, name, (TensorSignature(name, "float32", (length,), "cpu"),), (("op", "Sum"),), numbered)


class Rank:
    """What an engine does with control messages: announce what was submitted, follow the responses."""

    def __init__(self, number):
        self.number = number
        self.cache = Cache()
        self.seen = 0
        self.queues = {}
        """By key: the signatures that are still to be submitted, one after the other."""
        self.inbox = []
        self.pending = {}
        self.joins = False
        """It is to call join() when there is nothing left to submit."""
        self.joined = False
        self.log = []
        """What happened to every tensor, in order."""

    def submit(self, random):
        """Submit any tensor whose name is not pending; when there are no more, join if that is wanted."""
        free = [key for key, queue in self.queues.items() if queue and key not in self.pending]
        if free:
            signature = self.queues[random.choice(free)].popleft()
            self.pending[signature.key] = signature
            self.inbox.append(signature)
        elif self.joins and not any(self.queues.values()):
            self.joins, self.joined = False, True
            self.inbox.append(JOIN)

    def announcement(self):
        """Of all that is in the inbox; None when there is nothing."""
        if not self.inbox:
            return None
        bits, records, joins = 0, [], None
        for signature in self.inbox:
            if signature is JOIN:
                joins = False
                continue
            number = None if signature.numbered else self.cache.number(signature)
            if number is None:
                records.append(SubmissionRecord(signature, f"line of {self.number}"))
            else:
                bits |= 1 << number
        self.inbox = []
        return Announcement(0, self.seen, bits, tuple(records), joins)

    def apply(self, response):
        """Follow it, as Engine does."""
        assert response.number == self.seen + 1
        self.seen = response.number
        for failure in response.failures:
            self.end(failure.key, failure.kind)
        for signature in [self.cache[number] for number in numbers(response.bits)] + list(response.new):
            given = self.pending.get(signature.key)
            assert given == signature or (given is None and self.joined), "told to run what was not given"
            self.end(signature.key, signature)
        for number in response.forgotten:
            self.cache.forget(number)
        for number, signature in response.learned:
            self.cache.learn(number, signature)
        if response.all_joined >= 0:
            assert self.joined
            assert not self.pending, "what was given before join() is settled when all have joined"
            self.joined = False
            self.log.append(("join", response.all_joined))

    def end(self, key, how):
        self.pending.pop(key, None)
        self.inbox = [each for each in self.inbox if each.key != key]
        self.log.append((key, how))


class Job:
    """Ranks, the coordinator, and control messages under way between them; each pair's control messages keep their
    order."""

    def __init__(self, size, capacity):
        self.ranks = [Rank(number) for number in range(size)]
        self.coordinator = Coordinator(0, range(size), size, capacity)
        self.to_coordinator = [deque() for _ in self.ranks]
        self.to_rank = [deque() for _ in self.ranks]
        self.caches = {}
        self.highest = -1
        self.last_to_join = -1

    def act(self, what, rank, random):
        """One small step of the job; True when something happened."""
        if what == "submit":
            before = len(rank.inbox), rank.joined
            rank.submit(random)
            return before != (len(rank.inbox), rank.joined)
        if what == "announce":
            announcement = rank.announcement()
            self.to_coordinator[rank.number].extend([announcement] if announcement else [])
            return announcement is not None
        if what == "hear" and self.to_coordinator[rank.number]:
            announcement = self.to_coordinator[rank.number].popleft()
            self.coordinator.announce(rank.number, announcement)
            if announcement.join is not None:
                self.last_to_join = rank.number
            return True
        if what == "apply" and self.to_rank[rank.number]:
            self.apply(rank, self.to_rank[rank.number].popleft())
            return True
        return what == "decide" and self.decide()

    def decide(self):
        response = self.coordinator.decide()
        if response is None:
            return False
        for messages in self.to_rank:
            messages.append(response)
        self.highest = max([self.highest, *(number for number, _ in response.learned)])
        assert response.all_joined in (-1, self.last_to_join)
        return True

    def apply(self, rank, response):
        rank.apply(response)
        held = dict(rank.cache._by_number)
        assert self.caches.setdefault(response.number, held) == held, "caches are equal at equal response numbers"

    def run(self, random, steps):
        """Some random steps, then all that is left."""
        actions = ["submit", "announce", "hear", "apply", "decide"]
        slow = random.choice([None, *self.ranks])
        for _ in range(steps):
            rank = random.choice(self.ranks)
            if rank is not slow or random.random() < 0.2:
                self.act(random.choice(actions), rank, random)
        moved = True
        while moved:
            moved = False
            for what, rank in itertools.product(actions, self.ranks):
                moved |= self.act(what, rank, random)


def scripts(random, size, names, length, ragged):
    """By rank and key, what to submit; and by key and occurrence, what must become of it."""
    queues = [{} for _ in range(size)]
    expected = {}
    lengths = [random.randint(0, length) if ragged else length for _ in range(size)]
    for name in names:
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
    queues, expected = [{} for _ in range(size)], {}
    for number in range(count):
        kind = random.choice(["allreduce", "allgather"])
        odd = random.randrange(size) if random.random() < 0.1 and size > 1 else None
        for rank in range(size):
            signature = tensor(f"noname.{number}", 3, "barrier" if rank == odd else kind, numbered=True)
            queues[rank][signature.key] = deque([signature])
        agreed = tensor(f"noname.{number}", 3, kind, numbered=True)
        expected[f"noname.{number}"] = [agreed if odd is None else MISMATCH]
    return queues, expected


def outcomes(log):
    """By key, what became of it, in order."""
    by_key = {}
    for key, how in log:
        by_key.setdefault(key, []).append(how)
    return by_key


SEEDS = st.integers(0, 2**32).map(randomness.Random)
everything = settings(suppress_health_check=list(HealthCheck))


@everything
@given(st.integers(1, 4), st.integers(0, 5), SEEDS)
def test_every_rank_runs_everything_once_and_in_the_same_order(size, capacity, random):
    names = [f"t{number}" for number in range(random.randint(1, 8))]
    job = Job(size, capacity)
    queues, expected = scripts(random, size, names, length=random.randint(1, 12), ragged=False)
    unnamed, of_unnamed = numbered(random, size, count=random.randint(0, 5))
    for rank in job.ranks:
        rank.queues = queues[rank.number] | unnamed[rank.number]
    job.run(random, steps=random.randint(0, 1500))
    for rank in job.ranks:
        assert rank.log == job.ranks[0].log
        assert outcomes(rank.log) == expected | of_unnamed
        assert not rank.pending
    assert job.highest < 2 * len(names), "one each, and those taken back that a rank has not read of"
    assert job.coordinator.oldest_s() is None


@everything
@given(st.integers(1, 4), st.integers(0, 5), SEEDS)
def test_ranks_that_join_take_part_in_what_the_others_still_do(size, capacity, random):
    names = [f"t{number}" for number in range(random.randint(1, 6))]
    job = Job(size, capacity)
    for epoch in range(3):
        queues, expected = scripts(random, size, names, length=8, ragged=True)
        for rank in job.ranks:
            rank.queues, rank.log, rank.joins = queues[rank.number], [], True
        job.run(random, steps=random.randint(0, 800))
        for rank in job.ranks:
            assert outcomes(rank.log) == expected | {"join": [job.last_to_join]}, f"rank {rank.number}, epoch {epoch}"
            assert rank.log == job.ranks[0].log
            assert not rank.pending
    assert job.highest < 2 * len(names), "one each, and those taken back that a rank has not read of"
