"""Measures one run of a script: a ringrun of its own, which is ended once enough steps were seen.

A rank counts its own steps, by its own clock (ringreduce/execution/steps.py). For the first half of the time it records
what each step waits for, from which the parts of a step come; for the second half it only counts, since recording takes
time itself: that is the speed. Of each half, what had been counted at its start is taken off. A script that ends by
itself before the second one is measured as a whole, but for its first step.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..job.control_socket import COUNTS, TOTALS, RunningJob, ask, find_jobs
from ..job.plan import run_module
from ..processes import start_with_parent, uninterrupted
from ..report.outcome import LAST_WORDS, SILENT
from ..run_report import DATA, STEP_ENDS
from ..text import counted, numbered

FIRST_STEPS, FIRST_S = 10, 5.0
"""So many steps are left out, or those of so many seconds, but _LEAST_FIRST: they compile, and announce tensors."""
_WARM = 0.25
"""Of --seconds: so long is left out where steps are short, as caches and the allocator fill."""
LEAST_STEPS = 5
"""Fewer steps are no measurement."""
_LEAST_FIRST = 2
_LOOK_S = 0.2
_END_S = 30.0
_LOADER = " (data loader)"
_OUTPUT = "output"
_OF_RINGRUN, _ALONE = "ringrun: ", "are not connected"

Totals = Mapping[str, Any]
Answer = Mapping[int, Totals]
"""What each rank has counted since its first step, by rank."""


@dataclass(frozen=True)
class Bounds:
    """How long one run is measured, after its first steps."""

    seconds: float = 10.0
    steps: int | None = None
    wait_s: float = 120.0
    """How long it may take until the first steps are over."""

    longer: float = 6.0
    """Times the seconds, where steps are so long that there are fewer than LEAST_STEPS."""

    @property
    def half(self) -> Bounds:
        """For one of the two halves of a run; where steps are long, the first one may take all of the time."""
        steps = self.steps and max(LEAST_STEPS, self.steps // 2)
        return replace(self, seconds=self.seconds / 2, steps=steps, longer=4 * self.longer)

    def are_first_over(self, now: Answer) -> bool:
        """Return whether all ranks have done the steps that are left out."""
        warm_s = min(FIRST_S, _WARM * self.seconds)
        return all(
            each["step"] >= _LEAST_FIRST and each["step_s"] >= (warm_s if each["step"] >= FIRST_STEPS else FIRST_S)
            for each in now.values()
        )

    def is_enough(self, before: Answer, now: Answer) -> bool:
        """Return whether the steps between two answers are enough."""
        steps: int = min(each["step"] - before[rank]["step"] for rank, each in now.items())
        seconds: float = min(each["step_s"] - before[rank]["step_s"] for rank, each in now.items())
        is_long = seconds >= self.seconds and (steps >= LEAST_STEPS or seconds >= self.longer * self.seconds)
        return is_long or (self.steps is not None and steps >= self.steps)

    def left_s(self, before: Answer, now: Answer) -> float:
        """Return how long it takes at least until they are enough."""
        if not before or self.steps is not None:
            return 0.0
        measured_s: float = min(each["step_s"] - before[rank]["step_s"] for rank, each in now.items())
        return self.seconds - measured_s


@dataclass(frozen=True)
class Run:
    """What one run has given; times are of a step, in ms, on average over the ranks."""

    size: int
    steps: int = 0
    steps_s: float = 0.0
    """Steps a second."""
    examples: float | None = None
    """Of one rank and step; None where nobody has counted them."""
    step_ms: float = 0.0
    exposed_ms: float = 0.0
    waiting_ms: float = 0.0
    core_ms: float = 0.0
    """Another thread had the core: of the rank that waited least."""
    loading_ms: float = 0.0
    late: str = ""
    """Who keeps the others waiting most, and why."""
    late_ms: float = 0.0
    """How long the others wait for that, on average."""
    advice: tuple[tuple[str, float], ...] = ()
    """The run report's: a text, and how many ms of a step it saves."""
    hosts: int = 1
    problem: str = ""
    """Why there are no figures."""
    ended: bool = False
    """The script has ended by itself."""

    @property
    def computing_ms(self) -> float:
        """The rest of a step."""
        return max(0.0, self.step_ms - self.exposed_ms - self.waiting_ms)

    @property
    def examples_s(self) -> float | None:
        """Examples a second, of all ranks."""
        return None if self.examples is None else self.examples * self.size * self.steps_s


def measure(size: int, flags: Sequence[str], command: Sequence[str], folder: str, bounds: Bounds) -> Run:
    """Run `command` with `size` ranks, by a ringrun with `flags`, until it is measured; `folder` is for files."""
    own = ["-np", str(size), "--report", folder]
    argv = [sys.executable, *run_module(__package__.partition(".")[0]), *own, *flags, *command]
    with open(Path(folder, _OUTPUT), "wb") as output, contextlib.ExitStack() as at_end:
        with uninterrupted():
            process = start_with_parent(
                argv,
                signal.SIGTERM,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
            at_end.callback(_end, process)
        seen = Seen()
        has_ended = _watch(process, size, bounds, seen)
    said = Path(folder, _OUTPUT).read_text(errors="replace").splitlines()
    return run_of(size, _read(Path(folder, DATA)), seen, said, process.returncode if has_ended else None)


@dataclass
class Seen:
    """What ranks have said: of their recorded steps after the first ones and last, and of those only counted."""

    recorded: tuple[Answer, Answer] = ({}, {})
    counted: tuple[Answer, Answer] = ({}, {})


def _watch(process: subprocess.Popen[bytes], size: int, bounds: Bounds, seen: Seen) -> bool:
    """Watch a job until it is measured; return whether it has ended by itself."""
    until_s, half = time.monotonic() + bounds.wait_s, bounds.half
    job, question, left_s = None, TOTALS, 0.0
    while not _ends_within(process, max(_LOOK_S, left_s)):  # each look takes time from a core
        job = job or next((each for each in find_jobs() if each.pid == process.pid), None)
        answer = _answer(job, question) if job else None
        if answer is None:
            job = None
        elif len(answer) == size and question is TOTALS:
            before = seen.recorded[0]
            if not before and bounds.are_first_over(answer):
                before, until_s = answer, time.monotonic() + 2 * bounds.longer * bounds.seconds
            seen.recorded, left_s = (before, answer), half.left_s(before, answer)
            if before and half.is_enough(before, answer):
                question, left_s = COUNTS, 0.0
        elif len(now := _counted(answer)) == size:
            before = seen.counted[0] or now
            seen.counted = before, now
            if half.is_enough(before, now):
                return False
            left_s = half.left_s(before, now)
        if time.monotonic() > until_s:
            return False
    return True


def _counted(answer: Answer) -> Answer:
    """Return the steps that ranks only count, of those that have begun to, as if they were recorded ones."""
    names = "step", "step_s", "core_wait_s"
    return {
        rank: dict(zip(names, said["counted"], strict=True)) for rank, said in answer.items() if said.get("counted")
    }


def _ends_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    return process.returncode is not None


def _answer(job: RunningJob, question: bytes) -> Answer | None:
    try:
        return {said["rank"]: said for said in map(json.loads, ask(job, question).splitlines())}
    except (OSError, ValueError):  # it ends just now
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job, which leaves nothing behind, unless it takes too long for that; a second Ctrl-C waits for it."""
    with uninterrupted():
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):  # the job was not even started
        return {}
    return report


def run_of(size: int, report: Mapping[str, Any], seen: Seen, said: Sequence[str], code: int | None) -> Run:
    """Return what a run has given; `said`: what it has printed, and `code` its exit code, if it has ended by itself."""
    if code:
        return Run(size, problem=f"failed: {_why(report, said, code)}", ended=True)
    before, now = seen.recorded
    rows = {row["rank"]: row for row in report.get("ranks") or ()}
    last = {rank: _later(row, before.get(rank) or {}, now.get(rank) or {}) for rank, row in rows.items()}
    grown = [_grown(before.get(rank) or {}, each) for rank, each in last.items() if each.get("step_s")]
    steps = min((each["step"] for each in grown), default=0) if len(grown) == size else 0
    if steps < LEAST_STEPS and before and code is not None:  # so short that none came after the first look
        return run_of(size, report, Seen(({}, now)), said, code)
    if steps < LEAST_STEPS:
        has_ended, silent = code is not None, [rank for rank in range(size) if not last.get(rank, {}).get("step_s")]
        problem = _too_few(int(steps), has_ended=has_ended, is_warm=bool(before))
        if silent:
            problem = _no_step(report, silent, size, said, has_ended=has_ended)
        return Run(size, int(steps), problem=problem, ended=has_ended)
    known = all(each["examples"] for each in grown)
    recorded_s = _mean([each["step_s"] / each["step"] for each in grown])
    unrecorded = [_grown(seen.counted[0][rank], each) for rank, each in seen.counted[1].items()]
    is_counted = bool(unrecorded) and min(each["step"] for each in unrecorded) >= LEAST_STEPS
    step_s = _mean([each["step_s"] / each["step"] for each in unrecorded]) if is_counted else recorded_s
    steps = int(min(each["step"] for each in unrecorded)) if is_counted else steps
    parts, late = report["step"], [each for each in report["stragglers"] if each["kind"] != "slow link"]
    to_ms = 1e3 * step_s / recorded_s
    of_parts = sum(parts[f"{name}_ms"] for name in ("computing", "exposed", "waiting")) or 1.0
    to_mean = 1e3 * step_s / of_parts  # the report's are of its last steps
    return Run(
        size,
        int(steps),
        1 / step_s,
        _mean([each["examples"] / each["step"] for each in grown]) if known else None,
        1e3 * step_s,
        parts["exposed_ms"] * to_mean,
        parts["waiting_ms"] * to_mean,
        min(1e3 * each["core_wait_s"] / each["step"] for each in (unrecorded if is_counted else grown)),
        _mean([to_ms * each["loading"] * each["step_s"] / each["step"] for each in grown]),
        f"{late[0]['who']} ({late[0]['text']})" if late else "",
        min(late[0]["delay_ms"], late[0]["caused_ms"] / (size - 1)) * to_mean if late else 0.0,
        tuple((each["text"], each["saves_ms"] * to_mean) for each in report["advice"]),
        len(report["job"]["hosts"]),
        ended=code is not None,
    )


def _later(row: Mapping[str, Any], before: Totals, now: Totals) -> Totals:
    """Return what a rank has counted at its end, as the report has it, with what only its answers have."""
    core_s = 1e-3 * row["core_wait_ms"] * row["steps"]
    if now.get("step") and "core_wait_s" in now:  # as often in the steps that came after this answer
        since = before if before.get("step", 0) < now["step"] else {}
        steps, since_s = since.get("step", 0), since.get("core_wait_s", 0.0)
        core_s = since_s + (now["core_wait_s"] - since_s) * (row["steps"] - steps) / (now["step"] - steps)
    report = {"step": row["steps"], "step_s": row["steps_s"], "examples": row["examples"], "core_wait_s": core_s}
    return {**now, **report}


def _grown(before: Totals, now: Totals) -> dict[str, float]:
    """Return what has come since `before`; `loading`: the share of the time in which a data loader was at work."""
    found = {name: (now.get(name) or 0) - (before.get(name) or 0) for name in ("step", "step_s", "examples")}
    found["core_wait_s"] = max(0.0, (now.get("core_wait_s") or 0) - (before.get("core_wait_s") or 0))
    seen = {line: count - before.get("lines", {}).get(line, 0) for line, count in now.get("lines", {}).items()}
    if not any(seen.values()):  # the script has ended before another look
        seen = now.get("lines", {})
    loading = sum(count for line, count in seen.items() if line.endswith(_LOADER))
    return found | {"loading": loading / max(1, sum(seen.values()))}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _why(report: Mapping[str, Any], said: Sequence[str], code: int) -> str:
    """Return in a line how a run has failed: its first rank's exception or last line, else ringrun's own error."""
    for failure in (report.get("failures") or ())[:1]:
        how, card = f"rank {failure['rank']} {failure['text']}", list(report["job"].get("card") or ())
        if any(line.endswith(LAST_WORDS) for line in card):
            return f"{how}: {card[-2].strip()}"
        own = re.compile(rf"[-\d:. ]*\[ *{failure['rank']}\] (.+)")
        printed = [match[1] for match in map(own.match, said) if match] if any(SILENT in line for line in card) else []
        return ": ".join([how, *printed[-1:]])
    errors = [line for line in said if line.startswith(f"{_OF_RINGRUN}error: ")]
    return (errors or [*said[-1:], f"exit code {code}"])[0].removeprefix(f"{_OF_RINGRUN}error: ")


def _too_few(steps: int, *, has_ended: bool, is_warm: bool) -> str:
    """Return why a run whose ranks have all counted steps is no measurement."""
    when, more = "in the time allowed", f"allow more with {'--seconds' if is_warm else '--wait'}"
    if has_ended:
        when, more = "before the script ended", "let it train longer"
    many = f"only {counted(steps, 'step')}" if steps else "no step"
    return f"{many} could be measured {when}; {more}"


def _no_step(
    report: Mapping[str, Any], silent: Sequence[int], size: int, said: Sequence[str], *, has_ended: bool
) -> str:
    """Return why the `silent` ranks have none; what ringrun has said of ranks that never joined explains it."""
    when = "before the script ended" if has_ended else "before the time of --wait was up"
    first = " after the first one" if report.get("timeline") else ""  # which is in no sum
    why = f"no step{first} was counted {when}: {STEP_ENDS}"
    if len(silent) < size:
        why = f"{numbered('rank', silent)} counted no step, others did: every rank must end its steps"
    alone = [line.removeprefix(_OF_RINGRUN) for line in said if _ALONE in line]
    return "; ".join([why, *alone[:1]])
