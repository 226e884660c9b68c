"""What arrays may be: every type and op to the bit, of any length, anywhere in memory, of any library; and
what is refused."""

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from tests.gpu.libraries import libraries, same_bits
from tests.support.reference import COMPLEX, FLOATS, INTEGERS, OPS, Exporter, data, legal

pytestmark = pytest.mark.mpi
COUNTS = [0, 1, 2, 3, 15, 16, 17, 127, 1001, 65_537]


@pytest.fixture
def maker(library):
    """`put` of a library; the test is skipped for types that it has not."""

    def put(array, **options):
        if array.dtype.name not in library.dtypes:
            pytest.skip(f"{library.name} has no {array.dtype.name}")
        return library.put(array, **options)

    return put


def special(dtype, count, rank, seed=0):
    """With a few infinities and NaNs; no zeros, of whose signs Min and Max promise nothing."""
    values = data(dtype, count, rank, seed)
    if dtype in FLOATS:
        places = np.random.default_rng([seed, rank]).integers(0, 12, count)
        for place, value in enumerate((np.inf, -np.inf, np.nan)):
            values[places == place] = np.asarray(value).astype(values.dtype)
    return values


@pytest.mark.parametrize("dtype", TABLE)
def test_every_type_and_op(path, library, maker, dtype):
    for op in (op for op in OPS if legal(op, dtype)):
        fuses = dtype in COMPLEX and op is rr.Product
        for count in COUNTS:
            values = special(dtype, count, rr.rank(), count)
            expected = rr.allreduce(values, op=op, name="on the host")
            handle = rr.allreduce_async(maker(values), op=op, name="on the GPU")
            same_bits(library.get(rr.synchronize(handle)), expected, fuses)
            array = maker(values)
            assert rr.allreduce_(array, op=op, name="in place") is array
            same_bits(library.get(array), expected, fuses)


@pytest.mark.parametrize("dtype", [name for name in TABLE if name not in ("bool", *COMPLEX)])
def test_scales(path, library, maker, dtype):
    scales = {"prescale_factor": 0.3, "postscale_factor": 3.0 if dtype in INTEGERS else 1.7}
    for op in (rr.Sum, rr.Average, rr.Max):
        values = data(dtype, 1001, rr.rank())
        expected = rr.allreduce(values, op=op, name="on the host", **scales)
        same_bits(library.get(rr.allreduce(maker(values), op=op, name="on the GPU", **scales)), expected)


@pytest.mark.parametrize("dtype", TABLE)
def test_reducescatter(path, library, maker, dtype):
    for op in (op for op in (rr.Average, rr.Sum) if legal(op, dtype)):
        for rows in (0, 1, rr.size() - 1, rr.size(), 331):
            values = data(dtype, 3 * rows, rr.rank()).reshape(rows, 3)
            expected = rr.reducescatter(values, name="on the host", op=op)
            same_bits(library.get(rr.reducescatter(maker(values), name="on the GPU", op=op)), expected)


@pytest.mark.parametrize("dtype", TABLE)
def test_gather_broadcast_and_alltoall(path, library, maker, dtype):
    rows = 50 + rr.rank()
    values = data(dtype, 3 * rows, rr.rank()).reshape(rows, 3)
    everyones = rr.allgather(values, name="host")
    same_bits(library.get(rr.allgather(maker(values), name="gpu")), everyones)
    same_bits(
        library.get(rr.broadcast(maker(values[:50]), rr.size() - 1, name="gpu")), everyones[-rows_of_last() :][:50]
    )
    splits = list(range(1, rr.size()))
    splits.append(rows - sum(splits))
    came, counts = rr.alltoall(maker(values), splits=splits, name="gpu")
    expected, counted = rr.alltoall(values, splits=splits, name="host")
    same_bits(library.get(came), expected)
    assert counts.tolist() == counted.tolist()


def rows_of_last():
    return 50 + rr.size() - 1


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "float32", "complex128"])
def test_arrays_that_begin_anywhere(path, library, maker, dtype):
    for offset in range(1, 17):
        for count in (1, 17, 1001):
            values = data(dtype, count, rr.rank(), offset)
            array = maker(values, offset=offset)
            expected = rr.allreduce(values, op=rr.Sum, name="on the host")
            same_bits(library.get(rr.allreduce_(array, op=rr.Sum, name="on the GPU")), expected)


def test_what_lies_beside_an_array_stays(path, library, maker):
    for dtype in ("int8", "float16", "float32"):
        for before, count, after in ((1, 1001, 3), (3, 17, 1), (5, 70_001, 7)):
            values = data(dtype, before + count + after, rr.rank())
            whole = maker(values)
            rr.allreduce_(whole[before : before + count], op=rr.Sum, name="the middle")
            values[before : before + count] = rr.allreduce(
                values[before : before + count], op=rr.Sum, name="on the host"
            )
            same_bits(library.get(whole), values)


def test_groups_of_all_lengths_and_types(path, library):
    dtypes = [dtype for dtype in library.dtypes if dtype != "bool"]
    values = [data(dtypes[k % len(dtypes)], (k * k) % 997, rr.rank(), k) for k in range(200)]
    expected = rr.grouped_allreduce(values, op=rr.Average, name="on the host")
    arrays = [library.put(each, offset=k % 4) for k, each in enumerate(values)]
    for found, other in zip(rr.grouped_allreduce(arrays, op=rr.Average, name="new"), expected, strict=True):
        same_bits(library.get(found), other)
    rr.grouped_allreduce_(arrays, op=rr.Average, name="in place")
    for found, other in zip(arrays, expected, strict=True):
        same_bits(library.get(found), other)


def test_an_array_of_many_slots(path, library):
    """100 MB, with the default slots of 32 MiB and with short ones."""
    count = 25_000_003 if "short" not in path else 250_003
    values = data("float32", count, rr.rank())
    same_bits(
        library.get(rr.allreduce(library.put(values), name="on the GPU")), rr.allreduce(values, name="on the host")
    )


def test_compression(path, library):
    values = data("float32", 10_001, rr.rank())
    for compression in (
        (rr.Compression.fp16, rr.Compression.bf16) if library.name == "torch" else (rr.Compression.fp16,)
    ):
        found = rr.allreduce(library.put(values), op=rr.Sum, compression=compression, name="on the GPU")
        expected = rr.allreduce(values, op=rr.Sum, compression=compression, name="on the host")
        same_bits(library.get(found), expected)


def test_another_librarys_array_by_dlpack(path):
    cupy = libraries()[0]
    values = data("float32", 1001, rr.rank())
    with cupy.on(cupy.stream()):
        found = rr.allreduce(Exporter(cupy.put(values, late_ms=20)), op=rr.Sum, name="foreign")
        same_bits(cupy.get(found), rr.allreduce(values, op=rr.Sum, name="on the host"))
        with pytest.raises(rr.UnsupportedArrayError, match="cannot be changed in place"):
            rr.allreduce_(Exporter(cupy.put(values)), op=rr.Sum, name="foreign")


def test_an_array_that_is_not_contiguous(path, library):
    values = data("float32", 100, rr.rank()).reshape(10, 10)
    array = library.put(values)
    expected = rr.allreduce(values.T, name="on the host")
    same_bits(library.get(rr.allreduce(array.T, name="copied")), expected)
    rr.allreduce_(array.T, name="written back")
    same_bits(library.get(array), expected.T)


@pytest.mark.mpi(min_size=2)
def test_an_array_that_is_on_the_host_elsewhere(path, library):
    """An error on every rank, which names the ranks; and the job goes on."""
    last = rr.size() - 1
    values = data("float32", 100, rr.rank())
    for _ in range(3):
        with pytest.raises(rr.MismatchError, match=rf"rank {last} .*a tensor on cpu, but rank 0 has one on cuda"):
            rr.allreduce(values if rr.rank() == last else library.put(values), name="w")
        expected = rr.allreduce(values, name="on the host")
        same_bits(library.get(rr.allreduce(library.put(values), name="on the GPU")), expected)


def test_an_array_on_another_gpu_of_this_host():
    """A rank uses one GPU: the first array says which. The error names both, on the rank that made the mistake."""
    cupy = libraries()[0].module
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU: there is no other")
    here = cupy.cuda.Device().id
    rr.allreduce(cupy.ones(3), name="first")
    other = (here + 1) % cupy.cuda.runtime.getDeviceCount()
    refused = pytest.raises(rr.InputError, match=rf"an array on cuda:{other}, but its first was on cuda:{here}")
    with cupy.cuda.Device(other), refused:
        rr.allreduce(cupy.ones(3), name="second")
    assert rr.allreduce(cupy.ones(3), op=rr.Sum, name="third").get().tolist() == [rr.size()] * 3
