"""A group's counters and schedule, and the tree of leaders: what is ready, in which order, at what cost."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.negotiation.leader import FAN_OUT, Leader, children_of, parent_of
from ringreduce.negotiation.protocol import Ready
from ringreduce.transport.counters import (
    LOG,
    MOST_IDS,
    RING,
    TOTAL,
    Counters,
    GroupBlock,
    Schedule,
    group_bytes,
)
from tests.support.loops import in_a_loop
from tests.support.opcodes import opcodes_of

CAPACITY = 8


def nothing():
    pass


def group(size, capacity=CAPACITY, fence=nothing, start=0):
    """A lone group's members and leader, which knows all ids; counters begin at `start`."""
    blocks = [GroupBlock(np.zeros(group_bytes(capacity), np.uint8), capacity) for _ in range(size)]
    leader = Leader(0, blocks, capacity, fence)
    for each in blocks:
        each.counters[...] = each.words[TOTAL] = start
    leader._totals = [start] * size
    leader.passed[...] = start
    leader.change(1, (), range(capacity))
    return [Counters(blocks, member, fence) for member in range(size)], leader


IDS = st.lists(st.integers(0, 2), max_size=3) | st.lists(st.integers(0, 2), min_size=LOG - 1, max_size=LOG + 1)
STEPS = st.tuples(st.integers(0, 1), IDS, st.booleans(), st.booleans())


@given(st.lists(STEPS, min_size=10, max_size=30), st.sampled_from([0, (1 << 31) - 1, (1 << 32) - 2]))
def test_an_id_is_ready_as_often_as_the_slowest_member_has_submitted_it(steps, start):
    """Also where counters and the log's numbers wrap around, a member takes back what is not ready, the leader lags."""
    members, leader = group(2, start=start)
    submitted, ready = np.zeros((2, CAPACITY), int), np.zeros(CAPACITY, int)
    for member, ids, looks, withdraws in steps:
        members[member].submit(ids)
        np.add.at(submitted[member], ids, 1)
        if not looks:
            continue
        found = leader.poll()
        assert found == sorted(found)
        np.add.at(ready, found, 1)
        assert (ready == submitted.min(axis=0)).all()
        assert leader.poll() == []
        if withdraws and ids and submitted[member, ids[0]] > ready[ids[0]]:
            members[member].withdraw(ids[0], 1)
            submitted[member, ids[0]] -= 1


def test_a_few_submissions_are_looked_up_and_many_are_found_by_a_look_at_all(monkeypatch):
    looks = []
    monkeypatch.setattr(Leader, "_ready", lambda self: looks.append("all") or [])
    monkeypatch.setattr(Leader, "_ready_of", lambda self, ids: looks.append(ids) or [])
    members, leader = group(2)
    leader.poll()
    members[1].submit([5])
    members[0].submit([3, 5])
    leader.poll()
    members[0].submit([1] * (LOG // 2 + 1))
    members[1].submit([1] * (LOG // 2))
    leader.poll()
    members[0].submit([2] * (LOG + 1))
    leader.poll()
    leader.poll()
    assert looks == ["all", [3, 5], "all", "all"], "the first time it has just learned the ids"


@pytest.mark.parametrize("late", range(3))
def test_what_is_overwritten_in_a_log_while_the_leader_reads_it_is_found_all_the_same(late):
    """The member goes once around its log between the leader's look at the totals and that at the log."""
    members, leader = group(2, capacity=2 * LOG)
    leader.poll()

    def fence():
        leader._fence = nothing
        for each in range(LOG + late - 1):
            members[1].submit([4 + each])

    members[0].submit([1, 2])
    assert leader.poll() == []
    members[1].submit([1, 2])
    leader._fence = fence
    assert leader.poll() + leader.poll() == [1, 2]
    members[0].submit(range(4, LOG + 4))
    assert leader.poll() == list(range(4, LOG + 3 + late))[:LOG]


def test_what_faster_ranks_have_submitted_is_found_when_a_leader_that_lags_learns_the_id():
    blocks = [GroupBlock(np.zeros(group_bytes(CAPACITY), np.uint8), CAPACITY) for _ in range(2)]
    leader = Leader(0, blocks, CAPACITY, nothing)
    for member in range(2):
        Counters(blocks, member, nothing).submit([2])
    assert leader.poll() == []
    leader.change(1, (), [2])
    assert leader.poll() == [2]


def test_a_report_from_below_is_looked_at_though_nobody_here_submits_anything_more():
    blocks = [GroupBlock(np.zeros(group_bytes(CAPACITY), np.uint8), CAPACITY)]
    leader = Leader(0, blocks, CAPACITY, nothing, children=["below"])
    leader.change(1, (), range(CAPACITY))
    Counters(blocks, 0, nothing).submit([3, 1])
    assert leader.poll() == []
    leader.receive("below", Ready(0, [1], [], 1))
    assert leader.poll() == [1]
    leader.receive("below", Ready(0, [2, 3], [], 1))
    assert leader.poll() == [3]


def test_a_submission_that_comes_while_the_leader_looks_is_found_the_next_time():
    """Whatever a member does at a fence of the leader: a total that was read with old counters must not hide it."""
    late = []

    def fence():
        if late:
            members[1].submit(late.pop())

    members, leader = group(2, fence=nothing)
    leader._fence = fence
    members[0].submit([4, 6])
    members[1].submit([6])
    late.append([4])
    assert sorted(leader.poll() + leader.poll()) == [4, 6]


def test_a_member_counts_and_logs_before_it_raises_its_total():
    seen = []
    blocks = [GroupBlock(np.zeros(group_bytes(CAPACITY), np.uint8), CAPACITY)]
    own = blocks[0]
    member = Counters(blocks, 0, lambda: seen.append((own.counters[3], own.log[0], own.words[TOTAL])))
    member.submit([3])
    assert seen[0] == (1, 3, 0)
    assert own.words[TOTAL] == 1


def test_in_memory_that_was_cleared_a_new_group_begins_anew():
    """As after a world that was given up, or a process set that was removed: old logs hold larger numbers."""
    memory = [np.zeros(group_bytes(CAPACITY), np.uint8) for _ in range(2)]
    for times in (LOG + 3, 1):
        blocks = [GroupBlock(each, CAPACITY) for each in memory]
        leader = Leader(0, blocks, CAPACITY, nothing)
        leader.change(1, (), range(CAPACITY))
        members = [Counters(blocks, member, nothing) for member in range(2)]
        assert leader.poll() == []
        for _ in range(times):
            for each in members:
                each.submit([5])
            assert leader.poll() == [5]
        for each in memory:
            each[:] = 0


def test_what_is_not_cached_is_never_ready():
    (only,), leader = group(1)
    leader.change(2, (3,), ())
    only.submit([3])
    assert leader.poll() == []
    only.withdraw(3, 1)
    leader.change(3, (), (3,))
    assert leader.poll() == []
    only.submit([3])
    assert leader.poll() == [3]


def test_what_the_slowest_member_has_not_read_stays():
    blocks = [GroupBlock(np.zeros(group_bytes(1), np.uint8), 1) for _ in range(3)]
    schedule, fast, slow = Schedule(blocks, nothing), Counters(blocks, 1, nothing), Counters(blocks, 2, nothing)
    for number in range(RING):
        schedule.append([number])
        fast.read()
    assert entries(slow) == [[number] for number in range(RING // 2)]
    assert entries(schedule) == [[number] for number in range(RING)], "the leader's own rank needs no room in the ring"


def test_a_group_of_one_has_no_ring():
    blocks = [GroupBlock(np.zeros(group_bytes(1), np.uint8), 1)]
    schedule = Schedule(blocks, lambda: pytest.fail("nobody else reads it"))
    for number in range(2 * RING):
        schedule.append([number])
    assert entries(schedule) == [[number] for number in range(2 * RING)]
    assert not any(blocks[0].schedule)


def entries(member):
    return [ids for ids, _ in iter(member.read, None)]


BATCHES = st.tuples(st.lists(st.integers(0, 9), max_size=700), st.just(b""))
SUMS = st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=1), st.binary(max_size=8192))


@given(st.lists(BATCHES | SUMS, max_size=60), st.randoms(use_true_random=False))
def test_every_member_reads_all_entries_in_order_whoever_lags(batches, random):
    blocks = [GroupBlock(np.zeros(group_bytes(10), np.uint8), 10) for _ in range(3)]
    schedule = Schedule(blocks, nothing)
    members = [schedule, *(Counters(blocks, k, nothing) for k in range(1, 3))]
    read = [[] for _ in members]
    for batch in batches:
        schedule.append(*batch)
        for member, found in random.sample(list(zip(members, read, strict=True)), random.randint(0, 3)):
            found += itertools.islice(iter(member.read, None), random.randint(0, 5))
    for _ in range(len(batches) + 1):
        for member, found in zip(members, read, strict=True):
            found += iter(member.read, None)
        schedule.flush()
    assert read == [batches] * 3


def test_a_batch_that_is_longer_than_the_schedule_is_cut():
    blocks = [GroupBlock(np.zeros(group_bytes(1), np.uint8), 1) for _ in range(2)]
    schedule = Schedule(blocks, nothing)
    members = [schedule, Counters(blocks, 1, nothing)]
    batch = [number % 7 for number in range(3 * RING)]
    schedule.append(batch)
    read = [[], []]
    for _ in range(9):
        for member, found in zip(members, read, strict=True):
            found += entries(member)
        schedule.flush()
    assert [list(itertools.chain(*each)) for each in read] == [batch] * 2
    assert max(map(len, read[0])) == MOST_IDS


@in_a_loop("groups", [1, 2, 5, 6, 21, 64, 513])
def test_the_tree_has_every_group_once(groups):
    below = [child for number in range(groups) for child in children_of(number, groups)]
    assert below == list(range(1, groups))
    assert all(number in children_of(parent_of(number), groups) for number in range(1, groups))


def test_what_waits_and_since_when():
    (first, second), leader = group(2)
    first.submit([1, 2])
    assert leader.waiting(10.0) == {1: 10.0, 2: 10.0}
    second.submit([1])
    assert leader.poll() == [1]
    first.submit([1])
    assert leader.waiting(12.0) == {1: 12.0, 2: 10.0}, "the next submission of 1 is another one"
    assert leader.waiting(13.0) == {1: 12.0, 2: 10.0}


# Scale: hosts of 8 ranks, without a network


class Hosts:
    """Groups and what they send each other: all messages are delivered at once."""

    def __init__(self, count, local=8, capacity=256):
        self.messages = [0] * count
        self.members, self.leaders = [], []
        for number in range(count):
            blocks = [GroupBlock(np.zeros(group_bytes(capacity), np.uint8), capacity) for _ in range(local)]
            below = children_of(number, count)
            self.members.append([Counters(blocks, member, nothing) for member in range(local)])
            self.leaders.append(Leader(0, blocks, capacity, nothing, below, number == 0))
            self.leaders[-1].change(1, (), range(161))

    def up(self, number):
        """A leader looks; its news goes up, and what the root finds ready goes down."""
        leader = self.leaders[number]
        ids = leader.poll()
        if number == 0:
            if ids:
                self.down(0, [ids])
        elif (report := leader.report(ids)) is not None:
            self.messages[number] += 1
            self.leaders[parent_of(number)].receive(number, report)
            self.up(parent_of(number))

    def down(self, number, batches):
        self.leaders[number].schedule(batches)
        for child in children_of(number, len(self.leaders)):
            self.messages[number] += 1
            self.down(child, batches)

    def step(self, batches=13):
        """161 tensors in so many batches, each submitted by all ranks, the last hosts first."""
        for batch in np.array_split(np.arange(161), batches):
            for number in reversed(range(len(self.leaders))):
                for member in self.members[number]:
                    member.submit(batch.tolist())
                self.up(number)
            readers = [
                each for group, leader in zip(self.members, self.leaders, strict=True) for each in (leader, *group[1:])
            ]
            read = {tuple(itertools.chain(*entries(member))) for member in readers}
            assert read == {tuple(batch.tolist())}


@in_a_loop("count", [1, 2, 7, 64])
def test_a_batch_costs_a_host_one_message_up_and_one_to_each_below(count):
    hosts = Hosts(count)
    hosts.step()
    assert sum(hosts.messages) == 13 * 2 * (count - 1)
    assert max(hosts.messages) <= 13 * (FAN_OUT + 1)


def test_the_roots_work_does_not_grow_with_the_number_of_hosts():
    work = []
    for count in (8, 64):
        hosts = Hosts(count)
        for number in reversed(range(1, count)):
            for member in hosts.members[number]:
                member.submit(range(161))
            ids = hosts.leaders[number].poll()
            if ids:
                hosts.leaders[parent_of(number)].receive(number, hosts.leaders[number].report(ids))
        for member in hosts.members[0]:
            member.submit(range(161))
        root = hosts.leaders[0]
        work.append(opcodes_of(lambda root=root: root.schedule([root.poll()])))
    assert work[0] == work[1]
