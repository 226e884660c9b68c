"""Jobs of `ringrun --elastic` whose ranks die at random: does each go on in the same processes, with the right result?

    python -m tests.support.elastic.storm --jobs 300 --seed 1    # seeds 1 to 300; ringrun is the one beside this Python
    python -m tests.support.elastic.storm --jobs 1 --seed 17 -v  # one of them again, with what it printed
    python -m tests.support.elastic.storm --plain --jobs 500     # plain.py: does each end, and name who failed?

A seed says how many ranks there are, on how many hosts by name, how many parameters they train, and who dies where,
when and how (tests/support/elastic/program.py). What a job leaves is seen: isolated.py.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.support import jobs
from tests.support.elastic import isolated, plain
from tests.support.elastic.program import replay

PYTHON = Path(sys.executable)
STEPS = 30
STALL_ABORT_S = 10  # a rank that is slow for another reason, as beside other programs, is no stalled one
ENDS = ["SIGKILL", "SIGSEGV", "abort", "_exit0", "_exit7"]  # of a process, from any thread
FAILURES = [*ENDS, "raise", "exit3"]
STALLS = ["SIGSTOP", "sleep"]
PLACES = ["step", "submitted", "between", "start", "control", "window", "sync", "leaving"]


class Job(NamedTuple):
    """What a seed has drawn."""

    size: int
    spares: int
    deaths: list[str]  # as program.py wants them
    variables: dict[str, str]

    def __str__(self) -> str:
        """One line."""
        spares = f"+{self.spares}" if self.spares else ""
        return " ".join(
            [f"{self.size}{spares} ranks", *(f"{k[9:]}={v}" for k, v in self.variables.items()), *self.deaths]
        )


def draw(seed: int, spares: int = 0, way: str = "") -> Job:
    """With spares two ranks die, else one to three; one is always left.  way: how they train."""
    dice = random.Random(seed)
    size = dice.randint(3, 4) if spares else dice.randint(2, 5)
    variables = {"TRAINING_COUNT": str(dice.choice([10, 1000, 60_000]))}
    if size > 2 and dice.random() < 0.3:
        variables["TRAINING_PER_HOST"] = "2"
    if seed % 4 == 0 and not way:
        variables["TRAINING_WIRE"] = "int4"
    victims = dice.sample(range(size), 2 if spares else min(size - 1, dice.choice([1, 1, 1, 2, 2, 3])))
    places = [*PLACES, *["message", "message"] * ("TRAINING_PER_HOST" in variables)]
    first = death(dice, victims[0], places)
    deaths = [first, *(another(dice, rank, first, places) for rank in victims[1:])]
    return Job(size, spares, deaths, {**variables, **({"TRAINING_WAY": way} if way else {})})


def death(dice: random.Random, rank: int, places: list[str]) -> str:
    """Of one rank."""
    where = dice.choice(places)
    ends = FAILURES if where in ("step", "submitted", "between", "sync") else ENDS
    when = {
        "step": dice.randrange(STEPS),
        "submitted": dice.randrange(STEPS),
        "between": dice.randrange(STEPS),
        "start": round(dice.choice([0.02, 0.15]) * dice.random(), 4),
        "control": dice.randrange(6),
        "window": dice.randrange(40),
        "message": dice.randrange(40),
    }.get(where, 0)
    may_stall = where not in ("start", "leaving") and dice.random() < 0.08
    return f"{rank} {where} {when} {dice.choice(STALLS if may_stall else ends)}"


def another(dice: random.Random, rank: int, first: str, places: list[str]) -> str:
    """Of a further rank: at once with the first, while the others re-form, or at any time."""
    _, where, when, _ = first.split()
    how = dice.choice(ENDS)
    return dice.choice([f"{rank} {where} {when} {how}", f"{rank} meeting 0 {how}", death(dice, rank, places)])


class Outcome(NamedTuple):
    """Of a job."""

    seconds: float
    printed: str
    wrong: list[str]
    died: list[int]


def run(job: Job, python: Path = PYTHON) -> Outcome:
    """Run a job, and look at all that it must have done."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rank = [python, "-m", "tests.support.elastic.program", STEPS, folder, *job.deaths]
        command = [jobs.ringrun(python), "--elastic", "-np", job.size, "--spares", job.spares, *rank]
        limits = {"RINGREDUCE_STALL_ABORT_S": str(STALL_ABORT_S), "RINGREDUCE_STALL_CHECK_S": "4"}
        ended = isolated.run(command, **limits, **job.variables)
        died = sorted(int(each.stem) for each in folder.glob("*.died"))
        return outcome(ended, 0, faults(job, folder, died, ended.printed), died)


def outcome(ended: isolated.Ended, code: int, wrong: list[str], died: list[int]) -> Outcome:
    """Of a job that was to end with this code, and in which this was wrong besides."""
    if ended.code is None:
        return Outcome(ended.seconds, ended.printed, ["it hangs"], [])
    codes = [f"exit code {ended.code}"] * (ended.code != code)
    return Outcome(ended.seconds, ended.printed, [f"left: {line}" for line in ended.left] + codes + wrong, died)


def faults(job: Job, folder: Path, died: list[int], printed: str) -> list[str]:
    """What is wrong with what a job has left and printed."""
    found = []
    named = sorted(map(int, re.findall(r"-- ringrun: rank (\d+) of \d+ failed --", printed)))
    results = {int(each.stem): json.loads(each.read_text()) for each in folder.glob("*.json")}
    hows = {int(each.split()[0]): each.split()[-1] for each in job.deaths}
    failed = {rank for rank in died if hows[rank] != "_exit0"}
    finished = {rank for rank in failed & set(results) if hows[rank] in STALLS}  # it is woken then, or not waited for
    if not failed - finished <= set(named) <= failed:
        found.append(f"ranks {died} died, and {named} are named")
    trained = set(range(job.size + job.spares)) if not job.spares else set(results) | set(range(job.size))
    if missing := trained - set(results) - set(died):
        found.append(f"no result of ranks {sorted(missing)}")
    for rank, result in results.items():
        if len(result["history"]) != STEPS:
            found.append(f"rank {rank}: {len(result['history'])} steps")
        expected = replay(result["history"], len(result["parameters"]), result["momentum"])
        error = 0.4 if "TRAINING_WIRE" in job.variables else 1e-9
        if not np.allclose(result["parameters"], expected, rtol=1e-9, atol=error):
            found.append(f"rank {rank}: not what one process computes")
        if result["parameters"] != results[min(results)]["parameters"]:
            found.append(f"rank {rank}: not the bits of rank {min(results)}")
        if (folder / f"{rank}.pid").read_text().split() != [str(result["pid"])]:
            found.append(f"rank {rank} was started again")
        taking_part = [each[0] if isinstance(each[-1], bool) else each for each in result["history"]]
        if job.spares and {len(each) for each in taking_part} != {job.size}:
            found.append(f"rank {rank}: the world's size changed")
    return found


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first job")
    parser.add_argument("--plain", action="store_true", help="jobs that are not elastic: one rank fails")
    parser.add_argument("--python", type=Path, default=PYTHON, help="another, as one with MPICH")
    parser.add_argument("--spares", type=int, default=0, help="2: two deaths a job, and two spares")
    parser.add_argument("--way", default="", choices=["", "sharded", "local"], help="how they train: see program.py")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no job after this time")
    parser.add_argument("-v", action="store_true", help="show what each job prints")
    options = parser.parse_args()
    began_s, failed, took_s, deaths = time.monotonic(), [], [], []
    for seed in range(options.seed, options.seed + options.jobs):
        if time.monotonic() - began_s > options.seconds:
            break
        kind = plain if options.plain else sys.modules[__name__]
        job = kind.draw(seed, options.spares, *[options.way] * (kind is not plain))
        outcome = kind.run(job, options.python)
        took_s.append(outcome.seconds)
        deaths.append(len(outcome.died))
        verdict = "; ".join(outcome.wrong) or "right"
        print(f"{seed}: {outcome.seconds:.1f} s, {job}: {outcome.died} died: {verdict}", flush=True)
        if outcome.wrong or options.v:
            print(outcome.printed, flush=True)
        failed += [seed] * bool(outcome.wrong)
    took = f"{sum(took_s):.0f} s, the longest {max(took_s):.1f}"
    died = f"{sum(deaths)} ranks died in {np.count_nonzero(deaths)} of {len(deaths)} jobs"
    print(f"from seed {options.seed}: {died}, {took}; wrong: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
