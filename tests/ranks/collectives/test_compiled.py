"""The all-reduce of the compiled module, on threads: as NumPy's, whether a rank has the one or the other."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import compiled, shared
from ringreduce.collectives.ops import Average, Reduction, Sum
from ringreduce.execution.in_slot import Gets, InSlot
from ringreduce.kernels import native, quantized
from ringreduce.transport import stores
from ringreduce.transport.base import complete
from ringreduce.transport.stores import WAYS
from ringreduce.transport.window import Signatures
from tests.support.reference import MATRIX, data, folded
from tests.support.slots import SLOT_BYTES, on_a_host

pytestmark = pytest.mark.skipif(native.module is None, reason=f"the compiled module: {native.MISSING}")


class Always:
    """In place of `Region.stores`: all operations are done in one way."""

    def __init__(self, way):
        self.way = way

    def of(self, nbytes):
        return self

    def begin(self):
        return self.way

    def end(self, us_per_byte):
        assert us_per_byte >= 0


@pytest.fixture
def all_are_large(monkeypatch):
    """Operations of any size stream, if `Region.stores` says so."""
    monkeypatch.setattr(compiled, "LARGE_BYTES", 1)


def allreduce(arrays, region, reduction, by_numpy, progress=lambda count: None):
    """Arrays in one go, in place, or into others where `by_numpy` is None; returns the results."""
    targets = [np.zeros_like(each) for each in arrays] if by_numpy is None else arrays
    if by_numpy:
        capacity = region.piece_bytes(sum(each.nbytes for each in arrays)) // reduction.element.itemsize
        bounds = list(itertools.accumulate([each.size for each in arrays], initial=0))
        slots = [[] for _ in range(-(-bounds[-1] // capacity))]
        for array, start in zip(arrays, bounds, strict=False):
            cuts = [0, *range(capacity - start % capacity, array.size, capacity), array.size]
            for low, high in itertools.pairwise(cuts):
                if low < high:
                    slots[(start + low) // capacity].append(shared.BufferPair(array[low:high], array[low:high]))
        complete(shared.allreduce(slots, region, reduction))
    else:
        assert compiled.can(region, reduction)
        complete(compiled.allreduce(arrays, targets, region, reduction, progress))
    return targets


CASES = [(name, op) for name, op in MATRIX if Reduction(op, TABLE[name], 2).compiled]
counts = st.lists(st.sampled_from([0, 1, 2, 7, 300, 5000, 20001]), min_size=1, max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(CASES), counts), min_size=1, max_size=4), st.integers(2, 5), st.randoms())
def test_as_numpy_does_on_any_of_the_ranks(all_are_large, operations, size, draw):
    """One operation after the other; each rank's own choice of the two, of in place or not, and of what it streams.

    Each goes through the slots in pieces of another length, alike on all ranks.
    """
    pieces = [draw.choice([SLOT_BYTES, SLOT_BYTES // 4, 3 * 64]) for _ in operations]
    ways = [[draw.randrange(WAYS) for _ in operations] for _ in range(size)]
    kinds = [[draw.choice([True, False, None]) for _ in operations] for _ in range(size)]
    draws = [
        [[data(name, count, rank, 10 * k + j) for j, count in enumerate(lengths)] for rank in range(size)]
        for k, ((name, _), lengths) in enumerate(operations)
    ]

    def program(region):
        results = []
        for number, ((name, op), _) in enumerate(operations):
            region.stores = Always(ways[region.rank][number])
            region.piece_bytes = lambda _, piece=pieces[number]: piece
            arrays = [each.copy().view(TABLE[name].storage) for each in draws[number][region.rank]]
            reduction = Reduction(op, TABLE[name], size)
            results.append(
                [each.tobytes() for each in allreduce(arrays, region, reduction, kinds[region.rank][number])]
            )
        return results

    expected = [
        [folded(op, parts).tobytes() for parts in zip(*by_rank, strict=True)]
        for ((_, op), _), by_rank in zip(operations, draws, strict=True)
    ]
    assert on_a_host(size, program) == [expected] * size


@pytest.mark.parametrize("size", [2, 3])
def test_arrays_are_reported_when_they_are_finished(size):
    """Not before their last slot is copied out, and not all at the end."""
    lengths = [100, 3 * SLOT_BYTES // 4, 5, 4 * SLOT_BYTES // 4]

    def program(region):
        arrays = [data("float32", count, region.rank, k) for k, count in enumerate(lengths)]
        seen = []

        def progress(finished):
            whole = [end <= finished for end in itertools.accumulate(lengths)]
            copies = [each.copy() for each, is_whole in zip(arrays, whole, strict=True) if is_whole]
            seen.append((finished, copies))

        results = allreduce(arrays, region, Reduction(Sum, TABLE["float32"], size), False, progress)
        assert seen[-1][0] == sum(lengths)
        for _, copies in seen:
            for early, late in zip(copies, results, strict=False):
                np.testing.assert_array_equal(early, late)

    on_a_host(size, program)


@pytest.mark.parametrize("way", range(WAYS))
def test_streamed_elements_begin_at_any_byte(way, all_are_large):
    """Of arrays that are shorter than a cache line, or whose ends are none of a line's."""
    lengths = [1, 15, 16, 17, 100, 4099, 3]

    def program(region):
        region.stores = Always(way)
        memory = np.zeros(4 * sum(lengths) + 3 * len(lengths) + 1, np.uint8)
        arrays, low = [], 1
        for k, count in enumerate(lengths):
            arrays.append(memory[low : low + 4 * count].view(np.float32))
            arrays[-1][...] = data("float32", count, region.rank, k)
            low += 4 * count + 3
        gaps = memory.copy()
        return allreduce(arrays, region, Reduction(Sum, TABLE["float32"], 3), False), gaps, memory

    for results, before, after in on_a_host(3, program):
        low = 1
        for k, (count, result) in enumerate(zip(lengths, results, strict=True)):
            parts = [data("float32", count, rank, k) for rank in range(3)]
            assert result.tobytes() == folded(Sum, parts).tobytes()
            before[low : low + 4 * count] = after[low : low + 4 * count]
            low += 4 * count + 3
        assert (before == after).all(), "nothing is written beside the arrays"


def test_only_what_no_cache_holds_streams(monkeypatch):
    """And the way of each operation is that of its class of sizes, which learns how long it took."""
    monkeypatch.setattr(compiled, "LARGE_BYTES", 4 * SLOT_BYTES)
    monkeypatch.setattr(stores, "LARGE_BYTES", 4 * SLOT_BYTES)
    counts = [SLOT_BYTES - 1, SLOT_BYTES, 3 * SLOT_BYTES, 4 * SLOT_BYTES]

    def program(region):
        asked, ended = [], []
        for size, each in enumerate(region.stores.classes):
            monkeypatch.setattr(each, "begin", lambda way=size + 1: way)
            monkeypatch.setattr(each, "end", ended.append)
        compiled_region = region.compiled
        region.compiled = SimpleNamespace(
            allreduce=lambda *args: (asked.append(args[-1]), compiled_region.allreduce(*args))[1]
        )
        for count in counts:
            allreduce([data("float32", count, region.rank, 0)], region, Reduction(Sum, TABLE["float32"], 2), False)
        assert asked == [0, 1, 1, 2]
        assert len(ended) == 3
        assert min(ended) > 0

    on_a_host(2, program)


@pytest.mark.parametrize("size", [2, 4])
def test_no_flag_is_seen_before_its_data(size, all_are_large):
    """A litmus: short and long operations follow each other as fast as ranks can, and each has other data."""
    reduction, long = Reduction(Sum, TABLE["float32"], size), 3 * SLOT_BYTES // 4

    def program(region):
        signatures = Signatures(region.window, 1, range(size), range(size), region.rank)
        short, many = np.empty(16, np.float32), np.empty(long, np.float32)
        exchanges = [
            InSlot(gets, region, 0, reduction).compiled(signatures, 7) for gets in (Gets.REDUCED, Gets.IN_CHUNKS)
        ]
        for number in range(2000):
            short[...] = size * number + region.rank
            assert exchanges[number % 2].run(short, short, number, region.sequence, 1e6) == 0
            assert (short == size * size * number + size * (size - 1) / 2).all()
            region.sequence += 1
            if number % 10 == 0:
                many[...] = number + region.rank
                region.stores = Always((number // 10 + region.rank) % WAYS)
                allreduce([many], region, Reduction(Sum, TABLE["float32"], size), False)
                assert (many == size * number + size * (size - 1) / 2).all()

    on_a_host(size, program)


def test_a_sum_of_blocks_in_two_places():
    parts = [np.random.default_rng(k).integers(0, 100, 4 * 258).astype(np.uint8) for k in range(3)]
    out, also, alone = (np.zeros_like(parts[0]) for _ in range(3))
    native.module.reduce(parts, out, also, 12, 0, 1.0, 3.0, 1.0)
    quantized.reduce(8, parts, alone, 3, 1.0)
    assert out.any()
    assert out.tobytes() == also.tobytes() == alone.tobytes()


def test_arguments_that_do_not_fit_are_refused():
    flags, memory = [np.zeros(128, np.uint8)] * 2, [np.zeros(4 * 64, np.uint8)] * 2
    region = native.module.Region(flags, memory, 0, 4)
    ones, numbers = np.ones(4, np.float32), Reduction(Average, TABLE["float32"], 2).compiled
    with pytest.raises(ValueError, match="array 0: 12 B into 16"):
        region.allreduce([ones[:3]], [ones], *numbers, 0, False, 16)
    for capacity in (0, 17):
        with pytest.raises(ValueError, match=f"{capacity} elements in 64 B"):
            region.allreduce([ones], [ones], *numbers, 0, False, capacity)
    for number, op in [(14, 0), (12, 1)]:  # blocks are only summed
        with pytest.raises(ValueError, match=f"type {number}, op {op}"):
            region.allreduce([ones], [ones], number, op, *numbers[2:], 0, False, 1)
    with pytest.raises(ValueError, match="array 1: 12 B, not 16"):
        native.module.reduce([ones, ones[:3]], ones.copy(), None, *numbers)
    with pytest.raises(ValueError, match="2 members, rank 2"):
        native.module.Region(flags, memory, 2, 4)
    with pytest.raises((ValueError, BufferError)):
        native.module.reduce([np.ones((2, 4))[:, 0]], np.ones(2), None, *numbers)
    with pytest.raises(ValueError, match="16 B into 16"):
        native.module.convert(ones, ones.copy(), False)
    of_bytes, blocks = np.ones(1024, np.uint8), np.ones(2 * 258, np.uint8)
    for elements, size, bits in [(1024, 257, 8), (1024, 258, 4), (1024, 258, 7), (1024, 516, 8), (1023, 258, 8)]:
        for arrays in (
            [of_bytes[:elements], blocks[:size], bits, False, 0],
            [blocks[:size], of_bytes[:elements], bits],
        ):
            with pytest.raises(ValueError, match=f"{len(arrays[0])} B into {len(arrays[1])}, in {bits} bits"):
                native.module.recode(*arrays)
    run = {gets: region.exchange(region, 0, 0, gets, *numbers, 2).run for gets in Gets if gets is not Gets.OF_ROOT}
    with pytest.raises(ValueError, match="root 2"):
        region.exchange(region, 0, 0, Gets.OF_ROOT, *numbers, 2)
    more = np.ones(20, np.float32)
    for gets, source, target in (
        (Gets.REDUCED, more, more.copy()),  # longer than a slot
        (Gets.REDUCED, ones, more[:5].copy()),
        (Gets.OWN_PART, ones, more[:3].copy()),  # from element 2 on
        (Gets.GATHERED, ones, more[:7].copy()),
    ):
        with pytest.raises(ValueError, match=f"{source.nbytes} B into {target.nbytes}, by a slot of 64"):
            run[gets](source, target, 0, 0, 0.0)
