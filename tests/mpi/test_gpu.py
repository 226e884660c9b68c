"""GPU arrays on real ranks: processes that map each other's memory, and a real MPI; the GPU is a fake (fake_cupy).

What is queued on a rank's streams runs late, in its own process, or when another rank waits for it. MPI is given
addresses of "GPU memory" as an MPI with CUDA is; it is the host's here, so what it reads too early is stale.
"""

import gc

import numpy as np
import pytest

import ringreduce as rr
from tests.support import fake_cupy
from tests.support.reference import OPS, assert_reduced, data, legal
from tests.support.tiers import parted

pytestmark = pytest.mark.mpi
SLOT_BYTES = 8192
PATHS = {
    "ipc": {},  # and once more with streams that run at random
    "host_staged": {"CUDA_IPC": "0", "CUDA_AWARE_MPI": "0"},
    "cuda_aware": {"CUDA_IPC": "0", "CUDA_AWARE_MPI": "1"},
}
SETS = {1: [], 2: [[1]], 3: [[2, 0]], 4: [[0, 3], [1, 2, 3]]}
COUNTS = [5, 1023, 0, 9000, 33, 1, 2048]


@pytest.fixture(scope="module", params=parted(["ipc, random", *PATHS], lambda path: path == "ipc, random"))
def path(request):
    """A world in which GPU arrays go one of the paths, with short slots and process sets; afterwards the usual one."""
    rr.shutdown()
    mode = "random" if "random" in request.param else "lazy"
    with pytest.MonkeyPatch.context() as patch, fake_cupy.checked(mode, seed=5, one_process=True):
        for name, value in {
            **PATHS.get(request.param, {}),
            "CUDA_SLOT_BYTES": SLOT_BYTES,
            "FUSION_SLOT_BYTES": 4096,
        }.items():
            patch.setenv(f"RINGREDUCE_{name}", str(value))
        enter()
        yield request.param
        leave()
    rr.init()


def enter():
    from mpi4py import MPI

    rr.init(process_sets=[rr.ProcessSet(ranks) for ranks in SETS[MPI.COMM_WORLD.size]])


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


def test_all_ranks_have_equal_bits(path):
    """Of any floats; where sums are made in rank order, those of that sum."""
    arrays = [data("float32", 5003, rank) for rank in range(rr.size())]
    result = rr.allreduce(put(arrays[rr.rank()]), op=rr.Sum)
    same(result, rr.broadcast(result.get(), 0))
    if path.startswith("ipc"):
        expected = arrays[0].copy()
        for each in arrays[1:]:
            expected += each
        same(result, expected)


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


def test_process_sets(path):
    for number, ranks in enumerate(SETS[rr.size()], 1):
        if rr.rank() in ranks:
            some = rr.ProcessSet(ranks)
            some.process_set_id = number
            result = rr.allreduce(put(exact("float32", 5003)), op=rr.Sum, name="w", process_set=some)
            same(result, sum(exact("float32", 5003, rank) for rank in ranks))


def test_ranks_that_join(path):
    for step in range(rr.rank() + 1):
        result = rr.allreduce(put(exact("float32", 5003, seed=step)), op=rr.Sum, name="w")
        same(result, sum(exact("float32", 5003, rank, step) for rank in range(step, rr.size())))
    assert rr.join() == rr.size() - 1


def test_worlds_come_and_go(path):
    """And leave nothing on the GPU behind, neither memory nor events."""
    for seed in range(2):
        leave()
        enter()
        result = rr.allreduce(put(exact("float32", 5003, seed=seed)), op=rr.Sum)
        same(result, sum(exact("float32", 5003, rank, seed) for rank in range(rr.size())))
