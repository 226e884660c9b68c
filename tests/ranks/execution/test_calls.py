"""How many calls of Python functions an operation takes: of a known name, of a channel, and of a poll in vain.

Counted, not timed, so the bounds hold on any machine. Calls of the interpreter cost most of a short operation's time.
"""

import functools
import sys
import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.engine import inbox
from ringreduce.engine.express import Express
from ringreduce.engine.polling import Polling
from ringreduce.execution.program import Programs
from ringreduce.kernels import native
from ringreduce.testing import run_ranks
from ringreduce.transport.window import Flags

EXPRESS, IN_PIECES, NAMED, ORDERED = 10, 40, 100, 5  # of a rank that comes last, its engine's among them
POLL, POLL_ALL, LOOK = 12, 24, 8  # of what a thread that waits polls; of all services; before a sleep
ROUNDS = 4000  # at most
WARM = 16

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(native.module is None, reason="ringreduce was installed without a compiler"),
]


class Count:
    """Counts the calls of this thread while `on`, and those of this rank's engine; a generator that goes on is one."""

    def __init__(self):
        self.number, self.on, self.thread = 0, False, None

    def of(self, function):
        """How many calls it takes, itself among them."""
        self.number, self.on, self.thread = 0, True, threading.get_ident()
        sys.setprofile(self.note)
        try:
            function()
        finally:
            sys.setprofile(None)
            self.on = False
        return self.number

    def note(self, frame, event, argument):
        self.number += event == "call" and self.on


def in_vain_is_free(monkeypatch, owner, name, by_rank):
    """Its calls do not count where it returns False, nor, of a wait for a flag, at all: how many depends on others."""
    original = getattr(owner, name)

    def counted(self, *arguments):  # is itself a call, which does not count
        for count in by_rank:
            if count.thread == threading.get_ident():
                count.number, before = count.number - count.on, count.number - count.on
                found = original(self, *arguments)
                if not found or name == "arrived_soon":
                    count.number = before
                return found
        return original(self, *arguments)

    monkeypatch.setattr(owner, name, counted)


@pytest.fixture
def counts(monkeypatch):
    """By rank. Who counts is no profiler of the user's, beside which the engine's thread would do the work.

    Nor does it, in a main thread, where a test before has left a signal handler, as torch's data loader does.
    """
    by_rank = [Count(), Count()]
    by_thread = {f"ringreduce engine {rank}": count for rank, count in enumerate(by_rank)}
    monkeypatch.setattr(sys, "getprofile", int)
    monkeypatch.setattr(inbox, "getsignal", {}.get)
    in_vain_is_free(monkeypatch, Polling, "_poll", by_rank)
    in_vain_is_free(monkeypatch, Flags, "arrived_soon", by_rank)

    def note(frame, event, argument):
        count = by_thread.get(threading.current_thread().name)
        if count is None:
            sys.setprofile(None)
        elif count.on and event == "call":
            count.number += 1

    threading.setprofile(note)
    yield by_rank
    threading.setprofile(None)


def fewest(counts, make, bound):
    """On two ranks, each of which comes last in turn: the fewest calls of each when it does.

    Where others use the machine, the engine's thread may take over, so it tries again until both are within the bound.
    """

    def program():
        once, found, ready = make(), [], False
        for _ in range(WARM):
            once()
        for number in range(ROUNDS):
            if rr.allreduce(float(ready), name="ready", op=rr.Min):
                break
            if number % 2 == rr.rank():
                time.sleep(0.003)
                found.append(counts[rr.rank()].of(once))
                ready = min(found) <= bound
            else:
                once()
        return min(found)

    return run_ranks(2, program)


KNOWN = {
    "allreduce_": lambda: functools.partial(rr.allreduce_, np.ones(1024, np.float32), name="w"),
    "allreduce": lambda: functools.partial(rr.allreduce, np.ones(1024, np.float32)),
    "broadcast_": lambda: functools.partial(rr.broadcast_, np.ones(1024, np.float32), 0, "w"),
    "barrier": lambda: rr.barrier,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_call(counts, name):
    found = fewest(counts, KNOWN[name], EXPRESS)
    assert max(found) <= EXPRESS, found


@pytest.mark.parametrize("is_named", [True, False])
def test_a_known_call_in_pieces(counts, is_named):
    """Of 2 MiB."""
    ones = np.ones(1 << 19, np.float32)
    find = {True: lambda: functools.partial(rr.allreduce_, name="w"), False: lambda: rr.ordered().allreduce_}[is_named]
    found = fewest(counts, lambda: functools.partial(find(), ones, op=rr.Max), IN_PIECES)
    assert max(found) <= IN_PIECES, found


def test_a_known_named_call_that_is_submitted(counts, monkeypatch):
    monkeypatch.setattr(Express, "run", lambda *_: None)
    monkeypatch.setattr(Programs, "learn", lambda *_: None)
    found = fewest(counts, lambda: functools.partial(rr.allreduce_, np.ones(1024, np.float32), name="w"), NAMED)
    assert max(found) <= NAMED, found


def test_a_call_of_a_channel(counts):
    found = fewest(counts, lambda: functools.partial(rr.ordered().allreduce_, np.ones(1024, np.float32)), ORDERED)
    assert max(found) <= ORDERED, found


def test_a_poll_in_vain(monkeypatch):
    """While a call is pending: of what a thread that waits polls, and of all services; and the look before a sleep."""

    monkeypatch.setattr(sys, "getprofile", int)

    def program():
        array, count = np.ones(1024, np.float32), Count()
        rr.ordered()
        for _ in range(WARM):
            rr.allreduce_(array, name="w")
        rr.barrier()
        found = None
        if rr.rank() == 0:  # the leader
            polling = runtime.current("a test").engine._polling
            found = [0]
            while not found[0]:
                time.sleep(0.01)
                with polling.lock:
                    found = [polling._is_idle() and count.of(polling._is_idle)]
            handle = rr.allreduce_async_(array, name="w")
            handle.ended_within(0.05)
            with polling.lock:
                looks = [functools.partial(polling._poll, polling._first), polling.poll]
                found += [min(count.of(each) for _ in range(9)) for each in looks]
            rr.allreduce_(np.ones(1), name="both")
            handle.wait()
        else:
            rr.allreduce_(np.ones(1), name="both")
            rr.allreduce_(array, name="w")
        return found

    idle, first, everything = run_ranks(2, program)[0]
    assert first <= POLL
    assert everything <= POLL_ALL
    assert idle <= LOOK
