"""The coordinator as a state machine: what it decides, told this and that. See also test_interleavings.py."""

import sys

import pytest

from ringreduce.execution.signature import Signature, SubmissionRecord, TensorSignature
from ringreduce.negotiation.cache import numbers
from ringreduce.negotiation.coordinator import Coordinator
from ringreduce.negotiation.protocol import Announcement, Failure


def tensor(name, length=3, kind="allreduce", numbered=False):
    described = (TensorSignature(name, "float32", (length,), "cpu"),) if kind != "barrier" else ()
    return Signature(kind, name, described, numbered=numbered)


class Ranks:
    """A coordinator, and what ranks 0, 1, … tell it. A rank has read all that was decided, unless said otherwise."""

    def __init__(self, size=2, capacity=8):
        self.now_s = 0.0
        self.coordinator = Coordinator(0, range(size), size, capacity, clock=lambda: self.now_s)
        self.size = size
        self.response = 0

    def tell(self, rank, *signatures, bits=0, seen=None, waits=False, join=None, leave=""):
        records = tuple(SubmissionRecord(each, f"line {rank}", waits) for each in signatures)
        seen = self.response if seen is None else seen
        self.coordinator.announce(rank, Announcement(0, seen, bits, records, join, leave))

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
        """Have the cache hold these; returns their numbers, in order."""
        self.all_tell(*signatures)
        learned = {signature: number for number, signature in self.decide().learned}
        return [learned[each] for each in signatures]


def told(ranks):
    """What is decided now: bits' numbers, new names, failed keys and kinds."""
    response = ranks.decide()
    if response is None:
        return None
    return (
        list(numbers(response.bits)),
        [each.name for each in response.new],
        {each.key: each.kind for each in response.failures},
    )


def test_nothing_is_decided_before_all_have_given_it():
    ranks = Ranks(3)
    assert told(ranks) is None
    ranks.tell(2, tensor("a"), tensor("b"))
    assert told(ranks) is None
    ranks.tell(0, tensor("b"))
    ranks.tell(1, tensor("b"))
    assert told(ranks) == ([], ["b"], {})
    ranks.tell(1, tensor("a"))
    assert told(ranks) is None
    ranks.tell(0, tensor("a"))
    assert told(ranks) == ([], ["a"], {})
    assert told(ranks) is None


def test_what_was_new_is_a_bit_from_then_on():
    ranks = Ranks()
    a, b = ranks.learn(tensor("a"), tensor("b"))
    assert {a, b} == {0, 1}
    ranks.tell(0, bits=1 << a | 1 << b)
    assert told(ranks) is None
    ranks.tell(1, bits=1 << b)
    assert told(ranks) == ([b], [], {})
    ranks.tell(1, bits=1 << a)
    assert told(ranks) == ([a], [], {})


def test_numbered_tensors_are_not_remembered():
    ranks = Ranks()
    ranks.all_tell(tensor("noname.1", numbered=True))
    response = ranks.decide()
    assert (len(response.new), response.learned) == (1, ())


@pytest.mark.parametrize("bit_first", [True, False])
def test_a_bit_and_a_description_are_compared(bit_first):
    ranks = Ranks()
    (a,) = ranks.learn(tensor("a", 3))
    tellings = [lambda: ranks.tell(0, bits=1 << a), lambda: ranks.tell(1, tensor("a", 4))]
    for telling in tellings if bit_first else tellings[::-1]:
        assert ranks.decide() is None
        telling()
    (failure,) = ranks.decide().failures
    assert (failure.key, failure.kind) == ("allreduce.a", "MismatchError")
    assert "rank 1 of 2, allreduce 'a' (line 1): float32[4], but rank 0 has float32[3] (line 0)" in failure.message
    assert ranks.coordinator.oldest_s() is None
    ranks.all_tell(bits=1 << a)
    assert told(ranks) == ([a], [], {}), "the cache still holds what it held"


def test_a_shape_that_changes_on_all_ranks_is_learned_under_the_same_number():
    ranks = Ranks(3)
    (a,) = ranks.learn(tensor("a", 3))
    for rank in (2, 0, 1):
        ranks.tell(rank, tensor("a", 4))
    response = ranks.decide()
    assert response.new == (tensor("a", 4),)
    assert response.learned == ((a, tensor("a", 4)),)
    assert ranks.coordinator.signature(a) == tensor("a", 4)


def test_the_longest_unused_is_forgotten():
    ranks = Ranks(capacity=2)
    a, b = ranks.learn(tensor("a"), tensor("b"))
    ranks.all_tell(bits=1 << a)
    ranks.decide()
    ranks.all_tell(tensor("c"))
    response = ranks.decide()
    assert response.forgotten == (b,)
    assert response.learned == ((2, tensor("c")),), "b's number is not free: a rank may not have read of it"
    ranks.all_tell(tensor("d"))
    assert ranks.decide().learned[0][0] == b, "now it is"


def test_what_is_under_way_as_a_bit_is_not_forgotten():
    ranks = Ranks(capacity=1)
    (a,) = ranks.learn(tensor("a"))
    ranks.tell(0, bits=1 << a)
    ranks.all_tell(tensor("b"))
    response = ranks.decide()
    assert response.forgotten == ()
    ranks.tell(1, bits=1 << a)
    assert told(ranks) == ([a], [], {})


def test_a_bit_whose_number_was_taken_back_meanwhile_still_means_its_tensor():
    ranks = Ranks(capacity=1)
    (a,) = ranks.learn(tensor("a"))
    ranks.all_tell(tensor("b"))
    assert ranks.decide().forgotten == (a,)
    ranks.tell(0, tensor("c"))  # has read of it
    ranks.tell(1, bits=1 << a, seen=1)  # has not
    ranks.tell(0, tensor("a"))
    assert told(ranks) == ([], ["a"], {})
    ranks.tell(1, tensor("c"))
    assert told(ranks) == ([], ["c"], {})


def test_a_taken_back_number_is_given_again_only_when_all_have_read_of_it():
    ranks = Ranks(capacity=1)
    ranks.learn(tensor("a"))
    ranks.all_tell(tensor("b"))
    assert ranks.decide().forgotten == (0,)
    for name, taken in (("c", 2), ("d", 3)):
        ranks.tell(0, tensor(name))
        ranks.tell(1, tensor(name), seen=1)
        assert ranks.decide().learned[0][0] == taken, "rank 1 has not read of response 2"
    ranks.all_tell(tensor("e"))
    assert ranks.decide().learned[0][0] < 3


def test_no_capacity_no_memory():
    ranks = Ranks(capacity=0)
    for _ in range(2):
        ranks.all_tell(tensor("a"))
        response = ranks.decide()
        assert (response.new, response.learned, response.forgotten) == ((tensor("a"),), (), ())


def test_more_new_tensors_than_there_is_room_for():
    ranks = Ranks(capacity=2)
    ranks.all_tell(*(tensor(name) for name in "abcd"))
    response = ranks.decide()
    assert [each.name for each in response.new] == list("abcd")
    assert [each.name for _, each in response.learned] == list("ab")


# Scale


def opcodes_of(work):
    """How many of Python's instructions this takes: a measure that no loaded machine changes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def work_of_two_steps(size):
    """Of 12 tensors in 4 batches, decided after every announcement: when they are new, and when they are known."""
    ranks = Ranks(size, capacity=100)
    tensors = [tensor(f"layer{k}") for k in range(12)]

    def step(known):
        for low in range(0, 12, 3):
            batch = tensors[low : low + 3]
            bits = sum(1 << ranks.coordinator._cache.number_of_key(each.key) for each in batch) if known else 0
            for rank in range(size):
                ranks.tell(rank, *([] if known else batch), bits=bits)
                assert (ranks.decide() is not None) == (rank == size - 1)

    return opcodes_of(lambda: step(False)), opcodes_of(lambda: step(True))


def test_the_work_of_a_step_grows_no_faster_than_the_number_of_ranks_but_for_its_logarithm():
    few, many = work_of_two_steps(8), work_of_two_steps(64)
    for what, before, after in zip(("new", "known"), few, many, strict=True):
        assert after <= 8 * 1.5 * before, f"{what}: {before} instructions with 8 ranks, {after} with 64"


# Join


def test_ranks_that_joined_are_not_waited_for():
    ranks = Ranks(3)
    (a,) = ranks.learn(tensor("a"))
    ranks.tell(1, join=False)
    assert ranks.decide() is None
    ranks.tell(0, tensor("b"), bits=1 << a)
    assert ranks.decide() is None
    ranks.tell(2, tensor("b"), bits=1 << a)
    response = ranks.decide()
    assert (response.bits, response.new, response.joined) == (1 << a, (tensor("b"),), (1,))
    assert response.all_joined == -1


def test_joining_completes_what_the_others_wait_for():
    ranks = Ranks(2)
    (a,) = ranks.learn(tensor("a"))
    ranks.tell(0, tensor("b"), bits=1 << a)
    assert ranks.decide() is None
    ranks.tell(1, join=False)
    assert told(ranks) == ([a], ["b"], {})


def test_the_last_to_join_is_told_and_then_nobody_has_joined():
    ranks = Ranks(3)
    for rank in (2, 0):
        ranks.tell(rank, join=False)
        assert ranks.decide() is None
    ranks.tell(1, join=False)
    assert ranks.decide().all_joined == 1
    ranks.tell(0, tensor("a"))
    assert ranks.decide() is None


@pytest.mark.parametrize("by_bit", [True, False])
def test_what_was_given_before_all_joined_is_run(by_bit):
    ranks = Ranks(2, capacity=8 if by_bit else 0)
    ranks.all_tell(tensor("a"))
    ranks.decide()
    ranks.tell(0, *([] if by_bit else [tensor("a")]), bits=int(by_bit), join=False)
    ranks.tell(1, join=False)
    response = ranks.decide()
    assert (response.bits, len(response.new)) == ((1, 0) if by_bit else (0, 1))
    assert response.joined == (0, 1)
    assert response.all_joined == 1


@pytest.mark.parametrize(("flags", "expected"), [((True, True), True), ((True, False), False), ((False, True), False)])
def test_averages_of_the_live_when_all_that_joined_say_so(flags, expected):
    ranks = Ranks(3)
    for rank, flag in enumerate(flags):
        ranks.tell(rank, join=flag)
    ranks.tell(2, tensor("a"))
    assert ranks.decide().live_average is expected


@pytest.mark.parametrize("known", [False, True])
def test_only_allreduce_while_somebody_has_joined(known):
    ranks = Ranks(3, capacity=8 if known else 0)
    gather = tensor("g", kind="allgather")
    ranks.all_tell(gather, tensor("a"))
    ranks.decide()
    given = {"bits": 0b11} if known else {}
    ranks.tell(0, join=False)
    for rank in (1, 2):
        ranks.tell(rank, *([] if known else [gather, tensor("a")]), **given)
    response = ranks.decide()
    assert [(each.key, each.kind) for each in response.failures] == [("allgather.g", "CollectiveError")]
    assert "rank 0 called join(), and a joined rank can take part in allreduce only" in response.failures[0].message
    ran = [ranks.coordinator.signature(number).name for number in numbers(response.bits)]
    assert ran + [each.name for each in response.new] == ["a"]
    assert ranks.coordinator.oldest_s() is None


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
    assert told(ranks) == ([], ["a"], {})
    ranks.tell(0, tensor("a", kind="allgather"))
    assert told(ranks) == ([], ["a"], {})


# The end


def test_who_leaves_first_closes_the_set():
    ranks = Ranks(3)
    ranks.tell(0, tensor("a"))
    ranks.tell(2, leave="it called shutdown()")
    ranks.tell(1, leave="later")
    response = ranks.decide()
    assert (response.closed, response.leaver) == ("rank 2 has left the job: it called shutdown()", 2)
    assert ranks.coordinator.closed
    ranks.all_tell(tensor("a"))
    assert ranks.decide() is None


def test_what_is_ready_is_run_although_somebody_leaves():
    ranks = Ranks(2)
    ranks.all_tell(tensor("a"))
    ranks.tell(1, leave="done")
    response = ranks.decide()
    assert (response.new, response.leaver) == ((tensor("a"),), 1)


# What waits


def test_what_waits_is_told_with_ranks_and_lines():
    ranks = Ranks(3)
    (a,) = ranks.learn(tensor("a"))
    assert ranks.coordinator.oldest_s() is None
    ranks.now_s = 10.0
    ranks.tell(1, bits=1 << a)
    ranks.now_s = 14.0
    ranks.tell(0, tensor("b"))
    ranks.tell(2, tensor("b"))
    ranks.now_s = 16.0
    assert ranks.coordinator.oldest_s() == 10.0
    first, second = ranks.coordinator.waiting(2.0)
    assert (first.signature, first.since_s, first.submitted, first.missing) == (tensor("a"), 10, {1: "line 1"}, [0, 2])
    assert (second.signature.name, second.since_s, second.missing) == ("b", 14, [1])
    assert sorted(second.submitted) == [0, 2]
    assert [each.signature.name for each in ranks.coordinator.waiting(5.0)] == ["a"]
    assert ranks.coordinator.waiting(7.0) == []


def test_what_waits_for_ranks_that_joined_does_not_miss_them():
    ranks = Ranks(3)
    ranks.tell(0, tensor("a"))
    ranks.tell(1, join=False)
    (waiting,) = ranks.coordinator.waiting(0.0)
    assert waiting.missing == [2]


def test_a_rank_that_has_waited_longer_than_was_known():
    ranks = Ranks(2)
    (a,) = ranks.learn(tensor("a"))
    ranks.now_s = 20.0
    ranks.tell(1, tensor("b"), bits=1 << a)
    ranks.coordinator.backdate(15.0)
    assert ranks.coordinator.oldest_s() == 5.0
    ranks.coordinator.backdate(1.0)
    assert [each.since_s for each in ranks.coordinator.waiting(0.0)] == [5.0, 5.0]


def test_bits_that_came_together_and_are_not_ready_together_still_wait():
    ranks = Ranks(2)
    a, b = ranks.learn(tensor("a"), tensor("b"))
    ranks.now_s = 3.0
    ranks.tell(0, bits=1 << a | 1 << b)
    ranks.tell(1, bits=1 << a)
    assert told(ranks) == ([a], [], {})
    assert [(each.signature.name, each.since_s) for each in ranks.coordinator.waiting(0.0)] == [("b", 3.0)]
    ranks.tell(1, bits=1 << b)
    ranks.decide()
    assert ranks.coordinator.waiting(0.0) == []


@pytest.mark.parametrize("known", [False, True])
def test_what_is_given_up_fails_and_late_announcements_of_it_are_dropped(known):
    ranks = Ranks(2, capacity=8 if known else 0)
    ranks.all_tell(tensor("a"), tensor("b"))
    learned = {each.name: number for number, each in ranks.decide().learned}
    given = {"bits": 1 << learned["a"]} if known else {}
    records = [] if known else [tensor("a")]
    ranks.tell(0, *records, **given)
    response = ranks.coordinator.abandon([Failure("allreduce.a", "StalledError", "it waited too long")])
    ranks.response += 1
    assert response.number == ranks.response
    assert [tuple(each) for each in response.failures] == [("allreduce.a", "StalledError", "it waited too long")]
    ranks.tell(1, *records, seen=1, **given)  # it was under way: rank 1 fails it when it reads the response
    assert ranks.coordinator.oldest_s() is None
    ranks.tell(0, *records, **given)  # rank 0 tries again
    assert ranks.decide() is None
    ranks.tell(1, *records, **given)
    assert told(ranks)[:2] == (([learned["a"]], []) if known else ([], ["a"]))
