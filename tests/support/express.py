"""How calls of this rank's express end: counted, hurried, or made to go another way."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

import ringreduce as rr
from ringreduce import runtime
from ringreduce.negotiation.protocol import GLOBAL
from tests.support.patience import wait_until

WARM = 8  # calls until each rank has learned a name


def own():
    return runtime.current("a test").engine.express


def state():
    """Of the set of all ranks, on this one."""
    return runtime.current("a test").engine.states[GLOBAL]


def known():
    """The programs of this rank, by name, or kind where they have none."""
    return {call[1] or call[0]: each for call, each in own().programs._by_call.items()}


@dataclasses.dataclass
class Counting:
    """In place of a program's `run`: it counts what that returns; its first call goes by `how`, if set."""

    original: Callable
    counts: list[int]
    how: Callable | None = None

    def __call__(self, *arguments):
        how, self.how = self.how, None
        found = how(self.original, *arguments) if how else self.original(*arguments)
        self.counts[found] += 1
        return found


def hurried(program):
    """It waits for nobody from now on."""
    program.run.original = functools.partial(within, program.run.original, 0.0)


def within(run, patience_us, source, target, number, sequence, _, group):
    """The call, with another patience."""
    return run(source, target, number, sequence, patience_us, group)


def watched(name, counts, how=None):
    """Count, for this rank, how the calls of this name end."""
    if name in known() and not isinstance(known()[name].run, Counting):
        known()[name].run = Counting(known()[name].run, counts, how)


def run(name, array):
    """A call that goes this way, or not at all: then it returns None."""
    return own().run(known()[name], array, array)


def fast(name, array):
    """A call that goes this way, once nothing else is under way: the engine's thread may look around just now."""
    wait_until(lambda: run(name, array) is not None)


def element(rank, name, number, count=64):
    return np.arange(count, dtype=np.float32) % 7 + 100 * rank + 10 * "abc".index(name) + number


def warm(names="abc"):
    """Until each name has its id, and was learned, on all ranks."""
    for name in names:
        for number in range(WARM):
            rr.allreduce_(element(rr.rank(), name, number), name=name, op=rr.Sum)


def values(rank, number, count):
    return np.arange(count, dtype=np.float64) % 5 + 10 * rank + number
