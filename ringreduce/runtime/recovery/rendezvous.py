"""The rendezvous after a loss: the ranks of the launcher's newest list meet, in the processes that they are.

They use the communicators, the shared memory and the measured constants of the job's start, with tags of their own.
Nothing is collective over lost ranks, and nothing waits inside MPI: who waits looks for a newer list, and begins anew.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ringreduce.errors import CollectiveError
from ringreduce.execution.host import HostResources, clear_block
from ringreduce.execution.opening import allgather_object
from ringreduce.monitor import launcher_link
from ringreduce.runtime import ProcessSets, Setup
from ringreduce.runtime.recovery.membership import Members, Membership
from ringreduce.transport.base import Task
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.window import Window
from ringreduce.transport.world import World

MEETING_S = 60.0  # beside stall_abort_s, for the ranks of a list: by then the launcher has ended those that hang
REPORT_EVERY_S = 1.0  # how often a rank that waits for others tells the launcher
EAGER_S, SLEEP_S = 20e-3, 200e-6  # a wait first yields the core only


class Met(NamedTuple):
    """A world in which all ranks have met."""

    membership: Membership
    world: World
    transport: MessageTransport
    values: list[Any]  # what each rank brought


class _NewerError(Exception):
    """A newer list is known."""


def world_of(start: World, membership: Membership) -> World:
    """The world that a list describes.  start: that of all ranks that the launcher started."""
    ranks = membership.ranks
    hosts = tuple(start.hosts[each] for each in ranks)
    rank, size = ranks.index(start.rank), len(ranks)
    return dataclasses.replace(start, rank=rank, size=size, hosts=hosts, origins=ranks, number=membership.number)


def setup_of(start: Setup, world: World, transport: MessageTransport, process_sets: ProcessSets) -> Setup:
    """A later world with what was measured at the job's start: constants must be equal on all ranks."""
    host, whole = start.host, start.world
    window = None
    if host.window is not None and len(set(world.hosts)) < world.size:  # else, as at the start, no rank has one
        beside = [each for each in world.origins if whole.hosts[each] == whole.hosts[whole.rank]]
        window = Window([host.window.blocks[whole.local_ranks[each]] for each in beside])
    later = HostResources(world, transport, host.settings, window, host.constants, host.cores, host.links)
    offsets = [start.clock_offsets_us[each] for each in world.origins]
    return Setup(world, transport, later, [each - offsets[0] for each in offsets], process_sets)


def meet(start: Setup, last: Setup, members: Members, value: Any) -> Met:
    """Meet the ranks of the newest list, which names this one; all do so, and none goes on before all have.

    start: of the job.  last: of the world that was given up, on this rank.  value: what this rank brings.

    Cost:   two small allgathers.
    Raises: CollectiveError when they do not come.
    """
    while True:
        membership = members.newest
        if start.world.rank not in membership.ranks:  # those have ended whom this spare was to join: so will the job
            members.wait(lambda each: start.world.rank in each.ranks)
            continue
        try:
            return _meet(start, last, members, membership, value)
        except _NewerError:
            continue


def _meet(start: Setup, last: Setup, members: Members, membership: Membership, value: Any) -> Met:
    settings, report_s = start.host.settings, 0.0
    limit_s = MEETING_S + settings.stall_abort_s  # a rank may compute so long before it hears
    until_s = membership.heard_s + limit_s

    def check() -> None:
        nonlocal report_s
        if members.newer_than(membership.number):
            raise _NewerError
        if (now_s := time.monotonic()) > report_s:
            launcher_link.report(settings.error_file, meeting=membership.number)
            report_s = now_s + REPORT_EVERY_S
        if now_s > until_s:
            raise CollectiveError(
                f"the ranks {list(membership.ranks)} of membership {membership.number} did not reconnect "
                f"within {limit_s:g} s"
            )

    world, before = world_of(start.world, membership), last.transport.in_flight
    living = [rank for rank, each in enumerate(last.world.origins) if each in membership.ranks]
    transport = MessageTransport(world)
    transport.acknowledge_failures()
    if start.host.window is not None:
        clear_block(start.host.window, settings, start.world.local_rank)
    try:
        gathering = Task(allgather_object(value, transport))
        while not gathering.ended:
            _until(gathering.ready, check)
            gathering.step()
        _until(lambda: not before.receives_from(living), check)  # no late message may reach an array
    except (CollectiveError, _NewerError):
        transport.in_flight.abandon()
        raise
    except Exception as exc:  # of MPI: another rank is dead, as the launcher will say
        _until(lambda: False, check)
        raise AssertionError("unreachable") from exc
    return Met(membership, world, transport, gathering.result)


def _until(done: Callable[[], bool], check: Callable[[], None]) -> None:
    eager_s = time.monotonic() + EAGER_S
    while not done():
        check()
        if time.monotonic() < eager_s:
            os.sched_yield()
        else:
            time.sleep(SLEEP_S)
