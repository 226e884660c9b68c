"""What the tests of torch's ShardedOptimizer train."""

import torch

import ringreduce.torch as hvd
from ringreduce.settings import Settings

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
DETERMINISTIC = Settings(deterministic=True)


def model_of(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    layers = torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5, bias=False)
    model = torch.nn.Sequential(*layers)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 3
    return model.to(dtype)


def loss_of(model, step, rank=None):
    generator = torch.Generator().manual_seed(100 * step + (hvd.rank() if rank is None else rank))
    x = torch.randn(6, 7, generator=generator).to(next(model.parameters()).dtype)
    return (model(x)[:, :5] - x[:, :5]).square().mean()


def bits(model):
    return [each.detach().clone() for each in model.parameters()]


def assert_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)


def sharded(model=None, name="Adam", **options):
    model = model or model_of()
    return model, hvd.ShardedOptimizer(OPTIMIZERS[name](model.parameters()), model.named_parameters(), **options)


def plain(model=None, name="Adam", **options):
    model = model or model_of()
    return model, hvd.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), model.named_parameters(), **options)


def after(steps, optimizer, model, first=0):
    for step in range(first, steps):
        optimizer.zero_grad()
        loss_of(model, step, rank=7).backward()
        optimizer.step()
