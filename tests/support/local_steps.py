"""Training with local steps by one process, which does what all ranks do."""

import numpy as np

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


class Simulated:
    """Training with local steps by one process; `own` has each rank's parameters."""

    def __init__(
        self, ranks, parameters, gradient, groups, *, sync_every, delay=0, warmup_steps=0, momentum=0.0, lr=1.0
    ):
        """groups: the names of the parameters in each fragment."""
        self.anchors, self.gradient, self.groups = dict(parameters), gradient, groups
        self.interval, self.delay, self.warmup_steps = sync_every // len(groups), delay, warmup_steps
        self.momentum, self.lr, self.velocity = momentum, lr, dict.fromkeys(parameters, 0.0)
        self.steps = 0
        self.begin(ranks)

    def begin(self, ranks):
        """All begin from the anchors."""
        self.own, self.sent = {rank: dict(self.anchors) for rank in ranks}, []

    def step(self, hosts=None):
        """One of each rank; hosts: by rank, those of a host average their gradients."""
        self.steps += 1
        hosts = hosts or {rank: rank for rank in self.own}
        slopes = {
            rank: {name: self.gradient(each, name, rank, self.steps) for name, each in own.items()}
            for rank, own in self.own.items()
        }
        for rank, own in self.own.items():
            together = [slopes[other] for other in self.own if hosts[other] == hosts[rank]]
            own.update({name: each - RATE * np.mean([one[name] for one in together], 0) for name, each in own.items()})
        self._arrive()
        turn, rest = divmod(self.steps - self.warmup_steps, self.interval)
        if self.steps <= self.warmup_steps:
            self._send(self.anchors, self.steps, 1.0, 0.0)
        elif not rest:
            self._send(self.groups[(turn - 1) % len(self.groups)], self.steps + self.delay, self.lr, self.momentum)
        self._arrive()

    def _send(self, names, due, *outer):
        self.sent += [(due, name, {rank: own[name] for rank, own in self.own.items()}, *outer) for name in names]

    def _arrive(self):
        for due, name, values, lr, momentum in self.sent:
            if due == self.steps:
                pseudo = self.anchors[name] - np.mean(list(values.values()), axis=0)
                if momentum:
                    self.velocity[name] = momentum * self.velocity[name] + pseudo
                self.anchors[name] = self.anchors[name] - lr * (pseudo + momentum * self.velocity[name])
                for rank, own in self.own.items():
                    own[name] = self.anchors[name] + (own[name] - values[rank])
        self.sent = [each for each in self.sent if each[0] > self.steps]


def simulated(ranks, steps, sync_every, fragments=1, hosts=None, **options):
    """The parameters of all ranks after these steps, and the anchors."""
    made = Simulated(range(ranks), start(), gradient, FRAGMENTS[fragments], sync_every=sync_every, **options)
    for _ in range(steps):
        made.step(hosts)
    return made.own, made.anchors


def assert_close(values, expected):
    for name, each in expected.items():
        np.testing.assert_allclose(values[name], each, rtol=1e-12, atol=1e-12, err_msg=name)
