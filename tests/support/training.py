"""What the tests of the torch optimizer train, and the same alone on all data."""

import torch

import ringreduce.torch as hvd

BATCH = 12


def make_model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def batch(step):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)


def share(step):
    return batch(step)[hvd.rank() :: hvd.size()]


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def parameters(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def gradients(model):
    return torch.cat([parameter.grad.detach().reshape(-1) for parameter in model.parameters()])


def wrap(model, lr=0.1, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), **options)


def same_on_all(results):
    assert all(torch.equal(result, results[0]) for result in results), "bit-identical"
    return results[0]
