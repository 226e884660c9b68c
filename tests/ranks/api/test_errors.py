"""Every error of the API: its type and its message on every rank, and a collective that works afterwards."""

import threading

import numpy as np
import pytest

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce import runtime
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.torch import HorovodInternalError
from tests.support.loops import in_a_loop
from tests.support.on_threads import each_rank_of

torch = pytest.importorskip("torch", reason="torch is not installed: its tensors are not tested here")
LINE = r"\(test_errors.py:\d+\)"


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def goes_on():
    """The engine lives: a collective of each sort gives the right result."""
    size = rr.size()
    assert rr.allreduce(np.float64(rr.rank() + 1), op=rr.Sum) == size * (size + 1) / 2
    assert rr.allgather(np.array([rr.rank()])).tolist() == list(range(size))
    assert rr.allreduce(np.float64(rr.rank()), name="w", op=rr.Max) == size - 1, "the name is free again"
    rr.barrier()


MISMATCHES = {
    "shape": (
        lambda r: rr.allreduce_async(zeros(3 if r == 2 else 4), name="w"),
        rf"^rank 2 of 3, allreduce 'w' {LINE}: float32\[3\], but rank 0 has float32\[4\] {LINE}; "
        r"all ranks must pass equal shapes$",
    ),
    "number of dimensions": (
        lambda r: rr.allreduce_async(zeros(4, 1) if r == 1 else zeros(4), name="w"),
        rf"rank 1 of 3, allreduce 'w' {LINE}: float32\[4, 1\], but rank 0 has float32\[4\] .* equal shapes$",
    ),
    "dtype": (
        lambda r: rr.allreduce_async(zeros(4, dtype="float64" if r else "float32"), name="w"),
        r"float64\[4\], but rank 0 has float32\[4\] .*equal dtypes \(ranks 1-2 differ from rank 0\)$",
    ),
    "signedness": (
        lambda r: rr.allreduce_async(zeros(4, dtype=["int32", "int32", "uint32"][r]), name="w", op=rr.Sum),
        r"rank 2 of 3, .* uint32\[4\], but rank 0 has int32\[4\] .*equal dtypes$",
    ),
    "op": (
        lambda r: rr.allreduce_async(zeros(4), name="w", op=[rr.Sum, rr.Average, rr.Sum][r]),
        "rank 1 of 3, allreduce 'w' .*: op=Average, but rank 0 has op=Sum .*; all ranks must pass the same op",
    ),
    "prescale": (
        lambda r: rr.allreduce_async(zeros(4), name="w", prescale_factor=1.0 + (r == 2)),
        "rank 2 of 3, .*: prescale_factor=2.0, but rank 0 has prescale_factor=1.0 .* the same prescale_factor",
    ),
    "postscale": (
        lambda r: rr.allreduce_async(zeros(4), name="w", postscale_factor=0.5 if r == 1 else 1.0),
        "rank 1 of 3, .*: postscale_factor=0.5, but rank 0 has postscale_factor=1.0 .* the same postscale_factor",
    ),
    "group's number": (
        lambda r: rr.grouped_allreduce_async([zeros(4)] * (3 if r == 1 else 2), name="w"),
        rf"rank 1 of 3, allreduce 'w' {LINE}: 3 tensors, but rank 0 has 2 {LINE}; all ranks must pass the same number",
    ),
    "tree with a leaf more": (
        lambda r: rr.allreduce_async({"a": zeros(4), "b": [zeros(4)] * (1 + (r == 1))}, name="w"),
        rf"rank 1 of 3, allreduce 'w' {LINE}: 3 tensors, 'b.1' among them, but rank 0 has 2 {LINE}; all ranks",
    ),
    "tree with a leaf less": (
        lambda r: rr.allreduce_async_({"a": zeros(4)} | ({"b": zeros(4)} if r != 2 else {}), name="w"),
        "rank 2 of 3, allreduce 'w' .*: 1 tensors without 'b', but rank 0 has 2 ",
    ),
    "keys of a tree": (
        lambda r: rr.allreduce_async({"a": zeros(4), "c" if r else "b": zeros(4)}),
        "rank 1 of 3, allreduce 'c' .*: name 'c', but rank 0 has name 'b' .* the same name",
    ),
    "shape in a tree": (
        lambda r: rr.allreduce_async({"layers": [zeros(4), zeros(5 + r % 2)]}),
        r"rank 1 of 3, allreduce 'layers.1' .*: float32\[6\], but rank 0 has float32\[5\] .* equal shapes",
    ),
    "group of none": (
        lambda r: rr.grouped_allreduce_async([zeros(4)] * (r % 2), name="w"),
        "rank 1 of 3, allreduce .*: 1 tensors, but rank 0 has 0 ",
    ),
    "one of a group": (
        lambda r: rr.grouped_allreduce_async([zeros(4), zeros(5 + (r == 2))], name="w"),
        r"rank 2 of 3, allreduce 'w', tensor 2 of 2 .*: float32\[6\], but rank 0 has float32\[5\] .* equal shapes$",
    ),
    "names of a group": (
        lambda r: rr.grouped_allreduce_async([zeros(4)] * 2, name="w", names=["a", "c" if r else "b"]),
        "allreduce 'c' .*: name 'c', but rank 0 has name 'b' .* the same name",
    ),
    "allgather's other dimensions": (
        lambda r: rr.allgather_async(zeros(r, 3 + (r == 2)), name="w"),
        r"rank 2 of 3, allgather 'w' .*: float32\[4\], but rank 0 has float32\[3\] .* equal shapes$",
    ),
    "allgather's dtype": (
        lambda r: rr.grouped_allgather_async([zeros(2, dtype="int8" if r == 1 else "bool")], name="w"),
        r"rank 1 of 3, allgather 'w' .*: int8\[\], but rank 0 has bool\[\] .* equal dtypes$",
    ),
    "alltoall's other dimensions": (
        lambda r: rr.alltoall_async(zeros(3, 1 + (r == 1)), name="w"),
        r"rank 1 of 3, alltoall 'w' .*: float32\[2\], but rank 0 has float32\[1\] .* equal shapes$",
    ),
    "reducescatter's rows": (
        lambda r: rr.reducescatter_async(zeros(6 + (r == 2)), name="w"),
        r"rank 2 of 3, reducescatter 'w' .*: float32\[7\], but rank 0 has float32\[6\] .* equal shapes$",
    ),
    "reducescatter's op": (
        lambda r: rr.grouped_reducescatter_async([zeros(6)], name="w", op=rr.Sum if r else rr.Average),
        "rank 1 of 3, reducescatter 'w' .*: op=Sum, but rank 0 has op=Average .* the same op .ranks 1-2 differ",
    ),
    "broadcast's root": (
        lambda r: rr.broadcast_async(zeros(4), r % 2, name="w"),
        "rank 1 of 3, broadcast 'w' .*: root_rank=1, but rank 0 has root_rank=0 .* the same root_rank",
    ),
    "broadcast's shape": (
        lambda r: rr.broadcast_async_(zeros(4 + (r == 1)), 0, name="w"),
        r"rank 1 of 3, broadcast 'w' .*: float32\[5\], but rank 0 has float32\[4\] .* equal shapes$",
    ),
    "one rank's root is none": (
        lambda r: rr.broadcast_async(zeros(4), 7 if r == 2 else 0, name="w"),
        "rank 2 of 3, broadcast 'w' .*: root_rank=7, but rank 0 has root_rank=0",
    ),
}


@in_a_loop("case", MISMATCHES)
@in_a_loop("known", [False, True])
@each_rank_of(3)
def test_a_mismatch_is_told_on_every_rank_and_the_job_goes_on(case, known):
    """With the same message."""
    begin, message = MISMATCHES[case]
    for _ in range(2 * known):  # so that rank 0 announces it by a bit
        rr.synchronize(begin(0))
    for _ in range(2):
        handle = begin(rr.rank())
        with pytest.raises(rr.MismatchError, match=message) as caught:
            rr.synchronize(handle)
        assert rr.poll(handle)
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, HorovodInternalError)
        with pytest.raises(rr.CollectiveError, match=message):
            rr.synchronize(handle)  # each waiter gets it
    goes_on()
    return str(caught.value)


DIFFERENT = {
    "a name": (
        lambda r: [rr.allreduce, rr.allgather][r](zeros(4), name="w"),
        rf"^rank 1 of 2, allgather 'w' {LINE}: allgather 'w', but rank 0 has allreduce 'w' {LINE}; all ranks",
    ),
    "no name": (
        lambda r: [rr.allreduce, rr.allgather][r](zeros(4)),
        "allgather of an unnamed tensor, but rank 0 has allreduce of an unnamed tensor .*; unnamed tensors are "
        "numbered in order, so an extra call on a rank shifts all later ones: pass name=$",
    ),
    "no array": (
        lambda r: rr.barrier() if r else rr.allreduce(zeros(4)),
        "barrier, but rank 0 has allreduce of an unnamed tensor",
    ),
    "checks": (
        lambda r: rr.check("nan" if r else "divergence,nan:zero"),
        r"rank 1 of 2, barrier 'check' .*: check=nan:report, but rank 0 has check=nan:zero,divergence:100 ",
    ),
    "an object": (
        lambda r: rr.broadcast_object(r, r),
        "rank 1 of 2, broadcast_object .*root_rank=1, but rank 0 has root_rank=0",
    ),
}


@in_a_loop("case", DIFFERENT)
@each_rank_of(2)
def test_different_operations(case):
    call, message = DIFFERENT[case]
    with pytest.raises(rr.MismatchError, match=message):
        call(rr.rank())
    goes_on()


@each_rank_of(3)
def test_a_mistake_in_some_tensors_spares_the_others():
    """Among many under way, those that differ fail, and all others are right; in several rounds."""
    for step in range(4):
        handles = {}
        for number in np.random.default_rng(rr.rank() + 10 * step).permutation(30).tolist():
            wrong = number % 7 == step and rr.rank() == 1
            array = np.full(3 + wrong, 10.0 * rr.rank() + number)
            handles[number] = rr.allreduce_async(array, name=f"w{number}", op=rr.Sum)
        for number, handle in handles.items():
            if number % 7 == step:
                with pytest.raises(rr.MismatchError, match=rf"rank 1 of 3, allreduce 'w{number}' "):
                    rr.synchronize(handle)
            else:
                np.testing.assert_array_equal(rr.synchronize(handle), [30 + 3 * number] * 3)


@each_rank_of(2)
def test_a_name_that_is_pending_is_refused_at_once():
    message = (
        f"allreduce 'w': a tensor of this name is already pending on rank {rr.rank()}; synchronize it first, or "
        "use another name"
    )
    if rr.rank() == 0:  # rank 1 has not given it yet
        handle = rr.allreduce_async(zeros(4), name="w")
        for again in (rr.allreduce_async, rr.allreduce_, rr.allreduce):
            with pytest.raises(ValueError, match=message):
                again(zeros(4), name="w")
        assert not rr.poll(handle)
        rr.allgather_object(0, name="released")
    else:
        rr.allgather_object(0, name="released")
        handle = rr.allreduce_async(zeros(4) + 1, name="w", op=rr.Average)
    np.testing.assert_array_equal(rr.synchronize(handle), [0.5] * 4)
    goes_on()


@each_rank_of(2)
def test_the_same_name_may_be_another_operations():
    handles = [rr.allreduce_async(zeros(3), name="w"), rr.allgather_async(zeros(1), name="w")]
    assert [rr.synchronize(handle).shape for handle in handles] == [(3,), (2,)]


WRONG = {
    "average and op": (
        lambda: rr.allreduce(zeros(3), average=True, op=rr.Sum),
        "allreduce: both average=True and op=Sum were given; pass op only",
    ),
    "average and op, in place": (
        lambda: rr.grouped_allreduce_async_([zeros(3)], average=False, op=rr.Average),
        "both average=False and op=Average were given",
    ),
    "no op": (lambda: rr.allreduce(zeros(3), op="sum"), "op='sum'; expected Average, Sum, Adasum, Min, Max or Product"),
    "bool's average": (lambda: rr.allreduce(zeros(3, dtype=bool)), "bool elements cannot be averaged or scaled"),
    "bool's scale": (
        lambda: rr.allreduce_async(zeros(3, dtype=bool), op=rr.Sum, postscale_factor=2.0),
        "bool elements cannot be averaged or scaled",
    ),
    "a scale that is NaN": (
        lambda: rr.allreduce_async(zeros(3), postscale_factor=np.nan),
        "allreduce: prescale_factor=1.0, postscale_factor=nan; expected no NaN",
    ),
    "complex minimum": (
        lambda: rr.allreduce(zeros(3, dtype="complex64"), op=rr.Min),
        "complex64 elements have no order: op=Min is not defined",
    ),
    "integers' Adasum": (
        lambda: rr.allreduce(zeros(3, dtype="int32"), op=rr.Adasum),
        "Adasum is not defined for int32 elements; pass floating-point ones",
    ),
    "ranks for Adasum": (
        lambda: rr.allreduce(zeros(3), op=rr.Adasum),
        "op=Adasum: 3 ranks; expected a power of two, such as 2, 4 or 8",
    ),
    "reducescatter's op": (
        lambda: rr.reducescatter(zeros(3), op=rr.Max),
        "reducescatter: op=Max; expected Average or Sum",
    ),
    "0-d allgather": (lambda: rr.allgather(zeros(), name="w"), "allgather 'w': a 0-d tensor has no rows"),
    "0-d in a grouped allgather": (
        lambda: rr.grouped_allgather([zeros(2), 3.0]),
        "allgather, tensor 2 of 2: a 0-d tensor",
    ),
    "0-d alltoall": (lambda: rr.alltoall(np.float32(3)), "alltoall: a 0-d tensor has no rows"),
    "0-d reducescatter": (lambda: rr.reducescatter(zeros()), "reducescatter: a 0-d tensor has no rows to scatter"),
    "rows that cannot be parted": (
        lambda: rr.alltoall_async(zeros(4), name="w"),
        "alltoall 'w': 4 rows cannot be split equally among 3 ranks; pass splits, or a multiple of 3",
    ),
    "too few splits": (
        lambda: rr.alltoall(zeros(4), [2, 2], name="w"),
        r"alltoall 'w': splits=\[2, 2\]; expected 3 whole numbers of 0 or more, one for each rank",
    ),
    "2-d splits": (
        lambda: rr.alltoall(zeros(4), np.ones((3, 1), int)),
        r"splits=\[\[1\], \[1\], \[1\]\]; expected 3 whole",
    ),
    "a negative split": (lambda: rr.alltoall(zeros(4), [2, -1, 2]), r"splits=\[2, -1, 2\]; expected 3 whole numbers"),
    "splits that are no integers": (
        lambda: rr.alltoall(zeros(4), np.array([1.0, 1.0, 2.0])),
        r"splits=\[1.0, 1.0, 2.0\]; expected 3 whole numbers",
    ),
    "splits that are Python's objects": (
        lambda: rr.alltoall(zeros(4), np.array([1, 1, 2], object), name="w"),
        "^alltoall 'w': splits: elements of type object have no fixed size",
    ),
    "masked splits": (
        lambda: rr.alltoall(zeros(4), np.ma.array([1, 1, 2])),
        "^alltoall: splits: a masked array would lose its mask; pass array.filled",
    ),
    "splits past the end": (
        lambda: rr.alltoall(zeros(4), np.array([2, 2, 1], np.int32)),
        r"splits=\[2, 2, 1\] sum to 5, but the tensor has only 4 rows",
    ),
    "rows that go nowhere": (
        lambda: rr.alltoall(zeros(4), (1, 1, 1)),
        r"alltoall: splits=\[1, 1, 1\] sum to 3, but the tensor has 4 rows: each must go to a rank; pass tensor\[:3\]",
    ),
    "root": (lambda: rr.broadcast(zeros(3), 3), "broadcast: root_rank=3; expected a rank from 0 to 2"),
    "negative root": (lambda: rr.broadcast_(zeros(3), -1), "broadcast: root_rank=-1; expected a rank from 0 to 2"),
    "root of an object": (lambda: rr.broadcast_object(1, 9), "broadcast_object: root_rank=9; expected a rank from 0"),
    "text for a root": (lambda: rr.broadcast_object(3, "0"), "broadcast_object: root_rank='0'; expected a rank from 0"),
    "no names": (lambda: rr.grouped_allreduce([zeros(3)], names=[]), "allreduce: 0 names for 1 tensors; pass one for"),
    "two of one name": (
        lambda: rr.allreduce({"a.b": 1.0, "a": {"b": 2.0}}),
        "more than one array is called 'a.b'; rename the keys",
    ),
    "a number in place": (lambda: rr.allreduce_(3.0), "a float cannot be changed in place; pass an array"),
    "Python's objects": (
        lambda: rr.broadcast(np.array(["a", None]), 0),
        "broadcast: elements of type object have no fixed size; pass numbers, .* or use broadcast_object",
    ),
    "strings": (
        lambda: rr.allreduce(np.array(["a"])),
        "allreduce: elements of type <U1 can be moved, but not reduced: they can be broadcast, gathered and exchanged",
    ),
    "long doubles": (
        lambda: rr.allreduce(zeros(3, dtype="longdouble")),
        r"elements of type .* can be moved, but not reduced: convert them, such as array.astype\('float64'\)",
    ),
    "dates": (
        lambda: rr.reducescatter(np.zeros(3, "M8[ns]"), name="w"),
        r"reducescatter 'w': elements of type datetime64\[ns\] can be moved, but .*: pass array.view\('int64'\)",
    ),
    "other byte order": (
        lambda: rr.allreduce(np.zeros(3, ">f4")),
        r"elements of type >f4 .*in the byte order of other machines: pass array.astype\(array.dtype.newbyteorder",
    ),
    "read-only": (
        lambda: rr.allreduce_(np.broadcast_to(zeros(1), (1,))),
        "a read-only array cannot be changed in place",
    ),
    "no array": (lambda: rr.broadcast([1.0, 2.0], 0), r"a list is not an array; pass numpy.array\(...\) of numbers"),
    "a dict": (
        lambda: rr.broadcast({"loss": 1.0}, 0),
        "a dict is not an array; pass its arrays one by one; allreduce takes a dict",
    ),
    "a dict for a list": (
        lambda: rr.grouped_allreduce({"loss": zeros(1)}),
        "a str is not an array; for text use broadcast_object; if it is a key of a dict of arrays, pass",
    ),
    "masked": (
        lambda: rr.allreduce(np.ma.masked_array([1.0, 2.0], [0, 1])),
        "a masked array would lose its mask; pass",
    ),
    "no text of checks": (
        lambda: rr.check(None),
        r"check=None: expected a string: nan, .*; or an empty string for no checks",
    ),
    "a number for a name": (lambda: rr.allreduce(zeros(3), name=3), "^allreduce: name=3; expected text$"),
    "bytes for a name": (lambda: rr.broadcast_(zeros(3), 0, name=b"w"), "^broadcast: name=b'w'; expected text$"),
    "a list for a name": (lambda: rr.allgather(zeros(3), name=["w"]), r"^allgather: name=\['w'\]; expected text$"),
    "a list for an object's name": (
        lambda: rr.broadcast_object(3, name=["w"]),
        r"^broadcast_object: name=\['w'\]; expected text$",
    ),
    "no process set": (
        lambda: rr.allreduce(zeros(3), process_set=[0, 1]),
        r"allreduce: process_set=\[0, 1\]; expected a ProcessSet",
    ),
    "ranks for a channel": (lambda: rr.ordered([0, 1, 2]), r"^ordered: process_set=\[0, 1, 2\]; expected a Proc"),
    "no set for a channel": (lambda: rr.ordered(None), "^ordered: process_set=None; expected a Proc"),
    "a number for a handle": (lambda: rr.synchronize(3), "^synchronize: handle=3; expected what .*allreduce_async ret"),
    "None for a handle": (lambda: rr.synchronize(None), "^synchronize: handle=None; expected what a function such as"),
    "no handle to poll": (lambda: rr.poll(3), "^poll: handle=3; expected what a function such as allreduce_async ret"),
    "ranks to be removed": (
        lambda: rr.remove_process_set([0]),
        r"^remove_process_set: process_set=\[0\]; expected a ProcessSet$",
    ),
}


@in_a_loop("case", WRONG)
@each_rank_of(3)
def test_a_wrong_argument_is_a_value_error_and_the_job_goes_on(case):
    call, message = WRONG[case]
    for _ in range(2):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert isinstance(caught.value, rr.InputError)
    goes_on()


@each_rank_of(3)
def test_one_ranks_wrong_argument_can_be_corrected():
    """Nothing was announced: the other ranks wait for the right call."""
    if rr.rank() == 1:
        with pytest.raises(ValueError, match="elements of type <U1"):
            rr.allreduce(np.array(["a"]), name="w")
    assert rr.allreduce(zeros(3, 4) + rr.rank(), name="w", op=rr.Sum)[2, 3] == 3


NAMED = {
    "a text among metrics": (
        lambda: rr.allreduce({"loss": 1.0, "of": {"split": "val", "n": 3}}),
        "allreduce 'of.split': a str is not an array",
    ),
    "a number among parameters": (
        lambda: rr.broadcast_parameters({"w": zeros(2), "b": {"steps": 3}}),
        "broadcast_parameters 'b.steps': an int cannot be changed in place; pass an array, or use broadcast_object",
    ),
    "an object array": (
        lambda: rr.allreduce([zeros(2), {"ids": np.array([1, None])}]),
        "allreduce '1.ids': elements of type object have no fixed size",
    ),
    "a read-only one": (
        lambda: rr.broadcast_parameters([("w", zeros(2)), ("b", np.broadcast_to(zeros(1), (2,)))]),
        "broadcast_parameters 'b': a read-only array",
    ),
    "an expanded one": (
        lambda: rr.allreduce_({"w": zeros(2), "b": torch.zeros(1).expand(3)}),
        r"allreduce 'b': an array of shape \(3,\) whose elements share memory, .*; pass a copy: tensor.clone\(\)",
    ),
    "overlapping windows": (
        lambda: rr.broadcast_(np.lib.stride_tricks.as_strided(zeros(9), (3, 4), (8, 8)), 0, name="windows"),
        r"broadcast 'windows': an array of shape \(3, 4\) whose elements share memory",
    ),
    "one of a group": (
        lambda: rr.grouped_reducescatter([zeros(3), np.zeros(3, "M8[s]")], name="g"),
        r"reducescatter 'g', tensor 2 of 2: elements of type datetime64\[s\]",
    ),
    "one twice": (
        lambda: rr.grouped_allreduce_([MEMORY, zeros(2), MEMORY], op=rr.Sum),
        "allreduce, tensor 3 of 3: it shares memory with tensor 1 of this call, and would be changed twice",
    ),
    "one and its part": (
        lambda: rr.allreduce_({"all": MEMORY, "some": MEMORY[3:5]}),
        "allreduce 'some': it shares memory with tensor 1 of this call",
    ),
    "a gradient": (
        lambda: rr.DistributedOptimizer(lambda grads: grads)({"layer": {"w": zeros(2), "b": "zeros"}}),
        "allreduce 'layer.b': a str is not an array",
    ),
    "a compressed gradient": (
        lambda: rr.DistributedOptimizer(lambda grads: grads, compression=rr.Compression.fp16)(
            {"w": zeros(2), "b": np.array(["zeros"])}
        ),
        "allreduce 'b': elements of type <U5",
    ),
    "a factored gradient": (
        lambda: rr.DistributedOptimizer(lambda grads: grads, compression=rr.PowerSGD(1))(
            {"w": zeros(2), "b": [1, "z"]}
        ),
        "allreduce 'b.1': a str is not an array",
    ),
}
MEMORY = np.zeros(9)


@in_a_loop("case", NAMED)
@each_rank_of(2)
def test_of_several_arrays_the_one_that_is_refused_is_named(case):
    call, message = NAMED[case]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
    goes_on()


REFUSED = {
    "allreduce": lambda wrong: rr.allreduce("zeros" if wrong else zeros(2)),
    "a group": lambda wrong: rr.grouped_allreduce([zeros(2), None if wrong else zeros(2)]),
    "in place": lambda wrong: rr.allreduce_(np.broadcast_to(zeros(1), (2,)) if wrong else zeros(2)),
    "allgather": lambda wrong: rr.allgather(1.0 if wrong else zeros(2)),
    "alltoall": lambda wrong: rr.alltoall(zeros(4), [3, 0, 0] if wrong else [4, 0, 0]),
    "broadcast": lambda wrong: rr.broadcast(["zeros"] if wrong else zeros(2), 0),
    "broadcast_parameters": lambda wrong: rr.broadcast_parameters({"w": "zeros" if wrong else zeros(2)}),
    "reducescatter": lambda wrong: rr.reducescatter(1.0 if wrong else zeros(3)),
    "allreduce, ordered": lambda wrong: rr.ordered().allreduce("zeros" if wrong else zeros(2)),
    "scatter, ordered": lambda wrong: rr.ordered().scatter(1.0 if wrong else zeros(6), 0),
    "allreduce's op": lambda wrong: rr.allreduce(zeros(2), op="Sum" if wrong else rr.Sum),
    "allreduce's op, a list": lambda wrong: rr.allreduce_(zeros(2), op=["Sum"] if wrong else rr.Sum),
    "allreduce's average and op": lambda wrong: rr.allreduce_async(zeros(2), True if wrong else None, op=rr.Sum).wait(),
    "allreduce's scale": lambda wrong: rr.allreduce(zeros(2), prescale_factor=None if wrong else 1.0),
    "allreduce's other scale": lambda wrong: rr.grouped_allreduce_([zeros(2)], postscale_factor="a" if wrong else 1.0),
    "a tree": lambda wrong: rr.allreduce({"a.b": zeros(2), "a": {"b" if wrong else "c": zeros(2)}}),
    "a compressed tree": lambda wrong: rr.allreduce(
        {"a.b": zeros(2), "a": {"b" if wrong else "c": zeros(2)}}, compression=rr.Compression.fp16
    ),
    "a compression": lambda wrong: rr.allreduce(zeros(2), compression="fp16" if wrong else rr.Compression.fp16),
    "a group's op": lambda wrong: rr.grouped_allreduce([zeros(2)], op="Sum" if wrong else rr.Sum),
    "no group": lambda wrong: rr.grouped_allreduce_async(None if wrong else [zeros(2)]).wait(),
    "no group to gather": lambda wrong: rr.grouped_allgather(None if wrong else [zeros(2)]),
    "no compressed group": lambda wrong: rr.grouped_reducescatter(
        None if wrong else [zeros(3)], compression=rr.Compression.fp16
    ),
    "reducescatter's op": lambda wrong: rr.reducescatter(zeros(3), op=rr.Max if wrong else rr.Sum),
    "op, ordered": lambda wrong: rr.ordered().allreduce(zeros(2), op="Sum" if wrong else rr.Sum),
    "an optimizer": lambda wrong: rr.DistributedOptimizer(lambda grads: grads)(
        {"a.b": zeros(2), "a": {"b" if wrong else "c": zeros(2)}}
    ),
    "torch's splits": lambda wrong: hvd.alltoall(torch.ones(3), torch.ones(3, dtype=[torch.int32, torch.int64][wrong])),
    "a sparse tensor": lambda wrong: hvd.sparse_allreduce_async(
        torch.ones(2) if wrong else torch.ones(2).to_sparse(), None, hvd.Sum
    ).wait(),
    "gather, ordered": lambda wrong: rr.ordered().gather(1.0 if wrong else zeros(6), 2),
}


@in_a_loop("refusing", [0, 2])
@in_a_loop("case", REFUSED)
@each_rank_of(3)
def test_what_one_rank_refuses_is_the_others_error_and_later_calls_meet(case, refusing):
    kind, call = case.partition(",")[0], REFUSED[case]
    for _ in range(2):
        if rr.rank() == refusing:
            with pytest.raises(ValueError, match=r"expected|pass|rename") as caught:
                call(True)
            assert isinstance(caught.value, rr.InputError)
        else:
            message = rf"^rank {refusing} of 3, .*{LINE} was refused: .*(expected|pass|rename).*; rank . has .* {LINE}$"
            with pytest.raises(rr.MismatchError, match=message) as caught:
                call(False)
            assert kind in REFUSED or kind in str(caught.value)
        call(False)
        goes_on()


@each_rank_of(2)
def test_a_last_pass_that_one_rank_refuses_ends_its_step_too():
    optimizer = rr.DistributedOptimizer(lambda grads: grads["a.b"], op=rr.Sum, backward_passes_per_step=2)
    for step in range(3):
        first, last = (
            {"a.b": np.full(1, 10.0**step), "a": {key: np.ones(1)}} for key in ("c", "b" if not step else "c")
        )
        optimizer(first)
        if step:
            assert optimizer(last) == 4 * 10.0**step
        elif rr.rank() == 0:
            with pytest.raises(rr.InputError, match="more than one array is called"):
                optimizer(last)
        else:
            with pytest.raises(rr.MismatchError, match=r"^rank 0 of 2, .* was refused: more than one array is called"):
                optimizer(first)


BEFORE_INIT = {
    **{each.__name__: each for each in (rr.rank, rr.size, rr.local_rank, rr.local_size, rr.cross_rank, rr.cross_size)},
    **{each.__name__: each for each in (rr.is_homogeneous, rr.mpi_threads_supported, rr.barrier, rr.join)},
    "allreduce": lambda: rr.allreduce(zeros(3)),
    "reducescatter": lambda: rr.reducescatter(zeros(3)),
    "allgather": lambda: rr.allgather(zeros(3)),
    "alltoall": lambda: rr.alltoall(zeros(3)),
    "broadcast": lambda: rr.broadcast(zeros(3), 0),
    "broadcast_object": lambda: rr.broadcast_object(3),
    "allgather_object": lambda: rr.allgather_object(3),
    "start_timeline": lambda: rr.start_timeline("t.json"),
    "stop_timeline": rr.stop_timeline,
    "check": lambda: rr.check("nan"),
    "add_process_set": lambda: rr.add_process_set([0]),
    "remove_process_set": lambda: rr.remove_process_set(rr.global_process_set),
    "included": lambda: rr.ProcessSet([0]).included(),
}


@in_a_loop("name", BEFORE_INIT)
def test_a_call_outside_a_world_says_what_to_do(name):
    message = rf"^{name}\(\): ringreduce has not been initialized; use ringreduce.init\(\)$"
    assert not rr.is_initialized()
    with pytest.raises(ValueError, match=message):
        BEFORE_INIT[name]()

    def program():
        rr.init()
        assert rr.is_initialized()
        rr.shutdown()
        assert not rr.is_initialized()
        with pytest.raises(rr.NotInitializedError, match=message):
            BEFORE_INIT[name]()

    run_ranks(2, program)


def test_what_is_pending_when_a_rank_leaves_says_who_left_first_and_why():
    def program():
        goes_on()
        mine = rr.allreduce_async(zeros(3), name="only of rank 0 and 1") if rr.rank() != 2 else None
        all_submitted.wait(5)
        if rr.rank() == 2:
            rr.shutdown()
            return
        message = (
            rf"^rank {rr.rank()} of 3, allreduce 'only of rank 0 and 1' {LINE}: rank 2 has left the job: it called "
            rf"shutdown\(\) {LINE}; all ranks must call the same collectives the same number of times$"
        )
        with pytest.raises(rr.PeerLostError, match=message) as caught:
            rr.synchronize(mine)
        assert caught.value.lost_ranks == (2,)
        with pytest.raises(rr.PeerLostError, match=r"allreduce 'w' .*: rank 2 has left the job: it called shutdown"):
            rr.allreduce(zeros(3), name="w")

    all_submitted = threading.Barrier(3)
    run_ranks(3, program)


def test_what_this_rank_leaves_pending_is_told_too():
    def program():
        handle = rr.allreduce_async(zeros(3), name=f"only of rank {rr.rank()}")
        all_submitted.wait(5)
        engine = runtime.current("test").engine
        rr.shutdown()
        message = (
            r"was pending when this rank left the job \(it called shutdown|rank \d has left the job: it called shutd"
        )
        with pytest.raises(rr.CollectiveError, match=message):
            handle.wait()
        assert not engine.states[0].pending

    all_submitted = threading.Barrier(2)
    run_ranks(2, program)


def test_a_rank_that_fails_is_named_to_those_that_wait_for_it():
    told = {}

    def program():
        if rr.rank() == 1:
            raise KeyError("no such file")
        try:
            rr.allreduce(zeros(3), name="w")
        except rr.PeerLostError as exc:
            told[rr.rank()] = str(exc)
            raise

    with pytest.raises(KeyError, match="no such file"):
        run_ranks(3, program)
    assert sorted(told) == [0, 2]
    assert all("rank 1 has left the job: it failed with KeyError: 'no such file'" in text for text in told.values())


def test_a_tensor_that_one_rank_does_not_give_is_given_up_and_the_job_goes_on(capfd):
    settings = Settings(stall_check_s=0.2, stall_abort_s=0.5)
    late = threading.Event()

    def program():
        if rr.rank() == 1:
            late.wait(10)
        else:
            message = (
                rf"^allreduce 'w' \(float32\[3\]\): waiting for \d+ s; submitted by ranks 0,2 {LINE}; "
                "missing: rank 1. All ranks must submit it$"
            )
            with pytest.raises(rr.StalledError, match=message) as caught:
                rr.allreduce(zeros(3), name="w")
            assert isinstance(caught.value, RuntimeError)
            late.set()
        goes_on()

    run_ranks(3, program, settings=settings)
    assert "ringreduce: stalled: allreduce 'w'" in capfd.readouterr().err
