"""Later worlds of an elastic job: some of the ranks of the first, in the same processes, when the launcher says which.

They use the communicators, the shared memory and the measured constants of the first world, with tags of their own.
Nothing is collective over lost ranks, and nothing waits inside MPI: who waits looks for a newer list, and begins anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringreduce.errors import CollectiveError
from ringreduce.execution.host import Host, clear_block
from ringreduce.execution.opening import everyones
from ringreduce.membership import Members, Membership
from ringreduce.monitor.launcher_link import report_meeting
from ringreduce.transport.base import Steps
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.window import Window
from ringreduce.world import World

RECOVERY_S = 20.0  # how long a rank waits for a list
MEETING_S = 60.0  # beside stall_abort_s, for the ranks that it names: by then the launcher has ended those that hang
REPORT_EVERY_S = 1.0  # how often a rank that waits for others tells the launcher
EAGER_S, SLEEP_S = 20e-3, 200e-6  # a wait first yields the core only


class Origin(NamedTuple):
    """What stays of the job's start."""

    world: World  # all ranks that the launcher started
    host: Host
    clock_offsets_us: Sequence[float]

    def world_of(self, membership: Membership) -> World:
        """The world that a list describes."""
        start, ranks = self.world, membership.ranks
        return World(
            ranks.index(start.rank),
            len(ranks),
            tuple(start.hosts[each] for each in ranks),
            start.comm,
            start.control,
            start.local,
            start.generation,
            ranks,
            membership.number,
        )

    def host_of(self, world: World, transport: MessageTransport) -> Host:
        """This rank's host there, with the constants that were measured at the start: they must be equal on all."""
        host, start = self.host, self.world
        window = host.window
        if window is not None:
            own = [start.local_ranks[each] for each in world.origins if start.hosts[each] == start.hosts[start.rank]]
            window = Window([window.blocks[each] for each in own])
        if len(set(world.hosts)) == world.size:  # as at the start: no rank has one
            window = None
        return Host(world, transport, host.settings, window, host.constants, host.cores, host.links)

    def offsets_of(self, world: World) -> list[float]:
        """How far each rank's clock is ahead of rank 0's there."""
        offsets = [self.clock_offsets_us[each] for each in world.origins]
        return [each - offsets[0] for each in offsets]


class Regrouped(NamedTuple):
    """A world in which all ranks have met."""

    membership: Membership
    world: World
    transport: MessageTransport
    values: list[Any]  # what each rank brought


class _NewerError(Exception):
    """A newer list is known."""


def regroup(origin: Origin, members: Members, last: World, before: MessageTransport, value: Any) -> Regrouped:
    """Meet the ranks of the newest list, which names this one; all do so, and none goes on before all have.

    last, before: the world that was given up, on this rank, and its transport.
    value:        what this rank brings.
    Cost:   two small allgathers.
    Raises: CollectiveError when they do not come.
    """
    while True:
        membership = members.newest
        if origin.world.rank not in membership.ranks:  # those have ended whom this spare was to join: so will the job
            members.wait(lambda each: origin.world.rank in each.ranks)
            continue
        try:
            return _meet(origin, members, membership, last, before, value)
        except _NewerError:
            continue


def _meet(
    origin: Origin, members: Members, membership: Membership, last: World, before: MessageTransport, value: Any
) -> Regrouped:
    world = origin.world_of(membership)
    settings, report_s = origin.host.settings, 0.0
    limit_s = MEETING_S + settings.stall_abort_s  # a rank may compute so long before it hears
    until_s = membership.heard_s + limit_s

    def check() -> None:
        nonlocal report_s
        if members.newer_than(membership.number):
            raise _NewerError
        if (now_s := time.monotonic()) > report_s:
            report_meeting(settings.error_file, membership.number)
            report_s = now_s + REPORT_EVERY_S
        if now_s > until_s:
            raise CollectiveError(
                f"the ranks {list(membership.ranks)} of list {membership.number} did not meet within {limit_s:g} s"
            )

    living = [rank for rank, each in enumerate(last.origins) if each in membership.ranks]
    transport = MessageTransport(world)
    transport.acknowledge_failures()
    if origin.host.window is not None:
        clear_block(origin.host.window, settings, origin.world.local_rank)
    steps = everyones(value, transport)
    try:
        values = _driven(steps, check)
        _until(lambda: not before.in_flight.receives_from(living), check)  # no late message may reach an array
    except (CollectiveError, _NewerError):
        transport.in_flight.abandon()
        raise
    except Exception as exc:  # of MPI: another rank is dead, as the launcher will say
        _until(lambda: False, check)
        raise AssertionError("unreachable") from exc
    return Regrouped(membership, world, transport, values)


def _driven(steps: Steps[list[Any]], check: Callable[[], None]) -> list[Any]:
    while True:
        try:
            work = next(steps)
        except StopIteration as stop:
            result: list[Any] = stop.value
            return result
        _until(work.done, check)


def _until(done: Callable[[], bool], check: Callable[[], None]) -> None:
    eager_s = time.monotonic() + EAGER_S
    while not done():
        check()
        if time.monotonic() < eager_s:
            os.sched_yield()
        else:
            time.sleep(SLEEP_S)
