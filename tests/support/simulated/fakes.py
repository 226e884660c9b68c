"""What the real code of a simulated rank calls: MPI's messages, an engine of one operation, and the user's script."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ringreduce import elastic, runtime
from ringreduce.monitor import launcher_link
from ringreduce.transport.world import World

from .network import STEPS, TICK_S

if TYPE_CHECKING:
    from .rank import Rank


class _Current(threading.local):
    rank: Rank


CURRENT = _Current()
"""The rank whose thread this is."""


class MpiError(Exception):
    """MPI's."""


class _Request:
    """A message of MPI's; `memory` of one that is received."""

    def __init__(self, rank: Rank, peer: int, tag: int, memory: Any = None) -> None:
        self._rank, self._peer, self._memory, self._is_done = rank, rank.job.ranks[peer], memory, memory is None
        self._arrived = rank.arrived[peer, tag]

    def Test(self) -> bool:
        if not self._is_done and self._arrived:
            content = self._arrived.popleft()
            np.asarray(self._memory)[: len(content)] = np.frombuffer(content, np.uint8)
            self._is_done = True
        if not self._is_done and not self._peer.runs and self._rank.job.now_s >= self._peer.died_s + 2 * TICK_S:
            raise MpiError(f"rank {self._peer.number} has failed")
        return self._is_done

    def Cancel(self) -> None:
        self._is_done = True


class Comm:
    """MPI's communicator of all ranks, in one of them."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def Isend(self, memory: Any, to: int, tag: int) -> _Request:
        self._rank.send(to, self._rank.job.ranks[to].deliver, (self._rank.number, tag), bytes(memory))
        return _Request(self._rank, to, tag)

    def Irecv(self, memory: Any, source: int, tag: int) -> _Request:
        self._rank.act()
        return _Request(self._rank, source, tag, memory)

    def Ack_failed(self) -> None:
        pass


class Engine:
    """What re-forming and elastic.run ask of an engine."""

    def __init__(self, world: World, *_: Any) -> None:
        self.world, self._rank = world, CURRENT.rank
        self.ending = SimpleNamespace(error=None)
        self.gpu = SimpleNamespace(queued=tuple, close=lambda: None, free=lambda **_: None, default_index=0)
        self.process_sets = SimpleNamespace(numbered=list)
        self.submitting = SimpleNamespace(watch=None)
        self.stalls = SimpleNamespace(waiting_for=str)

    def give_up(self, error: Exception) -> None:
        self.ending.error = self.ending.error or error
        self._rank.notify()

    def join(self) -> None:
        pass

    def exchange(self, name: Any, value: Any) -> list[Any]:
        """See `Rank.exchange`."""
        if isinstance(self._rank.failure, ValueError) and not self._rank.cause:  # the script's
            self._rank.cause = "raise"
            raise self._rank.failure
        return self._rank.exchange(self.world, name, value, self._check)

    def _check(self) -> None:
        if self.ending.error:
            raise self.ending.error

    def leave(self, why: str, interrupted: Callable[[], bool] = lambda: False) -> bool:
        rank, others = self._rank, set(self.world.origins) - {self._rank.number}
        for each in sorted(others):
            rank.send(each, rank.job.ranks[each].collect, "left", rank.number, True)
        while not (others <= rank.left.keys() or self.ending.error):
            if interrupted():
                return False
            rank.wait(0.5)
        return self.ending.error is None


class State(elastic.State):
    """The steps that count, and who took part in each."""

    commits = 0

    def __init__(self, owner: Rank) -> None:
        super().__init__()
        self.owner = owner
        self.history: list[Any] = []
        self._saved: list[Any] = []

    def save(self) -> None:
        self._saved, self.commits = list(self.history), self.commits + 1

    def restore(self) -> None:
        self.history = list(self._saved)

    def sync(self) -> None:
        own = runtime.current("sync")
        root, engine = own.root or 0, own.engine
        origins = engine.world.origins
        has_state = self.owner.job.ranks[origins[root]].has_state
        self.history, self.commits = engine.exchange("sync", (list(self.history), self.commits))[root]
        assert has_state, f"ranks {origins} take their state from {origins[root]}, a spare without one"
        self.history = list(self.history)
        self.save()
        self.owner.has_state = True


def train(state: State) -> None:
    """The script: in each step all compare whom they have trained with."""
    while len(state.history) < STEPS:
        engine = runtime.current("train").engine
        state.owner.compute(state.owner.job.plan.step_s)
        everyones = engine.exchange(("step", len(state.history)), list(state.history))
        agree = all(each == state.history for each in everyones)
        assert agree, f"survivors {engine.world.origins} do not agree: {everyones}"
        state.history.append(engine.world.origins)
        state.commit()


def listen(error_file: str, waiting_for: Callable[[], str], hear: Any) -> Any:
    """Let the rank hear of lists: in place of a StatusServer."""
    CURRENT.rank.members = hear.__self__
    launcher_link.report(error_file, started="ringreduce", shared=[])
    return SimpleNamespace()


class Condition(contextlib.nullcontext):
    """Of the thread that listens, and of the rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self._rank = CURRENT.rank

    def notify_all(self) -> None:
        self._rank.notify()

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        job = self._rank.job
        until_s = job.now_s + (math.inf if timeout_s is None else timeout_s)
        while not is_true() and job.now_s < until_s:
            self._rank.wait(until_s - job.now_s)
        return is_true()
