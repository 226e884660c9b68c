"""GPU arrays on ranks that are threads, over a fake CUDA whose streams run late and whose every race is found."""

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest

import ringreduce as rr
from ringreduce import Sum
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support import fake_torch
from tests.support.on_threads import each_rank_of
from tests.support.reference import MATRIX, all_but_few_extended
from tests.support.tiers import adapters, parted

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


def expected_path(world, path):
    if world == "alone":
        return ALONE
    return "ipc" if path in ("ipc", "deterministic") and world in ("two", "three") else "host_staged"


@pytest.mark.parametrize(
    ("world", "path"),
    parted(
        itertools.product(WORLDS, PATHS),
        lambda world, path: world in ("three", "uneven hosts") or path in ("ipc", "deterministic-host_staged"),
        adapters,
    ),
)
def test_sums(gpu, world, path):
    """Tensors shorter and longer than a slot, empty ones, several steps: so slots are used again. info() tells how."""
    hosts = WORLDS[world]

    def program():
        rank, steps = rr.rank(), []
        assert rr.info().gpu_algorithm == (ALONE if world == "alone" else "no GPU array so far")
        for step in range(3):
            arrays = [gpu.array(values(n, "float32", rank, step + k)) for k, n in enumerate(COUNTS)]
            handles = [rr.allreduce_async(each, name=f"x{k}", op=Sum) for k, each in enumerate(arrays)]
            steps.append([rr.synchronize(each).get() for each in handles])
            assert all(
                np.array_equal(each.get(), values(n, "float32", rank, step + k))
                for k, (n, each) in enumerate(zip(COUNTS, arrays, strict=True))
            )
        return steps, rr.info().gpu_algorithm

    by_rank = ranks(hosts, program, **PATHS[path])
    (text,) = {text for _, text in by_rank}
    name, _, why = text.partition(": ")
    assert name == expected_path(world, path)
    assert why or world == "alone"
    for steps, _ in by_rank:
        for step, results in enumerate(steps):
            for k, (count, result) in enumerate(zip(COUNTS, results, strict=True)):
                expected = sum(values(count, "float32", rank, step + k) for rank in range(len(hosts)))
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(("dtype", "op"), all_but_few_extended(MATRIX))
@pytest.mark.parametrize("world", parted(["alone", "three", "hosts of two"], lambda world: world == "three"))
def test_every_type_and_op_as_on_the_host(cupy, monkeypatch, world, dtype, op):
    """Bit for bit what the same ranks get for NumPy arrays, scaled too."""
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
    for pairs in ranks(WORLDS[world], program):
        for on_gpu, on_host in pairs:
            assert on_gpu.dtype == on_host.dtype
            np.testing.assert_array_equal(on_gpu.view(np.uint8), np.asarray(on_host).view(np.uint8))


@pytest.mark.parametrize("world", ["two", "three", "hosts of two"])
def test_in_place_and_groups(gpu, world):
    hosts = WORLDS[world]
    kinds = [(700, "float64"), (5, "float32"), (900, "float16"), (0, "float32"), (64, "int32")]

    def program():
        single, *group = [gpu.array(values(count, dtype, rr.rank())) for count, dtype in kinds]
        assert rr.allreduce_(single, op=Sum) is single
        assert all(a is b for a, b in zip(rr.grouped_allreduce_(group, op=Sum), group, strict=True))
        return [each.get() for each in (single, *group)]

    for results in ranks(hosts, program):
        for result, kind in zip(results, kinds, strict=True):
            np.testing.assert_array_equal(result, sum(values(*kind, rank) for rank in range(len(hosts))))


@each_rank_of(2, settings=small())
def test_the_first_array_is_empty(gpu):
    assert rr.allreduce_(gpu.array(values(0, "float32", 0)), name="empty").shape == (0,)


@each_rank_of(2, settings=small())
def test_synchronize_does_not_wait_for_the_gpu(cupy):
    """Only the caller's stream waits."""
    rr.allreduce(cupy.array(values(500, "float32", rr.rank())), op=Sum)
    done = cupy.cuda.Event()
    done.record()
    assert not done.done
