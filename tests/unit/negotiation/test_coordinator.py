"""The coordinator as a state machine: what it decides, told this and that. See also test_interleavings.py."""

import pytest

from ringreduce.execution.signature import Signature, SubmissionRecord, TensorSignature
from ringreduce.negotiation.coordinator import Coordinator
from ringreduce.negotiation.protocol import Announcement, Failure
from tests.support.opcodes import opcodes_of


def tensor(name, length=3, kind="allreduce", numbered=False):
    described = TensorSignature("unnamed" if numbered else name, "float32", (length,), "cpu")
    return Signature(kind, name, (described,), numbered=numbered)


class Ranks:
    """A coordinator, and what ranks 0, 1, … tell it. A rank has read all that was decided, unless said otherwise."""

    def __init__(self, size=2, capacity=8):
        self.now_s = 0.0
        self.coordinator = Coordinator(0, range(size), size, capacity, clock=lambda: self.now_s)
        self.size = size
        self.response = 0

    def tell(self, rank, *signatures, seen=None, waits=False, join=None, leave=""):
        records = tuple(SubmissionRecord(each, f"line {rank}", waits) for each in signatures)
        seen = self.response if seen is None else seen
        self.coordinator.announce(rank, Announcement(0, seen, records, join, leave))

    def all_tell(self, *signatures, **kwargs):
        for rank in range(self.size):
            self.tell(rank, *signatures, **kwargs)

    def decide(self):
        response = self.coordinator.decide()
        if response is not None:
            self.response += 1
            assert response.number == self.response
        return response

    def learn(self, *signatures):
        """Have the cache hold these; returns their ids, in order."""
        self.all_tell(*signatures)
        learned = {signature: number for number, signature in self.decide().learned}
        return [learned[each] for each in signatures]


def told(ranks):
    """What is decided now: new names, failed keys and kinds."""
    response = ranks.decide()
    if response is None:
        return None
    return [each.name for each in response.new], {each.key: each.kind for each in response.failures}


def test_unnamed_tensors_are_cached_without_their_number():
    ranks = Ranks()
    ranks.all_tell(tensor("unnamed.1", numbered=True), tensor("unnamed.2", numbered=True))
    response = ranks.decide()
    assert len(response.new) == 2
    assert response.learned == ((0, tensor("unnamed.1", numbered=True).unnumbered),)
    ranks.all_tell(tensor("unnamed.3", numbered=True))
    assert ranks.decide().forgotten == (0,), "a record is compared with records"


def test_an_unnamed_tensor_is_not_cached_while_another_like_it_waits_as_a_record():
    ranks = Ranks()
    ranks.tell(0, tensor("unnamed.1", numbered=True), tensor("unnamed.2", numbered=True))
    ranks.tell(1, tensor("unnamed.1", numbered=True))
    assert ranks.decide().learned == ()
    ranks.tell(1, tensor("unnamed.2", numbered=True))
    assert len(ranks.decide().learned) == 1


def test_what_waits_beside_an_overdue_tensor_is_announced_again_as_a_record():
    ranks = Ranks()
    (a,) = ranks.learn(tensor("a"))
    ranks.tell(0, tensor("b"))
    ranks.coordinator.check(4.0, 5.0)
    assert ranks.decide() is None
    ranks.coordinator.check(6.0, 5.0)
    assert ranks.decide().forgotten == (a,)


def test_another_shape_of_a_cached_tensor_lets_all_announce_records():
    ranks = Ranks()
    (a,) = ranks.learn(tensor("a", 3))
    ranks.tell(1, tensor("a", 4))
    response = ranks.decide()
    assert (response.forgotten, response.new, response.failures) == ((a,), (), ())
    ranks.tell(0, tensor("a", 3))  # which it had submitted by its id
    (failure,) = ranks.decide().failures
    assert (failure.key, failure.kind) == ("allreduce.a", "MismatchError")
    assert "rank 1 of 2, allreduce 'a' (line 1): float32[4], but rank 0 has float32[3] (line 0)" in failure.message
    assert not ranks.coordinator.waiting(-1e9)


def test_the_longest_unused_is_forgotten():
    ranks = Ranks(capacity=2)
    a, b = ranks.learn(tensor("a"), tensor("b"))
    ranks.coordinator.ids.use([a])
    ranks.all_tell(tensor("c"))
    response = ranks.decide()
    assert (response.forgotten, response.learned) == ((b,), ()), "a rank may still submit by this id"
    ranks.all_tell(tensor("c"))
    assert ranks.decide().learned == (), "not all ranks have read that it is forgotten"
    ranks.coordinator.ids.read(response.number)
    ranks.all_tell(tensor("c"))
    assert ranks.decide().learned == ((b, tensor("c")),)


# Scale


def work_of_a_step(size):
    """Of 12 new tensors in 4 batches, decided after every announcement."""
    ranks = Ranks(size, capacity=100)
    tensors = [tensor(f"layer{k}") for k in range(12)]

    def step():
        for low in range(0, 12, 3):
            for rank in range(size):
                ranks.tell(rank, *tensors[low : low + 3])
                assert (ranks.decide() is not None) == (rank == size - 1)

    return opcodes_of(step)


def test_the_work_of_a_step_grows_no_faster_than_the_number_of_ranks():
    few, many = work_of_a_step(8), work_of_a_step(64)
    assert many <= 8 * 1.2 * few, f"{few} instructions with 8 ranks, {many} with 64"


# Join


def test_ranks_that_joined_are_not_waited_for():
    ranks = Ranks(3)
    (a,) = ranks.learn(tensor("a"))
    ranks.tell(1, join=False)
    response = ranks.decide()
    assert (response.forgotten, response.new) == ((a,), ()), "from now on all is a record"
    ranks.tell(0, tensor("a"), tensor("b"))
    assert ranks.decide() is None
    ranks.tell(2, tensor("a"), tensor("b"))
    response = ranks.decide()
    assert (response.new, response.learned, response.joined) == ((tensor("a"), tensor("b")), (), (1,))
    assert response.all_joined == -1


def test_the_last_to_join_is_told_and_then_nobody_has_joined():
    ranks = Ranks(3)
    for rank in (2, 0):
        ranks.tell(rank, join=False)
        assert ranks.decide() is None
    ranks.tell(1, join=False)
    assert ranks.decide().all_joined == 1
    ranks.tell(0, tensor("a"))
    assert ranks.decide() is None


@pytest.mark.parametrize(("flags", "expected"), [((True, True), True), ((True, False), False), ((False, True), False)])
def test_averages_of_the_live_when_all_that_joined_say_so(flags, expected):
    ranks = Ranks(3)
    for rank, flag in enumerate(flags):
        ranks.tell(rank, join=flag)
    ranks.tell(2, tensor("a"))
    assert ranks.decide().live_average is expected


def test_only_allreduce_while_somebody_has_joined():
    ranks = Ranks(3)
    gather = tensor("g", kind="allgather")
    ranks.tell(0, join=False)
    for rank in (1, 2):
        ranks.tell(rank, gather, tensor("a"))
    response = ranks.decide()
    assert [(each.key, each.kind) for each in response.failures] == [("allgather.g", "CollectiveError")]
    assert "rank 0 called join(), and a joined rank can take part in allreduce only" in response.failures[0].message
    assert [each.name for each in response.new] == ["a"]
    assert not ranks.coordinator.waiting(-1e9)


# Rivals


def test_two_operations_under_one_name_when_everybody_waits_in_one():
    ranks = Ranks(3)
    ranks.tell(0, tensor("a"), waits=True)
    ranks.tell(1, tensor("a", kind="allgather"), waits=True)
    assert ranks.decide() is None, "rank 2 may be about to give either"
    ranks.tell(2, tensor("a"), waits=True)
    response = ranks.decide()
    assert sorted(each.key for each in response.failures) == ["allgather.a", "allreduce.a"]
    assert len({each.message for each in response.failures}) == 1
    assert "allgather 'a', but rank 0 has allreduce 'a'" in response.failures[0].message


def test_no_rivals_when_somebody_goes_on_meanwhile():
    ranks = Ranks(2)
    ranks.tell(0, tensor("a"), waits=True)
    ranks.tell(1, tensor("a", kind="allgather"), waits=False)
    assert ranks.decide() is None
    ranks.tell(1, tensor("a"))
    assert told(ranks) == (["a"], {})
    ranks.tell(0, tensor("a", kind="allgather"))
    assert told(ranks) == (["a"], {})


# The end


def test_what_is_ready_is_run_although_somebody_leaves():
    ranks = Ranks(2)
    ranks.all_tell(tensor("a"))
    ranks.tell(1, leave="done")
    response = ranks.decide()
    assert (response.new, response.leaver) == ((tensor("a"),), 1)


# What waits


def test_what_waits_is_told_with_ranks_and_lines():
    ranks = Ranks(3)
    assert not ranks.coordinator.waiting(-1e9)
    ranks.now_s = 10.0
    ranks.tell(1, tensor("a"))
    ranks.now_s = 14.0
    ranks.tell(0, tensor("b"))
    ranks.tell(2, tensor("b"))
    ranks.now_s = 16.0
    assert ranks.coordinator.waiting(-1e9)[0].since_s == 10.0
    first, second = ranks.coordinator.waiting(2.0)
    assert (first.signature, first.since_s, first.submitted, first.missing) == (tensor("a"), 10, {1: "line 1"}, [0, 2])
    assert (second.signature.name, second.since_s, second.missing) == ("b", 14, [1])
    assert sorted(second.submitted) == [0, 2]
    assert [each.signature.name for each in ranks.coordinator.waiting(5.0)] == ["a"]
    assert ranks.coordinator.waiting(7.0) == []
    ranks.tell(2, leave="done")
    ranks.decide()
    assert ranks.coordinator.waiting(-1e9) == [], "they have failed"


def test_what_all_have_submitted_waits_for_nobody():
    ranks = Ranks(2)
    ranks.tell(0, tensor("a"))
    ranks.tell(1, tensor("b"))
    ranks.tell(1, tensor("a"))
    assert [(each.signature.name, each.missing) for each in ranks.coordinator.waiting(-1e9)] == [("b", [0])]
    assert [each.name for each in ranks.decide().new] == ["a"]


def test_a_record_of_what_was_submitted_long_ago_has_waited_so_long():
    ranks = Ranks(3)
    ranks.now_s = 10.0
    for rank, waited_s in ((1, 4.0), (0, 6.0)):
        ranks.coordinator.announce(rank, Announcement(0, 0, (SubmissionRecord(tensor("a"), "", False, waited_s),)))
    assert ranks.coordinator.waiting(-1e9)[0].since_s == 4.0


def test_what_waits_for_ranks_that_joined_does_not_miss_them():
    ranks = Ranks(3)
    ranks.tell(0, tensor("a"))
    ranks.tell(1, join=False)
    (waiting,) = ranks.coordinator.waiting(0.0)
    assert waiting.missing == [2]


@pytest.mark.parametrize("known", [False, True])
def test_what_is_given_up_fails_and_late_announcements_of_it_are_dropped(known):
    ranks = Ranks(2)
    if known:
        ranks.learn(tensor("a"))
    ranks.tell(0, tensor("a"))
    response = ranks.coordinator.abandon([Failure("allreduce.a", "StalledError", "it waited too long")])
    ranks.response += 1
    assert response.number == ranks.response
    assert response.forgotten == ((0,) if known else ()), "before it fails: rank 1 may have submitted it by its id"
    assert [tuple(each) for each in response.failures] == [("allreduce.a", "StalledError", "it waited too long")]
    ranks.coordinator.ids.read(response.number)  # shared memory says so, and may be faster than rank 1's message
    ranks.tell(1, tensor("a"), seen=response.number - 1)  # it was under way: rank 1 fails it when it reads the response
    assert not ranks.coordinator.waiting(-1e9)
    ranks.tell(0, tensor("a"))  # rank 0 tries again
    assert ranks.decide() is None
    ranks.tell(1, tensor("a"))
    assert told(ranks)[0] == ["a"]
