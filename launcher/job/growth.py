"""Hosts that come, or come back, while an elastic job runs; and hosts that fail, and are left out for a while.

    the hosts that are named ── every POLL_S ── some are not used, and answer ── HostsCame ── ranks hear of it,
    and commit ── the first to do so reports Committed ── the attempt ends, and the next one has the hosts

Horovod's names: --host-discovery-script, HostsUpdatedInterrupt, --blacklist-cooldown-range.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ..elastic import LONGEST_COOLDOWN_S
from ..errors import LauncherError
from ..hosts import Host, is_here, stop_discovery
from .events import Events, HostsCame
from .plan import Job

POLL_S = 2.0
NOT_UPDATED = "ringrun: warning: the list of hosts was not updated: {}"
_LEAVE_S, _PAUSE_S = 1.0, 0.02  # one that asks hosts takes longer, and goes with the process
_LONGEST_PAUSE_S = 60.0
"""Between two questions to hosts that are named and not used."""

CANNOT_START_S = (60.0, LONGEST_COOLDOWN_S)
"""For how long a host that came is left out which could not start ranks, if the user says nothing."""


class Blacklist:
    """The hosts that have failed, each for a time that doubles with its failures, within the range `cooldown_s`."""

    def __init__(self, cooldown_s: tuple[float, float] | None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._cooldown_s = cooldown_s
        self._now_s = now_s
        self._failures: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def failed(self, host: str, default_s: tuple[float, float] | None = None) -> float:
        """A rank there has failed; return for how long the host is left out from now on, 0 if nothing changes.

        default_s: the range where the user has given none; None: no host is left out then.
        """
        cooldown_s = self._cooldown_s or default_s
        if cooldown_s is None or self.left_s(host):
            return 0.0
        least_s, most_s = cooldown_s
        times = self._failures[host] = self._failures.get(host, 0) + 1
        cools_s = float(min(least_s * 2.0 ** min(times - 1, 64), most_s))
        self._until_s[host] = self._now_s() + cools_s
        return cools_s

    def left_s(self, host: str) -> float:
        """For how long it is still left out."""
        return max(0.0, self._until_s.get(host, 0.0) - self._now_s())

    def without(self, hosts: Sequence[Host]) -> list[Host]:
        """Those that are not left out."""
        return [host for host in hosts if not self.left_s(host.name)]

    def next_s(self) -> float:
        """How long until the first host comes back; 0: none is left out."""
        return min(filter(None, map(self.left_s, list(self._until_s))), default=0.0)


@dataclass(frozen=True)
class Growth:
    """What there is to know of a job's hosts while it runs, and between its attempts."""

    named: Callable[[], Sequence[Host]]
    """Returns those that are named now and not left out."""
    known: Callable[[], Sequence[Host]]
    """Returns those that were named when that was last found out, and are not left out now."""
    blacklist: Blacklist
    most: int
    """How many ranks the job may have, spares included."""

    def update(self, say: Callable[[str], None]) -> None:
        """Find out which hosts are named now; what is wrong with the file or script is said, and nothing changes."""
        try:
            self.named()
        except LauncherError as error:
            say(NOT_UPDATED.format(error))


@dataclass(frozen=True)
class InUse:
    """What an attempt has just now."""

    ranks: int
    """How many run."""
    size: int
    """How many were started."""
    slots: Mapping[str, int]
    """How many on each host, by name; none on one that is lost. Empty: all are on this host."""


class HostWatch:
    """Looks for hosts that a job could use and does not, in a thread, while one attempt runs.

    A host that is named need not answer yet: hosts are asked again, ever more seldom, while slots are left.
    """

    def __init__(
        self,
        growth: Growth,
        reallocate: Callable[[Collection[str]], Job | None],
        in_use: Callable[[], InUse | None],
        events: Events,
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """reallocate: asks all hosts but these; returns the job as a restart would begin it now; None: none answers.

        in_use: None while the attempt's ranks are being started, which would not hear of hosts.
        """
        self._growth, self._reallocate, self._in_use = growth, reallocate, in_use
        self._events, self._say, self._now_s = events, say, now_s
        self._asked: object = None  # what there was when the hosts were asked last
        self._pause_s = self._due_s = 0.0
        self._said: object = None
        self._complaint = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringrun hosts", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more; what looks just now is ended, also what begins to in this moment."""
        self._ended.set()
        until_s = time.monotonic() + _LEAVE_S
        while self._thread.is_alive() and time.monotonic() < until_s:
            stop_discovery()
            self._thread.join(_PAUSE_S)

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.look()
            self._ended.wait(POLL_S)

    def look(self) -> None:
        """Look once; what is wrong with the file or the script is said once, and hosts stay as they were."""
        try:
            named, has = [Host(host.name, host.slots or 1) for host in self._growth.named()], self._in_use()
            if has and has.ranks < self._growth.most and _not_used(named, has) and self._is_due((named, has)):
                self._ask(named, has)
        except LauncherError as error:
            if str(error) != self._complaint and not self._ended.is_set():
                self._say(NOT_UPDATED.format(error))
            self._complaint = str(error)

    def _is_due(self, there_is: object) -> bool:
        """Return whether to ask the hosts: at once when something has changed."""
        if there_is != self._asked:
            self._asked, self._pause_s, self._due_s = there_is, POLL_S, 0.0
        return self._now_s() >= self._due_s

    def _ask(self, named: Sequence[Host], has: InUse) -> None:
        free = {host.name for host in _not_used(named, has)}
        job = self._reallocate({host.name for host in named} - free)
        self._due_s, self._pause_s = self._now_s() + self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if job is None or job.size <= has.ranks:
            return
        came = _not_used([Host(host.name, count) for host, count in job.hosts] or named, has)
        news = HostsCame(tuple(map(str, came)), job.size)
        if came and news != self._said:
            self._said = news
            self._events.put(news)


def _not_used(hosts: Sequence[Host], has: InUse) -> list[Host]:
    """Return those that have more slots than ranks of the job."""
    all_here = 0 if has.slots else has.size
    return [host for host in hosts if (host.slots or 1) > has.slots.get(host.name, all_here * is_here(host))]
