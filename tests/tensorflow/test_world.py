"""Numbers of ranks as operations: eagerly, and in a graph, where they are those when it runs."""

import pytest
import tensorflow as tf

import ringreduce as rr
import ringreduce.tensorflow as hvd
from ringreduce.api import world

RANK, SIZE = hvd.rank(), hvd.size()


@pytest.mark.quick
def test_numbers_of_ranks(run):
    @run
    def numbers():
        return hvd.size_op(), hvd.rank_op(name="mine"), hvd.local_size_op(), hvd.local_rank_op()

    found = numbers()
    assert [each.dtype for each in found] == [tf.int32] * 4
    assert [int(each) for each in found] == [SIZE, RANK, hvd.local_size(), hvd.local_rank()]


@pytest.mark.quick
def test_they_are_asked_for_when_the_graph_runs(monkeypatch):
    double = tf.function(lambda: 2 * hvd.rank_op())
    assert double() == 2 * RANK
    monkeypatch.setattr(world, "rank", lambda: RANK + 7)
    assert double() == 2 * RANK + 14, "not when it was traced"


@pytest.mark.skipif(SIZE == 1, reason="the only set is that of all ranks")
def test_of_a_process_set(run):
    others = hvd.add_process_set([SIZE - 1])
    number = others.process_set_id
    assert run(lambda: hvd.size_op(number))() == 1
    assert run(lambda: hvd.process_set_included_op(number))() == int(RANK == SIZE - 1)
    hvd.remove_process_set(others)


def test_of_a_set_that_is_not_there(run):
    assert run(hvd.process_set_included_op)() == 1
    assert run(lambda: hvd.process_set_included_op(99))() == -2
    with pytest.raises(
        (rr.InputError, tf.errors.OpError), match=r"size_op: process_set_id=99; the process sets are \[0"
    ):
        run(lambda: hvd.size_op(99))()
