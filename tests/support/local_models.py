"""Models of NumPy and torch that take local steps as tests/support/local_steps.py does."""

import torch

import ringreduce as rr
from tests.support.local_steps import RATE, gradient, start


class SGD:
    """NumPy's; it changes its arrays in place."""

    def __init__(self, params):
        self.params = params

    def step(self, grads):
        for name, each in self.params.items():
            each[...] = each - RATE * grads[name]


class OfNumpy:
    """A model and its optimizer."""

    def __init__(self, wrap):
        self.params = start()
        self.optimizer = wrap(SGD(self.params), self.params)

    def step(self, step, skips=False):
        self.optimizer.step({name: gradient(each, name, rr.rank(), step) for name, each in self.values().items()})

    def values(self):
        return {name: each.copy() for name, each in self.params.items()}


class OfTorch:
    """The same; in several groups, one parameter frozen."""

    def __init__(self, wrap):
        self.params = {name: torch.nn.Parameter(torch.from_numpy(each)) for name, each in start().items()}
        self.frozen = torch.nn.Parameter(torch.arange(3.0) + rr.rank(), requires_grad=False)
        groups = [
            {"params": list(self.params.values())[:2]},
            {"params": [*list(self.params.values())[2:], self.frozen]},
        ]
        named = [*self.params.items(), ("frozen", self.frozen)]
        self.optimizer = wrap(torch.optim.SGD(groups, lr=RATE), named)

    def step(self, step):
        for name, each in self.params.items():
            each.grad = torch.from_numpy(gradient(each.detach().numpy(), name, rr.rank(), step))
        self.optimizer.step()

    def values(self):
        return {name: each.detach().numpy().copy() for name, each in self.params.items()}


MODELS = {"numpy": OfNumpy, "torch": OfTorch}


def wrapping(sync_every, fragments=1, delay=0, warmup_steps=0, momentum=None, lr=1.0, hierarchical=False, **options):
    """What wraps an optimizer, of a model."""
    outer = None if momentum is None else rr.Nesterov(lr, momentum)

    def wrap(optimizer, parameters):
        if hierarchical:
            optimizer = rr.DistributedOptimizer(optimizer, process_set=rr.host_process_set)
        if (fragments, delay, outer, options) == (1, 0, None, {}):
            return rr.LocalSGD(optimizer, parameters, sync_every=sync_every, warmup_steps=warmup_steps)
        each = {"sync_every": sync_every, "outer": outer, "fragments": fragments, "delay": delay, **options}
        return rr.DiLoCo(optimizer, parameters, warmup_steps=warmup_steps, **each)

    return wrap


def trained(model, steps, **way):
    """A model after so many steps."""
    made = MODELS[model](wrapping(**way))
    for step in range(1, steps + 1):
        made.step(step)
    return made
