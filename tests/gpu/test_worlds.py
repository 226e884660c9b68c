"""Which GPU and which path a world takes, what info() tells of it, NCCL, ranks that join, worlds that come and go."""

import numpy as np
import pytest

import ringreduce as rr
from tests.gpu.libraries import gpus, libraries, same_bits
from tests.support.reference import assert_reduced, data

pytestmark = pytest.mark.mpi


def cupy():
    return libraries()[0].module


def shared_gpus():
    """True when two ranks use one GPU."""
    places = rr.allgather_object(gpus.place())
    return len(set(places)) < len(places)


def test_info_tells_the_path(path):
    rr.allreduce(cupy().ones(3), name="first")
    expected = f"{path.partition(',')[0]}: " if rr.size() > 1 else "one rank, "
    assert rr.info().gpu_algorithm.startswith(expected)


def test_ranks_take_the_gpus_in_turn():
    """Those of ringrun's placement; which is GPU r for local rank r, if all are alike."""
    count = cupy().cuda.runtime.getDeviceCount()
    assert len(set(rr.allgather_object(gpus.place()))) == min(count, rr.size())
    for library in libraries()[1:]:
        assert library.module.cuda.current_device() == cupy().cuda.Device().id


def test_a_rank_that_has_joined_changes_no_result(path, library):
    """Rank r takes r + 1 steps; an Average is divided by all. A rank that joined never had a GPU array of that step."""
    for epoch in range(2):
        for step in range(rr.rank() + 1):
            values = [data("float32", 10_001, rank, step) for rank in range(rr.size())]
            live = values[step:]
            found = library.get(rr.allreduce(library.put(values[rr.rank()]), name=f"w {step}", op=rr.Sum))
            assert_reduced(found, rr.Sum, live)
            found = library.get(rr.allreduce(library.put(values[rr.rank()]), name=f"v {step}", op=rr.Average))
            assert_reduced(found, rr.Average, live + [np.zeros_like(values[0])] * step)
        assert rr.join() == rr.size() - 1, epoch


def nccl_why_not():
    """The same on all ranks; empty: there is NCCL, and a GPU for each of them."""
    if shared_gpus():
        return "ranks share a GPU"
    return "" if all(rr.allgather_object(rr.nccl_built())) else "CuPy has no NCCL here"


def mpi_why_not():
    """The same; empty: MPI says that it takes GPU memory."""
    from ringreduce.gpu.cuda_aware import declared

    says_so, why = declared()
    return "" if says_so else why


OTHER_ORDERS = {
    "nccl": (nccl_why_not, {}),
    "nccl, asked for": (nccl_why_not, {"algorithm": "nccl"}),
    "cuda_aware": (mpi_why_not, {"cuda_nccl": 0, "cuda_ipc": 0, "cuda_aware_mpi": True}),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_paths_that_sum_in_orders_of_their_own(world, library, name):
    why_not, settings = OTHER_ORDERS[name]
    if reason := why_not():
        pytest.skip(reason)
    world(deterministic=0, **settings)
    for dtype in ("float32", "float64", "int32", "uint8", "float16"):
        values = [data(dtype, 100_003, rank) for rank in range(rr.size())]
        for op in (rr.Sum, rr.Average, rr.Max):
            with library.on(library.stream()):
                array = library.put(values[rr.rank()], late_ms=20)
                found = library.get(rr.allreduce(array, op=op, name="w"))
            same_bits(found, rr.broadcast(found, 0, name="rank 0's"))
            exact = np.max(values, 0) if op is rr.Max else np.sum(values, 0, dtype=np.float64)
            exact = exact / (rr.size() if op is rr.Average else 1)
            if np.dtype(dtype).kind in "iu":
                np.testing.assert_array_equal(found, np.trunc(exact).astype(dtype))
            else:
                tolerance = 0.02 if dtype == "float16" else 1e-5
                np.testing.assert_allclose(found, exact, rtol=tolerance, atol=tolerance)
    assert rr.info().gpu_algorithm.startswith(f"{name.partition(',')[0]}: ")


@pytest.mark.mpi(min_size=2)
def test_nccl_that_is_asked_for_where_ranks_share_a_gpu(world):
    if not shared_gpus():
        pytest.skip("every rank has a GPU of its own")
    world(algorithm="nccl", deterministic=0)
    with pytest.raises(rr.RingreduceError, match=r"RINGREDUCE_ALGORITHM=nccl: "):
        rr.allreduce(cupy().ones(100, np.float32), name="w")


@pytest.mark.mpi(min_size=3)
def test_nccl_in_process_sets_that_overlap(world):
    """Kernels that wait for other ranks' are in flight in several sets at once, in another order on each rank."""
    if reason := nccl_why_not():
        pytest.skip(reason)
    world(deterministic=0, dynamic_process_sets=1)
    members = [[each, (each + 1) % rr.size()] for each in range(rr.size())]
    sets = [(sorted(pair), rr.add_process_set(pair)) for pair in members]
    mine = [(pair, some) for pair, some in sets if some.included()]
    for step in range(10):
        order = np.random.default_rng([step, rr.rank()]).permutation(len(mine))
        arrays = {k: cupy().full(100_003, rr.rank() + step, np.float32) for k in order}
        handles = {k: rr.allreduce_async(arrays[k], op=rr.Sum, process_set=mine[k][1], name="w") for k in order}
        for k in sorted(handles):
            expected = sum(rank + step for rank in mine[k][0])
            assert (rr.synchronize(handles[k]).get() == expected).all()


def test_worlds_come_and_go_and_leave_no_memory_behind(world):
    """The slots of a world are 128 MiB a rank, and mapped by all others: forgotten ones would show."""
    free = []
    for number in range(5):
        world()
        assert rr.allreduce(cupy().ones(1000), op=rr.Sum, name="w").get().tolist() == [rr.size()] * 1000
        rr.shutdown()
        cupy().cuda.runtime.deviceSynchronize()
        rr.init()
        rr.barrier()
        free.append(cupy().cuda.runtime.memGetInfo()[0])
        rr.barrier()
        assert number == 0 or free[1] - free[-1] < 64 << 20, f"free memory falls: {free}"


@pytest.mark.parametrize("passes", [1, 2])
def test_torch_trains_alike_on_gpu_and_host(path, passes):
    """The same model on both, the same data: after each step equal bits on all ranks, and equal numbers on both."""
    found = {each.name: each for each in libraries()}
    if "torch" not in found:
        pytest.skip("torch is not here, or finds no GPU")
    torch = found["torch"].module
    import ringreduce.torch as hvd

    trained = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5)).to(device)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=[(f"{device}.{name}", each) for name, each in model.named_parameters()],
            backward_passes_per_step=passes,
        )
        for step in range(6):
            inputs = torch.from_numpy(data("float32", 640, rr.rank(), step).reshape(32, 20)).to(device)
            model(inputs).square().mean().backward()
            if step % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
        trained[device] = [each.detach().cpu().numpy() for each in model.parameters()]
    for one, other in zip(trained["cpu"], trained["cuda"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    everyones = rr.allgather_object([each.tobytes() for each in trained["cuda"]])
    assert all(each == everyones[0] for each in everyones), "bit-identical on all ranks"
