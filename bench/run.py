"""All figures of docs/benchmarks.md and README, of one machine, by one command: half an hour on 2 cores, best as root.

    python bench/run.py              # writes bench/results/<machine>.json; where it was stopped it goes on
    python bench/run.py --again      # although the file is complete: all figures anew
    python bench/run.py --list       # the jobs, and how many of them are there
    python bench/run.py --quick --results FOLDER     # minutes: to see that all works; the file says so
    python bench/tables.py           # then: writes the tables and the pictures

A set of figures is a job of a script in bench/, run several times; the sets take turns, so that a slow quarter of an
hour meets all of them. First `mpi_tuning.py` tries MPI's settings. The fastest is what the sets called `tuned` run
with, which is MPI_Allreduce beside ringreduce once more. Between hosts root is needed; without it those sets are
skipped. Nothing else should run: the file has the load of the minute before each job.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import beside, machine, mpi_variables, run_command
from figures import fastest_of

BENCH = Path(__file__).resolve().parent
JOBS, TIMEOUT_S = 3, 900
DDPS = ["DDP gloo", "DDP ring"]
HALF = ["--runs", "5"]
GRADIENTS = ["gradients.py", *HALF, "--only", *DDPS, "its backward alone", "MPI_Allreduce, packed", "Horovod's way"]
GRADIENTS_OF_MPI = ["gradients.py", *HALF, "--only", "MPI_Allreduce, packed"]
CALLS = ["allreduce.py", "--only", "allreduce_", "ordered()", "MPI_Allreduce", "torch gloo", "torch ring"]
CALLS_OF_MPI = ["allreduce.py", "--only", "allreduce_", "MPI_Allreduce"]
HOSTS = ["--hosts", "4", "--models", "resnet50", "--runs", "2"]
RESNET50, SHORT = 102_000_000, (8, 32768)


class Set(NamedTuple):
    """Some figures."""

    command: list[str]
    ranks: int = 0
    """0: the script starts its ranks by itself."""
    jobs: int = JOBS
    quick: tuple[str, ...] = ("--quick",)
    """What is added for a quick run; later arguments count."""
    tuned: tuple[str, int] | None = None
    """Run with what was fastest in this set for so many bytes."""


def sized(nbytes: int) -> list[str]:
    """One size of allreduce.py."""
    return ["--min-bytes", str(nbytes), "--max-bytes", str(nbytes)]


TUNING_SIZES = [str(each) for each in (*SHORT, 44_000_000, RESNET50)]
SMALL = ("--quick", "--sizes", *TUNING_SIZES[:2])
TINY = ("--quick", "--models", "tiny")
SETS = {
    "tuning, 2 ranks": Set(["mpi_tuning.py", "--sizes", *TUNING_SIZES], jobs=1, quick=SMALL),
    "tuning, 4 ranks": Set(["mpi_tuning.py", "--ranks", "4", "--sizes", str(RESNET50)], jobs=1, quick=SMALL),
    "tuning, 4 hosts": Set(
        ["mpi_tuning.py", "--hosts", "4", "--sizes", str(RESNET50), "--runs", "1"], jobs=1, quick=SMALL
    ),
    "step": Set(["train_step.py", "--batches", "1", *HALF], 2),
    "step, tuned": Set(
        ["train_step.py", "--batches", "1", *HALF, "--only", "ringreduce", "MPI_Allreduce"],
        2,
        tuned=("tuning, 2 ranks", 44_000_000),
    ),
    "step of 4": Set(
        ["train_step.py", "--batches", "4", "--runs", "3", "--only", "ringreduce", "MPI_Allreduce", *DDPS], 2
    ),
    "gradients, 2 ranks": Set(GRADIENTS, 2),
    "gradients, 2 ranks, tuned": Set(GRADIENTS_OF_MPI, 2, tuned=("tuning, 2 ranks", RESNET50)),
    "gradients, 4 ranks": Set(GRADIENTS, 4),
    "gradients, 4 ranks, tuned": Set(GRADIENTS_OF_MPI, 4, tuned=("tuning, 4 ranks", RESNET50)),
    "gradients, 4 hosts": Set([*GRADIENTS, "floor: raw TCP", *HOSTS], quick=TINY),
    "gradients, 4 hosts, tuned": Set([*GRADIENTS_OF_MPI, *HOSTS], quick=TINY, tuned=("tuning, 4 hosts", RESNET50)),
    "calls, 2 ranks": Set([*CALLS, "--factor", "16", "--max-bytes", str(128 << 20)], 2, quick=(*sized(8), "--quick")),
    "calls, 4 ranks": Set([*CALLS, *sized(8)], 4),
    "calls of 8 B, tuned": Set([*CALLS_OF_MPI, *sized(8)], 2, tuned=("tuning, 2 ranks", 8)),
    "calls of 32 KiB, tuned": Set([*CALLS_OF_MPI, *sized(32768)], 2, tuned=("tuning, 2 ranks", 32768)),
    "halves": Set(["halves.py", *HALF], 2),
    "deaths": Set(["elastic.py", "--who", "NumPy, 4 ranks"], jobs=1, quick=("--runs", "1")),
    "start": Set(["launch.py", "--ranks", "8", "--who", "mpirun", "ringrun"], jobs=1, quick=("--quick", "--runs", "1")),
}
"""By name, which bench/tables.py reads."""


class Results:
    """The file of one machine, written after every job."""

    def __init__(self, folder: Path, quick: bool, again: str | None = None) -> None:
        about = machine()
        self.path = folder / f"{slug(about['processor'])}-{about['cores']}-cores.json"
        self.kept: dict[str, Any] = {"machine": self.path.stem, "quick": quick, "date": about["date"], "sets": {}}
        before = json.loads(self.path.read_text()) if self.path.exists() else self.kept
        if quick and not before["quick"]:
            sys.exit(f"bench/run.py: {self.path} has figures of a whole run; pass --results FOLDER with --quick")
        if before["quick"] == quick:
            self.kept = before
        if again is not None:
            self.kept["sets"] = {name: jobs for name, jobs in self.kept["sets"].items() if again not in name}

    def jobs(self, name: str) -> list[dict[str, Any]]:
        """Those of a set that are there."""
        found: list[dict[str, Any]] = self.kept["sets"].setdefault(name, [])
        return found

    def missing(self) -> list[tuple[str, int]]:
        """The jobs that are still to be run: each set's first, then each set's second ..."""
        rounds = range(max(each.jobs for each in SETS.values()))
        jobs = 1 if self.kept["quick"] else JOBS
        return [
            (name, number)
            for number in rounds
            for name, each in SETS.items()
            if len(self.jobs(name)) <= number < min(each.jobs, jobs)
        ]

    def write(self) -> None:
        """A row a line: what has changed is seen in a diff."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.kept, indent=1)
        for pattern in (r"\{[^{}\[\]]*(?:(?:\[[^\[\]{}]*\]|\{[^{}\[\]]*\})[^{}\[\]]*)*\}", r"\[[^\[\]{}]*\]"):
            text = re.sub(pattern, lambda found: re.sub(r"\n\s*", " ", found[0]), text)
        self.path.write_text(text + "\n", encoding="utf-8")


def slug(text: str) -> str:
    """`AMD EPYC 7B13` as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("(r)", "").replace("(tm)", "")).strip("-")


def setting(tuned: tuple[str, int], results: Results) -> tuple[str, dict[str, str]] | None:
    """The name and the variables of MPI's fastest setting for about so many bytes; none where nothing was tried."""
    name, nbytes = tuned
    rows = [row for job in results.jobs(name) for row in job.get("rows", ())]
    if not rows:
        return None
    size = min((row["size"] for row in rows), key=lambda each: abs(each - nbytes))
    best = fastest_of(rows, size)
    return best["who"].strip(), mpi_variables(best["setting"])


def run_one(name: str, results: Results) -> dict[str, Any]:
    """A job: its header and rows, or why there are none."""
    chosen = SETS[name]
    kept: dict[str, Any] = {"began": time.strftime("%Y-%m-%d %H:%M:%S"), "load": round(os.getloadavg()[0], 1)}
    variables: dict[str, str] = {}
    if chosen.tuned:
        if not (found := setting(chosen.tuned, results)):
            return kept | {"skipped": "no setting of MPI was tried"}
        kept["tuned"], variables = found
    program = [str(BENCH / chosen.command[0]), *chosen.command[1:], *(chosen.quick if results.kept["quick"] else ())]
    start = [beside("ringrun"), "-np", str(chosen.ranks)] if chosen.ranks else []
    kept["command"] = shown([*start, "python", *program], variables)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        printed = run_command([*start, sys.executable, *program, "--json", str(file)], TIMEOUT_S, variables)
        if not file.exists():
            return kept | {"skipped": printed.strip().splitlines()[-1]}
        found_rows = json.loads(file.read_text())
    rows = [{key: tidy(value) for key, value in row.items() if key != "all"} for row in found_rows["rows"]]
    return kept | {"header": found_rows["header"], "rows": rows}


def shown(command: list[str], variables: dict[str, str]) -> str:
    """As somebody types it in a clone."""
    words = [Path(each).name if each == beside("ringrun") else each.replace(f"{BENCH}/", "bench/") for each in command]
    return shlex.join([*(f"{key}={value}" for key, value in variables.items()), *words])


def tidy(value: Any) -> Any:
    """Six digits say enough."""
    return float(f"{value:.6g}") if isinstance(value, float) else value.strip() if isinstance(value, str) else value


def commit() -> str:
    """Of this source; `-changed` where files differ from it, but for the results."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results")
    return (git("rev-parse", "--short=8", "HEAD") or "unknown") + ("-changed" if changed else "")


def git(*words: str) -> str:
    """What it says; nothing where there is none."""
    try:
        done = subprocess.run(["git", "-C", str(BENCH), *words], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def arguments() -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="one small job a set: minutes, and no figures to quote")
    made.add_argument("--again", action="store_true", help="forget what is there, with --only of these sets")
    made.add_argument("--list", action="store_true", help="run nothing")
    made.add_argument("--only", metavar="TEXT", default="", help="only the sets with this in their names")
    made.add_argument("--results", type=Path, default=BENCH / "results", metavar="FOLDER", help="(bench/results)")
    return made.parse_args()


def main() -> None:
    """Job by job."""
    options = arguments()
    results = Results(options.results, options.quick, options.only if options.again else None)
    todo = [(name, number) for name, number in results.missing() if options.only in name]
    if options.list:
        for name in SETS:
            print(f"{name:28} {len(results.jobs(name))} of {1 if options.quick else SETS[name].jobs}")
        return
    if not todo:
        print(f"{results.path} has them all, of {results.kept['date']}; --again takes them anew")
    began = time.monotonic()
    for count, (name, _) in enumerate(todo, 1):
        passed = datetime.timedelta(seconds=int(time.monotonic() - began))
        print(f"[{passed}] {count} of {len(todo)}: {name}", flush=True)
        job = run_one(name, results) | {"commit": commit()}
        results.jobs(name).append(job)
        results.kept["date"] = max(results.kept["date"], job["began"][:10])
        results.write()
        if "skipped" in job:
            print(f"  skipped: {job['skipped']}")


if __name__ == "__main__":
    main()
