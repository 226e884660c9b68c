"""What tests of all-reduces through shared memory have in common."""

import itertools
import random

import numpy as np

from ringreduce.collectives.shared import Part


def slots_of(source, target, capacity, pieces):
    """Slots of `capacity` elements, cut into about so many parts altogether."""
    count = source.size
    inner = random.Random(count).sample(range(1, count), min(pieces, count) - 1) if count > 1 else []
    bounds = sorted({0, count, *range(0, count, capacity), *inner})
    slots = [[] for _ in range(0, count, capacity)]
    for low, high in itertools.pairwise(bounds):
        slots[low // capacity].append(Part(source[low:high], target[low:high]))
    return slots


def reduced(array, storage, capacity, pieces, in_place, run):
    """This rank's result of run(slots); both memories are its own again at once, and it writes nonsense there."""
    source = array.copy().view(storage)
    target = source if in_place else np.zeros_like(source)
    run(slots_of(source, target, capacity, pieces))
    result = target.copy().view(array.dtype)
    assert in_place or source.tobytes() == array.tobytes(), "the input stays as it was"
    source.view(np.uint8)[...] = 0x55
    target.view(np.uint8)[...] = 0x55
    return result
