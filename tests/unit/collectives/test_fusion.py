import contextlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.arrays.view import as_buffer
from ringreduce.collectives import fusion
from ringreduce.collectives.fusion import Piece

CAPACITY = 16
counts_lists = st.lists(st.integers(0, 60), max_size=30)


def tensors_of(buckets):
    return [[piece.tensor for piece in bucket.pieces] for bucket in buckets]


def test_small_tensors_share_a_slot_and_long_ones_stream_through():
    buckets = fusion.plan((3, 4, 16, 5, 40, 0), CAPACITY, whole=True)
    assert tensors_of(buckets) == [[0, 1, 3], [2], [4], [4], [4]]
    assert [bucket.pieces for bucket in buckets[2:]] == [(Piece(4, 0, 16),), (Piece(4, 16, 32),), (Piece(4, 32, 40),)]


def test_a_full_slot_is_closed():
    assert tensors_of(fusion.plan((10, 10, 3), CAPACITY, whole=True)) == [[0], [1, 2]]


@given(counts_lists)
def test_every_element_travels_once_in_slots_that_are_full_at_most(counts):
    buckets = fusion.plan(tuple(counts), CAPACITY, whole=True)
    travelling = sorted((piece.tensor, n) for bucket in buckets for piece in bucket.pieces for n in range(*piece[1:]))
    assert travelling == [(number, n) for number, count in enumerate(counts) for n in range(count)]
    for bucket in buckets:
        assert bucket.length == sum(piece.high - piece.low for piece in bucket.pieces) <= CAPACITY
        assert len(bucket.pieces) == 1 or all(piece.high - piece.low == counts[piece.tensor] for piece in bucket.pieces)


@given(counts_lists)
def test_what_is_packed_is_unpacked_into_its_place(counts):
    inputs = [as_buffer(np.arange(n, dtype=np.float32) + 100 * k) for k, n in enumerate(counts)]
    outputs = [each.empty(each.shape) for each in inputs]
    for bucket in fusion.plan(tuple(counts), CAPACITY, whole=True):
        packed = np.empty(bucket.length, np.float64)
        fusion.pack(bucket, inputs, packed, widen=lambda flat: flat.astype(np.float64))
        fusion.unpack(bucket, packed * 2, outputs)
    for number, output in enumerate(outputs):
        np.testing.assert_array_equal(output.flat, 2 * (np.arange(counts[number]) + 100 * number))


def test_blocks_are_used_again_and_lie_in_one_allocation():
    memory = fusion.FusionBuffer(total_bytes=64, block_bytes=16)
    with contextlib.ExitStack() as uses:
        *blocks, beyond = [uses.enter_context(memory.block()) for _ in range(5)]
        assert {block.size for block in blocks} == {16}
        assert all(block.base is blocks[0].base for block in blocks)
        assert not any(np.shares_memory(one, other) for one in blocks for other in blocks if one is not other)
        assert beyond.base is not blocks[0].base, "made for the moment"
    # the one made for the moment was given back first: it must not take the place of another
    with contextlib.ExitStack() as uses:
        assert all(uses.enter_context(memory.block()).base is blocks[0].base for _ in range(4))


@given(counts_lists, st.sampled_from([1, 2, 4, 8]))
def test_aligned_pieces_cover_every_element_once_and_begin_where_many_bytes_are_read_at_once(counts, alignment):
    buckets = fusion.plan(tuple(counts), CAPACITY, alignment=alignment)
    travelling = [
        (piece.tensor, n) for bucket in buckets for piece in bucket.pieces for n in range(piece.low, piece.high)
    ]
    assert travelling == [(number, n) for number, count in enumerate(counts) for n in range(count)], "in order, once"
    for bucket in buckets:
        assert bucket.length <= CAPACITY
        assert bucket.length % alignment == 0
        assert all(start % alignment == 0 for start in bucket.starts)
        assert all(piece.low % alignment == 0 < piece.high - piece.low for piece in bucket.pieces)
        ends = [start + piece.high - piece.low for start, piece in zip(bucket.starts, bucket.pieces, strict=True)]
        gaps = [start - end for start, end in zip([*bucket.starts, bucket.length], [0, *ends], strict=True)]
        assert all(0 <= gap < alignment for gap in gaps), "pieces do not overlap, and no more than needed is left out"
    assert all(bucket.length == CAPACITY for bucket in buckets[:-1]), "all but the last are full"


def test_a_tensor_is_cut_at_a_multiple_of_the_alignment():
    first, second, third = fusion.plan((3, 30), CAPACITY, alignment=4)
    assert first == ((Piece(0, 0, 3), Piece(1, 0, 12)), (0, 4), 16)
    assert second == ((Piece(1, 12, 28),), (0,), 16)
    assert third == ((Piece(1, 28, 30),), (0,), 4)
