"""Ranks that pass different process sets for one tensor get an error each, and the job goes on."""

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import run_ranks


def numbered(number, ranks):
    process_set = rr.ProcessSet(ranks)
    process_set.process_set_id = number
    return process_set


@pytest.mark.parametrize("members", [[0, 1], [1, 2]], ids=["one coordinator", "two coordinators"])
def test_another_process_set_is_told_on_both_ranks(members):
    def program():
        part = numbered(1, members)
        if rr.rank() in members:
            chosen = part if rr.rank() == members[0] else rr.global_process_set
            with pytest.raises(rr.MismatchError) as caught:
                rr.allreduce(np.ones(3), name="w", process_set=chosen)
            message = str(caught.value)
            assert "allreduce 'w' (test_misplaced.py:" in message
            assert f"process set 1 (ranks {members[0]}, {members[1]})" in message
            assert "process set 0 (ranks 0, 1, 2)" in message
            assert message.endswith("all ranks must pass equal process sets")
            assert rr.allreduce(1.0, op=rr.Sum, process_set=part) == 2
        return rr.allreduce(1.0, name="after", op=rr.Sum)

    assert run_ranks(3, program, process_sets=[members]) == [3, 3, 3]


def test_a_name_may_be_pending_in_two_sets_at_once():
    def program():
        part = numbered(1, [0, 1])
        if rr.rank() == 2:
            return rr.allreduce(1.0 + rr.rank(), name="w", op=rr.Sum), None
        first, second = (part, rr.global_process_set) if rr.rank() else (rr.global_process_set, part)
        handles = {
            each: rr.allreduce_async(np.float64(1 + rr.rank()), name="w", op=rr.Sum, process_set=each)
            for each in (first, second)
        }
        return handles[rr.global_process_set].wait(), handles[part].wait()

    assert run_ranks(3, program, process_sets=[[0, 1]]) == [(6, 3), (6, 3), (6, None)]
