"""What the tests of the torch optimizer train, and the same alone on all data."""

import torch

import ringreduce.torch as hvd
from ringreduce.testing import run_ranks

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


def own_backward(model, step):
    """Of this rank's share."""
    loss_of(model, share(step)).backward()


def backward_of(model, x, rank, step):
    loss_of(model, x).backward()


def backward_that_lacks_a_layer(model, x, rank, step):
    """But for rank 0, there is no gradient of the last layer."""
    hidden = model[0](x)
    (model[2](hidden) if rank == 0 else hidden).square().mean().backward()


def parameters(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def wrap(model, lr=0.1, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), **options)


def wrapped(**options):
    """A new model, and its optimizer."""
    model = make_model()
    return model, wrap(model, **options)


def same_on_all(results):
    assert all(torch.equal(result, results[0]) for result in results), "bit-identical"
    return results[0]


def close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


def clip(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def trains_as_one_process(size, program, kinds=(hvd.DistributedOptimizer,), **options):
    """program(data, wrapped) makes the same of each rank's share, wrapped(optimizer, model), and of all data, alone."""
    expected = program(batch, lambda optimizer, _: optimizer)
    for kind in kinds:

        def wrapped(optimizer, model, kind=kind):
            return kind(optimizer, model.named_parameters(), **options)

        found = run_ranks(size, lambda wrapped=wrapped: program(share, wrapped))
        close(same_on_all(found), expected)


def trained(model, optimizer, steps, backward=own_backward, before_step=lambda model: None):
    """The parameters when it is trained so many steps, in each of which backward(model, step) computes gradients."""
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        before_step(model)
        optimizer.step()
    return parameters(model)


def alone(ranks, size, backward=backward_of, before_step=lambda model: None, make=make_model, steps=4, total=False):
    """The parameters of one process that computes what these ranks do: means of their gradients, or their total."""

    def all_backward(model, step):
        for rank in ranks:
            backward(model, batch(step)[rank::size], rank, step)
        for parameter in model.parameters():
            if parameter.grad is not None and not total:
                parameter.grad /= len(ranks)

    model = make()
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, all_backward, before_step)


def ranks_add_up(size, backward, before_step=lambda model: None, make=make_model, steps=4, wrapping=wrap, **options):
    """Ranks, each of which does backward(model, x, rank, step), get the parameters of one process that does it all."""

    def program():
        model = make()

        def own_backward(model, step):
            backward(model, share(step), hvd.rank(), step)

        return trained(model, wrapping(model, **options), steps, own_backward, before_step)

    total = options.get("op") is hvd.Sum
    close(same_on_all(run_ranks(size, program)), alone(range(size), size, backward, before_step, make, steps, total))
