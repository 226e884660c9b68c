"""Sends ringrun what a rank has recorded of its steps; as messages of `launcher_link.report`, in `measured`:

    {"about": …}    once: what this rank is
    {"totals": …}   each second: sums over all steps but the first one; while steps are only counted, those of before
    {"step": …}     the last steps, each once, a second after the start, then more and more seldom, and at the end, or
                    before steps are only counted

A thread of its own does that, without MPI, and looks now and then what the rank's script does. What ringrun does not
take is lost, and the job goes on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from ringreduce import __version__
from ringreduce.execution.algorithms import Algorithms
from ringreduce.execution.host import HostResources
from ringreduce.execution.steps import MOST, Step, StepRecorder
from ringreduce.monitor import launcher_link, loaders
from ringreduce.monitor.sampling import Sampler, memory
from ringreduce.monitor.side_job import SideJob
from ringreduce.settings import PER_RANK, Settings
from ringreduce.transport.base import EngineTransport
from ringreduce.transport.traffic import Traffic

SAMPLE_S = 20e-3, 50e-3  # between two samples; at random, since steps have a rhythm
TOTALS_S = 1.0
FIRST_STEPS_S, STEPS_S = 1.0, 60.0
LAST_S = 0.2  # how long the last steps may take
NOT_TOLD = {*PER_RANK, "report"}  # of the settings
MOST_BYTES = 60_000  # of a message
STEPS_OF_ALL, LEAST_STEPS = 1024, 4  # of all ranks together, of each rank
VERSIONS = "numpy", "mpi4py", "torch", "jax", "tensorflow", "keras", "cupy"


class Reporting:
    """One engine's.  about: see `about`."""

    def __init__(
        self,
        recorder: StepRecorder,
        transport: EngineTransport,
        host: HostResources,
        about: Mapping[str, Any],
        algorithms: Algorithms,
        fusion_bytes: int,
        for_s: float,
    ) -> None:
        """for_s: how long, from now on; then the recorder stops."""
        self._recorder, self._transport, self._host = recorder, transport, host
        self._about, self._algorithms, self._fusion_bytes = about, algorithms, fusion_bytes
        self._until_s = time.monotonic() + for_s
        self.job = SideJob("the record of steps", host.world.rank)
        self._sampler = Sampler(recorder.thread)
        self._has_begun = self._has_told = self._is_to_count = False
        self._recorded: dict[str, Any] | None = None  # the totals, once steps are only counted
        self._sent = -1  # the number of the last step that was sent
        self._due: list[Step] = []  # to be sent
        self._next_s, self._steps_s, self._interval_s = 0.0, time.monotonic() + FIRST_STEPS_S, FIRST_STEPS_S
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringreduce reports", daemon=True)
        self._thread.start()

    def prolong(self, for_s: float) -> bool:
        """Report for so many seconds from now, at least; False when it has ended."""
        self._until_s = max(self._until_s, time.monotonic() + for_s)
        return self._thread.is_alive()

    def only_count(self) -> None:
        """Record no more, and say how many steps there are. Any thread may call it."""
        self._is_to_count = True

    def close(self) -> None:
        """Send what is left; ringrun may be gone."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(LAST_S)
            self.job(self._finish)

    def _finish(self) -> None:
        self._send_totals(launcher_link.WAIT_S)
        self._send_steps()

    def _run(self) -> None:
        while not self._ending.wait(TOTALS_S if self._recorded else random.uniform(*SAMPLE_S)):  # noqa: S311 - no secret
            self.job(self._work)
            if time.monotonic() >= self._until_s:
                self._recorder.stop()
                return

    def _work(self) -> None:
        if self._is_to_count and self._recorded is None:
            self._send_steps()  # now, since a rank that only counts is often ended by a signal
            self._recorder.count()  # before the totals are taken: no step that ends meanwhile is recorded
            self._recorded = self._totals()
            self._transport.traffic = None
        if self._recorded is not None:
            self._send_totals()
            return
        now_s, recorder = time.monotonic(), self._recorder
        if self._sampler.thread != recorder.thread or (recorder.steps and not self._has_begun):
            self._has_begun, self._sampler = bool(recorder.steps), Sampler(recorder.thread)
            self._transport.traffic = Traffic()
        self._sampler.look()
        if now_s >= self._next_s:
            self._next_s = now_s + TOTALS_S
            loaders.watch(recorder)  # of what has been imported since
            self._send_totals()
        if now_s >= self._steps_s:
            self._due = self._not_sent()  # these alone, or ranks with short steps would send different ones
            self._interval_s = min(2 * self._interval_s, STEPS_S)
            self._steps_s = now_s + self._interval_s
        if self._due:  # one by one: ringrun's socket holds few
            self._send_step()

    def _send_totals(self, wait_s: float = 0.0) -> None:
        if not self._has_told:
            self._has_told = self._send("about", {**self._about, "versions": versions()}, wait_s)
        sums = self._recorded or self._totals()
        if counted := self._recorder.counted:
            sums = {**sums, "counted": (*counted, self._sampler.core_wait_s())}
        self._send("totals", {"at_s": time.monotonic(), **sums}, wait_s)

    def _totals(self) -> dict[str, Any]:
        traffic, (rss, shm) = self._transport.traffic or Traffic(), memory()
        others = {"rss": rss, "shm": shm, "fusion": self._fusion_bytes, "no_overlap": self._host.no_overlap}
        others["stores"] = self._algorithms.stores
        sent = {"sent": dict(traffic.nbytes), "send_s": dict(traffic.seconds)}
        return {**self._recorder.totals(), **self._sampler.totals(), **sent, **others}

    def _not_sent(self) -> list[Step]:
        """Of the last steps those that ringrun does not have."""
        kept = max(LEAST_STEPS, STEPS_OF_ALL // self._host.world.size)
        return [each for each in list(self._recorder.steps)[-kept:] if each.number > self._sent]

    def _send_steps(self) -> None:
        """Send all of them, as many as there is time for."""
        self._due, until_s = self._not_sent(), time.monotonic() + LAST_S
        while self._due and (left_s := until_s - time.monotonic()) > 0:
            self._send_step(left_s)

    def _send_step(self, wait_s: float = 0.0) -> None:
        """Send the next one that is due; it stays so until ringrun has it."""
        step = self._due[0]
        body = {name: getattr(step, name) for name in ("number", "from_s", "to_s", "waits", "operations")}
        if self._send("step", {**body, "more": max(0, step.count - MOST)}, wait_s):
            self._sent = self._due.pop(0).number

    def _send(self, kind: str, body: dict[str, Any], wait_s: float) -> bool:
        return launcher_link.report(self._host.settings.error_file, wait_s=wait_s, measured={kind: shortened(body)})


def about(host: HostResources, settings: Settings, algorithms: Algorithms, clock_ahead_us: float) -> dict[str, Any]:
    """What a rank is; what is equal on all ranks only rank 0 says."""
    world, defaults = host.world, dataclasses.asdict(Settings())
    own = {
        "rank": world.rank,
        "size": world.size,
        "origin": world.origins[world.rank] if world.origins else world.rank,
        "host": socket.gethostname(),
        "host_number": world.hosts[world.rank],
        "pid": os.getpid(),
        "clock_ahead_s": clock_ahead_us / 1e6,
    }
    if world.rank:
        return own
    values = {name: [value, defaults[name]] for name, value in dataclasses.asdict(settings).items()}
    changed = {name: pair for name, pair in values.items() if pair[0] != pair[1] and name not in NOT_TOLD}
    links = [(*pair, 1e9 * gbs) for pair, gbs in host.links.gbs]
    return {**own, "settings": changed, "links": links, "algorithms": algorithms.table()}


def versions() -> dict[str, str]:
    """Of Python, this package, and those that are imported."""
    imported = {name: getattr(sys.modules.get(name), "__version__", "") for name in VERSIONS}
    found = {"ringreduce": __version__, "python": platform.python_version(), **imported}
    return {name: version for name, version in found.items() if version}


def shortened(body: dict[str, Any]) -> dict[str, Any]:
    """The message without what is too long for a datagram, the last of its longest part.

    >>> {name: len(value) for name, value in shortened({"a": [1] * 30_000, "b": {"c": 1}}).items()}
    {'a': 15000, 'b': 1}
    """
    while len(json.dumps(body)) > MOST_BYTES:
        name = max(body, key=lambda each: len(json.dumps(body[each])))
        items: Iterable[Any] = body[name].items() if isinstance(body[name], dict) else body[name]
        kept = list(items)[: len(body[name]) // 2]
        if name == "operations":
            body["more"] += len(body[name]) - len(kept)
        body[name] = type(body[name])(kept)
    return body
