"""Every collective in every form, as programs that a rank runs and that check themselves against a float64 reference.

Shared by tests/ranks/api/test_matrix.py (ranks are threads) and tests/mpi/test_matrix.py (ranks are processes). A
program takes the ranks that take part, rising, and their process set. What it returns must be the same bytes on all
of them.
"""

import itertools
import math

import numpy as np

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives.ops import Reduction
from ringreduce.settings import Settings
from tests.support.reference import FLOATS, INTEGERS, MATRIX, assert_reduced, data, reduced, roundings

SMALL = Settings(fusion_buffer_bytes=4096, fusion_slot_bytes=512, shared_slot_bytes=256, ring_segment_bytes=200)
"""So little that a few hundred elements are cut into slots, and these into segments."""
SOME_RANKS = {1: [], 2: [1], 3: [2, 0], 4: [3, 0, 2]}
"""By size of the world: the ranks of a process set, in odd order; none: only the set of all ranks is there."""

SCATTERINGS = [(dtype, op) for dtype, op in MATRIX if op in (rr.Average, rr.Sum)]
SCALINGS = [(dtype, op) for dtype, op in MATRIX if dtype != "bool" and not (dtype in INTEGERS and op is rr.Product)]


def each(function):
    """Call it on one array after the other."""
    return lambda arrays, **kwargs: [function(array, **kwargs) for array in arrays]


def each_later(function):
    """Begin all; wait for the last one first."""

    def form(arrays, **kwargs):
        handles = [function(array, **kwargs) for array in arrays]
        results = [rr.synchronize(handle) for handle in reversed(handles)]
        assert all(rr.poll(handle) for handle in handles)
        return results[::-1]

    return form


def later(function):
    """Begin a group, and wait for it."""
    return lambda arrays, **kwargs: rr.synchronize(function(arrays, **kwargs))


def forms(name):
    """Of one array after the other, and of a group; at once, and later."""
    grouped = f"grouped_{name}"
    return {
        "sync": each(getattr(rr, name)),
        "async": each_later(getattr(rr, f"{name}_async")),
        "grouped": getattr(rr, grouped),
        "grouped async": later(getattr(rr, f"{grouped}_async")),
    }


ALLREDUCE, ALLGATHER, REDUCESCATTER = map(forms, ("allreduce", "allgather", "reducescatter"))
ALLREDUCE_IN_PLACE = {
    "in place": each(rr.allreduce_),
    "async in place": each_later(rr.allreduce_async_),
    "grouped in place": rr.grouped_allreduce_,
    "grouped async in place": later(rr.grouped_allreduce_async_),
}
BROADCAST = {"sync": each(rr.broadcast), "async": each_later(rr.broadcast_async)}
BROADCAST_IN_PLACE = {"in place": each(rr.broadcast_), "async in place": each_later(rr.broadcast_async_)}
ALLTOALL = {"sync": rr.alltoall, "async": lambda *args, **kwargs: rr.synchronize(rr.alltoall_async(*args, **kwargs))}
ONE_BY_ONE = ("sync", "in place")
"""Each tensor takes an agreement of its own: not run on all shapes."""


def shapes_for(dtype, op=rr.Sum):
    """None, one, odd counts, and more than a slot, or the whole fusion buffer, holds of what travels."""
    itemsize = Reduction(op, TABLE[dtype], 1).sum_type.itemsize
    slot, buffer = SMALL.fusion_slot_bytes // itemsize, SMALL.fusion_buffer_bytes // itemsize
    return [(0,), (), (7,), (3, 0, 2), (5, 3), (slot + 1,), (3, buffer // 3 + 1)]


def arrays_of(dtype, rank, shapes):
    """A rank's arrays, of its own values."""
    return [data(dtype, math.prod(shape), rank, seed).reshape(shape) for seed, shape in enumerate(shapes)]


def unchanged(form, arrays, **kwargs):
    """Run an out-of-place form: the inputs stay as they are, and the results are other memory."""
    before = [array.copy() for array in arrays]
    results = form(arrays, **kwargs)
    for array, copy, result in zip(arrays, before, results, strict=True):
        assert array.tobytes() == copy.tobytes()
        assert result.dtype == array.dtype
        assert not np.shares_memory(array, result)
    return results


def in_place(form, arrays, **kwargs):
    """Run an in-place form on copies; it returns the very arrays it was given."""
    copies = [array.copy() for array in arrays]
    results = form(copies, **kwargs)
    assert all(result is copy for result, copy in zip(results, copies, strict=True))
    return results


def bytes_of(results):
    return b"".join(result.tobytes() for result in results)


def allreduce_program(dtype, op, ranks, process_set):
    shapes = shapes_for(dtype, op)
    everyones = [arrays_of(dtype, rank, shapes) for rank in ranks]
    mine = everyones[ranks.index(rr.rank())]
    told = []
    for run, forms in ((unchanged, ALLREDUCE), (in_place, ALLREDUCE_IN_PLACE)):
        for name, form in forms.items():
            numbers = [1, 6] if name in ONE_BY_ONE else range(len(shapes))
            results = run(form, [mine[number] for number in numbers], op=op, process_set=process_set)
            for number, result in zip(numbers, results, strict=True):
                assert result.shape == shapes[number]
                assert_reduced(result, op, [arrays[number] for arrays in everyones])
            told.append(bytes_of(results))
    return told


def scaled_program(dtype, op, ranks, process_set):
    """Factors that no type holds exactly; integers are truncated after each."""
    shapes = shapes_for(dtype, op)[-2:]
    everyones = [arrays_of(dtype, rank, shapes) for rank in ranks]
    mine = everyones[ranks.index(rr.rank())]
    told = []
    for form in ("sync", "grouped async"):
        results = unchanged(
            ALLREDUCE[form], mine, op=op, prescale_factor=2.7, postscale_factor=1.3, process_set=process_set
        )
        for number, result in enumerate(results):
            assert_scaled(result, op, [arrays[number] for arrays in everyones], 2.7, 1.3)
        told.append(bytes_of(results))
    return told


def assert_scaled(result, op, arrays, prescale, postscale):
    """`result` is the reduction of the arrays times `prescale`, times `postscale`."""
    dtype = result.dtype
    if dtype.kind in "iu":
        before = [np.trunc(array * prescale).astype(np.int64) for array in arrays]
        expected = np.trunc(reduced(op, before) * postscale).astype(np.int64)
        np.testing.assert_array_equal(result, expected.astype(dtype))
        return
    wide = np.complex128 if dtype.kind == "c" else np.float64
    expected = reduced(op, [array.astype(wide) * prescale for array in arrays]) * postscale
    largest = sum(np.abs(array.astype(wide)) for array in arrays) * prescale * postscale
    if op is rr.Product:
        largest = np.abs(expected)
    epsilon = {"float16": 2**-11, "bfloat16": 2**-8}.get(dtype.name, 0)
    travels = 2**-23 if dtype.itemsize == 2 else np.finfo(dtype).eps
    travels += epsilon * roundings(dtype, len(arrays)) / 8
    assert (np.abs(result.astype(wide) - expected) <= epsilon * np.abs(expected) + 8 * travels * largest).all()


def adasum_program(dtype, ranks, process_set):
    """Not of three ranks: they have no halves."""
    if len(ranks) == 3:
        return None
    everyones = [arrays_of(dtype, rank, [(7,), (33, 2), (0,)]) for rank in ranks]
    mine = everyones[ranks.index(rr.rank())]
    told = []
    for run, forms in ((unchanged, ALLREDUCE), (in_place, ALLREDUCE_IN_PLACE)):
        for form in forms.values():
            results = run(form, mine, op=rr.Adasum, process_set=process_set)
            for number, result in enumerate(results):
                assert_adasum(result, [arrays[number] for arrays in everyones])
            told.append(bytes_of(results))
    return told


def assert_adasum(result, arrays):
    wide = np.complex128 if result.dtype.kind == "c" else np.float64
    expected = adasum([array.astype(wide) for array in arrays])
    tolerance = {"float16": 2**-10, "bfloat16": 2**-7}.get(result.dtype.name, 2**-20)
    np.testing.assert_allclose(result.astype(wide), expected, rtol=tolerance, atol=tolerance / 8)


def adasum(arrays):
    """Of the first and the second half: each less half of what it has in the other's direction."""
    if len(arrays) == 1:
        return arrays[0]
    one, other = adasum(arrays[: len(arrays) // 2]), adasum(arrays[len(arrays) // 2 :])
    common = np.vdot(one, other).real
    if not one.size:
        return one
    return (1 - common / (2 * np.vdot(one, one).real)) * one + (1 - common / (2 * np.vdot(other, other).real)) * other


def allgather_program(dtype, ranks, process_set):
    """Rows that differ per rank and per tensor, none of some ranks."""

    def arrays(rank):
        rows = [0, (rank * 2) % 3, 3 - rank % 4, 1, 40 * (1 + rank % 2)]
        tails = [(2,), (3, 2), (), (0, 2), (SMALL.fusion_slot_bytes // TABLE[dtype].itemsize // 16,)]
        return arrays_of(dtype, rank, [(n, *tail) for n, tail in zip(rows, tails, strict=True)])

    told = []
    for form in ALLGATHER.values():
        results = unchanged(form, arrays(rr.rank()), process_set=process_set)
        for result, *parts in zip(results, *map(arrays, ranks), strict=True):
            np.testing.assert_array_equal(result, np.concatenate(parts))
        told.append(bytes_of(results))
    return told


def broadcast_program(dtype, ranks, process_set):
    shapes = shapes_for(dtype)
    told = []
    for root in ranks:
        for run, forms in ((unchanged, BROADCAST), (in_place, BROADCAST_IN_PLACE)):
            for name, form in forms.items():
                own, expected = (arrays_of(dtype, rank, shapes) for rank in (rr.rank(), root))
                if name in ONE_BY_ONE:
                    own, expected = own[-1:], expected[-1:]
                results = run(form, own, root_rank=root, process_set=process_set)
                for result, roots in zip(results, expected, strict=True):
                    np.testing.assert_array_equal(result, roots, strict=True)
                told.append(bytes_of(results))
    return told


def alltoall_program(dtype, ranks, process_set):
    """Equal parts, and parts of all lengths."""
    size, me = len(ranks), ranks.index(rr.rank())
    for tail, rows in itertools.product([(), (3,), (0,)], [0, 1, 67]):
        everyones = [data(dtype, size * rows * math.prod(tail), rank).reshape(size * rows, *tail) for rank in ranks]
        for form in ALLTOALL.values():
            (result,) = unchanged(lambda arrays, form=form: [form(arrays[0], process_set=process_set)], [everyones[me]])
            parts = [array[me * rows : (me + 1) * rows] for array in everyones]
            np.testing.assert_array_equal(result, np.concatenate(parts))
    uneven_alltoall(dtype, ranks, process_set)


def uneven_alltoall(dtype, ranks, process_set):
    size, me = len(ranks), ranks.index(rr.rank())
    splits = [[(3 * source + 5 * target) % 4 for target in range(size)] for source in range(size)]
    everyones = [data(dtype, 2 * sum(own), rank).reshape(-1, 2) for own, rank in zip(splits, ranks, strict=True)]
    starts = [sum(own[:me]) for own in splits]
    expected = [array[start : start + own[me]] for array, start, own in zip(everyones, starts, splits, strict=True)]
    for form, given in itertools.product(ALLTOALL.values(), [list, lambda own: np.array(own, np.int32)]):
        result, received = form(everyones[me], given(splits[me]), process_set=process_set)
        np.testing.assert_array_equal(result, np.concatenate(expected))
        assert received.tolist() == [own[me] for own in splits]
        assert received.dtype == np.int32


def reducescatter_program(dtype, op, ranks, process_set):
    size, me = len(ranks), ranks.index(rr.rank())
    slot = SMALL.fusion_slot_bytes // TABLE[dtype].itemsize
    shapes = [(0,), (1,), (7, 3), (4 * size + 1,), (size, 0), (5, slot // 2)]
    everyones = [arrays_of(dtype, rank, shapes) for rank in ranks]
    for form in REDUCESCATTER.values():
        results = unchanged(form, everyones[me], op=op, process_set=process_set)
        for number, result in enumerate(results):
            parts = [np.array_split(arrays[number], size)[me] for arrays in everyones]  # the first get a row more
            assert result.shape == parts[0].shape
            assert_reduced(result, op, parts)
        if dtype in FLOATS + INTEGERS:
            (result,) = form(
                [everyones[me][2]], op=op, prescale_factor=2.7, postscale_factor=1.3, process_set=process_set
            )
            assert_scaled(result, op, [np.array_split(arrays[2], size)[me] for arrays in everyones], 2.7, 1.3)


def objects_program(ranks, process_set):
    """Objects of every length, with code of the script's own; a barrier between."""
    told = []
    for root in ranks:
        mine = {"from": rr.rank(), "long": "x" * (5000 * rr.rank()), "f": lambda x, root=root: x + root}
        got = rr.broadcast_object(mine if rr.rank() == root else None, root, process_set=process_set)
        assert (got["from"], len(got["long"]), got["f"](1)) == (root, 5000 * root, 1 + root)
        rr.barrier(process_set)
        gathered = rr.allgather_object(("y" * rr.rank(), root), process_set=process_set)
        assert gathered == [("y" * rank, root) for rank in ranks]
        told.append(gathered)
    return told


COPIES = [allgather_program, broadcast_program, alltoall_program]
"""What reduces nothing, each with a type."""


def join_program(dtype, ops, count):
    """Rank r takes r steps; a joined rank changes no result, but an Average is divided by all."""
    for step in range(rr.rank()):
        for op in ops:
            arrays = [data(dtype, count, rank, step) for rank in range(step + 1, rr.size())]
            if op is rr.Average:
                arrays += [np.zeros_like(arrays[0])] * (step + 1)
            mine = data(dtype, count, rr.rank(), step)
            single = rr.allreduce_async(mine, name=f"w{op}", op=op)
            for result in (rr.synchronize(single), *rr.grouped_allreduce([mine, mine], op=op)):
                assert_reduced(result, op, arrays)
    return rr.join()
