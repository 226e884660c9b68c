"""How calls of this rank's express end: counted, hurried, or made to go another way."""

import dataclasses
from collections.abc import Callable

import numpy as np

import ringreduce as rr
from ringreduce import runtime
from tests.support.patience import wait_until

WARM = 8  # calls until each rank has learned a name


def own():
    return runtime.current("a test").engine.express


@dataclasses.dataclass
class Counting:
    """In place of the `Exchange` of a name: it counts what that returns; its first call goes by `how`, if set."""

    original: object
    counts: list[int]
    how: Callable | None = None

    def run(self, *arguments):
        how, self.how = self.how, None
        found = how(self.original.run, *arguments) if how else self.original.run(*arguments)
        self.counts[found] += 1
        return found


def within(run, patience_us, source, target, number, sequence, _, group):
    """The call, with another patience."""
    return run(source, target, number, sequence, patience_us, group)


@dataclasses.dataclass
class Hurried:
    """In place of an `Exchange`: it waits for nobody."""

    original: object

    def run(self, *arguments):
        return within(self.original.run, 0.0, *arguments)


def watched(name, counts, how=None):
    """Count, for this rank, how the calls of this name end."""
    known = own()._known
    if name in known and not isinstance(known[name].exchange, Counting):
        known[name] = known[name]._replace(exchange=Counting(known[name].exchange, counts, how))


def fast(name, array):
    """A call that goes this way, once nothing else is under way: the engine's thread may look around just now."""
    wait_until(lambda: own().run("allreduce", name, array, array, (None, rr.Sum, 1.0, 1.0)) is not None)


def element(rank, name, number, count=64):
    return np.arange(count, dtype=np.float32) % 7 + 100 * rank + 10 * "abc".index(name) + number


def warm(names="abc"):
    """Until each name has its id, and was learned, on all ranks."""
    for name in names:
        for number in range(WARM):
            rr.allreduce_(element(rr.rank(), name, number), name=name, op=rr.Sum)


def values(rank, number, count):
    return np.arange(count, dtype=np.float64) % 5 + 10 * rank + number
