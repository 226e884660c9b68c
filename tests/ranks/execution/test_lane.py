"""Short sums of a channel without a submission: as with one, beside these, and when ranks are late or differ."""

import itertools
import random
import re
import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.view import to_write
from ringreduce.collectives import compiled
from ringreduce.collectives.compiled import PATIENCE_US
from ringreduce.execution import lane as of_lane
from ringreduce.kernels import native
from ringreduce.runtime.own_channel import OwnChannel
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.window import PACKED
from tests.support.patience import wait_until
from tests.support.tiers import SEEDS
from tests.support.world import on_every_world, on_every_world_and_hosts

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(native.module is None, reason=f"the compiled module: {native.MISSING}"),
]


def counted(channel):
    """How many of its calls have taken the lane, and how many have not."""
    lane, counts = channel._lane, [0, 0]
    run = lane.run

    def counting(*arguments):
        taken = run(*arguments)
        counts[not taken] += 1
        return taken

    lane.run = counting
    return counts


def until_taken(more_than, counts, once):
    """What `once` returns, called again until it has taken the lane so often on each rank: others may be late."""
    found = []
    for _ in range(40):
        found.append(once())
        if rr.allreduce(counts[0], op=rr.Min) > more_than:
            return found, counts[0]
    return found, counts[0]


def element(rank, number, count):
    return np.arange(count, dtype=np.float32) % 7 + 100 * rank + number


@pytest.mark.parametrize("root", [1.0, "keyword"])
def test_a_root_that_only_equals_a_rank_is_refused_whether_the_lane_knows_the_rank_or_not(root):
    args, kwargs = ((), {"root_rank": 1.0}) if root == "keyword" else ((root,), {})

    def program():
        channel = rr.ordered()
        for known in range(5):
            with pytest.raises(rr.InputError, match="root"):
                channel.broadcast_(np.ones(4), *args, **kwargs)
            for _ in range(4):
                good = ((), {"root_rank": 1}) if kwargs else ((1,), {})
                array = np.full(4, rr.rank() + 10.0 * known)
                assert channel.broadcast_(array, *good[0], **good[1]).tolist() == [1 + 10.0 * known] * 4
        return True

    assert run_ranks(2, program) == [True] * 2


def plan(seed, size):
    """Operations of all kinds: what, how many elements, op or root; "under way" is one while others come."""
    draw = random.Random(seed)
    kinds = ["allreduce", "allreduce", "new", "new", "gather", "scatter", "broadcast", "barrier", "under way"]
    for number in range(200):
        kind = draw.choice(kinds)
        chosen = draw.randrange(size) if kind == "broadcast" else draw.choice([rr.Sum, rr.Max, rr.Average])
        yield number, kind, 50_000 if kind == "under way" else draw.choice([1, 2, 999, 4096, 30_001]), chosen


def rows(count, number, rank):
    """Of an allgather; each fifth time they differ by rank."""
    return max(count - rank, 0) if number % 5 == 0 else count


def reference(arrays, number, kind, chosen, rank):
    if kind == "broadcast":
        return arrays[chosen]
    if kind == "gather":
        return np.concatenate([each[: rows(len(each), number, k)] for k, each in enumerate(arrays)])
    if kind == "scatter":
        return np.array_split(sum(arrays[1:], arrays[0]), len(arrays))[rank]
    total = np.maximum.reduce(arrays) if chosen is rr.Max else sum(arrays[1:], arrays[0])
    return total / np.float32(len(arrays)) if chosen is rr.Average else total


@on_every_world_and_hosts
@pytest.mark.parametrize("seed", SEEDS)
def test_operations_are_the_same_whichever_way_each_rank_takes(world, size, seed):
    least = 10 if getattr(world(size), "hosts", None) is None else 5

    def program():
        channel, mine = rr.ordered(), random.Random(f"{seed} {rr.rank()}")
        counts, lane = counted(channel), channel._lane
        of_lane.PATIENCE_US = 2_000  # for ranks that are late on busy cores
        found = until_taken(least, counts, lambda: once(channel, lane, mine))
        of_lane.PATIENCE_US = PATIENCE_US
        return found

    def once(channel, lane, mine):
        found, pending = [], []
        for number, kind, count, chosen in plan(seed, size):
            channel._lane = lane if mine.random() < 0.8 else None
            time.sleep(0.002 * (mine.random() < 0.03))
            array = element(rr.rank(), number, count)
            if kind == "barrier":
                channel.barrier()
            elif kind == "broadcast":
                assert channel.broadcast_(array, chosen) is array
                found.append(array.tobytes())
            elif kind == "allreduce":
                assert channel.allreduce_(array, op=chosen) is array
                found.append(array.tobytes())
            elif kind == "new":
                found.append(channel.allreduce(array, op=chosen).tobytes())
                np.testing.assert_array_equal(array, element(rr.rank(), number, count))
            elif kind == "gather":  # each fifth time of different lengths
                found.append(channel.allgather(array[: rows(count, number, rr.rank())]).tobytes())
            elif kind == "scatter":
                found.append(channel.reducescatter(array.reshape(-1, 1), op=rr.Sum).tobytes())
            else:
                pending.append(channel.allreduce_async(array, op=chosen))
        return found + [each.wait().tobytes() for each in pending]

    for rank, (found, taken) in enumerate(world(size).run(program)):
        expected, pending = [], []
        for number, kind, count, chosen in plan(seed, size):
            arrays = [element(each, number, count) for each in range(size)]
            if kind != "barrier":
                result = reference(arrays, number, kind, chosen, rank).tobytes()
                (pending if kind == "under way" else expected).append(result)
        assert found == [expected + pending] * len(found)
        assert taken > least


@on_every_world
@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_all_ranks(world, size, seed):
    """Into arrays that the caller gives; some ranks' calls take the lane, others' do not."""

    def program():
        mine = random.Random(f"{seed} {rr.rank()}")
        channel = OwnChannel(range(size), "of a test", 30, "call it again")
        counts, lane = counted(channel), channel._lane
        return until_taken(20, counts, lambda: once(channel, lane, mine))

    def once(channel, lane, mine):
        rank, results = rr.rank(), []
        for number in range(60):
            channel._lane = lane if mine.random() < 0.8 else None
            time.sleep(0.002 * (mine.random() < 0.03))
            count = (1, 999, 20_000)[number % 3]
            part, whole = element(rank, number, count), element(rank, number, size * count)
            gathered, own = np.empty(size * count, np.float32), np.empty(count, np.float32)
            arrays = [to_write([each])[0][0] for each in (part, gathered, whole, own)]
            channel.all_gather_single(*arrays[:2], waits=True).wait()
            channel.reduce_scatter_single(*arrays[2:], rr.Sum, 0.5, waits=True).wait()
            results.append((gathered.tobytes(), own.tobytes()))
        return results

    for rank, (found, taken) in enumerate(world(size).run(program)):
        assert taken > 20
        for number, (gathered, own) in enumerate(itertools.chain(*found)):
            number %= 60
            count = (1, 999, 20_000)[number % 3]
            assert gathered == np.concatenate([element(each, number, count) for each in range(size)]).tobytes()
            halves = [np.float32(0.5) * element(each, number, size * count) for each in range(size)]
            assert own == sum(halves[1:], halves[0])[rank * count : (rank + 1) * count].tobytes()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_sums_in_pieces_are_the_same_whichever_way_each_rank_takes(size, seed, monkeypatch):
    """Of arrays longer than a slot; ranks are late before they sign and afterwards; in place and into new memory."""
    begin, draws = compiled.allreduce, [random.Random(f"{seed} {rank}") for rank in range(size)]

    def sometimes_late(sources, targets, region, *others):
        time.sleep(0.005 * (draws[region.rank].random() < 0.1))
        return begin(sources, targets, region, *others)

    monkeypatch.setattr(compiled, "allreduce", sometimes_late)

    def program():
        channel, rank, handed_over = rr.ordered(), rr.rank(), []
        counts, lane, mine = counted(channel), channel._lane, draws[rr.rank()]
        run = lane.run

        def watching(*arguments):
            taken = run(*arguments)
            if lane._channel.rest is not None:
                handed_over.append(arguments[0])
            return taken

        lane.run = watching
        for number in range(120):
            channel._lane = lane if mine.random() < 0.8 else None
            time.sleep(0.002 * (mine.random() < 0.03))
            count = (3000, 20_001)[number % 2]
            array, expected = element(rank, number, count), sum(element(each, number, count) for each in range(size))
            if number % 3:
                result = channel.allreduce_(array, op=rr.Sum)
                assert result is array
            else:
                result = channel.allreduce(array, op=rr.Sum)
                np.testing.assert_array_equal(array, element(rank, number, count))
            np.testing.assert_array_equal(result, expected, strict=True)
        return counts[0], len(handed_over)

    found = run_ranks(size, program, settings=Settings(shared_slot_bytes=1 << 12), timeout_s=40)
    if size > 1:
        assert sum(taken for taken, _ in found) > 10, found
        assert sum(handed_over for _, handed_over in found) > 0, found


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end pytest where the test fails."""


@pytest.mark.parametrize("count", [3, 3000])
def test_a_failure_in_the_lane_ends_the_engine_and_nothing_is_signed_again(count, monkeypatch):
    """Nor does the lane go on. What cannot be used is submitted, which is known before it is signed."""
    begin, broken = compiled.allreduce, []
    both_are_ready = threading.Barrier(2)  # rr.barrier() may yet run on rank 1 when rank 0 goes on, and fails

    def allreduce(sources, targets, region, *others):
        if broken and region.rank == 0:
            raise ValueError("of a test")
        return begin(sources, targets, region, *others)

    monkeypatch.setattr(compiled, "allreduce", allreduce)

    def interrupted(run):
        def runs(*arguments):
            found = run(*arguments)
            if broken:
                raise Interrupted("of a test")
            return found

        return runs

    def until_it_fails(channel, array):  # when rank 0 takes the lane
        while True:
            channel.allreduce_(array, op=rr.Max)

    def program():
        channel, ones = rr.ordered(), np.ones(count)
        for _ in range(5):
            channel.allreduce_(ones, op=rr.Max)
        (known,) = channel._lane.programs._by_call.values()
        if rr.rank() == 0 and not known.in_pieces:
            known.run = interrupted(known.run)
        both_are_ready.wait()
        broken.append(rr.rank())
        failure = (Interrupted, ValueError, rr.CollectiveError) if rr.rank() == 0 else rr.CollectiveError
        with pytest.raises(failure, match="of a test"):
            until_it_fails(channel, ones)
        for _ in range(3):
            with pytest.raises(rr.CollectiveError, match="rank 0 of 2 failed inside an operation"):
                channel.allreduce_(ones, op=rr.Max)

    run_ranks(2, program, settings=Settings(shared_slot_bytes=1 << 12))


@on_every_world
def test_a_rank_that_is_late_with_its_chunk(world, size):
    """All have signed; the others' calls leave the lane when they wait for its sums."""

    def program():
        channel, rank = rr.ordered(), rr.rank()
        for _ in range(2):
            channel.allreduce_(np.ones(30_000, np.float32), op=rr.Sum)
        counts = counted(channel)
        channel._lane, lane = None if rank == 0 else channel._lane, channel._lane
        if rank == 0:  # signs, sums late
            region = lane._channel.executor.context.algorithms.shared_region
            publish = region.publish
            region.publish = lambda *which: (time.sleep(0.05), publish(*which))
        array = element(rank, 0, 30_000)
        channel.allreduce_(array, op=rr.Sum)
        taken = list(counts)
        return array.tobytes(), channel.allreduce(np.ones(1), op=rr.Sum).tolist(), taken

    arrays = [element(rank, 0, 30_000) for rank in range(size)]
    for rank, (array, one, taken) in enumerate(world(size).run(program)):
        assert array == sum(arrays[1:], arrays[0]).tobytes()
        assert one == [size]
        assert rank == 0 or taken == [0, 1]


@on_every_world_and_hosts
def test_late_ranks_and_operations_that_differ(world, size, monkeypatch):
    monkeypatch.setattr(of_lane, "TAKE_OVER_S", 10)  # of threads: the engine's may be looking, and lose the core

    def program():
        channel, rank = rr.ordered(), rr.rank()
        ones, two = np.ones(3), np.ones((2, 2))
        for _ in range(3):
            channel.allreduce_(ones, op=rr.Max)
            channel.allreduce_(two, op=rr.Max)
        counts = counted(channel)
        time.sleep(0.05 * (rank == 0))
        channel.allreduce_(ones, op=rr.Sum)  # not known yet
        signatures = channel._lane._channel.signatures
        if rank == 0 and signatures is not None:
            wait_until(lambda: all(each[PACKED] > signatures.sequence for each in signatures._flags[1:]))
        wait_until(lambda: not channel._lane._queue)  # nor has the engine's thread anything left to do
        time.sleep(0.05 * (rank == 0))
        channel.allreduce_(ones, op=rr.Sum)  # known, and rank 0 is late
        late, total = list(counts), ones.tolist()
        messages = []
        for odd, its, other in ((0, ones, two), (0, two, ones), (size - 1, two, ones)):
            with pytest.raises(rr.MismatchError) as raised:
                channel.allreduce_(its if rank == odd else other, op=rr.Max)
            messages.append(str(raised.value))
        with pytest.raises(rr.MismatchError) as raised:
            channel.barrier() if rank else channel.allreduce_(ones, op=rr.Max)
        messages.append(str(raised.value))
        return late, total, messages, channel.allreduce_(np.full(3, float(rank)), op=rr.Max).tolist()

    for rank, (late, total, messages, after) in enumerate(world(size).run(program)):
        if getattr(world(size), "hosts", None) is None:
            assert late[0] == (rank == 0)  # whoever came last
        assert total == [size**2] * 3
        wide = r"float64\[2, 2\], but rank 0"
        for message, text in zip(messages, [wide, r"\[3\], but rank 0", wide, "barrier"], strict=True):
            assert re.search(text, message), message
            assert "test_lane.py" in message
        assert after == [size - 1] * 3


@on_every_world_and_hosts
def test_a_rank_that_is_unsafe_waits_for_other_hosts_outside_of_the_lane(world, size):
    """There its handler may raise, or call a collective; while the compiled module waits, no handler runs."""

    def program():
        channel, ones = rr.ordered(), np.ones(3)
        channel.allreduce_(ones, op=rr.Max)
        (known,) = channel._lane.programs._by_call.values()
        counts, channel._lane._is_unsafe = counted(channel), lambda: True
        for _ in range(20):
            channel.allreduce_(ones, op=rr.Max)
        return known.in_python, counts[0]

    found = world(size).run(program)
    assert any(in_python for in_python, _ in found) == (getattr(world(size), "hosts", None) is not None)
    assert not any(in_python and taken for in_python, taken in found)


@on_every_world_and_hosts
def test_memory_that_the_lane_cannot_take(world, size):
    def program():
        channel = rr.ordered()
        wide = np.full((4, 6), float(rr.rank()))
        for _ in range(3):
            channel.allreduce_(wide[:, ::2], op=rr.Sum)  # rows with gaps
        read_only = np.ones(3)
        channel.allreduce_(read_only.copy(), op=rr.Sum)
        read_only.flags.writeable = False
        with pytest.raises(rr.InputError, match="read-only"):
            channel.allreduce_(read_only, op=rr.Sum)
        with pytest.raises(TypeError, match=r"allreduce_\(\) missing 1 .* 'tensor'"):
            channel.allreduce_()
        return wide.tolist(), channel.allreduce_(np.float64([[1, 2]]).T.copy(), op=rr.Sum).tolist()

    for rank, (wide, small) in enumerate(world(size).run(program)):
        total = size * (size - 1) / 2 * size**2
        assert wide == [[total, float(rank)] * 3] * 4
        assert small == [[size], [2 * size]]


def test_results_into_memory_that_is_kept_take_the_lane():
    def program():
        channel, rank = rr.ordered(), rr.rank()
        rows, own = np.empty(128), np.empty(32)
        counts = None
        for number in range(20):
            assert channel.allgather(element(rank, number, 64).astype(np.float64), out=rows) is rows
            np.testing.assert_array_equal(rows, np.concatenate([element(each, number, 64) for each in range(2)]))
            assert channel.reducescatter(np.full(64, 1.0 + rank), op=rr.Sum, out=own) is own
            assert (own == 3).all()
            counts = counts or counted(channel)
        with pytest.raises(rr.InputError, match="out"):
            channel.reducescatter(np.ones(64), op=rr.Sum, out=np.empty(32, np.float32))
        whole = np.ones(128)
        with pytest.raises(rr.InputError, match="out"):
            channel.allgather(whole[:64], out=whole)
        return counts[0]

    assert min(run_ranks(2, program)) > 0
