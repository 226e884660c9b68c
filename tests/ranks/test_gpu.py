"""GPU arrays on ranks that are threads, over a fake CUDA whose streams run late and whose every race is found."""

import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import ringreduce as rr
from ringreduce import Sum
from ringreduce.gpu import ipc
from ringreduce.kernels import half, half_numpy
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support import fake_cupy, fake_torch
from tests.support.reference import MATRIX, all_but_few_extended
from tests.support.tiers import parted

MODES = ["lazy", "eager", "random"]
WORLDS = {
    "alone": [0],
    "two": [0, 0],
    "three": [0, 0, 0],
    "hosts": [0, 1, 2],
    "hosts of two": [0, 0, 1, 1],
    "uneven hosts": [0, 0, 0, 1],
}
PATHS = {
    "ipc": {},
    "host_staged": {"cuda_ipc": False},
    "ring": {"algorithm": "ring"},
    "deterministic": {"deterministic": True},
    "deterministic-host_staged": {"deterministic": True, "cuda_ipc": False},
}
ALONE = "one rank, so nothing travels"
SLOT_BYTES = 4096


def as_other_process():
    """Each rank is a thread here, and plays a process: it maps what it may not touch otherwise."""
    return int(threading.current_thread().name.rpartition(" ")[2])


@pytest.fixture(params=parted(MODES, lambda mode: mode == "lazy"))
def gpu(request, monkeypatch):
    """The fake CuPy with one GPU, which finds races, in each of its modes."""
    monkeypatch.setattr(ipc, "process", as_other_process)
    with fake_cupy.checked(request.param, seed=17) as cupy:
        for name, module in cupy.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        yield cupy


def small(**chosen):
    """Settings with slots so short that there are many; without NCCL, since hosts share a GPU here."""
    chosen = {"cuda_slot_bytes": SLOT_BYTES, "cuda_nccl": False, **chosen}
    return Settings(fusion_slot_bytes=2048, shared_slot_bytes=1024, fusion_buffer_bytes=1 << 18, **chosen)


def ranks(hosts, program, **chosen):
    return run_ranks(len(hosts), program, hosts=hosts, settings=small(**chosen), timeout_s=60)


def values(count, dtype, rank, salt=0):
    """Elements that differ by rank and by index, small enough for sums and products to be exact."""
    numbers = (np.arange(count) * 7 + rank * 3 + salt) % 5 + rank % 2
    if dtype == "bool":
        return numbers % 3 == 0
    if dtype.startswith("complex"):
        return (numbers + 1j * ((numbers + salt) % 3)).astype(dtype)
    return numbers.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


COUNTS = [5, 1023, 0, 3000, 33, 1, 2048]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world", WORLDS)
def test_sums(gpu, world, path):
    """Tensors shorter and longer than a slot, empty ones, several steps: so slots are used again."""
    hosts = WORLDS[world]

    def program():
        rank, steps = rr.rank(), []
        for step in range(3):
            arrays = [gpu.array(values(n, "float32", rank, step + k)) for k, n in enumerate(COUNTS)]
            handles = [rr.allreduce_async(each, name=f"x{k}", op=Sum) for k, each in enumerate(arrays)]
            steps.append([rr.synchronize(each).get() for each in handles])
            assert all(
                np.array_equal(each.get(), values(n, "float32", rank, step + k))
                for k, (n, each) in enumerate(zip(COUNTS, arrays, strict=True))
            )
        return steps

    for steps in ranks(hosts, program, **PATHS[path]):
        for step, results in enumerate(steps):
            for k, (count, result) in enumerate(zip(COUNTS, results, strict=True)):
                expected = sum(values(count, "float32", rank, step + k) for rank in range(len(hosts)))
                np.testing.assert_array_equal(result, expected)


def test_an_empty_array_alone(gpu):
    def program():
        assert rr.allreduce_(gpu.array(values(0, "float32", 0)), name="empty").shape == (0,)
        return gpu.asnumpy(rr.allreduce(gpu.array(values(3, "float32", rr.rank())), op=rr.Sum))

    expected = values(3, "float32", 0) + values(3, "float32", 1)
    np.testing.assert_array_equal(ranks([0, 0], program), [expected] * 2)


def expected_path(world, path):
    if world == "alone":
        return ALONE
    return "ipc" if path in ("ipc", "deterministic") and world in ("two", "three") else "host_staged"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world", WORLDS)
def test_info_tells_the_path_and_why(cupy, monkeypatch, world, path):
    monkeypatch.setattr(ipc, "process", as_other_process)

    def program():
        assert rr.info().gpu_algorithm == ("no GPU array so far" if rr.size() > 1 else ALONE)
        rr.allreduce_(cupy.array(values(100, "float32", rr.rank())))
        return rr.info().gpu_algorithm

    texts = set(ranks(WORLDS[world], program, **PATHS[path]))
    assert len(texts) == 1
    name, _, why = texts.pop().partition(": ")
    assert name == expected_path(world, path)
    assert why or world == "alone"


@pytest.mark.parametrize(("dtype", "op"), all_but_few_extended(MATRIX))
@pytest.mark.parametrize("world", ["alone", "three", "hosts of two"])
def test_every_type_and_op_as_on_the_host(cupy, monkeypatch, world, dtype, op):
    """Bit for bit what the same ranks get for NumPy arrays, scaled too."""
    monkeypatch.setattr(ipc, "process", as_other_process)
    scales = {} if dtype == "bool" else {"prescale_factor": 0.75, "postscale_factor": 3.0}

    def program():
        pairs = []
        for chosen in ({}, scales):
            host = values(1500, dtype, rr.rank())
            pairs.append((reduced(host, op, chosen), rr.allreduce(host, op=op, **chosen)))
        return pairs

    def reduced(host, op, chosen):
        if dtype != "bfloat16":
            return rr.allreduce(cupy.array(host), op=op, **chosen).get()
        tensor = fake_torch.Tensor(fake_torch.tensor(host.view(np.uint16)).array, fake_torch.bfloat16)
        return rr.allreduce(tensor, op=op, **chosen).cpu().view(host.dtype)

    monkeypatch.setitem(sys.modules, "torch", fake_torch)  # CuPy's arrays have no bfloat16
    monkeypatch.setattr(half, "_module", lambda: half_numpy)  # torch's want a true torch, until numba has compiled
    for pairs in ranks(WORLDS[world], program):
        for on_gpu, on_host in pairs:
            assert on_gpu.dtype == on_host.dtype
            np.testing.assert_array_equal(on_gpu.view(np.uint8), np.asarray(on_host).view(np.uint8))


@pytest.mark.parametrize("world", ["two", "three", "hosts of two"])
def test_in_place_and_groups(gpu, world):
    hosts = WORLDS[world]

    def program():
        rank = rr.rank()
        single = gpu.array(values(700, "float64", rank))
        assert rr.allreduce_(single, op=Sum) is single
        group = [gpu.array(values(n, t, rank, n)) for n, t in ((5, "float32"), (900, "float16"), (64, "int32"))]
        assert all(a is b for a, b in zip(rr.grouped_allreduce_(group, op=Sum), group, strict=True))
        return [each.get() for each in (single, *group)]

    for results in ranks(hosts, program):
        wanted = [values(700, "float64", 0, 0)] and [
            sum(values(700, "float64", rank) for rank in range(len(hosts))),
            *(
                sum(values(n, t, rank, n) for rank in range(len(hosts)))
                for n, t in ((5, "float32"), (900, "float16"), (64, "int32"))
            ),
        ]
        for result, expected in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(result, expected)


def test_synchronize_does_not_wait_for_the_gpu(cupy, monkeypatch):
    """Only the caller's stream waits."""
    monkeypatch.setattr(ipc, "process", as_other_process)
    stuck = threading.Event()

    def program():
        array = cupy.array(values(500, "float32", rr.rank()))
        result = rr.allreduce(array, op=Sum)
        done = cupy.cuda.Event()
        done.record()
        before = done.done
        return before, result.get()

    for before, result in ranks([0, 0], program):
        assert not before
        np.testing.assert_array_equal(result, values(500, "float32", 0) + values(500, "float32", 1))
    assert not stuck.is_set()
