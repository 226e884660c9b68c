"""Sends the launcher what a rank has recorded of its steps: once what it is, each second sums, now and then the steps.

    {"about": {...}}   once for each world
    {"totals": {...}}  each second, sums over all steps
    {"step": {...}}    the last steps, a few seconds after the start, then more and more seldom, and at the end

A thread of its own does that, without MPI, and samples the main thread's stack meanwhile. It never harms the job: what
the launcher does not take is lost.
"""

from __future__ import annotations

import collections
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from ringreduce.monitor import launcher_link, sampling
from ringreduce.monitor.side_job import SideJob
from ringreduce.monitor.steps import Step, StepRecorder

SAMPLE_S = 20e-3, 50e-3  # between two samples; at random, as steps may have a rhythm
TOTALS_S = 1.0
FIRST_STEPS_S, STEPS_S = 5.0, 60.0
LAST_S = 0.2  # how long the last messages may take
MOST_BYTES = 60_000  # of a message
MOST_LINES = 64
STEPS_OF_ALL = 1024  # of all ranks together, but LEAST of each
LEAST = 4


class Reporting:
    """One engine's."""

    def __init__(
        self,
        recorder: StepRecorder,
        rank: int,
        size: int,
        error_file: str,
        about: Callable[[], dict[str, Any]],
        now: Callable[[], dict[str, Any]],
    ) -> None:
        """about: what this rank is, for the first message;  now: further sums."""
        self._recorder, self._error_file, self._about, self._now = recorder, error_file, about, now
        self._most_steps = max(LEAST, STEPS_OF_ALL // size)
        self.job = SideJob("the record of steps", rank)
        self._sampler = sampling.Sampler()
        self._ending = threading.Event()
        self._has_told = False
        self._waiting: collections.deque[Step] = collections.deque(maxlen=self._most_steps)
        self._sent = -1  # the number of the last step that was sent
        self._thread = threading.Thread(target=self._run, name="ringreduce reports", daemon=True)

    def start(self) -> None:
        """Report from now on."""
        self._thread.start()

    def close(self) -> None:
        """Send what is left; the launcher may be gone."""
        self._ending.set()
        self.job(self._finish)

    def _finish(self) -> None:
        self._thread.join(LAST_S)
        until_s = time.monotonic() + LAST_S
        self._send_totals()
        self._take_steps()
        while self._waiting and time.monotonic() < until_s:
            if not self._send_step():
                time.sleep(LAST_S / 100)

    def _run(self) -> None:
        next_s, interval_s = time.monotonic() + TOTALS_S, FIRST_STEPS_S
        steps_s = time.monotonic() + interval_s
        while not self._ending.wait(random.uniform(*SAMPLE_S)):  # noqa: S311 - no secret
            self.job(self._look)
            now = time.monotonic()
            if now >= next_s:
                next_s = now + TOTALS_S
                self.job(self._send_totals)
            if now >= steps_s:
                interval_s = min(2 * interval_s, STEPS_S)
                steps_s = now + interval_s
                self.job(self._take_steps)
            if self._waiting:  # one at a time: the launcher's socket holds few
                self.job(self._send_step)

    def _look(self) -> None:
        self._sampler.look(self._recorder.thread)

    def _take_steps(self) -> None:
        self._waiting.extend(each for each in list(self._recorder.steps) if each.number > self._sent)

    def _send_totals(self) -> None:
        if not self._has_told:
            self._has_told = self._send(about=self._about())
        self._send(totals=self.totals())

    def totals(self) -> dict[str, Any]:
        """See the module."""
        thread, sampler = self._recorder.thread, self._sampler
        (cpu_s, core_wait_s), (rss, shm) = sampling.processor(thread), sampling.memory()
        return {
            "at_s": time.monotonic(),
            **self._recorder.totals(),
            "lines": dict(sampler.lines.most_common(MOST_LINES)),
            "samples": sampler.samples,
            "cpu_s": cpu_s,
            "core_wait_s": core_wait_s,
            "rss": rss,
            "shm": shm,
            **self._now(),
        }

    def _send_step(self) -> bool:
        step = self._waiting[0]
        message = {
            "number": step.number,
            "from_s": step.from_s,
            "to_s": step.to_s,
            "operations": step.operations,
            "waits": step.waits,
            "more": step.operations_count - len(step.operations),
        }
        if is_sent := self._send(step=message):
            self._waiting.popleft()
            self._sent = step.number
        return is_sent

    def _send(self, **message: dict[str, Any]) -> bool:
        return launcher_link.report(self._error_file, measured=_cut(message))


def _cut(message: dict[str, Any]) -> dict[str, Any]:
    """The message, without what is too long for a datagram."""
    (kind, body), *_ = message.items()
    while len(json.dumps(body)) > MOST_BYTES:
        name = max(body, key=lambda each: len(json.dumps(body[each])))
        longest = body[name]
        kept = len(longest) // 2
        if isinstance(longest, dict):
            body[name] = dict(list(longest.items())[:kept])
        else:
            body[name] = longest[:kept]
        if name == "operations" and "more" in body:
            body["more"] += len(longest) - kept
    return {kind: body}
