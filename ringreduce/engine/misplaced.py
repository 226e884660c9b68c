"""Ranks that wait for one tensor in different process sets: an error at once, where it would be a stall.

Each set has a coordinator of its own, which hears of its own set only. So one that has waited a second asks the missing
ranks whether they wait for the tensor elsewhere, and if one does, both coordinators fail it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from ringreduce.engine.coordinator import Waiting
from ringreduce.engine.lane import Lane
from ringreduce.engine.letters import Elsewhere, Failure, Misplaced, Response, Where, encode
from ringreduce.transport.base import EngineTransport

ASK_S = 1.0
"""So long a tensor waits before the missing ranks are asked."""


class Checked(Protocol):
    """What the check needs of an engine."""

    transport: EngineTransport
    lanes: dict[int, Lane]
    sets: dict[int, tuple[int, ...]]

    def spread(self, lane: Lane, response: Response) -> None:
        """Send a coordinator's response to all members."""


class MisplacedCheck:
    """One engine's; used by its thread only."""

    def __init__(self, engine: Checked) -> None:
        self._engine = engine
        self._next_look_s = 0.0
        self._asked: dict[tuple[int, str], Waiting] = {}

    def look(self) -> None:
        """Ask about tensors that have waited for a while, each once. Called when nothing moves."""
        now = time.monotonic()
        if now < self._next_look_s:
            return
        self._next_look_s = now + ASK_S / 4
        asked: dict[tuple[int, str], Waiting] = {}
        for lane in self._engine.lanes.values():
            for waiting in lane.coordinator.waiting(ASK_S) if lane.coordinator is not None else ():
                place = (lane.number, waiting.description.key)
                asked[place] = waiting
                if waiting.waits and place not in self._asked and len(self._engine.sets) > 1:
                    self._ask(lane, waiting)
        self._asked = asked

    def _ask(self, lane: Lane, waiting: Waiting) -> None:
        for rank in waiting.missing:
            if rank != self._engine.transport.rank:
                self._engine.transport.post(encode(Where(lane.number, waiting.description.key)), rank)
            elif (found := self._elsewhere(lane.number, waiting.description.key)) is not None:
                self._fail(rank, found, waiting)

    def _elsewhere(self, process_set: int, key: str) -> Elsewhere | None:
        """Where this rank waits for a tensor, if not in this set."""
        for number, lane in self._engine.lanes.items():
            request = lane.pending.get(key)
            if number != process_set and request is not None and request.waits:
                return Elsewhere(process_set, key, number, request.line)
        return None

    def read(self, source: int, letter: Where | Elsewhere | Misplaced) -> None:
        """What another rank's check wrote."""
        if isinstance(letter, Where):
            found = self._elsewhere(letter.process_set, letter.key)
            if found is not None:
                self._engine.transport.post(encode(found), source)
        elif isinstance(letter, Elsewhere):
            waiting = self._asked.get((letter.process_set, letter.key))
            if waiting is not None:
                self._fail(source, letter, waiting)
        else:
            self._give_up(letter)

    def _fail(self, rank: int, found: Elsewhere, waiting: Waiting) -> None:
        """Here, and at the other set's coordinator."""
        message = explain(rank, found, waiting, self._engine.sets)
        failure = Failure(found.key, "MismatchError", message)
        self._give_up(Misplaced(found.process_set, failure))
        leader = self._engine.sets[found.other_set][0]
        if leader == self._engine.transport.rank:
            self._give_up(Misplaced(found.other_set, failure))
        else:
            self._engine.transport.post(encode(Misplaced(found.other_set, failure)), leader)

    def _give_up(self, misplaced: Misplaced) -> None:
        lane = self._engine.lanes.get(misplaced.process_set)
        if lane is not None and lane.coordinator is not None:
            self._engine.spread(lane, lane.coordinator.give_up([misplaced.failure]))


def explain(rank: int, found: Elsewhere, waiting: Waiting, sets: Mapping[int, tuple[int, ...]]) -> str:
    """The message of the MismatchError."""

    def named(number: int) -> str:
        return f"process set {number} (ranks {', '.join(map(str, sets[number]))})"

    first, line = min(waiting.given.items())
    return (
        f"rank {rank} of {len(sets[0])}, {waiting.description.kind} {waiting.description.name!r} ({found.line}): "
        f"{named(found.other_set)}, but rank {first} has {named(found.process_set)} ({line}); "
        "all ranks must pass equal process sets"
    )
