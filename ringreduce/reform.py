"""An elastic job goes on without the ranks that it has lost, or with others: for elastic.run."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import NoReturn, cast

from ringreduce import runtime
from ringreduce.errors import CollectiveError
from ringreduce.log import LOGGER
from ringreduce.monitor.launcher_link import report_ready, report_reformed
from ringreduce.monitor.timeline import BY_HAND, Event, now_us
from ringreduce.runtime import Runtime
from ringreduce.startup.survivors import RECOVERY_S
from ringreduce.startup.worlds import Elastic, Reformed, lost_error
from ringreduce.transport.message import MessageTransport
from ringreduce.world import World

GPU_SLEEP_S = 100e-6  # between two looks at the GPU

__all__ = [
    "Reformed",
    "await_gpu",
    "await_restart",
    "give_up",
    "has_state",
    "hosts_came",
    "is_elastic",
    "latest",
    "membership_changed",
    "reform",
]


def is_elastic() -> bool:
    """True when ringrun --elastic has started this job; raises NotInitializedError before init()."""
    return runtime.current("is_elastic").elastic is not None


def membership_changed() -> bool:
    """True when ranks are lost or have joined, so that the next collective raises PeerLostError."""
    current = runtime.current("membership_changed")
    return current.elastic is not None and current.elastic.members.newer_than(current.world.number)


def hosts_came() -> str:
    """The hosts that have come, with which the launcher is about to start this job again; empty: none."""
    elastic = runtime.current("hosts_came").elastic
    return "" if elastic is None else elastic.members.hosts


def await_restart() -> NoReturn:
    """This rank has committed: let the launcher start the job again, with the hosts that came; it ends this process."""
    current = runtime.current("await_restart")
    LOGGER.info(f"elastic: {hosts_came()} came; this attempt of the job ends, and the next one goes on")
    report_ready(current.settings.error_file, hosts_came())
    while True:
        time.sleep(1.0)


def has_state() -> None:
    """This rank has taken the others' state, if it was a spare: it may go on without them."""
    if (elastic := runtime.current("has_state").elastic) is not None:
        elastic.has_state = True


def latest() -> Reformed | None:
    """How this rank's world began; None: with the job."""
    elastic = runtime.current("latest").elastic
    return None if elastic is None else elastic.latest


def was_restarted() -> bool:
    """True in an elastic job that ringrun has started again."""
    current = runtime.current("was_restarted")
    return current.elastic is not None and current.settings.restart_count > 0


def kept_commits() -> str:
    """The folder where this host may have commits of an earlier attempt of the job; else empty."""
    current = runtime.current("kept_commits")
    return current.settings.state_dir if was_restarted() and latest() is None else ""


def keeps_commits() -> str:
    """The folder where this rank is to keep its commits for a restart: it is its host's first; else empty."""
    if not runtime.is_initialized():
        return ""
    current = runtime.current("keeps_commits")
    world, elastic = current.world, current.elastic
    is_first = elastic is not None and world.hosts.index(world.hosts[world.rank]) == world.rank
    return current.settings.state_dir if is_first else ""


def give_up() -> None:
    """This rank has failed: at its exit it does not wait for the others, who go on when its process has ended."""
    elastic = runtime.current("give_up").elastic if runtime.is_initialized() else None
    if elastic is not None:
        elastic.has_failed = True


def await_gpu(after_loss: bool = False) -> Exception | None:
    """Wait until this rank's GPU has done what collectives have queued; then it changes no array any more.

    Returns: None when the results are right; the error that has ended the world, with which they may be anything.
    Raises:  CollectiveError when the GPU is not done RECOVERY_S after a loss.
    """
    current = runtime.current("await_gpu")
    engine, until_s = current.engine, math.inf
    queued = engine.gpu.queued()
    while not all(each.done() for each in queued):
        if until_s == math.inf and (after_loss or engine.negotiation.error):
            until_s = time.monotonic() + RECOVERY_S
        if time.monotonic() > until_s:
            raise CollectiveError(
                f"{RECOVERY_S:g} s after a loss this rank's GPU has not done what was queued before; "
                "`ringrun --elastic --restarts N` would start the job again"
            )
        time.sleep(GPU_SLEEP_S)
    return engine.negotiation.error if queued else None


def reform(commits: int) -> Reformed:
    """Give up the world, after a CollectiveError other than MismatchError, and form that of the launcher's newest list.

    commits: how often this rank has committed its state.
    Cost:    waits for the list, up to RECOVERY_S, and for the ranks that it names; two small allgathers.
    Raises:  the error that ended the world, where the job is not elastic, or no list comes; CollectiveError when the
             ranks of the list do not come, or this rank's GPU does not end its work.
    """
    current, begun_s = runtime.current("reform"), time.monotonic()
    engine, last, elastic = current.engine, current.world, current.elastic
    error = engine.negotiation.error or CollectiveError(f"no rank of {last.size} is lost, as far as this one knows")
    if elastic is None or not elastic.members.wait(lambda each: each.number > last.number, RECOVERY_S):
        raise error
    engine.give_up(error)
    engine.join()
    await_gpu(after_loss=True)
    engine.gpu.close()
    stopped_s = time.monotonic()
    entered = elastic.enter(last, cast(MessageTransport, current.transport), commits, engine.process_sets.numbered())
    engine.gpu.free(of_lost_world=True)  # all have unmapped it before they met
    met_s = time.monotonic()
    current.enter(*entered)
    report_reformed(current.settings.error_file, entered.world.number)
    heard_s = elastic.members.newest.heard_s
    elastic.times_s = {"heard": heard_s, "failed": begun_s, "stopped": stopped_s, "met": met_s}
    elastic.times_s["new engine"] = time.monotonic()
    _log(elastic)
    _record(current, last, elastic)
    return cast(Reformed, elastic.latest)


def _record(current: Runtime, last: World, elastic: Elastic) -> None:
    """Go on with the timeline of the settings: a file for each world, FILE.2.json for that of list 2."""
    path, membership = Path(current.settings.timeline), elastic.members.newest
    if current.world.rank or not path.name or path.name.upper() == BY_HAND:
        return
    heard_us = membership.heard_s * 1e6  # by the clock of the timeline
    loss = Event(str(lost_error(last, membership)), "elastic", heard_us, now_us() - heard_us)
    file = path.with_name(f"{path.stem}.{current.world.number}{path.suffix}")
    try:
        current.engine.timeline.start(str(file), current.settings.timeline_mark_cycles, [loss])
    except (OSError, CollectiveError) as error:
        LOGGER.warning(f"the timeline does not go on in {file}: {error}")


def _log(elastic: Elastic) -> None:
    """Where the time went."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        since = [f"{name} {1e3 * (at - elastic.times_s['heard']):.1f}" for name, at in elastic.times_s.items()]
        who = f"rank {elastic.origin.world.rank} of the start, list {elastic.members.newest.number}"
        LOGGER.debug(f"{who}: ms since it was heard: {', '.join(since)}")
