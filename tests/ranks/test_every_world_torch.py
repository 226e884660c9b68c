"""The torch functions on threads and on real ranks: forms, gradients, sparse tensors, optimizers, SyncBatchNorm."""

import pytest
import torch

import ringreduce.torch as hvd
from tests.support.reference import data
from tests.support.world import on_every_world_with_torch


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
@on_every_world_with_torch
def test_allreduce_in_every_form(world, size, dtype):
    def program():
        parts = [(each * 10).to(dtype) for each in of_all((1000, 3))]
        wide = torch.float64 if dtype.is_floating_point else torch.int64
        expected = sum(each.to(wide) for each in parts)
        mine = parts[hvd.rank()]
        results = [
            hvd.allreduce(mine, op=hvd.Sum),
            hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum, name="named")),
            hvd.allreduce_(mine.clone(), op=hvd.Sum),
            hvd.synchronize(hvd.allreduce_async_(mine.clone(), op=hvd.Sum)),
            *hvd.grouped_allreduce([mine, mine.flip(0)], op=hvd.Sum)[:1],
            hvd.grouped_allreduce_([mine.flip(0), mine.clone()], op=hvd.Sum)[1],
        ]
        epsilon = torch.finfo(dtype).eps if dtype.is_floating_point else 0
        for result in results:
            assert result.dtype is dtype
            torch.testing.assert_close(result.to(wide), expected, rtol=epsilon, atol=200 * 2**-23 if epsilon else 0)
        everyones = hvd.allgather(torch.stack(results).view(torch.uint8).unsqueeze(0))
        assert (everyones == everyones[0]).all(), "bit-identical on all ranks"

    world(size).run(program)


@on_every_world_with_torch
def test_many_handles_at_once_in_an_order_of_each_ranks_own(world, size):
    def program():
        order = torch.randperm(60, generator=torch.Generator().manual_seed(hvd.rank())).tolist()
        handles = {n: hvd.allreduce_async_(numbers((n,), hvd.rank(), n), name=f"tensor {n}", op=hvd.Sum) for n in order}
        for n in sorted(order, key=lambda n: (n * 7) % 60):
            torch.testing.assert_close(hvd.synchronize(handles[n]), sum(of_all((n,), n), torch.zeros(n).double()))
            assert hvd.poll(handles[n])

    world(size).run(program)


@on_every_world_with_torch
def test_gradients(world, size):
    """Of the sum of all ranks' losses, computed by one process from all ranks' tensors; Horovod's scale it."""

    def program():
        size, me = hvd.size(), hvd.rank()
        rows, parts = 3 * size, [torch.tensor_split(torch.arange(3 * size + 1), size)[rank] for rank in range(size)]
        cases = [
            (lambda x: hvd.allreduce(x, name="mean"), lambda xs, r: sum(xs) / size, 1, rows),
            (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], lambda xs, r: sum(xs), 1, rows),
            (lambda x: hvd.allgather(x), lambda xs, r: torch.cat(xs), 1 / size, rows),
            (lambda x: hvd.broadcast(x, size - 1), lambda xs, r: xs[-1], 1 / size, rows),
            (lambda x: hvd.alltoall(x), lambda xs, r: torch.cat([x.chunk(size)[r] for x in xs]), 1, rows),
            (lambda x: hvd.reducescatter(x), lambda xs, r: (sum(xs) / size)[parts[r]], size, rows + 1),
        ]
        for call, model, factor, count in cases:
            everyones = [each.requires_grad_() for each in of_all((count, 2))]
            mine = everyones[me].detach().clone().requires_grad_()
            result = call(mine)
            (result.square() * (me + 1)).sum().backward()
            expected = [model(everyones, rank) for rank in range(size)]
            torch.testing.assert_close(result.detach(), expected[me].detach())
            loss = sum((each.square() * (rank + 1)).sum() for rank, each in enumerate(expected))
            (gradient,) = torch.autograd.grad(loss, [everyones[me]], materialize_grads=True)
            torch.testing.assert_close(mine.grad, factor * gradient)

    world(size).run(program)


@on_every_world_with_torch
def test_a_layer_parted_among_the_ranks(world, size):
    """An allreduce inside a model, by name: two steps forward and backward."""

    def program():
        weights = of_all((5, 4), 7)
        for step in range(2):
            mine = weights[hvd.rank()].clone().requires_grad_()
            x = numbers((6, 5), step)
            hvd.allreduce(x @ mine, op=hvd.Sum, name="partial sums").tanh().sum().backward()
            everyones = [each.clone().requires_grad_() for each in weights]
            (sum(x @ each for each in everyones).tanh().sum() * hvd.size()).backward()
            torch.testing.assert_close(mine.grad, everyones[hvd.rank()].grad)

    world(size).run(program)


@on_every_world_with_torch
def test_alltoall_with_splits(world, size):
    def program():
        size, me = hvd.size(), hvd.rank()
        splits = [[(source + 2 * target) % 3 for target in range(size)] for source in range(size)]
        everyones = [numbers((sum(own) + 1, 2), rank).requires_grad_() for rank, own in enumerate(splits)]
        mine = everyones[me]
        rows, received = hvd.alltoall(mine, torch.tensor(splits[me], dtype=torch.int32))
        pieces = [each.detach().split([*own, 1])[me] for each, own in zip(everyones, splits, strict=True)]
        torch.testing.assert_close(rows.detach(), torch.cat(pieces))
        assert received.tolist() == [own[me] for own in splits]
        (rows * (me + 1)).sum().backward()
        expected = torch.cat(
            [torch.full((n, 2), 1.0 + target) for target, n in enumerate([*splits[me]])] + [torch.zeros(1, 2)]
        )
        torch.testing.assert_close(mine.grad, expected.double())

    world(size).run(program)


@on_every_world_with_torch
def test_sparse_gradients(world, size):
    def program():
        embedding = torch.nn.Embedding.from_pretrained(numbers((10, 3), 0, dtype=torch.float32), False, sparse=True)
        embedding(torch.tensor([hvd.rank(), 9, 9])).pow(2).sum().backward()
        handle = hvd.sparse_allreduce_async(embedding.weight.grad, "embedding", hvd.Average)
        expected = torch.zeros(10, 3)
        for rank in range(hvd.size()):
            expected[rank] += 2 * embedding.weight.detach()[rank] / hvd.size()
            expected[9] += 4 * embedding.weight.detach()[9] / hvd.size()
        torch.testing.assert_close(handle().to_dense(), expected)

    world(size).run(program)


@on_every_world_with_torch
def test_optimizer_state_of_a_checkpoint_on_the_last_rank(world, size):
    def program():
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

    world(size).run(program)


@on_every_world_with_torch
def test_sync_batch_norm(world, size):
    def program():
        rows = [3 + rank for rank in range(hvd.size())]
        everyones = [numbers((n, 4, 2, 3), rank).requires_grad_() for rank, n in enumerate(rows)]
        layer, alone = hvd.SyncBatchNorm(4).double(), torch.nn.BatchNorm2d(4).double()
        mine = everyones[hvd.rank()].detach().clone().requires_grad_()
        y = layer(mine)
        y.pow(3).sum().backward()
        ys = alone(torch.cat(everyones))
        ys.pow(3).sum().backward()
        torch.testing.assert_close(y, ys.split(rows)[hvd.rank()])
        torch.testing.assert_close(mine.grad, everyones[hvd.rank()].grad)
        torch.testing.assert_close(hvd.allreduce(layer.weight.grad, op=hvd.Sum), alone.weight.grad)
        torch.testing.assert_close(layer.running_var, alone.running_var)

    world(size).run(program)


@on_every_world_with_torch
def test_gradients_agree_bit_for_bit(world, size):
    def program():
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        hvd.broadcast_parameters(model.state_dict())
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        for step in range(5):
            optimizer.zero_grad()
            model(torch.from_numpy(data("float32", 80, hvd.rank(), step).reshape(10, 8))).square().mean().backward()
            optimizer.step()
        digests = hvd.allgather_object([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
        assert all(digest == digests[0] for digest in digests)

    world(size).run(program)
