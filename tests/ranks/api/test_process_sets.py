"""Process sets on threads: who is in them, adding and removing them, and what is refused."""

import copy
import pickle
import types

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.loops import in_a_loop
from tests.support.on_threads import each_rank_of

DYNAMIC = Settings(dynamic_process_sets=True)


def total(process_set, name=None):
    return rr.allreduce(np.float64(10.0 ** rr.rank()), name=name, op=rr.Sum, process_set=process_set)


@each_rank_of(3, settings=DYNAMIC)
def test_what_a_set_knows_of_itself():
    own = rr.ProcessSet([2, 0])
    assert (own.process_set_id, own.size(), own.rank(), own.ranks) == (None, None, None, [0, 2])
    assert rr.add_process_set(own) is own
    assert rr.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2]}
    assert (own.process_set_id, own.size(), own.ranks) == (1, 2, [0, 2])
    communicator = types.SimpleNamespace(Get_group=None)
    assert (own.mpi_comm, rr.ProcessSet(communicator).mpi_comm) == (None, communicator)
    assert (own.rank(), own.included()) == [(0, True), (None, False), (1, True)][rr.rank()]


def test_the_set_of_all_ranks():
    everyone = rr.global_process_set

    def program():
        assert not rr.remove_process_set(everyone), "it stays"
        assert (everyone.process_set_id, everyone.size(), everyone.rank()) == (0, 2, rr.rank())
        assert (everyone.included(), total(everyone)) == (True, 11)
        assert (everyone.ranks, everyone.mpi_comm) == ([0, 1], None)

    run_ranks(2, program, settings=DYNAMIC)
    assert (everyone.size(), everyone.rank(), everyone.ranks) == (None, None, None)


@each_rank_of(3, settings=DYNAMIC)
def test_sets_come_and_go_and_numbers_are_never_given_twice():
    numbers = []
    for step in range(4):
        own = rr.add_process_set([2, 1] if step % 2 else [0, 2])
        numbers.append(own.process_set_id)
        if own.included():
            assert total(own, name="w") == sum(10.0**rank for rank in own.ranks)
        assert rr.remove_process_set(own)
        assert own.process_set_id is None
        assert not rr.remove_process_set(own)
        assert rr.get_process_set_ids_and_ranks() == {0: [0, 1, 2]}
    assert numbers == [1, 2, 3, 4]


@each_rank_of(4, settings=DYNAMIC)
def test_roots_are_ranks_of_the_world():
    own = rr.add_process_set([1, 3, 2])
    if own.included():
        with pytest.raises(ValueError, match=r"root_rank=0; expected one of the process set's ranks 1-3$"):
            rr.broadcast(np.zeros(2), 0, process_set=own)
        assert rr.broadcast_object(rr.rank(), 2, process_set=own) == 2


@each_rank_of(4, settings=DYNAMIC)
def test_a_mismatch_in_a_set_names_ranks_of_the_world_and_spares_the_others():
    own = rr.add_process_set([3, 1])
    everyone = rr.allreduce_async(np.float64(rr.rank()), name="w", op=rr.Sum)
    if own.included():
        with pytest.raises(rr.MismatchError, match=r"^rank 3 of 4, allreduce 'w' .*: float64\[4\], but rank 1 has"):
            rr.allreduce(np.zeros(1 + rr.rank()), name="w", process_set=own)
        assert total(own, name="w") == 1010
    assert rr.synchronize(everyone) == 6


@each_rank_of(3, settings=DYNAMIC)
def test_who_is_not_in_a_set_is_told():
    own = rr.add_process_set([0, 2])
    if rr.rank() == 1:
        for call in (
            lambda: total(own),
            lambda: rr.allgather(np.zeros(2), process_set=own),
            lambda: rr.alltoall(np.zeros(2), process_set=own),
            lambda: rr.broadcast(np.zeros(2), 0, process_set=own),
            lambda: rr.barrier(own),
        ):
            with pytest.raises(ValueError, match=r"rank 1 is not in process set 1, which has ranks 0,2; call it on"):
                call()
    assert rr.allreduce(np.float64(1), op=rr.Sum) == 3


@each_rank_of(3, settings=DYNAMIC)
def test_a_set_that_was_not_added_or_was_removed_is_told():
    own = rr.ProcessSet([0, 1])
    with pytest.raises(ValueError, match=r"allreduce: ProcessSet\(process_set_id=None, ranks=\[0, 1\]\) was not added"):
        total(own)
    rr.add_process_set(own)
    copy = rr.ProcessSet([0, 1])
    copy.process_set_id = own.process_set_id
    rr.remove_process_set(own)
    with pytest.raises(ValueError, match="was not added, or was removed; pass it to init"):
        total(own)
    with pytest.raises(ValueError, match="there is no process set 1; expected one that was passed to init"):
        total(copy)
    assert rr.allreduce(np.float64(1), op=rr.Sum) == 3


@each_rank_of(3, settings=DYNAMIC)
def test_what_is_pending_in_a_set_that_is_removed_fails():
    own = rr.add_process_set([0, 1])
    handle = rr.allreduce_async(np.zeros(2), name="of rank 0", process_set=own) if rr.rank() == 0 else None
    rr.remove_process_set(own)
    if handle is not None:
        with pytest.raises(rr.CollectiveError, match=r"rank 0 of 3, allreduce 'of rank 0' .*: process set 1 was remo"):
            rr.synchronize(handle)
    assert rr.allreduce(np.float64(1), op=rr.Sum) == 3


@in_a_loop(
    ("ranks", "message"),
    [
        ([0, 3], r"process set \[0, 3\]: expected different ranks from 0 to 2, at least one"),
        ([-1], r"process set \[-1\]: expected different ranks from 0 to 2"),
        ([1, 1], r"process set \[1, 1\]: expected different ranks"),
        ([], r"process set \[\]: expected different ranks from 0 to 2, at least one"),
        ([2, 1], r"add_process_set: process set 1 already has the ranks \[1, 2\]; use that one"),
        ([2, 1, 0], r"add_process_set: process set 0 already has the ranks \[0, 1, 2\]; use that one"),
    ],
)
@each_rank_of(3, settings=DYNAMIC)
def test_a_wrong_set_is_a_value_error_and_the_job_goes_on(ranks, message):
    own = rr.add_process_set([1, 2])
    with pytest.raises(ValueError, match=message):
        rr.add_process_set(rr.ProcessSet(ranks))
    if own.included():
        assert total(own) == 110
    assert rr.allreduce(np.float64(1), op=rr.Sum) == 3


@each_rank_of(3, settings=DYNAMIC)
def test_different_sets_on_different_ranks_are_told():
    with pytest.raises(
        rr.MismatchError, match=r"rank 1 of 3, add_process_set .*ranks=\(1, 2\), but rank 0 has .*\(0, 2"
    ):
        rr.add_process_set([1, 2] if rr.rank() == 1 else [0, 2])
    assert rr.get_process_set_ids_and_ranks() == {0: [0, 1, 2]}


@each_rank_of(3, settings=DYNAMIC)
def test_a_set_that_one_rank_adds_wrongly_keeps_its_place():
    own = rr.add_process_set([0, 2])
    wrong = r"process set 1 already has the ranks \[0, 2\]; use that one"
    with pytest.raises(rr.InputError if rr.rank() == 1 else rr.MismatchError, match=wrong):
        rr.add_process_set([2, 0] if rr.rank() == 1 else [1, 2])
    assert rr.allreduce(np.float64(rr.rank()), op=rr.Sum) == 3
    assert rr.add_process_set([0, 1]).process_set_id > own.process_set_id


def test_a_set_that_all_add_wrongly_at_the_start_is_told():
    for sets, message in [
        ([[0, 2]], r"process set \[0, 2\]: expected different ranks from 0 to 1"),
        ([[1], [1]], r"process_sets: \[1\] has the same ranks as another one; pass each set once"),
        ([[1, 0]], r"process_sets: \[0, 1\] has the same ranks as that of all ranks"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_ranks(2, rr.rank, process_sets=sets)


@each_rank_of(2, process_sets=[[1]])
def test_fixed_sets_stay_as_they_are():
    own = rr.ProcessSet([1])
    with pytest.raises(ValueError, match=r"add_process_set: process sets are fixed; set RINGREDUCE_DYNAMIC_PROCESS_S"):
        rr.add_process_set(own)
    own.process_set_id = 1
    with pytest.raises(ValueError, match="remove_process_set: process sets are fixed"):
        rr.remove_process_set(own)
    assert rr.get_process_set_ids_and_ranks() == {0: [0, 1], 1: [1]}


@pytest.mark.parametrize("wrong", ["static", 5, rr.global_process_set])
def test_init_takes_sets_or_the_word_dynamic(wrong):
    with pytest.raises(rr.InputError, match=r'init: process_sets=.*; expected a list of ProcessSet, or "dynamic"'):
        rr.init(process_sets=wrong)


@in_a_loop("wrong", [5, ["a", 0], "01", [0, 1.5], None])
def test_a_set_is_of_ranks(wrong):
    for make in (rr.ProcessSet, lambda ranks: rr.init(process_sets=[ranks])):
        with pytest.raises(rr.InputError, match=r"ProcessSet: .*; expected ranks, such as \[0, 1\], or an mpi4py comm"):
            make(wrong)


def test_looking_at_the_process_set_of_a_host_makes_nothing():
    """One rank may look, alone, before all have used it."""

    def program():
        looked = (rr.host_process_set.process_set_id, rr.host_process_set.ranks) if rr.rank() == 0 else None
        made = rr.get_process_set_ids_and_ranks()
        size = rr.host_process_set.size()  # here all come to it
        return looked, made, size, rr.host_process_set.process_set_id

    (first, *others), everyone = run_ranks(3, program, hosts=[0, 0, 1]), {0: [0, 1, 2]}
    assert first == ((None, [0, 1]), everyone, 2, 1)
    assert others == [(None, everyone, 2, 1), (None, everyone, 1, 2)]


def test_a_set_that_there_is_once_is_itself_when_it_is_copied_or_pickled():
    """As an attribute of a model that is saved whole, or of an optimizer."""
    for process_set in (rr.global_process_set, rr.host_process_set):
        assert copy.deepcopy(process_set) is process_set
        assert pickle.loads(pickle.dumps(process_set)) is process_set
