"""Training with local steps: on the ranks, with NumPy and torch, and by one process that does the same."""

import numpy as np
import torch

import ringreduce as rr

SHAPES = {"a": (3, 4), "b": (5,), "c": (), "d": (2, 3), "e": (1,), "f": (4,)}
FRAGMENTS = {1: ["abcdef"], 2: ["ace", "bdf"], 3: ["a", "bf", "cde"]}
"""By hand: the largest first, each into the smallest so far."""
RATE = 0.1


def start():
    return {
        name: np.sin(np.arange(np.prod(shape, dtype=int)) + ord(name)).reshape(shape) for name, shape in SHAPES.items()
    }


def gradient(parameter, name, rank, step):
    """Its data differ by rank, step, name and index."""
    target = np.cos(np.arange(parameter.size) * (rank + 1) + step * ord(name)).reshape(parameter.shape)
    return np.asarray((parameter - target) * (1 + rank / 2))


def simulated(ranks, steps, sync_every, fragments=1, delay=0, warmup_steps=0, momentum=0.0, lr=1.0, hosts=None):
    """The parameters of all ranks after these steps, and the anchors."""
    own, anchors, sent = [start() for _ in range(ranks)], start(), []
    velocity = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    hosts = hosts or range(ranks)
    for step in range(1, steps + 1):
        gradients = [{name: gradient(x[name], name, rank, step) for name in x} for rank, x in enumerate(own)]
        for rank, x in enumerate(own):
            together = [gradients[other] for other in range(ranks) if hosts[other] == hosts[rank]]
            for name in x:
                x[name] = x[name] - RATE * np.mean([each[name] for each in together], axis=0)
        turn, rest = divmod(step - warmup_steps, sync_every // fragments)
        if step <= warmup_steps:
            anchors = {name: np.mean([x[name] for x in own], axis=0) for name in anchors}
            own = [dict(anchors) for _ in own]
        for due, name, before in [each for each in sent if each[0] == step]:
            sent.remove((due, name, before))
            arrived(anchors, velocity, own, name, before, momentum, lr)
        if step > warmup_steps and not rest:
            for name in FRAGMENTS[fragments][(turn - 1) % fragments]:
                before = [x[name] for x in own]
                if delay:
                    sent.append((step + delay, name, before))
                else:
                    arrived(anchors, velocity, own, name, before, momentum, lr)
    return own, anchors


def arrived(anchors, velocity, own, name, before, momentum, lr):
    pseudo = anchors[name] - np.mean(before, axis=0)
    velocity[name] = momentum * velocity[name] + pseudo
    anchors[name] = anchors[name] - lr * (pseudo + momentum * velocity[name])
    for x, was in zip(own, before, strict=True):
        x[name] = anchors[name] + (x[name] - was)


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


def assert_close(values, expected):
    for name, each in expected.items():
        np.testing.assert_allclose(values[name], each, rtol=1e-12, atol=1e-12, err_msg=name)
