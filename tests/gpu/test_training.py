"""What torch's front ends do with a model on the GPU: trained alike on both, whatever wraps the optimizer."""

import contextlib
import re

import numpy as np
import pytest

import ringreduce as rr
from tests.gpu.libraries import libraries
from tests.support.reference import data

pytestmark = pytest.mark.mpi
STEPS = 12  # after which local steps are averaged, too


@pytest.fixture
def torch(world):
    found = {each.name: each for each in libraries()}
    if "torch" not in found:
        pytest.skip("torch is not here, or finds no GPU")
    world()
    return found["torch"].module


@pytest.fixture
def hvd(torch):
    import ringreduce.torch

    return ringreduce.torch


def network(torch, device):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5)).to(device)


def inputs(torch, step, device):
    return torch.from_numpy(data("float32", 640, rr.rank(), step).reshape(32, 20) / 100).to(device)


def distributed(**options):
    return lambda hvd, optimizer, named: hvd.DistributedOptimizer(optimizer, named, **options)


def compressed(name):
    return lambda hvd, optimizer, named: hvd.DistributedOptimizer(optimizer, named, getattr(hvd.Compression, name))


def sharded(compression="none"):
    return lambda hvd, optimizer, named: hvd.ShardedOptimizer(optimizer, named, getattr(hvd.Compression, compression))


WRAPPERS = {
    "plain": (distributed(), 1e-3),
    "two groups": (distributed(groups=2), 1e-3),
    "predivided": (distributed(gradient_predivide_factor=2.0), 1e-3),
    "waits in backward": (distributed(wait_in_backward=True), 1e-3),
    "fp16": (compressed("fp16"), 5e-3),
    "bf16": (compressed("bf16"), 3e-2),
    "int8": (compressed("int8"), 5e-2),
    "int4": (compressed("int4"), 2e-1),
    "LocalSGD": (lambda hvd, optimizer, named: hvd.LocalSGD(optimizer, named, sync_every=4), 5e-3),
    "DiLoCo": (lambda hvd, optimizer, named: hvd.DiLoCo(optimizer, named, sync_every=4), 5e-3),
    "sharded": (sharded(), 1e-3),
    "sharded, fp16": (sharded("fp16"), 5e-3),
}
"""What wraps an optimizer; and how far the losses on the GPU may be from those on the host."""


def trained(torch, hvd, device, wrap, scaled=False):
    """The losses, and the parameters."""
    model, losses = network(torch, device), []
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    named = [(f"{device}.{name}", each) for name, each in model.named_parameters()]
    optimizer = wrap(hvd, torch.optim.Adam(model.parameters(), lr=1e-3), named)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=scaled)
    for step in range(STEPS):
        with torch.autocast(device, dtype=torch.float16, enabled=scaled):
            loss = model(inputs(torch, step, device)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, torch.cat([each.detach().flatten().cpu() for each in model.parameters()]).numpy()


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_model_is_trained_as_on_the_host(torch, hvd, name):
    wrap, tolerance = WRAPPERS[name]
    on_host, _ = trained(torch, hvd, "cpu", wrap)
    on_gpu, parameters = trained(torch, hvd, "cuda", wrap)
    np.testing.assert_allclose(on_gpu, on_host, rtol=tolerance, atol=tolerance)
    everyones = rr.allgather_object(parameters.tobytes())
    assert all(each == everyones[0] for each in everyones), "bit-identical on all ranks"


@pytest.mark.parametrize("wrap", [distributed(), sharded()], ids=["plain", "sharded"])
def test_mixed_precision(torch, hvd, wrap):
    """On the GPU in 16 bits, with a GradScaler."""
    expected, _ = trained(torch, hvd, "cpu", wrap)
    found, _ = trained(torch, hvd, "cuda", wrap, scaled=True)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_adasum(torch, hvd):
    if rr.size() & (rr.size() - 1):
        pytest.skip("Adasum needs a power of two of ranks")
    ours = torch.full((1001,), rr.rank() + 1.0)
    found = hvd.allreduce(ours.cuda(), op=hvd.Adasum, name="on the GPU")
    torch.testing.assert_close(found.cpu(), hvd.allreduce(ours, op=hvd.Adasum, name="on the host"))


def test_gradients_go_through_the_collectives(torch, hvd):
    calls = [
        lambda tensor: hvd.allreduce(tensor, op=hvd.Sum),
        hvd.allgather,
        lambda tensor: hvd.broadcast(tensor, 0),
        lambda tensor: hvd.reducescatter(tensor, op=hvd.Sum),
        lambda tensor: hvd.alltoall(tensor, splits=torch.tensor([2] * rr.size(), dtype=torch.int32))[0],
    ]
    for call in calls:
        results = []
        for device in ("cpu", "cuda"):
            tensor = (torch.arange(4.0 * rr.size()).reshape(-1, 2) + rr.rank()).to(device).requires_grad_()
            result = call(tensor)
            (result * result).sum().backward()
            results.append((result.detach().cpu(), tensor.grad.cpu()))
        (one, its_gradient), (other, others_gradient) = results
        assert torch.equal(one, other)
        assert torch.equal(its_gradient, others_gradient)


def test_sync_batch_norm(torch, hvd):
    torch.manual_seed(1)
    everyones = torch.randn(8 * rr.size(), 6, 4, 4)
    whole, ours = torch.nn.BatchNorm2d(6), hvd.SyncBatchNorm(6).cuda()
    mine = slice(8 * rr.rank(), 8 * rr.rank() + 8)
    expected, found = everyones.clone().requires_grad_(), everyones[mine].cuda().requires_grad_()
    whole(expected).square().sum().backward()
    ours(found).square().sum().backward()
    torch.testing.assert_close(found.grad.cpu(), expected.grad[mine], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.running_var.cpu(), whole.running_var)


def test_sparse_gradients(torch, hvd):
    table = torch.nn.Embedding(50, 4, sparse=True).cuda()
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    before = table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), [("table", table.weight)])
    table(torch.tensor([1 + rr.rank(), 7], device="cuda")).sum().backward()
    optimizer.step()
    change = (before - table.weight.detach()).cpu().numpy()
    np.testing.assert_allclose(change[7], 1.0, rtol=1e-5)
    np.testing.assert_allclose(change[1 : 1 + min(6, rr.size())], 1 / rr.size(), rtol=1e-5)


def test_states_are_broadcast_kept_and_restored(torch, hvd):
    model = network(torch, "cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * (rr.rank() + 1))
    model(inputs(torch, 0, "cuda")).sum().backward()
    optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    moments = [each["exp_avg"].cpu().numpy().tobytes() for each in optimizer.state.values()]
    assert all(each == moments for each in rr.allgather_object(moments))
    assert optimizer.param_groups[0]["lr"] == 1e-3
    kept = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=3)
    weight = model[0].weight.detach().clone()
    kept.commit()
    with torch.no_grad():
        model[0].weight.zero_()
    kept.restore()
    assert torch.equal(model[0].weight, weight)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("action", ["raise", "zero"])
def test_the_rank_whose_gradient_has_a_nan_is_named(torch, hvd, action):
    model, bad = network(torch, "cuda"), rr.size() - 1
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    rr.check(f"nan:{action}")
    try:
        for step in range(5):
            batch = inputs(torch, step, "cuda")
            if step == 3 and rr.rank() == bad:
                batch[0, 0] = torch.nan
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            message = rf"rank {bad} of {rr.size()}, allreduce '.*' \(test_training.py:\d+\), step 3: NaN in its own"
            with pytest.raises(rr.NanError) if (step, action) == (3, "raise") else contextlib.nullcontext() as caught:
                optimizer.step()
            assert caught is None or re.match(message, str(caught.value))
            assert torch.equal(model[0].weight, before) is (step == 3)
    finally:
        rr.check("")


@pytest.mark.mpi(min_size=2)
def test_ranks_whose_parameters_differ_are_found(torch, hvd, capfd):
    model = network(torch, "cuda")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    rr.check("divergence:2")
    try:
        for step in range(4):
            if step == 2 and rr.rank() == rr.size() - 1:
                model[0].weight.data[0, 0] += 1
            optimizer.zero_grad()
            model(inputs(torch, step, "cuda")).square().mean().backward()
            optimizer.step()
        rr.barrier()
    finally:
        rr.check("")
    said = capfd.readouterr().err
    if rr.rank() == 0:
        assert re.search(r"parameter '0.weight' differs", said), said
