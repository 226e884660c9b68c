"""Short all-reduces between hosts: their elements travel with the negotiation."""

import functools

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks

HOSTS = [[0, 1, 2, 3, 4, 5], [0, 0, 1, 1], [1, 0, 1, 1, 2, 3, 3, 4, 5]]
"""Host 5 is below one that is below the first."""
CALLS = 5


def values(rank, call, dtype):
    return np.array([(rank + 1) * (call + 2), rank - call, 3], dtype)


def all_calls(dtype, op):
    return [rr.allreduce(values(rr.rank(), call, dtype), op=op, name="x").tolist() for call in range(CALLS)]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("op", [rr.Sum, rr.Average, rr.Max])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_results_are_right_and_only_the_first_call_sends_messages_of_its_own(dtype, op, hosts):
    messages, first = [], []
    size = len(hosts)
    results = run_ranks(size, functools.partial(all_calls, dtype, op), hosts=hosts, messages=messages)
    run_ranks(size, lambda: rr.allreduce(values(rr.rank(), 0, dtype), op=op, name="x"), hosts=hosts, messages=first)
    assert len(messages) == len(first) > 0
    for call in range(CALLS):
        everyones = np.array([values(rank, call, dtype) for rank in range(size)], np.float64)
        expected = {rr.Sum: everyones.sum(0), rr.Average: everyones.mean(0), rr.Max: everyones.max(0)}[op]
        expected = np.trunc(expected) if dtype == "int32" else expected.astype(dtype)
        assert [found[call] for found in results] == [expected.tolist()] * size


def test_deterministic_sums_keep_their_own_algorithm():
    messages = {}
    for deterministic in (False, True):
        found = messages[deterministic] = []
        program = functools.partial(all_calls, "float32", rr.Sum)
        run_ranks(3, program, hosts=[0, 1, 2], settings=Settings(deterministic=deterministic), messages=found)
    assert len(messages[True]) >= CALLS * len(messages[False]) // 2


@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 1, 1], [0, 0, 1]], ids=str)
def test_another_shape_of_a_known_name_is_an_error_on_all_ranks_and_the_next_call_is_right(hosts):
    def program():
        for _ in range(2):
            rr.allreduce(np.ones(3), name="x")
        with pytest.raises(rr.MismatchError, match=r"float64\[4\], but rank 0 has float64\[3\]"):
            rr.allreduce(np.ones(3 + (rr.rank() == 2)), name="x")
        for n in range(3):
            assert rr.allreduce(np.full(3, rr.rank() + n), op=rr.Sum, name="x").tolist() == [3 + 3 * n] * 3

    run_ranks(3, program, hosts=hosts)
