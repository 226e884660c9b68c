"""The functions on arrays, on threads: what they take, give and refuse; test_matrix.py has every type and form."""

import collections
import threading

import numpy as np
import pytest
import torch

import ringreduce as rr
from ringreduce.execution import context
from ringreduce.execution.submission import Submission
from ringreduce.runtime import arguments, lifecycle
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.world import World
from tests.support.on_threads import each_rank_of
from tests.support.reference import data

SMALL = Settings(fusion_slot_bytes=256, ring_segment_bytes=64)


@each_rank_of(4)
def test_numbers_give_numbers():
    largest = rr.allreduce(np.float32(rr.rank()), op=rr.Max)
    assert (rr.allreduce(1.0 + rr.rank()), largest, rr.allreduce(7, op=rr.Sum)) == (2.5, 3, 28)
    assert isinstance(largest, np.float32)


@pytest.mark.parametrize("compression", [rr.Compression.none, rr.Compression.fp16, rr.Compression.int8])
@each_rank_of(2)
def test_a_number_comes_back_as_a_number_of_its_type(compression):
    for number, expected in ((0.5, np.float64), (np.float32(0.5), np.float32), (3, np.float64)):
        found = rr.allreduce(number, compression=compression)
        both = [found, *rr.grouped_allreduce([number], compression=compression)]
        both += rr.grouped_allreduce(iter([number]), compression=compression)
        both.append(rr.allreduce({"a": number}, compression=compression)["a"])
        assert [(each, type(each)) for each in both] == [(number, expected)] * 4
    assert isinstance(rr.allreduce(np.array(0.5), compression=compression), np.ndarray)


Pair = collections.namedtuple("Pair", "loss count")


def tree(rank):
    """Filled in another order on each rank."""
    keys = ["layers", "metrics", "none"][rank:] + ["layers", "metrics", "none"][:rank]
    values = {
        "layers": [data("float32", 5, rank), (data("float64", 3, rank).reshape(3, 1),)],
        "metrics": Pair(float(rank), np.int64(7)),
        "none": None,
    }
    return {key: values[key] for key in keys}


@pytest.mark.parametrize("compression", [rr.Compression.none, rr.Compression.fp16])
@each_rank_of(2, settings=SMALL)
def test_allreduce_of_a_tree(compression):
    mine = tree(rr.rank())
    for number, result in enumerate(
        [
            rr.allreduce(mine, op=rr.Sum, compression=compression),
            rr.synchronize(rr.allreduce_async(mine, op=rr.Sum)),
            rr.ordered().allreduce(mine, op=rr.Sum),
        ]
    ):
        assert list(result) == list(mine)
        exact = number or compression is rr.Compression.none
        for at, own in enumerate([lambda it: it["layers"][0], lambda it: it["layers"][1][0]]):
            total = own(tree(0)) + own(tree(1))
            assert (own(result).dtype, own(result).shape) == (total.dtype, total.shape), at
            np.testing.assert_allclose(own(result), total, rtol=1e-6 if exact else 2e-3, atol=0 if exact else 2e-2)
        assert (result["metrics"], type(result["metrics"]), result["none"]) == (Pair(1, 14), Pair, None)
    assert rr.allreduce({}) == {}
    assert rr.allreduce([[1 + rr.rank()], ()]) == [[1.5], ()]


@pytest.mark.parametrize("channel", [False, True])
@each_rank_of(2)
def test_allreduce_of_a_tree_in_place(channel):
    where = rr.ordered() if channel else rr
    arrays = {"a": np.full(3, 1.0 + rr.rank()), "b": [np.full(2, rr.rank())]}
    assert where.allreduce_(arrays, op=rr.Sum) is arrays
    assert rr.synchronize(where.allreduce_async_(arrays["b"], op=rr.Max)) is arrays["b"]
    np.testing.assert_array_equal(arrays["a"], [3, 3, 3])
    np.testing.assert_array_equal(arrays["b"][0], [1, 1])


def parameters(rank):
    return {"layers": [data("float32", 50, rank), data("float64", 3, rank)], "scale": data("float32", 200, rank)}


@each_rank_of(3, settings=SMALL)
def test_broadcast_parameters_of_every_form():
    tree, pairs = parameters(rr.rank()), list(parameters(rr.rank())["layers"])
    rr.broadcast_parameters(tree, root_rank=1)
    rr.broadcast_parameters([("a", pairs[0]), ("b", pairs[1])], root_rank=2)
    model = torch.nn.BatchNorm1d(3)
    torch.nn.init.constant_(model.weight, rr.rank())
    model.num_batches_tracked.fill_(rr.rank())
    rr.broadcast_parameters(model.state_dict(), root_rank=1)
    rr.broadcast_parameters(model.named_parameters(), root_rank=1)
    np.testing.assert_array_equal(tree["scale"], parameters(1)["scale"])
    np.testing.assert_array_equal(tree["layers"][1], parameters(1)["layers"][1])
    np.testing.assert_array_equal(pairs[0], parameters(2)["layers"][0])
    assert (model.weight.tolist(), model.num_batches_tracked.item()) == ([1, 1, 1], 1)


@each_rank_of(2)
def test_broadcast_parameters_of_other_memory_layouts():
    weight = (torch.arange(48.0).reshape(2, 3, 2, 4) + 100 * rr.rank()).to(memory_format=torch.channels_last)
    array = (np.arange(6.0).reshape(2, 3) + 100 * rr.rank()).T
    rr.broadcast_parameters({"weight": torch.nn.Parameter(weight), "array": array, "plain": np.zeros(2)}, 1)
    assert not weight.is_contiguous()
    assert (weight.sum().item(), weight[1, 2, 0, 1].item(), array[2, 0]) == (sum(range(48)) + 4800.0, 141.0, 102.0)


@each_rank_of(1)
def test_broadcast_parameters_refuses_what_is_no_collection_of_tensors():
    for params, message in [
        (7, "a int; expected a dict of tensors, or a list of"),
        ({"lr": "fast"}, "a str is not an array"),
        (
            [("w", np.zeros(2)), ("w", np.ones(2))],
            "broadcast_parameters: names must differ; expected each once, got w, w",
        ),
        ({"a.b": np.zeros(2), "a": {"b": np.ones(2)}}, "more than one array is called 'a.b'"),
    ]:
        with pytest.raises(ValueError, match=message):
            rr.broadcast_parameters(params)


def test_who_is_where_on_uneven_hosts():
    def program():
        return rr.rank(), rr.size(), rr.local_rank(), rr.local_size(), rr.cross_rank(), rr.cross_size()

    assert run_ranks(3, program, hosts=[0, 0, 1]) == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)]
    assert run_ranks(2, rr.is_homogeneous) == [True, True]


def test_settings_that_differ_are_told_at_the_start():
    texts, met = [None, None], threading.Barrier(2)

    class Two(World):
        def allgather_object(self, value):
            met.wait()
            texts[self.rank] = value
            met.wait()
            return list(texts)

    def program():
        settings = Settings(ring_segment_bytes=64 if rr.rank() == 1 else 128, error_file=str(rr.rank()))
        with pytest.raises(rr.MismatchError, match=r"rank 1 of 2, init .*ring_segment_bytes=64, but rank 0 has .*=128"):
            lifecycle.agree_on_settings(Two(rr.rank(), 2, (0, 0)), settings)

    run_ranks(2, program)


def test_what_was_submitted_before_a_barrier_is_complete_before_it(monkeypatch):
    monkeypatch.setattr(context, "COMPLETION_INTERVAL_S", 1e9)
    completed = []
    complete = Submission.complete

    def noted(submission):
        if submission.signature.kind in ("allreduce", "barrier"):
            completed.append(submission.signature.kind)
        complete(submission)

    monkeypatch.setattr(Submission, "complete", noted)

    def program():
        handles = [rr.allreduce_async(np.ones(5, np.float32) * n, name=f"t{n}") for n in range(3)]
        rr.barrier()
        assert all(rr.poll(handle) for handle in handles)

    run_ranks(1, program, settings=Settings(cycle_time_ms=1000.0))
    assert completed == ["allreduce"] * 3 + ["barrier"]


def test_averages_of_integers(monkeypatch):
    """Nobody has chosen a type for Python's; arrays keep theirs, which is told once."""
    told = []
    monkeypatch.setattr(arguments.JOB, "warning", told.append)
    arguments._warn_of_truncated_averages.cache_clear()

    def of_numbers():
        several = rr.synchronize(rr.grouped_allreduce_async([90 + 5 * rr.rank(), 1.0]))
        return rr.allreduce(rr.rank()).item(), several[0].item(), rr.allreduce(1, op=rr.Sum).dtype.name

    def of_arrays():
        percent = 90 + 5 * rr.rank()
        return [rr.allreduce(each).item() for each in (np.array(percent), torch.tensor(percent), np.int32(percent))]

    assert run_ranks(2, of_numbers) == [(0.5, 92.5, "int64")] * 2
    assert told == []
    assert run_ranks(2, of_arrays) == [[92, 92, 92]] * 2
    assert set(told) == {
        "averages of integer arrays are truncated to whole numbers, as in Horovod; pass floats, or op=Sum (shown once)"
    }
