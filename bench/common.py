"""What all benches share: how time is taken, what is printed and kept. No contender and no picture stands here.

A figure is the median over several runs. In each run every contender has its turn, so that a change of the machine's
speed meets all of them, and who begins changes from run to run. The time of a run is that of the slowest rank, all
ranks starting together. Waiting ranks sleep, so that a rank that is done takes nothing from one that is not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ringreduce as rr

Action = Callable[[], object]
MAX_CALLS = 1000
QUICK_S = 0.01
END_S = 20
IN_TURNS = "median of {runs} runs, the rows in turns, of the slowest rank"


class Column(NamedTuple):
    """One column of a printed table: the key in a row, what is printed above, how a value is printed."""

    key: str
    heading: str
    unit: str = ""
    width: int = 10
    form: str = ""
    """A format such as `.1f`; none for texts."""
    left: bool = False
    """Texts that differ in length stand left."""


def about(**more: Any) -> dict[str, Any]:
    """What a reader needs to trust the figures: versions, the machine, the date."""
    import mpi4py
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return {
        "ranks": MPI.COMM_WORLD.size,
        **more,
        **machine(),
        "mpi4py": mpi4py.__version__,
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "mpi_settings": mpi_settings(),
        "torch": package_version("torch"),
        "horovod": package_version("horovod"),
    }


def machine() -> dict[str, Any]:
    """The part of `about` that needs no MPI."""
    return {
        "cores": os.cpu_count(),
        "processor": processor(),
        "ringreduce": rr.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 1),  # of the minute before: a quiet machine has less than 1
        "settings": settings(),
    }


def settings() -> str:
    """The environment variables that are not ringreduce's defaults."""
    given = {name: value for name, value in os.environ.items() if name.startswith("RINGREDUCE_")}
    for name in ("ERROR_FILE", "PLACED_GPU", "RESTART_COUNT", "STATE_DIR"):  # ringrun's own
        given.pop(f"RINGREDUCE_{name}", None)
    return " ".join(f"{name}={value}" for name, value in sorted(given.items())) or "default"


def mpi_settings() -> str:
    """What ringrun, or the user, has set of Open MPI; not what its own launcher sets in every job."""
    own = ("PREFIXES", "initial_wdir", "num_procs", "cpu_type")
    given = {
        name.removeprefix("OMPI_MCA_"): value for name, value in os.environ.items() if name.startswith("OMPI_MCA_")
    }
    kept = {name: value for name, value in given.items() if name not in own and not name.endswith("_directory")}
    return " ".join(f"{name}={value}" for name, value in sorted(kept.items())) or "default"


def mpi_variables(setting: Mapping[str, str]) -> dict[str, str]:
    """Parameters of Open MPI as environment variables, which ringrun and mpirun pass on."""
    return {f"OMPI_MCA_{name}": value for name, value in setting.items()}


def package_version(name: str) -> str:
    """The version of an installed package, without importing it; `absent` without one."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def processor() -> str:
    """The processor's name, as Linux has it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def neutral() -> Any:
    """A communicator of the bench's own: no contender's messages and none of its waits are in the way."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


def slowest(seconds: float) -> float:
    """The largest of all ranks' times; a rank that is done sleeps until the last one is."""
    rest()
    times: list[float] = neutral().allgather(seconds)
    return max(times)


def total(number: int) -> int:
    """The sum over all ranks."""
    return sum(neutral().allgather(number))


def rest() -> None:
    """A barrier without spinning."""
    request = neutral().Ibarrier()
    while not request.Test():
        time.sleep(1e-4)


def seconds_per_call(action: Action, calls: int) -> float:
    """The mean over `calls`, on the slowest rank; all ranks start together."""
    rest()
    neutral().Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return slowest((time.perf_counter() - start) / calls)


def in_turns(
    contenders: Mapping[str, Action],
    runs: int,
    seconds_per_run: float,
    before: Action = lambda: None,
    timer: Callable[[Action, int], float] = seconds_per_call,
) -> dict[str, list[float]]:
    """Seconds per call of each contender, run by run. `before` is called before each turn, untimed.

    Calls before, untimed too, say how many fill `seconds_per_run`: the first makes connections and memory, and a few,
    after another contender's, may take much longer than each of many.
    """
    calls = {}
    for name, action in contenders.items():
        before()
        action()
        tried, wanted = 0, 1
        while wanted > 2 * tried:
            tried = wanted
            before()
            wanted = max(1, min(MAX_CALLS, int(seconds_per_run / seconds_per_call(action, tried))))
        calls[name] = wanted
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for run in range(runs):
        first = run % len(names)
        for name in names[first:] + names[:first]:
            before()
            times[name].append(timer(contenders[name], calls[name]))
    return times


def microseconds(times: Sequence[float]) -> dict[str, Any]:
    """What a row keeps of a contender's times: the median, and every run for whoever wants the spread."""
    return {
        "time_us": round(statistics.median(times) * 1e6, 2),
        "runs_us": [round(each * 1e6, 2) for each in times],
    }


def beside(name: str) -> str:
    """The command that stands beside this Python, else the one on PATH."""
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else shutil.which(name) or name


def run_job(options: Sequence[str], program: Sequence[str], timeout_s: float) -> str:
    """What a job prints, `ringrun OPTIONS python PROGRAM`; one that fails ends the bench, with that."""
    return run_command([beside("ringrun"), *options, sys.executable, *program], timeout_s)


def run_command(command: Sequence[str], timeout_s: float, variables: Mapping[str, str] | None = None) -> str:
    """What it prints, with these environment variables, too; one that fails ends the bench, with that.

    It gets SIGTERM when it takes too long, or this process is ended, so that it can end what it has started.
    """
    own = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env={**os.environ, **(variables or {})}, start_new_session=True, **own) as job:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            printed, _ = job.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(job.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.communicate(timeout=END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if job.returncode:
        sys.exit(f"{' '.join(command)}: exit code {job.returncode}:\n{printed}")
    return str(printed)


def is_printing() -> bool:
    """True on the rank that prints and writes files."""
    return bool(neutral().rank == 0)


class Report:
    """The rows of one bench: printed as they come, kept as JSON, and the count of wrong elements as the exit code."""

    def __init__(
        self,
        bench: str,
        header: dict[str, Any],
        columns: Sequence[Column],
        prints: bool,
        note: str,
        state: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """state: measures that of the cores, on all ranks together (state.py)."""
        self.bench, self.header, self.columns, self.prints = bench, header, columns, prints
        self.rows: list[dict[str, Any]] = []
        self._state = state
        self._before = None if state is None else state()
        self._labelled = 0
        self.say(f"# {bench}: " + ", ".join(f"{key} {value}" for key, value in header.items()))
        self.say(f"# {note}")
        self.say("".join(self._cell(column.heading, column) for column in columns))
        self.say("".join(self._cell(f"({column.unit})" if column.unit else "", column) for column in columns))

    def say(self, line: str) -> None:
        """Print on the rank that prints."""
        if self.prints:
            print(line.rstrip(), flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """One more row; what has no column is kept for the JSON only."""
        self.rows.append(row)
        self.say("".join(self._cell(row.get(column.key), column) for column in self.columns))

    def label(self) -> None:
        """Measure the state of the cores, on all ranks: the rows since the last time get it, before and after."""
        if self._state is None or self._labelled == len(self.rows):
            return
        before, self._before = self._before, self._state()
        for row in self.rows[self._labelled :]:
            row["state"] = [before, self._before]
        self._labelled = len(self.rows)
        for when, found in ("before", before or {}), ("after", self._before):
            self.say(f"# state {when}: {in_words(found)}")

    def finish(self, options: argparse.Namespace, plot: Callable[[Report, str], None] | None = None) -> None:
        """Write and draw what the command line asks for; end with an error when an element was wrong."""
        self.label()
        if options.json and self.prints:
            columns = [column._asdict() for column in self.columns]
            kept = {"bench": self.bench, "header": self.header, "columns": columns, "rows": self.rows}
            Path(options.json).write_text(json.dumps(kept, indent=1), encoding="utf-8")
        if plot and options.plot and self.prints:
            plot(self, options.plot)
        wrong = sum(row["wrong"] for row in self.rows if row["wrong"])
        if wrong:
            sys.exit(f"bench/{self.bench}.py: {wrong} wrong elements")

    @staticmethod
    def _cell(value: Any, column: Column) -> str:
        """A table cell, as wide as its column."""
        text = cell_text(value, column)
        return f"{text:<{column.width}}" if column.left else f"{text:>{column.width}}"


def in_words(state: Mapping[str, Any]) -> str:
    """What state.py has measured, for a line of a report."""
    trips = ", ".join("-" if each is None else f"{each:.0f}" for each in state["round_trip_ns"]) or "-"
    stores = "; ".join(dict.fromkeys(filter(None, state["stores"]))) or "-"
    return f"round trip of a flag {trips} ns; copy {state['copy_gbs']} GB/s; stores {stores}"


def cell_text(value: Any, column: Column) -> str:
    """What a table cell says; a dash where there is nothing to say."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, column.form)


def seconds_per_run(options: argparse.Namespace, usual: float) -> float:
    """How long each contender's turn takes."""
    return QUICK_S if options.quick else usual


def flag(name: str, usual: Any, quick: Any = None, **options: Any) -> tuple[str, Any, Any, dict[str, Any]]:
    """A flag of one bench: its value, which says the type and may be a list, and the one with --quick if it differs."""
    if isinstance(usual, bool):
        options["action"] = "store_true"
    elif isinstance(usual, list):
        options = {"nargs": "+", "type": type(usual[0]), **options}
    elif usual is not None:
        options.setdefault("type", type(usual))
    return name, usual, quick, {"default": usual if quick is None else None, **options}


def main(
    bench: str,
    manual: str | None,
    columns: Sequence[Column],
    measure: Callable[[argparse.Namespace, Report], object],
    flags: Sequence[tuple[str, Any, Any, dict[str, Any]]] = (),
    *,
    runs: int,
    note: str = IN_TURNS,
    header: Callable[[argparse.Namespace], dict[str, Any]] = lambda _: machine(),
    check: Callable[[argparse.Namespace], str] = lambda _: "",
    worker: Callable[[argparse.Namespace], object] | None = None,
    why_not: Callable[[], str] = str,
    in_job: bool = False,
    with_torch: bool = False,
    plot: Callable[[Report, str], None] | None = None,
) -> None:
    """A bench from its command line to its exit code; `measure` adds the rows.

    note:       below the header; `{runs}` and the like are options.
    check:      what is wrong with the options; it may change them.
    worker:     with --worker, a hidden flag, it runs instead: in a job that the bench has started.
    why_not:    why it cannot run here.
    in_job:     ringrun starts it, so all ranks run it; the header is the job's.
    with_torch: it cannot do without.
    """
    made = parser(manual, runs)
    settled = {made.add_argument(name, **each).dest: (usual, quick) for name, usual, quick, each in flags}
    options = parse(made)
    for name, (usual, quick) in settled.items():
        if getattr(options, name) is None:
            setattr(options, name, usual if quick is None or not options.quick else quick)
    if wrong := check(options):
        made.error(wrong)
    if worker and options.worker:
        worker(options)
        return
    if reason := why_not():
        print(f"bench/{bench}.py: skipped: {reason}")
        return
    if with_torch:
        if package_version("torch") == "absent":
            sys.exit(f"bench/{bench}.py needs torch: pip install '.[bench]'")
        import torch

        torch.set_num_threads(1)
    if in_job:
        rr.init()
    state: Callable[[], dict[str, Any]] | None = None
    if in_job:
        state = importlib.import_module("state").state  # which needs MPI, and imports this module
    about_it = about(hosts=len(set(rr.info().hosts))) if in_job else header(options)
    report = Report(bench, about_it, columns, not in_job or is_printing(), note.format(**vars(options)), state)
    measure(options, report)
    report.finish(options, plot)


def parser(manual: str | None, runs: int) -> argparse.ArgumentParser:
    """A command line with what all benches take; the module's docstring is the manual."""
    made = argparse.ArgumentParser(description=manual, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--runs", type=int, default=None, metavar="N", help=f"a figure is the median of so many ({runs})")
    made.add_argument(
        "--quick", action="store_true", help="small and few: seconds, to see that all works, not how fast"
    )
    made.add_argument("--json", metavar="FILE", help="write the header and the rows there")
    made.add_argument("--plot", metavar="FILE.png", help="draw them there (needs matplotlib)")
    made.set_defaults(default_runs=runs)
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with the number of runs settled."""
    options = made.parse_args(argv)
    if options.runs is not None and options.runs < 1:
        made.error("expected --runs of 1 or more")
    options.runs = options.runs or (2 if options.quick else options.default_runs)
    return options
