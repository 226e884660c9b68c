"""What tests of collectives through shared memory have in common."""

import itertools
import random
import threading
import time

import numpy as np

from ringreduce.collectives.shared import BufferPair
from ringreduce.transport.window import Region, Window, block_bytes
from tests.support.patience import patient
from tests.support.reference import MATRIX

SLOT_BYTES = 64 << 10
LIMIT_S = 40


def be_slow(region, seed):
    """Now and then its rank sleeps: before it packs, sums or copies, and before it tells that it has."""
    draw, slots, publish = random.Random(f"{seed} {region.rank}"), region.slots, region.publish

    def slow_slots(sequence, dtype):
        dawdle(draw)
        return slots(sequence, dtype)

    def slow_publish(flag, sequence):
        dawdle(draw)
        publish(flag, sequence)
        dawdle(draw)

    region.slots, region.publish = slow_slots, slow_publish


def dawdle(draw, share=0.08):
    if draw.random() < share:
        time.sleep(draw.choice([0.0005, 0.002, 0.006]))


def on_a_host(size, program, slow=None):
    """Run program(region) on threads, each a rank of one host; returns what each returned, by rank.

    slow: the seed of how they dawdle.
    """
    failures, results = [], [None] * size
    until_s = time.monotonic() + patient(LIMIT_S)

    def check(rank):
        if failures or time.monotonic() > until_s:
            raise TimeoutError(f"waited for rank {rank} in vain")

    blocks = [np.zeros(block_bytes(SLOT_BYTES, 2), np.uint8) for _ in range(size)]
    window = Window(blocks, check=check)
    regions = [Region(window, 1, SLOT_BYTES, range(size), range(size), rank) for rank in range(size)]
    for region in regions if slow is not None else ():
        be_slow(region, slow)

    def run(rank):
        try:
            results[rank] = program(regions[rank])
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert len({region.sequence for region in regions}) == 1, (
        "the next operation begins with the same slot on all ranks"
    )
    return results


def slots_of(source, target, capacity, pieces):
    """Slots of `capacity` elements, cut into about so many parts altogether."""
    count = source.size
    inner = random.Random(count).sample(range(1, count), min(pieces, count) - 1) if count > 1 else []
    bounds = sorted({0, count, *range(0, count, capacity), *inner})
    slots = [[] for _ in range(0, count, capacity)]
    for low, high in itertools.pairwise(bounds):
        slots[low // capacity].append(BufferPair(source[low:high], target[low:high]))
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


def random_plan(seed, length, counts, **choices):
    """Operations of all kinds, each a dtype, op, count and options: short ones, one slot or many, one part or many."""
    draw = random.Random(seed)
    plan = []
    for _ in range(length):
        name, op = draw.choice(MATRIX)
        count = draw.choice(counts)
        options = {
            "capacity": draw.choice([10**9, max(1, count // draw.randint(1, 9))]),
            "pieces": draw.choice([1, 2, 9]),
            "in_place": draw.random() < 0.5,
        }
        plan.append((name, op, count, options | {key: draw.choice(values) for key, values in choices.items()}))
    return plan
