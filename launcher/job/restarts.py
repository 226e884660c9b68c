"""--restarts N: the whole job again after a failure, up to N times, on the hosts that still answer.

    attempt 0 ── fails ── pause 1 s ── attempt 1 ── fails ── pause 2 s ── attempt 2 …   (4, 8, 16, then 30 s)

Only the failure of a rank, or its loss, makes an attempt follow: not a command line that is wrong, a signal to ringrun,
--timeout, or a job that does not even start. What an attempt is, and which hosts answer, is the caller's business.
"""

import itertools
import queue
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..elastic import with_size
from ..environment import COUNT_VARIABLE
from ..errors import LauncherError, MachineError
from ..hosts import Host, assign, is_here
from ..text import counted
from .events import Events, Signalled
from .growth import CANNOT_START_S, Blacklist
from .plan import Job
from .signals import ENDING, SignalReader

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before the first restart, the second …; the last one stays."""


@dataclass(frozen=True)
class Ending:
    """How one attempt ended: with which exit code, and whether because a rank failed or was lost.

    `scales_up`: it has ended so that the next one has more hosts, or did not start with them.
    `keeps_commits`: its hosts still have its commits.
    """

    exit_code: int
    failed: bool = False
    scales_up: bool = False
    keeps_commits: bool = False


Attempt = Callable[[Job, float | None], Ending]
"""Runs a job to its end, or to a deadline on the monotonic clock; it has printed its report."""

Reallocate = Callable[[Job, Collection[str]], Job | None]
"""Returns the job on the hosts that answer, or are in use, with fewer ranks if they have fewer slots; None: on none."""

Wait = Callable[[float], int | None]
"""Waits so many seconds; returns the signal that ended the wait early."""

Say = Callable[[str], None]


def run(job: Job, attempt: Attempt, reallocate: Reallocate, wait: Wait, say: Say, blacklist: Blacklist) -> int:
    """Run `job`, and again while it fails and may; return the exit code of the last attempt.

    Where hosts that came cannot start ranks it goes on without them.
    """
    deadline_s = None if job.timeout_s is None else time.monotonic() + job.timeout_s
    current, failures = job, 0
    came: set[str] = set()  # hosts for which the last attempt has ended
    for count in itertools.count():
        left = replace(current, restarts=job.restarts - failures)
        ending = _try(left, attempt, count, deadline_s, say, came, blacklist)
        if not ending.scales_up and (not ending.failed or failures == job.restarts):
            break
        pause_s = 0.0 if ending.scales_up else _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
        failures += not ending.scales_up
        if deadline_s is not None and time.monotonic() + pause_s >= deadline_s:
            say(f"ringrun: no restart, because --timeout {job.timeout_s:g} s is up before it could begin")
            break
        if not ending.scales_up:
            say(f"ringrun: restart {failures} of {job.restarts} in {pause_s:g} s")
        number, found = wait(pause_s), None
        try:
            while number is None:
                found = reallocate(job, ())  # all that was asked for: a host may be back
                is_enough = found and not (job.elastic and found.size < job.elastic.min_np)
                if is_enough or not (left_s := blacklist.next_s()):
                    break
                if deadline_s is not None and time.monotonic() + left_s >= deadline_s:
                    up = f"--timeout {job.timeout_s:g} s is up"
                    raise LauncherError(f"{up} before a host that failed may be used again")
                say(f"ringrun: waiting {left_s:.0f} s for a host that failed and is left out until then")
                number = wait(left_s)
        except LauncherError as error:
            say(f"ringrun: no restart: {error}")
            break
        if number is not None:
            say("ringrun: interrupted before the restart")
            return 128 + number
        if found is None:
            say("ringrun: no restart, because no host answers")
            break
        if found.elastic and job.elastic:
            elastic = with_size(found.elastic, job.size - job.elastic.spares, found.size)
            found = replace(found, elastic=elastic)
            if found.size < elastic.min_np:
                have = f"hosts that answer have {counted(found.size, 'slot')}"
                say(f"ringrun: no restart, because {have}, and --min-np is {elastic.min_np}")
                break
        if found.size != job.size:
            of = f" of {job.size}" if found.size < job.size else ""
            say(f"ringrun: hosts that answer have {found.size} slots; continuing with {found.size}{of} ranks")
        came = _away(found) - _away(current) if ending.scales_up else set()
        current = found
    return ending.exit_code


def _away(job: Job) -> set[str]:
    return {host.name for host, _ in job.hosts if not is_here(host)}


def _try(
    job: Job, attempt: Attempt, count: int, deadline_s: float | None, say: Say, came: set[str], without: Blacklist
) -> Ending:
    """Run one attempt. After a first one that did start, one that does not is a failure like others: a host is lost.

    If hosts came before it, they are left out then, and it does not count.
    """
    variables = {**job.variables, COUNT_VARIABLE: str(count)}
    try:
        return attempt(replace(job, variables=variables), deadline_s)
    except MachineError as error:
        if not came and (not count or not job.restarts):
            raise
        say(f"ringrun: error: {error}")
        for host in sorted(came):
            cools_s = without.failed(host, CANNOT_START_S)
            say(f"ringrun: continuing without host {host}, which has joined, but is left out for {cools_s:g} s")
        return Ending(error.exit_code, failed=True, scales_up=bool(came))


def reallocated(
    hosts: Sequence[Host], before: Mapping[str, int], answering: Collection[str], size: int
) -> list[tuple[Host, int]]:
    """Return which of the `hosts` get how many ranks once only those in `answering` do: `size` if there are slots.

    before: how many ranks each had at first, by name. Where a host's slots were not said they are as many as these.
    """
    left = [replace(host, slots=host.slots or before.get(host.name) or 1) for host in hosts if host.name in answering]
    slots = sum(host.slots or 0 for host in left)
    return assign(left, min(size, slots), lambda host: host.slots or 1) if left else []


def on_hosts_that_answer(
    known: Callable[[], Sequence[Host]],
    answering: Callable[[Sequence[str]], Collection[str]],
    most: int,
    merged: Callable[[Sequence[Host]], Sequence[Host]] = list,
) -> Reallocate:
    """Return a function that assigns the ranks again, to those of the `known` hosts that answer.

    answering: is given the names of the hosts that are to be asked, perhaps this host's, too.
    most: how many ranks there may be, spares included.
    merged: returns hosts that are one machine as one, by what `answering` has found.
    """

    def reallocate(job: Job, in_use: Collection[str]) -> Job | None:
        hosts = known()
        if not job.hosts and all(map(is_here, hosts)):
            slots = sum(host.slots or job.size for host in hosts)
            return replace(job, size=min(most, slots)) if job.elastic and hosts else job
        before = {host.name: count for host, count in job.hosts}
        if not before:  # all ranks were on this host
            before = {host.name: job.size for host in hosts if is_here(host)}
        asked = [host.name for host in hosts if host.name not in in_use]
        there = {*in_use, *answering(asked)}
        placed = reallocated(merged(hosts), before, there, most)
        if not placed:
            return None
        is_remote = not all(is_here(host) for host, _ in placed)
        return replace(job, size=sum(count for _, count in placed), hosts=placed if is_remote else ())

    return reallocate


class SignalRelay(SignalReader):
    """Takes the signals of a whole run and passes each on to the attempt, or the pause, of the moment."""

    def __init__(self) -> None:
        super().__init__(self.take)
        self._events: Events = queue.SimpleQueue()
        self.ending: int | None = None
        """The last of those that end a job."""

    def take(self, number: int) -> None:
        """Take a signal; called in the reader's thread."""
        if number in ENDING:
            self.ending = number
        self._events.put(Signalled(number))

    def to(self, events: Events) -> None:
        """Pass on to `events` from here on, signals that nobody has taken included."""
        before, self._events = self._events, events
        while True:
            try:
                event = before.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, Signalled):
                events.put(event)

    def wait(self, seconds: float) -> int | None:
        """Wait, or until a signal comes that would end a job; return that."""
        events: Events = queue.SimpleQueue()
        self.to(events)
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                event = events.get(timeout=left_s)
            except queue.Empty:
                return None
            if isinstance(event, Signalled) and event.number in ENDING:
                return event.number
        return None
