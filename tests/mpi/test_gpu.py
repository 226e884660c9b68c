"""GPU arrays on real ranks: processes that map each other's memory, and a real MPI; the GPU is a fake (fake_cupy).

tests/gpu runs there too (end_to_end/test_stand_in.py): its process sets, joins and streams are not tested here again.

What is queued on a rank's streams runs late, in its own process, or when another rank waits for it. MPI is given
addresses of "GPU memory" as an MPI with CUDA is; it is the host's here, so what it reads too early is stale.
"""

import gc

import numpy as np
import pytest

import ringreduce as rr
from tests.support import fake_cupy, on_ranks
from tests.support.reference import OPS, assert_reduced, data, legal
from tests.support.tiers import parted

pytestmark = pytest.mark.mpi
SLOT_BYTES = 8192
PATHS = {
    "ipc": {},  # and once more with streams that run at random
    "host_staged": {"cuda_ipc": 0, "cuda_aware_mpi": False},
    "cuda_aware": {"cuda_ipc": 0, "cuda_aware_mpi": True},
}
COUNTS = [5, 1023, 0, 9000, 33, 1, 2048]


@pytest.fixture(scope="module", params=parted(["ipc, random", *PATHS], lambda path: path == "ipc, random"))
def path(request):
    """A world in which GPU arrays go one of the paths, with short slots."""
    rr.shutdown()
    mode = "random" if "random" in request.param else "lazy"
    with on_ranks.worlds() as form, fake_cupy.checked(mode, seed=5, one_process=True):
        form(**PATHS.get(request.param, {}), cuda_slot_bytes=SLOT_BYTES, fusion_slot_bytes=4096)
        yield request.param
        leave()


def leave():
    """Shut down; what a world had on the GPU is given back then, all of it."""
    rr.shutdown()
    gc.collect()
    with fake_cupy.machine.entered():
        left = [each for each in fake_cupy.machine.memory.in_use() if each.kind == "device"]
    assert left == [], [str(each) for each in left]
    assert fake_cupy.machine.exported == []


def exact(dtype, count, rank=None, seed=0):
    """Elements whose sums and products are exact, so that equal bits do not hang on the order; by rank and index."""
    values = data(dtype, count, rr.rank() if rank is None else rank, seed)
    if values.dtype.kind in "biu":
        return values
    whole = (np.sign(values.real) * (1 + np.arange(count) % 3)).astype(values.dtype)
    return whole + np.sign(values.imag) * values.dtype.type(1j) if values.dtype.kind == "c" else whole


def put(values):
    return fake_cupy.asarray(values)


def same(on_gpu, on_host):
    found = on_gpu.get()
    assert (found.dtype, found.shape) == (on_host.dtype, on_host.shape)
    assert found.tobytes() == on_host.tobytes()


def test_it_takes_this_path(path):
    rr.allreduce(put(exact("float32", 3)))
    expected = f"{path.partition(',')[0]}: " if rr.size() > 1 else "one rank, "
    assert rr.info().gpu_algorithm.startswith(expected), rr.info().gpu_algorithm


@pytest.mark.parametrize(
    "dtype",
    parted(["bool", "uint8", "int64", "float16", "float32", "float64", "complex64"], lambda dtype: dtype == "float16"),
)
def test_every_type_and_op(path, dtype):
    for op in (op for op in OPS if legal(op, dtype)):
        for count in (1, 17, 5003):
            everyones = [exact(dtype, count, rank, count) for rank in range(rr.size())]
            mine = everyones[rr.rank()]
            result = rr.allreduce(put(mine), op=op, name="on the GPU")
            assert_reduced(result.get(), op, everyones)
            same(result, rr.allreduce(mine, op=op, name="on the host"))


def test_many_at_once_and_again(path):
    """More than there are slots, several steps with other data; what went in is not changed."""
    for step in range(3):
        mine = [exact("float32", count, seed=step + k) for k, count in enumerate(COUNTS)]
        arrays = [put(each) for each in mine]
        handles = [rr.allreduce_async(each, op=rr.Sum, name=f"x{k}") for k, each in enumerate(arrays)]
        for k in np.random.default_rng([step, rr.rank()]).permutation(len(COUNTS)):
            everyones = [exact("float32", COUNTS[k], rank, step + k) for rank in range(rr.size())]
            same(rr.synchronize(handles[k]), np.sum(everyones, 0, dtype=np.float32))
            same(arrays[k], mine[k])


@pytest.mark.parametrize("dtype", parted(["int8", "float16", "complex128"], lambda dtype: dtype == "int8"))
def test_gather_broadcast_and_alltoall(path, dtype):
    rows = 1500 + rr.rank()
    everyones = [data(dtype, 3 * (1500 + rank), rank).reshape(-1, 3) for rank in range(rr.size())]
    mine, last = everyones[rr.rank()], rr.size() - 1
    same(rr.allgather(put(mine)), np.concatenate(everyones))
    same(rr.broadcast(put(mine[:1500]), last), everyones[last][:1500])
    array = put(mine[:1500])
    assert rr.broadcast_(array, last) is array
    same(array, everyones[last][:1500])
    splits = [100 * (k + 1) + rr.rank() for k in range(rr.size())]
    splits[-1] += rows - sum(splits)
    came, counts = rr.alltoall(put(mine), splits=splits)
    expected, counted = rr.alltoall(mine, splits=splits)
    same(came, expected)
    assert counts.tolist() == counted.tolist()


def test_worlds_come_and_go(path):
    """And leave nothing on the GPU behind, neither memory nor events."""
    for seed in range(2):
        leave()
        rr.init()
        result = rr.allreduce(put(exact("float32", 5003, seed=seed)), op=rr.Sum)
        same(result, sum(exact("float32", 5003, rank, seed) for rank in range(rr.size())))
