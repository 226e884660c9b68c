"""The torch functions on threads and on real ranks: many handles, a layer inside a model, optimizers."""

import pytest
import torch

import ringreduce.torch as hvd
from tests.support.world import each_rank, on_every_world_with_torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def numbers(shape, rank, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def of_all(shape, seed=0, dtype=torch.float64):
    return [numbers(shape, rank, seed, dtype) for rank in range(hvd.size())]


@each_rank(on_every_world_with_torch)
def test_many_handles_at_once_in_an_order_of_each_ranks_own():
    order = torch.randperm(60, generator=torch.Generator().manual_seed(hvd.rank())).tolist()
    handles = {n: hvd.allreduce_async_(numbers((n,), hvd.rank(), n), name=f"tensor {n}", op=hvd.Sum) for n in order}
    for n in sorted(order, key=lambda n: (n * 7) % 60):
        torch.testing.assert_close(hvd.synchronize(handles[n]), sum(of_all((n,), n), torch.zeros(n).double()))
        assert hvd.poll(handles[n])


@each_rank(on_every_world_with_torch)
def test_a_layer_parted_among_the_ranks():
    """An allreduce inside a model, by name: two steps forward and backward."""
    weights = of_all((5, 4), 7)
    for step in range(2):
        mine = weights[hvd.rank()].clone().requires_grad_()
        x = numbers((6, 5), step)
        hvd.allreduce(x @ mine, op=hvd.Sum, name="partial sums").tanh().sum().backward()
        everyones = [each.clone().requires_grad_() for each in weights]
        (sum(x @ each for each in everyones).tanh().sum() * hvd.size()).backward()
        torch.testing.assert_close(mine.grad, everyones[hvd.rank()].grad)


@each_rank(on_every_world_with_torch)
def test_optimizer_state_of_a_checkpoint_on_the_last_rank():
    root = hvd.size() - 1
    model = torch.nn.Linear(300, 200)
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (1 + hvd.rank()), betas=(0.5 + hvd.rank() / 10, 0.9))
    if hvd.rank() == root:
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    assert optimizer.param_groups[0]["lr"] == 0.1 / hvd.size()
    assert optimizer.state[model.weight]["step"] == 1
    optimizer.zero_grad()
    model(numbers((4, 300), hvd.rank(), dtype=torch.float32)).square().mean().backward()
    optimizer.step()
    states = hvd.allgather_object({"optimizer": optimizer.state_dict(), "model": model.state_dict()})
    for state in states:
        assert state["optimizer"]["param_groups"] == states[0]["optimizer"]["param_groups"]
        for key, value in state["optimizer"]["state"][0].items():
            assert torch.equal(value, states[0]["optimizer"]["state"][0][key])
        assert torch.equal(state["model"]["weight"], states[0]["model"]["weight"])
