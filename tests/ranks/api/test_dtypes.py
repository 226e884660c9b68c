"""Elements of any type of a fixed size are moved, as bytes; what cannot be added up is refused by name, with a cure.

And averages of 64-bit integers, whose sums are longer than 64 bits.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest

import ringreduce as rr
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.loops import in_a_loop
from tests.support.tiers import adapters, parted

torch = pytest.importorskip("torch", reason="torch is not installed: its tensors are not tested here")
hvd = pytest.importorskip("ringreduce.torch")

RECORD = np.dtype([("id", "<i4"), ("at", "<f8", 2), ("name", "S3")])
NUMPY = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.int4, ml_dtypes.uint2, ">f8", ">u2", "longdouble"]
NUMPY += ["clongdouble", "M8[ns]", "m8[s]", "S5", "U7", "V3", RECORD]
TORCH = [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "uint16",
    "uint32",
    "uint64",
    "complex32",
]
HOSTS = [(0, 0, 0), (0, 1, 2), (0, 0, 1)]


def numpy_bytes(dtype):
    def make(rows, rank):
        dtype_ = np.dtype(dtype)
        memory = np.random.default_rng([rank, rows]).integers(65, 90, (rows, 2, dtype_.itemsize), np.uint8)
        return memory.view(dtype_).reshape(rows, 2)

    return make


def torch_bytes(name):
    def make(rows, rank):
        dtype = getattr(torch, name)
        memory = torch.arange(rows * 2 * dtype.itemsize, dtype=torch.uint8) * 3 + rank
        return memory.reshape(rows, -1).view(dtype)

    return make


def same(found, expected):
    assert type(found) is type(expected)
    assert (found.dtype, tuple(found.shape)) == (expected.dtype, tuple(expected.shape))
    if isinstance(found, torch.Tensor):
        found, expected = (each.contiguous().view(torch.uint8).numpy() for each in (found, expected))
    assert found.tobytes() == expected.tobytes()


def joined(parts):
    if isinstance(parts[0], torch.Tensor):
        return torch.cat([each.view(torch.uint8) for each in parts]).view(parts[0].dtype)
    return np.frombuffer(b"".join(each.tobytes() for each in parts), parts[0].dtype).reshape(-1, 2)


def moved(make):
    rank, size = rr.rank(), rr.size()
    even, uneven = [make(6, each) for each in range(size)], [make(1 + 2 * each, each) for each in range(size)]
    for channel in (rr, rr.ordered()):
        same(channel.broadcast(even[rank], 1), even[1])
        target = make(6, rank)
        assert channel.broadcast_(target, 2) is target
        same(target, even[2])
        same(channel.allgather(uneven[rank]), joined(uneven))
        same(channel.alltoall(even[rank]), joined([each[2 * rank : 2 * rank + 2] for each in even]))
    together = rr.grouped_allgather([uneven[rank], np.full(2, rank)])
    same(together[0], joined(uneven))
    assert together[1].tolist() == [0, 0, 1, 1, 2, 2]
    found = channel.gather(uneven[rank], 1)
    if rank == 1:
        same(found, joined(uneven))
    same(channel.scatter(even[rank], 2), even[2][2 * rank : 2 * rank + 2])
    handle = channel.send_async(uneven[rank], (rank + 1) % size)
    same(channel.recv(make(1 + 2 * ((rank - 1) % size), rank), (rank - 1) % size), uneven[(rank - 1) % size])
    handle.wait()


@pytest.mark.parametrize(
    "hosts", [pytest.param(hosts, marks=[adapters] * (hosts != (0, 0, 1))) for hosts in HOSTS], ids=str
)
@pytest.mark.parametrize("kind", [*NUMPY, *TORCH], ids=str)
def test_they_are_moved_whole(kind, hosts):
    made = torch_bytes(kind) if kind in TORCH else numpy_bytes(kind)
    run_ranks(3, lambda: moved(made), hosts=hosts)


def test_long_ones_are_moved_whole():
    """Longer than a slot, all together and each."""
    record = np.dtype([("image", np.uint8, (1100, 1000))])

    def program():
        for dtype, rows in ((ml_dtypes.float8_e5m2, 3_000_001), (RECORD, 100_003), (record, 2)):
            whole = [np.random.default_rng(each).bytes(rows * np.dtype(dtype).itemsize) for each in range(3)]
            mine = np.frombuffer(whole[rr.rank()], dtype)
            assert rr.broadcast(mine, 1).tobytes() == whole[1]
            assert rr.allgather(mine).tobytes() == b"".join(whole)

    for hosts in HOSTS:
        run_ranks(3, program, hosts=hosts)


@pytest.mark.parametrize("dtype", ["S3", RECORD, "U7", "U20", np.dtype([("box", "<f8", 20)])], ids=str)
def test_rows_of_any_length_are_gathered_whichever_way_each_rank_takes(dtype):
    """Longer than a cache line, or of a length that does not divide one; known, and then of other numbers of rows."""
    make = numpy_bytes(dtype)

    def program():
        ordered = rr.ordered()
        for rows in ([3, 3], [3, 3], [3, 3], [3, 3], [2, 3], [3, 1], [0, 3], [0, 0], [3, 3]):
            everyones = [make(each, rank) for rank, each in enumerate(rows)]
            for channel in (rr, ordered):
                same(channel.allgather(everyones[rr.rank()]), joined(everyones))

    run_ranks(2, program)


REFUSED = {
    ml_dtypes.float8_e4m3fn: r"float8_e4m3fn .*convert them, such as array.astype\('float32'\)",
    ml_dtypes.int4: r"int4 .*array.astype\('float32'\)",
    ">f8": r">f8 .*byte order of other machines: pass array.astype\(array.dtype.newbyteorder\('='\)\)",
    "longdouble": r"float128 .*array.astype\('float64'\)",
    "M8[ns]": r"datetime64\[ns\] .*pass array.view\('int64'\)",
    "S5": r"\|S5 .*they can be broadcast, gathered and exchanged only",
    RECORD: r"\[\('id', .*they can be broadcast",
}


@in_a_loop("dtype", REFUSED)
def test_what_is_not_added_up_is_refused_with_its_name_and_the_cure(dtype):
    array, why = np.zeros(3, dtype), REFUSED[dtype]

    def program():
        for op in (rr.Sum, rr.Average, rr.Max):
            with pytest.raises(ValueError, match=f"^allreduce 'opt.scale': elements of type {why}"):
                rr.allreduce({"w": np.ones(3), "opt": {"scale": array}}, op=op)
        with pytest.raises(ValueError, match=f"^allreduce, tensor 2 of 2: elements of type {why}"):
            rr.grouped_allreduce_([np.ones(2), array.copy()])
        with pytest.raises(ValueError, match=f"^reducescatter: elements of type {why}"):
            rr.reducescatter(array)
        with pytest.raises(ValueError, match=f"^allreduce: elements of type {why}"):
            rr.ordered().allreduce(array)
        assert rr.allreduce(np.float64(rr.rank()), op=rr.Sum) == 1

    run_ranks(2, program)


def test_ranks_that_move_other_types_are_told():
    def program():
        with pytest.raises(
            rr.MismatchError, match=r"rank 1 of 2, broadcast 'w' .*: >f8\[3\], but rank 0 has float64\[3\]"
        ):
            rr.broadcast(np.zeros(3, ">f8" if rr.rank() else "<f8"), 0, name="w")

    run_ranks(2, program)


ELSEWHERE = [np.array([1, "a"], object), np.zeros(2, [("a", "O")]), np.array(["a"], np.dtypes.StringDType())]


@pytest.mark.parametrize("array", ELSEWHERE, ids=str)
def test_what_refers_to_other_memory_cannot_be_moved(array):
    def program():
        for call in (rr.allreduce, rr.allgather, lambda each: rr.broadcast(each, 0)):
            with pytest.raises(rr.UnsupportedArrayError, match=r"have no fixed size; .* or use broadcast_object"):
                call(array)

    run_ranks(2, program)


def stamps(name, count, rank):
    """Nanoseconds: six or more of them are beyond int64, and three of these uint64."""
    largest = 1_753_000_000_000_000_000 if name == "int64" else np.iinfo(name).max
    found = np.array([largest - index - 1000 * rank for index in range(count)], name)
    return np.where(np.arange(count) % 3 == 1, -found, found) if name == "int64" else found


def exact_means(name, live):
    count, size = 301, rr.size()
    channel = rr.ordered()
    several = rr.add_process_set([0, size - 1])
    sums = [sum(column) for column in zip(*(stamps(name, count, each).tolist() for each in live), strict=True)]
    expected = [abs(each) // len(live) * (-1 if each < 0 else 1) for each in sums]
    if rr.rank() not in live:
        rr.join(live_average=True)
        return
    mine = stamps(name, count, rr.rank())
    both = rr.grouped_allreduce([mine, torch.from_numpy(mine)] if name == "int64" else [mine, mine[:0]])
    assert [both[0].tolist(), rr.allreduce(mine).tolist(), rr.allreduce_(mine.copy()).tolist()] == [expected] * 3
    if len(live) < size:
        rr.join(live_average=True)
        return
    for _ in range(3):  # the second one takes the lane
        assert channel.allreduce(mine[:7]).tolist() == expected[:7]
    lengths = [count // size + (each < count % size) for each in range(size)]
    low = sum(lengths[: rr.rank()])
    assert rr.reducescatter(mine).tolist() == expected[low : low + lengths[rr.rank()]]
    if rr.rank() in (0, size - 1):
        first, last = stamps(name, count, 0).tolist(), stamps(name, count, size - 1).tolist()
        of_two = [abs(a + b) // 2 * (-1 if a < 0 else 1) for a, b in zip(first, last, strict=True)]
        assert rr.allreduce(mine, process_set=several).tolist() == of_two


@pytest.mark.parametrize(
    ("name", "algorithm"),
    parted(
        itertools.product(["int64", "uint64"], ["auto", "ring", "halving", "doubling"]),
        lambda name, algorithm: (name == "int64") == (algorithm in ("auto", "halving")),
        adapters,
    ),
)
def test_averages_of_64_bit_integers_are_exact(name, algorithm):
    for hosts in [(0,) * 6, (0, 1, 2, 3, 4, 5), (0, 0, 0, 1, 1, 2)]:
        settings = Settings(algorithm=algorithm, fusion_slot_bytes=1024, dynamic_process_sets=True)
        run_ranks(6, lambda: exact_means(name, range(6)), hosts=hosts, settings=settings)


def test_averages_of_64_bit_integers_over_ranks_that_train_on_are_exact():
    for hosts in [(0,) * 6, (0, 0, 0, 1, 1, 2)]:
        run_ranks(6, lambda: exact_means("int64", range(5)), hosts=hosts, settings=Settings(dynamic_process_sets=True))
