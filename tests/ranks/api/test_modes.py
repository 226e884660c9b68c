"""Modes that a program has set for a thread, or for a whole library: the results are those of any other program."""

import contextlib
import copy
import io
import itertools
import sys
import warnings

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.reference import COMPLEX, legal
from tests.support.tiers import adapters

torch = pytest.importorskip("torch", reason="torch is not installed: its adapter is not tested here")
hvd = pytest.importorskip("ringreduce.torch")

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "int32", "int64", "uint8"]
FACTORS = [{}, {"prescale_factor": 1e-30, "postscale_factor": 1e30}, {"prescale_factor": 1e4}]


def awkward(name, rank):
    """Elements whose sums and products overflow, underflow and are no numbers; more than a vector register's."""
    if name in ("int32", "int64", "uint8"):
        return np.arange(40).astype(name) * (rank + 1)
    tensor = torch.zeros(40, dtype=getattr(torch, name))
    limits = torch.finfo(tensor.dtype)
    small = [limits.tiny, limits.smallest_normal * 2**-3, limits.max, -limits.max, 0.0, np.nan, np.inf, -np.inf]
    tensor[: len(small)] = torch.tensor(small, dtype=torch.float64).to(tensor.dtype)
    tensor[8] = np.inf if rank else -np.inf
    return tensor if name == "bfloat16" else tensor.numpy()


def reductions(name, rank):
    """What is called on each element type."""
    array, channel = awkward(name, rank), rr.ordered()
    for op, factors in itertools.product((rr.Sum, rr.Average, rr.Min, rr.Max, rr.Product, rr.Adasum), FACTORS):
        floats = name not in ("int32", "int64", "uint8")
        if legal(op, name) and not (op is rr.Adasum and (factors or not floats)):
            kept = factors if floats else {}
            yield lambda op=op, kept=kept: rr.allreduce(array, op=op, **kept)
            if op in (rr.Sum, rr.Average):
                yield lambda op=op, kept=kept: rr.reducescatter(array, op=op, **kept)
            if not kept:
                yield lambda op=op: channel.allreduce(array, op=op)
                yield lambda op=op: channel.allreduce(array, op=op)  # by the lane
    if floats and name not in COMPLEX:
        for each in (rr.Compression.fp16, rr.Compression.bf16, rr.Compression.int8, rr.Compression.int4):
            yield lambda each=each: rr.allreduce(array, compression=each)


def optimizers():
    """Optimizers that compute on gradients by themselves."""
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    for given in ({"compression": rr.Compression.fp16}, {"compression": rr.PowerSGD(2)}, {"op": rr.Adasum}, options):
        yield rr.DistributedOptimizer(lambda grads: grads, **given)


def strict_program():
    """Every warning of NumPy's is an error, in this thread and, since ranks are threads, in the engine's."""
    np.seterr(all="raise")
    for name in DTYPES:
        for call in reductions(name, rr.rank()):
            call()
    for optimizer in optimizers():
        for number in (3e38, 1e-42, 0.0, np.inf):
            for _ in range(2):
                optimizer({"w": np.full((20, 30), number, np.float32)})
    assert rr.allreduce(np.ones(2), op=rr.Sum).tolist() == [2, 2]


OTHERS = [pytest.param((0, 0), False, marks=adapters), pytest.param((0, 1), True, marks=adapters)]


@pytest.mark.parametrize(("hosts", "compiled"), [((0, 0), True), ((0, 1), False), *OTHERS], ids=str)
def test_numpys_errors_and_pythons_warnings(hosts, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr("ringreduce.kernels.native.module", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*averages of integer")
        for algorithm in ("auto", "ring"):
            run_ranks(2, strict_program, hosts=hosts, settings=Settings(algorithm=algorithm))


NORM = hvd.SyncBatchNorm(3)  # made before there is any mode


def of_torch(rank, size):
    """Each function, by name; a tensor's device and type are in the name of nothing that it calls."""
    row = {"dtype": torch.float32, "device": "cpu"}
    value = torch.full((4, 3), rank + 1.0, **row)
    whole = torch.full((4,), rank, dtype=torch.int64, device="cpu")
    splits = [4] + [0] * (size - 1)
    sparse = torch.sparse_coo_tensor([[0], [rank]], [1.0], (3, 3), check_invariants=True, **row)
    return {
        "allreduce": lambda: hvd.allreduce(value),
        "in place": lambda: hvd.allreduce_(value.clone()),
        "group": lambda: hvd.grouped_allreduce([value, whole]),
        "allgather": lambda: hvd.grouped_allgather([value, whole]),
        "broadcast": lambda: hvd.broadcast(value, 0),
        "alltoall": lambda: hvd.alltoall(value),
        "splits": lambda: hvd.alltoall(value, splits),
        "reducescatter": lambda: hvd.grouped_reducescatter([value, whole]),
        "sparse": lambda: hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)().to_dense(),
        "compressed": lambda: hvd.allreduce(value, compression=hvd.Compression.fp16),
        "adasum": lambda: hvd.allreduce(value, op=hvd.Adasum),
        "objects": lambda: [each["w"] for each in hvd.allgather_object({"w": value})],
        "ordered": lambda: rr.ordered().allreduce(value),
        "scatter": lambda: rr.ordered().scatter(torch.zeros(2 * size, **row), 0),
        "backward": lambda: backward(value, splits),
        "optimizer": lambda: trained(value, lambda *given: hvd.DistributedOptimizer(*given)),
        "sharded": lambda: trained(value, lambda *given: hvd.ShardedOptimizer(*given)),
        "norm": lambda: trained(value, lambda *given: hvd.DistributedOptimizer(*given), copy.deepcopy(NORM)),
    }


def backward(value, splits):
    """The gradients of what has some; none where autograd is off."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return []
    for function in (hvd.allreduce, hvd.allgather, lambda x: hvd.alltoall(x, splits)[0], hvd.reducescatter):
        tensor = value.clone().requires_grad_()
        function(tensor).sum().backward()
        yield tensor.grad


def trained(value, wrap, *layers):
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return []
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, dtype=torch.float32, device="cpu"), *layers)
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.1), list(model.named_parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        model(value).sum().backward()
        optimizer.step()
    return [*model.parameters(), *(each.grad for each in model.parameters() if each.grad is not None)]


def a_default_device():
    torch.set_default_device("meta")
    return lambda: torch.set_default_device(None)


def inside(context):
    def enter():
        entered = context()
        entered.__enter__()
        return lambda: entered.__exit__(None, None, None)

    return enter


MODES = {
    "a default device": a_default_device,
    "no gradients": inside(torch.no_grad),
    "inference": inside(torch.inference_mode),
    "autocast": inside(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "none": inside(contextlib.nullcontext),
}


def of_mode(mode):
    leave = MODES[mode]()
    try:
        for name, call in of_torch(rr.rank(), rr.size()).items():
            found = call()
            for each in [found] if isinstance(found, torch.Tensor) else found:
                assert each.device.type == "cpu", name
                assert each.dtype in (torch.float32, torch.int64, torch.int32), name
    finally:
        leave()


@pytest.mark.parametrize("mode", MODES)
def test_torchs_modes_of_a_thread(mode):
    run_ranks(2, lambda: of_mode(mode))


def test_torchs_search_for_anomalies_in_the_whole_process():
    with torch.autograd.set_detect_anomaly(True):
        run_ranks(2, lambda: of_mode("none"))
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_default_type(dtype):
    torch.set_default_dtype(dtype)
    try:
        run_ranks(2, lambda: of_mode("no gradients"))
        run_ranks(2, lambda: of_mode("a default device"))
    finally:
        torch.set_default_dtype(torch.float32)


class Broken(io.StringIO):
    def write(self, _):
        raise OSError("a full disk")


@pytest.mark.parametrize("stream", [None, Broken()], ids=["none", "broken"])
def test_no_stream_to_write_to(stream, monkeypatch):
    def program():
        rr.allreduce(np.array([rr.rank()]))  # warns of integers, once
        if rr.rank():
            handle = rr.allreduce_async(np.ones(2), name="w")
            rr.barrier()
        else:
            rr.barrier()
            handle = rr.allreduce_async(np.ones(2), name="w")
        return rr.synchronize(handle).tolist()

    with monkeypatch.context() as without:
        without.setattr(sys, "stdout", stream)
        without.setattr(sys, "stderr", stream)
        found = run_ranks(2, program, settings=Settings(log_level="trace"))
    assert found == [[1.0, 1.0]] * 2
