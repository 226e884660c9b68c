"""Tries knobs while the job trains, and keeps the fastest. On rank 0, for the process set of all ranks.

What counts is the time that the lane is busy with all-reduces, for each byte of a training step:

    step      from one name to the same name again: one step of training, whatever is in it and however it was fused
    sample    steps of one candidate, of some MB together; the first step with new knobs is not counted
    cost      busy seconds / bytes of a sample; search.py compares medians of them

Busy time is what the knobs change. The time of whole steps would be closer to what the user waits for, but computing
varies more from step to step than what is to be measured. Waiting for a late rank is not in it: nothing is run before
all ranks have submitted it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ringreduce.engine import tuned
from ringreduce.engine.description import Description
from ringreduce.engine.host import Host
from ringreduce.engine.knobs import Knobs, candidates
from ringreduce.engine.letters import Response
from ringreduce.engine.request import Request
from ringreduce.engine.routes import Routes
from ringreduce.engine.search import Search
from ringreduce.settings import Settings
from ringreduce.transport.base import Steps
from ringreduce.world import World

WARM_UP_STEPS = 3
"""They tell what a step is like; nothing is measured in them."""
SAMPLE_BYTES = 4 << 20
LEAST_STEP_BYTES = 256 << 10
"""What is shorter has nothing to tune."""
UNNAMED_STEP_BYTES = 16 << 20
"""Where no tensor has a name, nobody can tell where a step ends."""
LONGEST_STEP_BYTES = 4 << 30
"""Where names never come again neither."""
MOST_STEPS = 4000
"""Then the default stays."""


class Step:
    """What was reduced in one step of training."""

    def __init__(self, counts: bool) -> None:
        self.counts = counts
        """The knobs were the same before."""
        self.names: set[str] = set()
        self.nbytes = 0
        self.busy_s = 0.0
        self.runs = 0
        """All-reduces that were run together are one run."""
        self.pending = 0


class Tuner:
    """See above. All but `steer` and `timed` are its own."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        host: Host,
        routes: Routes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._world, self._settings, self._host, self._routes = world, settings, host, routes
        self._clock = clock
        self._knobs = Knobs.of(settings)
        """Those that all ranks use."""
        self._candidates = [self._knobs]
        self._search: Search | None = None
        self._step = Step(counts=False)
        self._steps = 0
        self._largest = 0
        """Bytes of the largest step so far."""
        self._warm_up: list[Step] = []
        self._sample_s = 0.0
        self._sample_bytes = 0
        self.ended = False

    def steer(self, response: Response, descriptions: Sequence[Description]) -> Response:
        """The response, with new knobs where it begins a step that shall have others.

        descriptions: what it runs.
        """
        reductions = [each for each in descriptions if each.kind == "allreduce"]
        if self.ended or not self._is_new_step(reductions):
            return response
        done, self._step = self._step, Step(counts=True)
        self._steps += 1
        wanted = self._learn(done)
        if wanted.moves_like(self._knobs) and wanted.origin == self._knobs.origin:
            return response
        self._step.counts = wanted.moves_like(self._knobs)
        self._knobs = wanted
        return response._replace(knobs=wanted)

    def timed(self, steps: Steps[None], requests: Sequence[Request]) -> Steps[None]:
        """The same steps, counted in the step of training to which they belong."""
        if self.ended or not any(each.description.kind == "allreduce" for each in requests):
            return steps
        step = self._step
        step.names.update(each.key for each in requests if not each.description.numbered)
        step.nbytes += sum(each.nbytes for request in requests for each in request.inputs)
        step.runs += 1
        step.pending += 1
        return self._clocked(steps, step)

    def close(self) -> None:
        """The job ends."""
        if not self.ended and self._steps:
            tuned.report(f"the job ended after {self._steps} steps, before the search; the defaults stay")
        self.ended = True

    def _clocked(self, steps: Steps[None], step: Step) -> Steps[None]:
        since_s = self._clock()
        yield from steps
        step.busy_s += self._clock() - since_s
        step.pending -= 1

    def _is_new_step(self, descriptions: Sequence[Description]) -> bool:
        step = self._step
        if step.nbytes > LONGEST_STEP_BYTES or (not step.names and step.nbytes > UNNAMED_STEP_BYTES):
            return bool(descriptions)
        return any(each.key in step.names for each in descriptions)

    def _learn(self, done: Step) -> Knobs:
        """What a step that has ended tells; returns the knobs for the next."""
        self._largest = max(self._largest, done.nbytes)
        if self._search is None:
            self._warm_up.append(done)
            return self._begin() if len(self._warm_up) == WARM_UP_STEPS else self._knobs
        # less than usual: an evaluation, a metric by itself
        if done.counts and not done.pending and 2 * done.nbytes >= self._largest:
            self._add(done, self._search)
        if self._search.ended or self._steps >= MOST_STEPS:
            return self._end(self._search)
        return self._candidates[self._search.current]._replace(origin="trial")

    def _begin(self) -> Knobs:
        if self._largest < LEAST_STEP_BYTES:
            tuned.report(f"the all-reduces of a step have {self._largest} B together: too little to tune")
            self.ended = True
            return self._knobs
        largest = max(self._warm_up, key=lambda each: each.nbytes)
        self._candidates = candidates(
            self._settings,
            self._routes.candidates,
            self._world.hosts,
            largest.nbytes // largest.runs,
            self._host.constants,
        )
        self._search = Search(len(self._candidates))
        return self._end(self._search) if self._search.ended else self._knobs._replace(origin="trial")

    def _add(self, done: Step, search: Search) -> None:
        self._sample_s += done.busy_s
        self._sample_bytes += done.nbytes
        if self._sample_bytes >= SAMPLE_BYTES:
            search.record(self._sample_s / self._sample_bytes)
            self._sample_s, self._sample_bytes = 0.0, 0

    def _end(self, search: Search) -> Knobs:
        self.ended = True
        best = self._candidates[search.best]._replace(origin="tuned")
        path, why_not = self._settings.autotune_file, ""
        if path:
            why_not = tuned.write(path, self._content(best, search))
        kept = f"; {path} cannot be written: {why_not}" if why_not else f"; written to {path}" if path else ""
        tuned.report(f"{self._found(best, search)}, after {self._steps} steps{kept}")
        return best

    def _found(self, best: Knobs, search: Search) -> str:
        default = _gbs(search.last_cost(0))
        if search.best == 0:
            return f"nothing is clearly faster than the defaults ({default} GB/s)"
        return f"{_gbs(search.last_cost(search.best))} GB/s (with the defaults {default}) with {best}"

    def _content(self, best: Knobs, search: Search) -> dict[str, object]:
        tried = [
            {"knobs": tuned.plain(each), "gbs": _gbs(search.cost(number)), "samples": search.samples(number)}
            for number, each in enumerate(self._candidates)
        ]
        return {
            "layout": tuned.layout(self._world, self._host.window is not None),
            "knobs": tuned.plain(best),
            "step_mb": round(self._largest / 1e6, 3),
            "steps": self._steps,
            "tried": tried,
        }


def _gbs(cost: float | None) -> float | None:
    """Seconds for a byte as GB/s."""
    return None if not cost else float(f"{1e-9 / cost:.4g}")
