"""Many tensors, few messages: the plan of which tensors travel together, and packing and unpacking them.

    tensors    |w1|b1|   w2   |b2|          w3           |b3|         (of one element type)
    slots      |w1|b1|   w2   |b2|b3|   |          w3           |
                packed, one message        alone: travels in place, without a copy

Tensors of one element type share slots, in the order given. A tensor as large as a slot travels alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ringreduce import buffers
from ringreduce.buffers import Buffer
from ringreduce.dtypes import ElementType


@dataclasses.dataclass(frozen=True)
class Slot:
    """Tensors that travel together."""

    element: ElementType
    device: str
    tensors: tuple[int, ...]
    """Their numbers, in the order in which they lie in the slot."""
    count: int
    """Elements of all together."""


def plan(tensors: Sequence[Buffer], slot_bytes: int) -> list[Slot]:
    """Which tensors share a slot. Depends on counts, element types, devices and order only, so all ranks plan the same.

    Empty tensors are in no slot.
    """
    slots: list[Slot] = []
    open_slots: dict[tuple[str, str], int] = {}
    for number, tensor in enumerate(tensors):
        if tensor.count == 0:
            continue
        kind = (tensor.element.name, tensor.device)
        index = open_slots.get(kind)
        alone = tensor.nbytes >= slot_bytes
        fits = index is not None and slots[index].count * tensor.element.itemsize + tensor.nbytes <= slot_bytes
        if index is not None and fits and not alone:
            slot = slots[index]
            slots[index] = dataclasses.replace(slot, tensors=(*slot.tensors, number), count=slot.count + tensor.count)
            continue
        if not alone:
            open_slots[kind] = len(slots)
        slots.append(Slot(tensor.element, tensor.device, (number,), tensor.count))
    return slots


def pack(slot: Slot, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Any:
    """The slot's elements in one flat array to be changed in place.

    A copy of the inputs; or the output's own memory, filled from the input, for a tensor that is alone.
    """
    if len(slot.tensors) == 1:
        (number,) = slot.tensors
        if outputs[number] is not inputs[number]:
            outputs[number].flat[...] = inputs[number].flat
        return outputs[number].flat
    packed = buffers.empty_like(inputs[slot.tensors[0]].flat, slot.count, slot.element.storage)
    start = 0
    for number in slot.tensors:
        flat = inputs[number].flat
        packed[start : start + flat.size] = flat
        start += flat.size
    return packed


def unpack(slot: Slot, packed: Any, outputs: Sequence[Buffer]) -> None:
    """Copy a slot's elements into the outputs; nothing for a tensor that is alone."""
    if len(slot.tensors) == 1:
        return
    start = 0
    for number in slot.tensors:
        flat = outputs[number].flat
        flat[...] = packed[start : start + flat.size]
        start += flat.size
