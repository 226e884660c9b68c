"""What fails on one rank before it takes part fails on all, with that rank's words: nobody waits for it."""

import threading

import numpy as np
import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from tests.support.loops import in_a_loop
from tests.support.on_threads import each_rank_of, known


class Unpicklable:
    """As a lock, a generator or an open file is."""

    def __reduce__(self):
        raise RuntimeError(f"rank {rr.rank()} says no")


@in_a_loop("name", ["mine", None])
@in_a_loop("what", ["broadcast_object", "allgather_object"])
@each_rank_of(3)
def test_an_object_that_one_rank_cannot_pickle(what, name):
    obj = Unpicklable() if rr.rank() == 1 else {"rank": rr.rank()}
    error = RuntimeError if rr.rank() == 1 else rr.MismatchError
    with pytest.raises(error, match="rank 1 says no") as caught:
        rr.broadcast_object(obj, 1, name) if what == "broadcast_object" else rr.allgather_object(obj, name)
    if rr.rank() != 1:
        assert f"rank 1 of 3, {what}{f' {name!r}' if name else ''} (test_prepared.py:" in str(caught.value)
    return np.array(rr.allgather_object(rr.rank(), name))


@each_rank_of(2)
def test_all_of_them():
    with pytest.raises(TypeError, match="cannot pickle"):
        rr.allgather_object(threading.Lock())
    with pytest.raises((TypeError, rr.MismatchError), match="cannot pickle"):
        rr.broadcast_object(threading.Lock(), 1)
    return np.array(rr.allgather_object(1))


class Odd(Exception):
    """As an exception is whose class takes other arguments than its `args`."""

    def __init__(self, rank, index):
        super().__init__(f"{rank} {index}")


GET = {
    "allgather_object": lambda obj, pair: rr.allgather_object(obj, process_set=pair),
    "broadcast_object": lambda obj, pair: rr.broadcast_object(obj, 2, process_set=pair),
    "recv_object": lambda obj, pair: pair.recv_object(2) if rr.rank() == 0 else pair.send_object(obj, 0),
}


@pytest.mark.parametrize("function", GET)
@each_rank_of(3, process_sets=[[0, 2]])
def test_an_object_that_cannot_be_unpickled(function):
    pair = rr.ordered(known([0, 2], 1)) if function == "recv_object" else known([0, 2], 1)
    if rr.rank() == 0 or (rr.rank() == 2 and function == "allgather_object"):
        message = f"^{function}: what rank 2 sent cannot be unpickled here: TypeError: .*'index'; the modules of"
        with pytest.raises(rr.InputError, match=message):
            GET[function](Odd(2, 7) if rr.rank() == 2 else {"rank": 0}, pair)
    elif rr.rank() == 2:
        GET[function](Odd(2, 7), pair)
    return np.array(rr.allgather_object(1))


@each_rank_of(3, process_sets=[[0, 2]])
def test_in_a_process_set_and_alone():
    if rr.rank() != 1:
        with pytest.raises((TypeError, rr.MismatchError), match=r"rank 2 of 3.*cannot pickle|^cannot pickle"):
            rr.broadcast_object(threading.Lock() if rr.rank() == 2 else 0, 2, "x", known([0, 2], 1))
    return np.array(rr.allgather_object(1))


ODD = {
    "a number": lambda: 3,
    "a text": lambda: "abc",
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
    "read-only": lambda: np.broadcast_to(np.ones(2), (3, 2)),
}


@in_a_loop("odd", ODD)
@in_a_loop("on", [(0,), (1,), (0, 1)])
@each_rank_of(2)
def test_broadcast_parameters_names_what_cannot_be_sent_on_all_ranks(odd, on):
    state = {"first": np.ones(2), "blocks.3": {"q": ODD[odd]() if rr.rank() in on else torch.ones(2)}}
    with pytest.raises((ValueError, rr.MismatchError), match=r"broadcast_parameters 'blocks\.3\.q': "):
        hvd.broadcast_parameters(state, 1)
    return np.array(rr.allgather_object(1))
