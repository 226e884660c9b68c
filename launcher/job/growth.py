"""Hosts that come, or come back, while an elastic job runs; and hosts that fail, and are left out for a while.

    the hosts that are named ── every POLL_S ── some are new, and answer ── HostsCame ── ranks hear of it, and commit
    ── the first to do so reports Ready ── the attempt ends, and the next one has the hosts

Horovod's names: --host-discovery-script, HostsUpdatedInterrupt, --blacklist-cooldown-range.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import LauncherError
from ..hosts import Host
from .events import Events, HostsCame
from .plan import Job

POLL_S = 2.0


class Blacklist:
    """The hosts that have failed, each for a time that doubles with its failures, within the range `cooldown_s`.

    Without one no host is left out.
    """

    def __init__(self, cooldown_s: tuple[float, float] | None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._cooldown_s = cooldown_s
        self._now_s = now_s
        self._failures: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def failed(self, host: str) -> float:
        """A rank there has failed; return for how long the host is left out from now on, 0 if nothing changes."""
        if self._cooldown_s is None or self.left_s(host):
            return 0.0
        least_s, most_s = self._cooldown_s
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
    blacklist: Blacklist


class HostWatch:
    """Looks for hosts that are new, in a thread, while one attempt runs."""

    def __init__(
        self,
        named: Callable[[], Sequence[Host]],
        again: Callable[[], Job | None],
        events: Events,
        say: Callable[[str], None],
        poll_s: float = POLL_S,
    ) -> None:
        """again: returns the job as a restart would begin it now; None: no host answers."""
        self._named, self._again, self._events, self._say, self._poll_s = named, again, events, say, poll_s
        self._known: Mapping[str, int] | None = None  # slots by host; None: before the first look
        self._complaint = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringrun hosts", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.look()
            self._ended.wait(self._poll_s)

    def look(self) -> None:
        """Look once; what is wrong with the file or the script is said once, and hosts stay as they were."""
        try:
            named = {host.name: host.slots or 1 for host in self._named()}
            known, self._known = named if self._known is None else self._known, named
            came = [str(Host(name, slots)) for name, slots in named.items() if slots > known.get(name, 0)]
            if came and (job := self._again()):
                self._events.put(HostsCame(tuple(came), job.size))
        except LauncherError as error:
            if str(error) != self._complaint:
                self._say(f"ringrun: warning: hosts stay as they are: {error}")
            self._complaint = str(error)
