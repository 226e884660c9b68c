"""NCCL through CuPy: types, ops and errors; ranks are threads, over the fake CuPy."""

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from ringreduce.arrays.cuda import Device, Stream
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives.ops import Adasum, Average, Max, Min, Product, ReduceOp, Reduction, Sum
from ringreduce.errors import CollectiveError, MissingExtraError
from ringreduce.gpu import nccl
from ringreduce.transport.base import complete
from tests.support.fake_cupy.nccl import NcclError

TYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"]
SIZE, COUNT = 3, 37
UID = bytes((7 * k + 100) % 256 for k in range(128))


@pytest.fixture(params=[bytes, tuple], ids=["CuPy 14", "CuPy 13"])
def binding(request, cupy, monkeypatch):
    """cupy.cuda.nccl, whose identifiers are bytes, or signed chars."""
    module = cupy.cuda.nccl
    uid = UID if request.param is bytes else tuple(np.frombuffer(UID, np.int8).tolist())
    communicator = module.NcclCommunicator

    def connect(size, given, rank):
        if not isinstance(given, request.param):
            raise TypeError("Argument 'commId' has incorrect type")
        assert given == uid
        assert os.environ["NCCL_RUNTIME_CONNECT"] == "0", "else the first all-reduce would wait for the others"
        return communicator(size, given, rank)

    cupy.machine.device_count = 4 + SIZE
    monkeypatch.setattr(module, "get_unique_id", lambda: uid)
    monkeypatch.setattr(module, "NcclCommunicator", connect)
    return module


def on_ranks(size, work):
    """The results of work(rank) in a thread for each rank."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def connected():
    uid = nccl.unique_id()
    return on_ranks(SIZE, lambda rank: complete(nccl.connect(Device(rank + 4), SIZE, uid, rank)))


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
def test_every_type_and_op_that_it_has(name, binding, cupy):
    element = TABLE[name]
    communicators = connected()
    for op in ReduceOp:
        if not nccl.supported(element, op):
            message = f"NCCL has no {op!r} of {name} elements; RINGREDUCE_CUDA_NCCL=0 does without NCCL"
            with pytest.raises(CollectiveError, match=message):
                communicators[0].allreduce(0, COUNT, element, op, Stream(Device(4)))
            continue
        parts = [elements(element, rank) for rank in range(SIZE)]

        def reduced(rank, op=op, parts=parts):
            with Device(rank + 4), Stream(Device(rank + 4)) as stream:
                array = cupy.asarray(parts[rank].view(element.storage))
            communicators[rank].allreduce(array.data.ptr, COUNT, element, op, stream)
            with Device(rank + 4), stream:
                return array.get()

        found = on_ranks(SIZE, reduced)
        ufunc = {Sum: np.add, Average: np.add, Product: np.multiply, Min: np.minimum, Max: np.maximum}[op]
        expected = ufunc(ufunc(parts[0], parts[1]), parts[2])
        assert [each.tobytes() for each in found] == [expected.tobytes()] * SIZE, op


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


def test_a_rank_that_waits_for_another_is_not_blocked(binding):
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


def test_it_is_given_back_on_its_own_device(binding, cupy):
    first, second, _ = connected()
    ended = []
    for each, name in ((first, "destroy"), (second, "abort")):
        each._communicator = SimpleNamespace(**{name: lambda name=name: ended.append((name, cupy.machine.device))})
    first.close()
    second.abort()
    assert ended == [("destroy", 4), ("abort", 5)]


WHY = "NCCL_DEBUG=INFO makes it print why; RINGREDUCE_CUDA_NCCL=0 does without NCCL"


@pytest.mark.parametrize(
    ("error", "told"), [(NcclError(5), "NCCL_ERROR_INVALID_USAGE: status 5"), (KeyError(8), "ncclResult_t 8")]
)
def test_its_errors_say_what_to_do(error, told, binding, monkeypatch):
    communicator = connected()[1]

    def fail(*_):
        raise error

    for where, what, call, text in [
        (binding, "get_unique_id", nccl.unique_id, "no identifier was made"),
        (
            communicator._communicator,
            "allReduce",
            lambda: communicator.allreduce(0, 1, TABLE["float32"], Sum, Stream(Device(5))),
            "the all-reduce was not started",
        ),
        (communicator._communicator, "check_async_error", communicator.check, "an all-reduce failed"),
        (
            binding,
            "NcclCommunicator",
            lambda: complete(nccl.connect(Device(4), 3, UID, 0)),
            "rank 0 of 3 could not connect",
        ),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(where, what, fail)
            with pytest.raises(CollectiveError) as caught:
                call()
        assert str(caught.value) == f"NCCL: {text}: {told}; {WHY}"
    communicator.check()


def test_without_nccl_the_wheel_is_named(cupy, monkeypatch):
    monkeypatch.setattr(cupy.cuda.nccl, "available", False)
    message = "CuPy finds no NCCL; install it with: pip install nvidia-nccl-cu12; RINGREDUCE_CUDA_NCCL=0"
    assert nccl.why_not().startswith(message)
    with pytest.raises(MissingExtraError, match=message):
        nccl.unique_id()
    with pytest.raises(MissingExtraError, match=message):
        complete(nccl.connect(Device(0), 1, bytes(128), 0))


def test_ranks_that_share_a_gpu_are_named():
    one, two = "0000:3B:00.0", "0000:5E:00.0"
    assert nccl.shared_gpu([one, two, one, two], [0, 0, 1, 1]) == ""  # another host's GPU may have the same place
    expected = "ranks 1, 3 share GPU 0000:5E:00.0 of host 0, but NCCL needs one per rank"
    assert nccl.shared_gpu([one, two, two, two], [0, 0, 1, 0]) == expected
