"""The functions on arrays, on threads: what they take, give and refuse; test_matrix.py has every type and form."""

import threading

import numpy as np
import pytest
import torch

import ringreduce as rr
from ringreduce import runtime
from ringreduce.arrays.dtypes import TABLE
from ringreduce.execution import context
from ringreduce.execution.submission import Submission
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.world import World
from tests.support.reference import assert_reduced, data

SMALL = Settings(fusion_slot_bytes=256, ring_segment_bytes=64)


def test_the_callers_arrays_are_changed_only_in_place_forms():
    def program():
        large, small = np.full(100, 1.0 + rr.rank()), np.full(3, 1.0 + rr.rank())
        rr.grouped_allreduce([large, small], op=rr.Sum, prescale_factor=2.0)
        return large[0], small[0]

    assert run_ranks(2, program, settings=SMALL) == [(1, 1), (2, 2)]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "complex64", "int32"])
def test_prescale_and_postscale(name):
    def program():
        return rr.allreduce(data(name, 20, rr.rank()), op=rr.Sum, prescale_factor=2.0, postscale_factor=0.5)

    expected = sum(data(name, 20, rank).astype(complex) for rank in range(3))
    tolerance = 2**-7 if TABLE[name].itemsize == 2 else 1e-6
    for result in run_ranks(3, program):
        np.testing.assert_allclose(result.astype(complex), expected, rtol=tolerance, atol=tolerance)


def test_numbers_give_numbers():
    def program():
        return rr.allreduce(1.0 + rr.rank()), rr.allreduce(np.float32(rr.rank()), op=rr.Max), rr.allreduce(7, op=rr.Sum)

    for mean, largest, total in run_ranks(4, program):
        assert (mean, largest, total) == (2.5, 3, 28)
        assert isinstance(largest, np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_torch_tensors_give_torch_tensors(dtype):
    def program():
        tensor = torch.arange(6).reshape(2, 3).to(dtype)
        reduced = rr.allreduce(tensor, op=rr.Max)
        gathered = rr.allgather(tensor)
        copied = rr.broadcast(torch.full((3,), rr.rank()).to(dtype), 1)
        rr.broadcast_(tensor, 0)
        return reduced, gathered, copied

    for reduced, gathered, copied in run_ranks(2, program):
        assert (reduced.dtype, gathered.dtype, copied.dtype) == (dtype,) * 3
        assert torch.equal(reduced, torch.arange(6).reshape(2, 3).to(dtype))
        assert torch.equal(gathered, torch.arange(6).reshape(2, 3).repeat(2, 1).to(dtype))
        assert torch.equal(copied, torch.ones(3).to(dtype))


def test_device_memory_passes_through_the_same_code(cupy):
    host = [data("float32", 100, rank) for rank in range(3)]
    halves = [data("float16", 40, rank) for rank in range(3)]

    def program():
        device = [cupy.asarray(host[rr.rank()].copy()), cupy.asarray(halves[rr.rank()].copy())]
        reduced = rr.grouped_allreduce(device, op=rr.Average)
        gathered = rr.allgather(cupy.asarray(np.full((rr.rank(), 2), 5.0)))
        copied = rr.broadcast(device[0], 2)
        assert all(isinstance(each, cupy.ndarray) for each in (*reduced, gathered, copied))
        return [each.get() for each in reduced], gathered.get(), copied.get()

    for reduced, gathered, copied in run_ranks(3, program, settings=SMALL):
        assert_reduced(reduced[0], rr.Average, host)
        assert_reduced(reduced[1], rr.Average, halves)
        assert gathered.shape == (3, 2)
        np.testing.assert_array_equal(copied, host[2])


@pytest.mark.parametrize("name", TABLE)
def test_broadcast_in_both_forms(name):
    arrays = [data(name, 6, rank).reshape(2, 3) for rank in range(3)]

    def program():
        mine = arrays[rr.rank()].copy()
        new = rr.broadcast(mine, 1)
        np.testing.assert_array_equal(mine, arrays[rr.rank()])
        assert rr.broadcast_(mine, 2) is mine
        return new, mine

    for new, changed in run_ranks(3, program):
        np.testing.assert_array_equal(new, arrays[1])
        np.testing.assert_array_equal(changed, arrays[2])


def parameters(rank):
    return {"layers": [data("float32", 50, rank), data("float64", 3, rank)], "scale": data("float32", 200, rank)}


def test_broadcast_parameters_of_every_form():
    def program():
        tree, pairs = parameters(rr.rank()), list(parameters(rr.rank())["layers"])
        rr.broadcast_parameters(tree, root_rank=1)
        rr.broadcast_parameters([("a", pairs[0]), ("b", pairs[1])], root_rank=2)
        model = torch.nn.BatchNorm1d(3)
        with torch.no_grad():
            model.weight.fill_(rr.rank())
            model.num_batches_tracked.fill_(rr.rank())
        rr.broadcast_parameters(model.state_dict(), root_rank=1)
        rr.broadcast_parameters(model.named_parameters(), root_rank=1)
        return tree, pairs, model.weight.tolist(), model.num_batches_tracked.item()

    for tree, pairs, weight, tracked in run_ranks(3, program, settings=SMALL):
        np.testing.assert_array_equal(tree["scale"], parameters(1)["scale"])
        np.testing.assert_array_equal(tree["layers"][1], parameters(1)["layers"][1])
        np.testing.assert_array_equal(pairs[0], parameters(2)["layers"][0])
        assert (weight, tracked) == ([1, 1, 1], 1)


def test_broadcast_parameters_of_other_memory_layouts():
    def program():
        weight = (torch.arange(48.0).reshape(2, 3, 2, 4) + 100 * rr.rank()).to(memory_format=torch.channels_last)
        array = (np.arange(6.0).reshape(2, 3) + 100 * rr.rank()).T
        rr.broadcast_parameters({"weight": torch.nn.Parameter(weight), "array": array, "plain": np.zeros(2)}, 1)
        assert not weight.is_contiguous()
        return weight.sum().item(), weight[1, 2, 0, 1].item(), array[2, 0]

    expected = (sum(range(48)) + 4800.0, 100 + 41.0, 102.0)
    assert run_ranks(2, program) == [expected] * 2


def test_broadcast_parameters_refuses_what_is_no_collection_of_tensors():
    def program(params):
        rr.broadcast_parameters(params)

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
            run_ranks(1, lambda params=params: program(params))


def test_objects_travel_with_lambdas_and_of_any_length():
    def program():
        told = rr.broadcast_object({"rank": rr.rank(), "f": lambda x: x + 1} if rr.rank() == 2 else None, root_rank=2)
        everyone = rr.allgather_object("x" * rr.rank())
        return told["rank"], told["f"](1), everyone

    assert run_ranks(3, program) == [(2, 2, ["", "x", "xx"])] * 3


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
            runtime.agree_on_settings(Two(rr.rank(), 2, (0, 0)), settings)

    run_ranks(2, program)


def test_init_and_shutdown_inside_a_threaded_rank():
    def program():
        rr.init()
        assert rr.is_initialized()
        rr.shutdown()
        with pytest.raises(rr.NotInitializedError):
            rr.rank()
        return rr.is_initialized()

    assert run_ranks(2, program) == [False, False]


DIFFERENCES = [
    (
        lambda r: rr.allreduce(np.zeros(1000 if r == 2 else 1024, np.float32), name="layer3.w"),
        r"rank 2 of 3, allreduce 'layer3.w' \(test_api.py:\d+\): float32\[1000\], but rank 0 has float32\[1024\] "
        r"\(test_api.py:\d+\); all ranks must pass equal shapes$",
    ),
    (
        lambda r: rr.allreduce(np.zeros(4, np.float64 if r else np.float32)),
        r"rank 1 of 3, .*: float64\[4\], but rank 0 has float32\[4\] .*equal dtypes \(ranks 1-2 differ from rank 0\); "
        r"unnamed tensors are numbered in order, so one more call on a rank shifts all later ones: pass name=$",
    ),
    (
        lambda r: rr.allreduce(np.zeros(4), op=rr.Min if r == 1 else rr.Max),
        "rank 1 of 3, .*: op=Min, but rank 0 has op=Max",
    ),
    (
        lambda r: rr.allreduce(np.zeros(4), op=rr.Sum, prescale_factor=1.0 + r),
        "prescale_factor=2.0, but rank 0 has prescale_factor=1.0 .* equal values of prescale_factor",
    ),
    (
        lambda r: rr.broadcast(np.zeros(4), r % 2),
        "root_rank=1, but rank 0 has root_rank=0 .* equal values of root_rank",
    ),
    (
        lambda r: rr.allgather(np.zeros((2, 3 + r // 2))),
        r"rank 2 of 3, allgather .*: float64\[4\], but rank 0 has float64\[3\]",
    ),
    (
        lambda r: rr.barrier() if r else rr.allreduce(np.zeros(4)),
        r"rank 1 of 3, barrier 'noname.\d' .*: barrier 'noname.\d', but rank 0 has allreduce 'noname.\d' .* operations",
    ),
    (
        lambda r: rr.grouped_allreduce([np.zeros(4)] * (3 - r // 2)),
        r"rank 2 of 3, allreduce 'noname.1' \(test_api.py:\d+\): 2 tensors, but rank 0 has 3 .* equally many",
    ),
    (
        lambda r: rr.grouped_allreduce([np.zeros(4)] * (r % 2)),
        r"rank 1 of 3, allreduce .*: 1 tensors, but rank 0 has 0 ",
    ),
    (
        lambda r: rr.broadcast_object(r, root_rank=r),
        "broadcast_object 'noname.1' .*root_rank=1, but rank 0 has root_rank=0",
    ),
]


@pytest.mark.parametrize(("call", "message"), DIFFERENCES, ids=range(len(DIFFERENCES)))
def test_a_difference_is_told_on_every_rank_and_the_job_goes_on(call, message):
    def program():
        with pytest.raises(rr.MismatchError, match=message):
            call(rr.rank())
        return rr.allreduce(np.float64(rr.rank()), op=rr.Sum)

    assert run_ranks(3, program) == [3, 3, 3]


def test_no_thread_waits_for_a_gpu(cupy):
    """Streams wait for each other; tests/ranks/test_gpu.py has more."""

    def program():
        rr.allreduce(cupy.asarray(np.ones(3)))
        assert cupy.cuda.synchronized == []

    run_ranks(1, program)


def test_the_device_must_be_of_one_kind(cupy):
    def program():
        array = np.zeros(4)
        with pytest.raises(rr.MismatchError, match="a tensor on cuda, but rank 0 has one on cpu"):
            rr.allreduce(array if rr.rank() == 0 else cupy.asarray(array))

    run_ranks(2, program)


WRONG = [
    (lambda: rr.allreduce(np.zeros(3), op="sum"), "op='sum'; expected Average, Sum, Adasum, Min, Max or Product"),
    (lambda: rr.allreduce(np.zeros(3, bool)), "bool elements cannot be averaged or scaled"),
    (lambda: rr.allreduce(np.zeros(3, complex), op=rr.Max), "complex128 elements have no order"),
    (lambda: rr.allgather(np.float32(1)), "allgather: a 0-d tensor has no rows; pass one of"),
    (lambda: rr.broadcast(np.zeros(3), 5), "broadcast: root_rank=5; expected a rank from 0 to 1"),
    (lambda: rr.broadcast(np.zeros(3), -1), "broadcast: root_rank=-1; expected a rank from 0 to 1"),
    (lambda: rr.broadcast_object(3, "0"), "broadcast_object: root_rank='0'; expected a rank from 0 to 1"),
    (lambda: rr.grouped_allreduce([np.zeros(3)], names=[]), "allreduce: 0 names for 1 tensors; pass one for each"),
    (lambda: rr.allreduce_(3.0), "a float cannot be changed in place; pass an array"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_argument_is_told_and_the_job_goes_on(call, message):
    def program():
        with pytest.raises(rr.InputError, match=message):
            call()
        return rr.allreduce(np.float64(rr.rank()), op=rr.Sum)

    assert run_ranks(2, program) == [1, 1]


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
    monkeypatch.setattr(rr.api.arguments.LOGGER, "warning", told.append)
    rr.api.arguments._warn_of_truncated_averages.cache_clear()

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
