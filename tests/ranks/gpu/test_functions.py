"""What else can be done with GPU arrays, on ranks that are threads over the fake CUDA; all-reduces: test_gpu.py."""

import logging
import sys
import threading

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import Sum, runtime
from ringreduce.arrays import buffer
from ringreduce.collectives.partition import chunk_bounds
from ringreduce.gpu import cuda_aware, nccl
from ringreduce.gpu.stage import Stage
from ringreduce.gpu.stream import Gpu
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.ranks.gpu.test_gpu import SLOT_BYTES, ranks, small, values
from tests.support import fake_torch
from tests.support.on_threads import each_rank_of
from tests.support.reference import Exporter, data
from tests.support.tiers import parted


def total(count, dtype, size, salt=0):
    return sum(values(count, dtype, rank, salt) for rank in range(size))


@pytest.mark.parametrize("hosts", [[0], [0, 0], [0, 0, 0, 0], [0, 0, 1], [0, 1, 2]], ids=str)
def test_rows_in_many_slots_and_none(gpu, hosts):
    """More than a slot holds, other numbers for each pair of ranks, and nothing for some."""
    size = len(hosts)
    sent = [[(3 * source + 5 * target) % 4 * 211 for target in range(size)] for source in range(size)]

    def rows_of(rank, count, dtype="float64"):
        return values(3 * count, dtype, rank).reshape(-1, 3)

    def program():
        rank, results = rr.rank(), []
        for again in range(2):
            array = gpu.array(rows_of(rank, 1500))
            parameters = {"w": gpu.array(rows_of(rank, 7, "int32"))}
            rr.broadcast_parameters(parameters, root_rank=0)
            results.append(rr.allgather(gpu.array(rows_of(rank, 700 * ((rank + again) % 3)))))
            results.append(rr.alltoall(gpu.array(rows_of(rank, sum(sent[rank]))), splits=sent[rank])[0])
            results.append(rr.reducescatter(gpu.array(rows_of(rank, 1001 + again, "int64")), op=Sum))
            results.append(rr.allreduce(gpu.array(rows_of(rank, 999)), op=Sum))
            results += [rr.broadcast(array, root_rank=size - 1), array.copy(), parameters["w"]]
            results.append(rr.broadcast_(array, root_rank=0))
        return [each.get() for each in results]

    for rank, results in enumerate(ranks(hosts, program)):
        starts = [sum(sent[each][:rank]) for each in range(size)]
        for again in range(2):
            parts = [rows_of(each, sum(sent[each]))[low : low + sent[each][rank]] for each, low in enumerate(starts)]
            whole = sum(rows_of(each, 1001 + again, "int64") for each in range(size))
            bounds = chunk_bounds(1001 + again, size)
            expected = [
                np.concatenate([rows_of(each, 700 * ((each + again) % 3)) for each in range(size)]),
                np.concatenate(parts),
                whole[bounds[rank] : bounds[rank + 1]],
                sum(rows_of(each, 999) for each in range(size)),
                rows_of(size - 1, 1500),
                rows_of(rank, 1500),
                rows_of(0, 7, "int32"),
                rows_of(0, 1500),
            ]
            for found, wanted in zip(results[8 * again : 8 * again + 8], expected, strict=True):
                np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("size", [2, 3, 4])
@each_rank_of("size", settings=small())
def test_reducescatter_has_the_hosts_bits(gpu, size, dtype):
    """Of sums that are rounded, so that their order shows."""
    mine = data(dtype, 3003, rr.rank())
    on_gpu, on_host = (rr.reducescatter(array, op=rr.Average) for array in (gpu.array(mine), mine))
    assert on_gpu.get().tobytes() == on_host.tobytes()


@each_rank_of(2, settings=small(cuda_ipc=False))
def test_scratch_memory_of_a_reducescatter_is_not_used_again_too_soon(gpu):
    """It comes from the pool of the caller's stream, which knows nothing of what the engine's still does with it."""
    rows = [1, 2, 7, 3]
    arrays = [gpu.array(values(3 * count, "float32", rr.rank()).reshape(-1, 3)) for count in rows]
    results = [each.get() for each in rr.grouped_reducescatter(arrays, op=Sum)]
    for count, result in zip(rows, results, strict=True):
        expected = np.array_split(total(3 * count, "float32", 2).reshape(-1, 3), 2)
        np.testing.assert_array_equal(result, expected[rr.rank()])


@each_rank_of(2, settings=small())
def test_adasum(gpu):
    host = values(900, "float32", rr.rank(), 1)
    on_gpu = rr.allreduce(gpu.array(host), op=rr.Adasum).get()
    np.testing.assert_allclose(on_gpu, rr.allreduce(host, op=rr.Adasum), rtol=1e-6)


@each_rank_of(3, settings=small())
def test_results_are_used_on_the_stream_that_asks_for_them(gpu):
    with gpu.cuda.Stream(non_blocking=True):
        handle = rr.allreduce_async(gpu.array(values(2500, "float32", rr.rank())), op=Sum)
    with gpu.cuda.Stream(non_blocking=True):
        result = rr.synchronize(handle)
        np.testing.assert_array_equal((result + result).get(), 2 * total(2500, "float32", 3))


@each_rank_of(2, settings=small())
def test_the_callers_current_stream_stays(gpu):
    """CuPy's use() ends with any `with` of a stream in the thread."""
    stream = gpu.cuda.Stream(non_blocking=True)
    stream.use()
    array = gpu.array(values(900, "float32", rr.rank()))
    rr.allreduce(array, op=Sum)
    rr.allreduce_(array, op=Sum)
    rr.allgather(array)
    rr.alltoall(gpu.array(values(4, "float32", 0)), splits=gpu.array(np.array([2, 2])))
    assert gpu.cuda.get_current_stream() == stream


def test_by_ipc_the_host_moves_nothing(cupy, monkeypatch):
    monkeypatch.setattr(Stage, "pinned", None)
    messages = []

    def program():
        return rr.allreduce(cupy.array(values(30_000, "float32", rr.rank())), op=Sum).get()

    for result in run_ranks(3, program, settings=small(), messages=messages, timeout_s=60):
        np.testing.assert_array_equal(result, total(30_000, "float32", 3))
    assert max(each.nbytes for each in messages) < 4096, "but for what the ranks agree on"


# MPI that takes GPU memory


@pytest.fixture
def mpi_takes_gpu(monkeypatch):
    """Messages between threads are of GPU memory, which the sender's or receiver's host reads and writes at once."""
    settled = buffer.message_bytes

    monkeypatch.setattr(buffer, "message_bytes", lambda flat: getattr(settled(flat), "_memory", flat.view(np.uint8)))
    monkeypatch.setattr(cuda_aware, "answer", lambda is_set: (True, "a test"))
    monkeypatch.setattr(Gpu, "over_mpi", True)


@pytest.mark.parametrize("places", parted([[0, 1], [0, 1, 2], [0, 0, 1, 1]], lambda places: len(places) == 3))
def test_messages_of_gpu_memory(gpu, mpi_takes_gpu, places):
    """Subnormal numbers, too: the smallest float32 times what comes."""
    size, tiny = len(places), np.float32(1e-45)

    def program():
        rank, results = rr.rank(), []
        for step in range(2):
            arrays = [gpu.array(values(2500, dtype, rank, step)) for dtype in ("float32", "float16", "int8", "float64")]
            arrays.append(gpu.array(values(900, "float32", rank, step) * tiny))
            handles = [rr.allreduce_async(each, op=Sum, name=f"x{k}") for k, each in enumerate(arrays)]
            results.append([rr.synchronize(each).get() for each in handles])
        gathered = rr.allgather(gpu.array(values(300, "float32", rank))).get()
        return results, gathered, rr.info().gpu_algorithm

    for steps, gathered, path in ranks(places, program):
        assert path.startswith("cuda_aware: a test; no ipc: several hosts; no nccl: ")
        for step, results in enumerate(steps):
            for dtype, result in zip(("float32", "float16", "int8", "float64"), results, strict=False):
                np.testing.assert_array_equal(result, total(2500, dtype, size, step))
            np.testing.assert_array_equal(results[-1], total(900, "float32", size, step) * tiny)
        np.testing.assert_array_equal(gathered, np.concatenate([values(300, "float32", each) for each in range(size)]))


@each_rank_of(3, hosts=[0, 1, 2], settings=small(deterministic=True))
def test_a_deterministic_sum_goes_through_the_host_whatever_mpi_takes(cupy, mpi_takes_gpu):
    result = rr.allreduce(cupy.array(values(2500, "float32", rr.rank())), op=Sum).get()
    np.testing.assert_array_equal(result, total(2500, "float32", 3))
    assert rr.info().gpu_algorithm.startswith("host_staged: GPU memory has only the ring; ")


# torch


def test_torch_tensors_on_torchs_current_stream(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch)

    def program():
        rank = rr.rank()
        with fake_torch.cuda.stream(fake_torch.cuda.Stream()):
            tensor, own = (fake_torch.tensor(values(2500, "float32", rank, salt)) for salt in range(2))
            result = rr.allreduce(tensor, op=Sum)
            assert isinstance(result, fake_torch.Tensor)
            assert rr.allreduce_(own, op=Sum) is own
            rows = rr.allgather(fake_torch.tensor(values(4, "int64", rank)))
            splits = fake_torch.tensor(np.array([1, 3]))
            received = rr.alltoall(fake_torch.tensor(values(4, "int64", rank)), splits=splits)[1]
            assert received.cpu().tolist() == [1 + 2 * rank] * 2
            return result.cpu(), own.cpu(), rows.cpu()

    for result, own, rows in ranks([0, 0], program):
        np.testing.assert_array_equal(result, total(2500, "float32", 2))
        np.testing.assert_array_equal(own, total(2500, "float32", 2, 1))
        np.testing.assert_array_equal(rows, np.concatenate([values(4, "int64", rank) for rank in range(2)]))


def test_torch_tensors_on_a_gpu_without_cupy_name_the_extra(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch)

    def program():
        with pytest.raises(rr.MissingExtraError, match=r"pip install 'cupy-cuda12x\[ctk\]'"):
            rr.allreduce_(fake_torch.tensor(values(5, "float32", 0)))

    with monkeypatch.context() as patch:  # undone before `cupy` is, whose module would else stay
        patch.setitem(sys.modules, "cupy", None)
        run_ranks(1, program)


# what goes wrong


@each_rank_of(2, settings=small())
def test_an_array_on_the_host_here_and_on_a_gpu_there(gpu):
    host = values(100, "float32", rr.rank())
    with pytest.raises(rr.MismatchError, match="a tensor on cuda, but rank 0 has one on cpu"):
        rr.allreduce(host if rr.rank() == 0 else gpu.array(host), name="w")
    np.testing.assert_array_equal(rr.allreduce(gpu.array(host), name="w", op=Sum).get(), total(100, "float32", 2))


@each_rank_of(2, settings=small())
def test_host_and_gpu_arrays_in_one_group(gpu):
    arrays = [values(100, "float32", rr.rank()), gpu.array(values(50, "float32", rr.rank()))]
    on_host, on_gpu = rr.grouped_allreduce(arrays, op=Sum)
    np.testing.assert_array_equal(on_host, total(100, "float32", 2))
    np.testing.assert_array_equal(on_gpu.get(), total(50, "float32", 2))


@each_rank_of(1)
def test_an_array_on_another_gpu_than_the_first(cupy):
    cupy.machine.device_count = 2
    rr.allreduce_(cupy.array(values(10, "float32", 0)))
    with cupy.cuda.Device(1):
        wrong = cupy.array(values(10, "float32", 0))
    with pytest.raises(rr.InputError, match="an array on cuda:1, but its first was on cuda:0; a rank uses one GPU"):
        rr.allreduce_(wrong)


@pytest.mark.parametrize("obstacle", ["", "ipc", "peers", "memory"])
def test_what_cannot_be_mapped_goes_through_the_host_and_one_line_says_so(gpu, caplog, obstacle):
    """Each rank has a GPU of its own."""
    gpu.machine.device_count = 2
    gpu.refuse_ipc, gpu.refuse_peers = obstacle == "ipc", obstacle == "peers"
    if obstacle == "memory":
        gpu.machine.memory_bytes = 24 << 20

    def program():
        gpu.cuda.Device(rr.rank()).use()
        results = [rr.allreduce(gpu.array(values(3000, "float32", rr.rank(), k)), op=Sum).get() for k in range(3)]
        return results, rr.info().gpu_algorithm

    with caplog.at_level(logging.WARNING, "ringreduce"):
        by_rank = ranks([0, 0], program, cuda_slot_bytes=(8 << 20) if obstacle == "memory" else SLOT_BYTES)
    for results, text in by_rank:
        np.testing.assert_array_equal(results, [total(3000, "float32", 2, k) for k in range(3)])
        assert text.startswith("host_staged: " if obstacle else "ipc: ")
    lines = [each.getMessage() for each in caplog.records if "GPU arrays" in each.getMessage()]
    assert len(lines) == bool(obstacle)
    for line in lines:
        assert line.startswith("GPU arrays are copied through host memory instead of by CUDA IPC: rank ")
        assert "CUDARuntimeError" in line


# NCCL


@pytest.fixture
def nccl_ranks(cupy):
    """Runs ranks, each on its GPU where there are as many, whose streams run at random."""
    cupy.machine.mode = "random"

    def run(size, program, device_count, **chosen):
        cupy.machine.device_count = device_count

        def on_its_gpu():
            cupy.cuda.Device(rr.rank() % device_count).use()
            return program(cupy)

        return run_ranks(size, on_its_gpu, settings=Settings(cuda_slot_bytes=SLOT_BYTES, **chosen), timeout_s=60)

    return run


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("float32", Sum),
        ("float32", rr.Average),
        ("int32", rr.Average),
        ("int16", Sum),
        ("float64", rr.Max),
        ("bool", Sum),
        ("complex64", Sum),
        ("float16", rr.Average),
    ],
)
def test_nccl_is_the_default_where_every_rank_has_a_gpu(nccl_ranks, dtype, op):
    """What it has not goes another way."""

    def program(cupy):
        host = values(3000, dtype, rr.rank())
        scales = {} if dtype == "bool" else {"postscale_factor": 2.0}
        on_gpu = rr.allreduce(cupy.array(host), op=op, **scales).get()
        expected = "nccl: every rank has a GPU of its own, and NCCL is installed"
        other = "; else ipc: the host's ranks map each other's GPU memory (CUDA IPC)" if dtype == "int16" else ""
        assert rr.info().gpu_algorithm == expected + other
        return on_gpu, rr.allreduce(host, op=op, **scales)

    for on_gpu, on_host in nccl_ranks(3, program, device_count=3):
        np.testing.assert_allclose(on_gpu, on_host, rtol=2e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize(
    ("dtype", "scales", "terms", "expected"),
    [
        ("int32", {}, [1 << 30, 3 << 29, 1 << 30], 7 * (1 << 29) // 3),
        ("float16", {}, [30000, 30100, 30200], 30100),
        ("float16", {"prescale_factor": 0.25, "postscale_factor": 4.0}, [30000, 30100, 30200], 30100),
    ],
)
def test_nccl_averages_what_has_a_sum_that_is_too_large_for_its_type(nccl_ranks, dtype, scales, terms, expected):
    def program(cupy):
        array = cupy.array(np.full(50, terms[rr.rank()], dtype))
        result = rr.allreduce(array, op=rr.Average, **scales).get().astype(np.float64)
        np.testing.assert_allclose(result, expected, rtol=2e-3 if dtype == "float16" else 0)

    nccl_ranks(3, program, device_count=3)


def gpu_algorithm(cupy):
    result = rr.allreduce(cupy.array(values(900, "float32", rr.rank())), op=Sum).get()
    np.testing.assert_array_equal(result, total(900, "float32", rr.size()))
    return rr.info().gpu_algorithm


@pytest.mark.parametrize(
    ("gpus", "chosen", "why"),
    [
        (3, {"cuda_nccl": False}, "RINGREDUCE_CUDA_NCCL=0"),
        (3, {"deterministic": True}, "RINGREDUCE_DETERMINISTIC=1"),
        (3, {"algorithm": "shared"}, "RINGREDUCE_ALGORITHM=shared"),
        (2, {}, "ranks 0, 2 share GPU "),
    ],
)
def test_what_rules_nccl_out(nccl_ranks, gpus, chosen, why):
    for text in nccl_ranks(3, gpu_algorithm, device_count=gpus, **chosen):
        assert text.startswith(f"ipc: the host's ranks map each other's GPU memory (CUDA IPC); no nccl: {why}")


def test_one_rank_without_nccl_rules_it_out_on_all(nccl_ranks, monkeypatch):
    monkeypatch.setattr(nccl, "why_not", lambda: "no NCCL" if threading.current_thread().name.endswith(" 1") else "")
    for text in nccl_ranks(2, gpu_algorithm, device_count=2):
        assert text.startswith("ipc: ")
        assert text.endswith("; no nccl: rank 1: no NCCL")


def test_a_rank_that_nccl_does_not_connect_rules_it_out_on_all(nccl_ranks, monkeypatch, heard):
    connect = nccl.connect

    def failing(device, size, uid, rank):
        made = yield from connect(device, size, uid, rank)
        if rank == 1:
            made.abort()
            raise rr.CollectiveError("NCCL: no route")
        return made

    monkeypatch.setattr(nccl, "connect", failing)
    with heard.at_level(logging.WARNING, "ringreduce"):
        for text in nccl_ranks(2, gpu_algorithm, device_count=2):
            assert text.endswith("; no nccl: rank 1: NCCL: no route")
    (line,) = [each.getMessage() for each in heard.records if "NCCL" in each.getMessage()]
    assert line == "GPU arrays are not reduced by NCCL: rank 1: NCCL: no route"


def test_nccl_that_is_asked_for_on_a_gpu_that_ranks_share_is_an_error_on_all(nccl_ranks):
    def program(cupy):
        for _ in range(2):
            with pytest.raises(rr.InputError, match=r"RINGREDUCE_ALGORITHM=nccl: .*ranks 0, 2 share GPU"):
                rr.allreduce_(cupy.array(values(10, "float32", rr.rank())), name="x")
        on_host = rr.allreduce(values(10, "float32", rr.rank()), op=Sum)
        np.testing.assert_array_equal(on_host, total(10, "float32", 3))

    nccl_ranks(3, program, device_count=2, algorithm="nccl")


SETS = [[0, 1, 2], [0, 1], [1, 2], [0, 2]]


def test_nccl_for_process_sets_that_overlap(nccl_ranks):
    """Each rank submits to them in an order of its own: kernels that wait for other ranks' may not wait in a row."""

    def program(cupy):
        rank = rr.rank()
        sets = [rr.global_process_set, *(rr.add_process_set(members) for members in SETS[1:])]
        mine = [(members, each) for members, each in zip(SETS, sets, strict=True) if rank in members]
        for step in range(4):
            handles = {}
            for number in np.random.default_rng([step, rank]).permutation(len(mine)):
                array, own = cupy.array(values(1800, "float32", rank, step)), mine[number][1]
                handles[number] = rr.allreduce_async(array, op=Sum, process_set=own, name=f"s{step}")
            for number, handle in sorted(handles.items()):
                expected = sum(values(1800, "float32", each, step) for each in mine[number][0])
                np.testing.assert_array_equal(rr.synchronize(handle).get(), expected)
        states = runtime.current("test").engine.states.values()
        assert {state.executor.context.gpu.text().partition(":")[0] for state in states} == {"nccl"}

    nccl_ranks(3, program, 3, dynamic_process_sets=True)


def test_ranks_that_have_joined_take_part_in_nccl(nccl_ranks):
    def program(cupy):
        for step in range(rr.rank()):
            mine = cupy.array(values(1500, "float32", rr.rank(), step))
            expected = sum(values(1500, "float32", each, step) for each in range(step + 1, 3))
            np.testing.assert_array_equal(rr.allreduce(mine, op=Sum, name=f"w{step}").get(), expected)
        rr.join()

    nccl_ranks(3, program, device_count=3)


@each_rank_of(2, settings=small())
def test_dlpack_of_another_library(gpu):
    array = Exporter(gpu.array(values(700, "float32", rr.rank())))
    with pytest.raises(rr.UnsupportedArrayError, match="cannot be changed in place"):
        rr.allreduce_(array)
    np.testing.assert_array_equal(rr.allreduce(array, op=Sum).get(), total(700, "float32", 2))


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1]], ids=str)
def test_a_sharded_optimizer(gpu, hosts):
    """As of host arrays, of which one is in no type with the others."""
    gradients = [{name: values(7, dtype, rank) for name, dtype in (("a", "f4"), ("b", "f8"))} for rank in range(3)]

    class Momentum:
        def __init__(self, params):
            self.params, self.velocity = params, {name: each * 0 for name, each in params.items()}

        def step(self, grads):
            for name, grad in grads.items():
                self.velocity[name] = self.velocity[name] * 0.5 + grad
                self.params[name][...] = self.params[name] - self.velocity[name]

    def program(asarray):
        params = {"a": asarray(np.arange(7, dtype="f4")), "b": asarray(np.ones(7))}
        optimizer = rr.ShardedOptimizer(Momentum, params)
        for _ in range(2):
            optimizer.step({name: asarray(each) for name, each in gradients[rr.rank()].items()})
        return params, optimizer.state_dict()["velocity"]

    found = run_ranks(len(hosts), lambda: program(gpu.asarray), hosts=hosts)
    for mine, expected in zip(found, run_ranks(len(hosts), lambda: program(np.copy), hosts=hosts), strict=True):
        for one, other in zip(mine, expected, strict=True):
            for name, each in one.items():
                np.testing.assert_array_equal(each.get(), other[name], strict=True)
