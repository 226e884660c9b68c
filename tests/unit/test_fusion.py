import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringreduce import fusion
from ringreduce.buffers import as_buffer

SLOT_BYTES = 64


def numbered(counts, dtypes):
    return [
        as_buffer(np.arange(n).astype(dtype) + 10 * k) for k, (n, dtype) in enumerate(zip(counts, dtypes, strict=True))
    ]


def test_small_tensors_share_a_slot_and_large_ones_travel_alone():
    slots = fusion.plan(numbered([3, 4, 16, 5, 100, 0], ["f4"] * 6), SLOT_BYTES)
    assert [slot.tensors for slot in slots] == [(0, 1, 3), (2,), (4,)]


def test_another_type_does_not_close_the_slot():
    slots = fusion.plan(numbered([3, 3, 3, 3], ["f4", "f8", "f4", "f8"]), SLOT_BYTES)
    assert [(slot.element.name, slot.tensors) for slot in slots] == [("float32", (0, 2)), ("float64", (1, 3))]


def test_a_full_slot_is_closed():
    slots = fusion.plan(numbered([10, 10, 3], ["f4"] * 3), SLOT_BYTES)
    assert [slot.tensors for slot in slots] == [(0,), (1, 2)]


tensor_lists = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["f4", "f8", "i2"])), max_size=30)


@given(tensor_lists)
def test_every_element_travels_once_in_slots_that_are_full_at_most(tensors):
    inputs = numbered(*([list(column) for column in zip(*tensors, strict=True)] or [[], []]))
    slots = fusion.plan(inputs, SLOT_BYTES)
    assert sorted(n for slot in slots for n in slot.tensors) == [n for n, each in enumerate(inputs) if each.count]
    for slot in slots:
        assert slot.count == sum(inputs[n].count for n in slot.tensors)
        assert slot.count * slot.element.itemsize <= SLOT_BYTES or len(slot.tensors) == 1


@given(tensor_lists)
def test_what_is_packed_is_unpacked_into_its_place(tensors):
    inputs = numbered(*([list(column) for column in zip(*tensors, strict=True)] or [[], []]))
    before = [each.flat.copy() for each in inputs]
    outputs = [each.empty(each.shape) for each in inputs]
    for slot in fusion.plan(inputs, SLOT_BYTES):
        packed = fusion.pack(slot, inputs, outputs)
        packed *= 2
        fusion.unpack(slot, packed, outputs)
    for old, given_array, output in zip(before, inputs, outputs, strict=True):
        np.testing.assert_array_equal(given_array.flat, old)
        np.testing.assert_array_equal(output.flat, old * 2)
