"""NCCL through CuPy: types, ops and errors.

A stand-in takes the place of CuPy's module: its ranks are threads, and its device memory is the host's.
"""

import ctypes
import os
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.errors import CollectiveError, MissingExtraError
from ringreduce.gpu import nccl
from ringreduce.gpu.runtime import Device
from ringreduce.ops import Adasum, Average, Max, Min, Product, ReduceOp, Reduction, Sum
from ringreduce.transport.base import complete

# the values of CuPy 13.6 and 14.2, which are those of nccl.h
TYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"]
OPS = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}
COUNT = 37


class NcclError(RuntimeError):
    """As CuPy's."""


class Fake:
    """cupy.cuda.nccl for threads: a communicator is found by its identifier, and memory by its address."""

    available = True
    NcclError = NcclError

    def __init__(self, size, uid_type):
        self.uid_type, self.fails, self.ended = uid_type, {}, []
        self.barrier = threading.Barrier(size, timeout=20)
        self.size = size
        self.parts, self.devices = {}, {}
        self.current = threading.local()
        for number, name in enumerate(TYPES):
            setattr(self, f"NCCL_{name.upper()}", number)
        for number, name in enumerate(OPS):
            setattr(self, f"NCCL_{name}", number)
        self.uid = bytes((7 * k + 100) % 256 for k in range(128))

    def get_unique_id(self):
        self.fail("get_unique_id")
        return self.uid if self.uid_type is bytes else tuple(np.frombuffer(self.uid, np.int8).tolist())

    def fail(self, what):
        if what in self.fails:
            raise self.fails[what]

    def NcclCommunicator(self, size, uid, rank):
        if not isinstance(uid, self.uid_type):
            raise TypeError("Argument 'commId' has incorrect type")
        assert size == self.size
        assert all(-128 <= each < 128 for each in uid) or self.uid_type is bytes
        assert bytes(each & 255 for each in uid) == self.uid
        assert os.environ["NCCL_RUNTIME_CONNECT"] == "0", "else the first all-reduce would wait for the others"
        self.fail("NcclCommunicator")
        self.barrier.wait()
        return Communicator(self, rank)

    def getDevice(self):
        return getattr(self.current, "device", 0)

    def setDevice(self, number):
        self.current.device = number


class Communicator:
    def __init__(self, fake, rank):
        self.fake, self.rank, self.device = fake, rank, fake.getDevice()

    def allReduce(self, source, target, words, dtype, op, stream):
        fake = self.fake
        fake.fail("allReduce")
        assert fake.getDevice() == self.device == self.rank + 4
        assert (source, stream) == (target, 1000 + self.rank)
        name = TYPES[dtype]
        kind = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        memory = np.frombuffer((ctypes.c_char * (words * kind.itemsize)).from_address(source), kind)
        fake.parts[self.rank] = memory.copy()
        fake.barrier.wait()
        total = fake.parts[0]
        for rank in range(1, fake.size):
            total = list(OPS.values())[op](total, fake.parts[rank])
        fake.barrier.wait()
        memory[...] = total

    def check_async_error(self):
        self.fake.fail("check_async_error")

    def destroy(self):
        self.fake.ended.append(("destroy", self.rank, self.fake.getDevice()))

    def abort(self):
        self.fake.ended.append(("abort", self.rank, self.fake.getDevice()))


@pytest.fixture(params=[bytes, tuple], ids=["CuPy 14", "CuPy 13"])
def fake(request, monkeypatch):
    return install(monkeypatch, Fake(3, request.param))


def install(monkeypatch, fake):
    cuda = types.SimpleNamespace(
        nccl=fake,
        runtime=types.SimpleNamespace(
            getDevice=fake.getDevice, setDevice=fake.setDevice, runtimeGetVersion=lambda: 12090
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", fake)
    return fake


def on_ranks(size, work):
    """The results of work(rank) in a thread for each rank."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def connected(fake):
    uid = nccl.unique_id()
    return on_ranks(fake.size, lambda rank: complete(nccl.connect(Device(rank + 4), fake.size, uid, rank)))


def stream(rank):
    return types.SimpleNamespace(pointer=1000 + rank)


def elements(element, rank):
    """Data that differ by rank and by index, small enough that every type holds their sums and products exactly."""
    numbers = (np.arange(COUNT) * (rank + 2) + rank) % 5
    if element.kind == "b":
        return numbers < 2 + rank % 2
    if element.kind == "c":
        return (numbers + 1j * numbers[::-1]).astype(element.storage)
    if element.name == "bfloat16":
        return numbers.astype(ml_dtypes.bfloat16)
    return numbers.astype(element.storage)


@pytest.mark.parametrize("name", TABLE)
def test_every_type_and_op_that_it_has(name, fake):
    element = TABLE[name]
    communicators = connected(fake)
    for op in ReduceOp:
        if not nccl.supported(element, op):
            message = f"NCCL has no {op!r} of {name} elements; RINGREDUCE_CUDA_NCCL=0 does without NCCL"
            with pytest.raises(CollectiveError, match=message):
                communicators[0].allreduce(0, COUNT, element, op, stream(0))
            continue
        parts = [elements(element, rank) for rank in range(fake.size)]
        expected = [each.copy() for each in parts]
        arrays = [each.copy() for each in parts]

        def reduce(rank, op=op, arrays=arrays):
            communicators[rank].allreduce(arrays[rank].ctypes.data, COUNT, element, op, stream(rank))

        on_ranks(fake.size, reduce)
        ufunc = {Sum: np.add, Average: np.add, Product: np.multiply, Min: np.minimum, Max: np.maximum}[op]
        for other in expected[1:]:
            expected[0] = ufunc(expected[0], other)
        for array in arrays:
            assert array.tobytes() == expected[0].tobytes(), op


def test_what_it_has():
    have = {(name, op) for name in TABLE for op in ReduceOp if nccl.supported(TABLE[name], op)}
    numbers = {(name, op) for name in TYPES for op in (Sum, Average, Product, Min, Max)}
    assert have - numbers == {
        *(("bool", op) for op in (Sum, Product, Min, Max)),
        *((name, op) for name in ("complex64", "complex128") for op in (Sum, Average)),
    }
    assert have > numbers
    for name, op in have:  # it is asked only for what may be reduced at all
        Reduction(op, TABLE[name], 2).check()
    assert not any(nccl.supported(element, Adasum) for element in TABLE.values())


def test_a_rank_that_waits_for_another_is_not_blocked(fake):
    uid = nccl.unique_id()
    steps = nccl.connect(Device(4), 3, uid, 0)
    request = next(steps)
    assert request.peer == 0
    assert not request.done()
    others = on_ranks(2, lambda rank: nccl.Nccl(Device(rank + 5), 3, uid, rank + 1))
    request.wait()
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert [each.device.index for each in (stop.value.value, *others)] == [4, 5, 6]


def test_it_is_given_back_on_its_own_device(fake):
    first, second, _ = connected(fake)
    first.close()
    second.abort()
    assert fake.ended == [("destroy", 0, 4), ("abort", 1, 5)]


WHY = "NCCL_DEBUG=INFO makes it print why; RINGREDUCE_CUDA_NCCL=0 does without NCCL"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NcclError("NCCL_ERROR_SYSTEM_ERROR: no route"), "NCCL_ERROR_SYSTEM_ERROR: no route"),
        (KeyError(8), "ncclResult_t 8"),
    ],
)
def test_its_errors_say_what_to_do(error, told, fake):
    communicator = connected(fake)[1]
    element = TABLE["float32"]
    for what, call, text in [
        ("get_unique_id", nccl.unique_id, "no identifier was made"),
        ("allReduce", lambda: communicator.allreduce(0, 1, element, Sum, stream(1)), "the all-reduce was not started"),
        ("check_async_error", communicator.check, "an all-reduce failed"),
        (
            "NcclCommunicator",
            lambda: complete(nccl.connect(Device(4), 3, fake.uid, 0)),
            "rank 0 of 3 could not connect",
        ),
    ]:
        fake.fails = {what: error}
        with pytest.raises(CollectiveError) as caught:
            call()
        assert str(caught.value) == f"NCCL: {text}: {told}; {WHY}"
    fake.fails = {}
    communicator.check()


def test_without_nccl_the_wheel_is_named(monkeypatch):
    fake = install(monkeypatch, Fake(1, bytes))
    fake.available = False
    message = "CuPy finds no NCCL; install it with: pip install nvidia-nccl-cu12; RINGREDUCE_CUDA_NCCL=0"
    assert nccl.why_not().startswith(message)
    with pytest.raises(MissingExtraError, match=message):
        nccl.unique_id()
    with pytest.raises(MissingExtraError, match=message):
        complete(nccl.connect(Device(0), 1, bytes(128), 0))


def test_ranks_that_share_a_gpu_are_named():
    one, two = "0000:3B:00.0", "0000:5E:00.0"
    assert nccl.shared_gpu([one, two, one, two], [0, 0, 1, 1]) == ""  # another host's GPU may have the same place
    expected = "ranks 1, 3 share GPU 0000:5E:00.0 of host 0, but NCCL needs one a rank"
    assert nccl.shared_gpu([one, two, two, two], [0, 0, 1, 0]) == expected
