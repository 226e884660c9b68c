"""Which of MPI's own settings and algorithms reduces one buffer fastest here: what a tuned MPI_Allreduce can do.

    python bench/mpi_tuning.py                                   # 2 ranks
    python bench/mpi_tuning.py --ranks 4 --sizes 102000000
    python bench/mpi_tuning.py --hosts 4 --sizes 102000000       # as root: a rank on each, see bench/network.py

Each setting is a job of its own, in which MPI_Allreduce sums a buffer of each size, in place. Tried are, of Open MPI:

    default               what ringrun sets (the header has it), and MPI's choice of an algorithm
    tuned N NAME          coll_tuned_allreduce_algorithm, each that this MPI has; the segmented ring with 1 MiB, too
    coll NAME             another component before tuned, where this MPI has it: sm, xhc, han, adapt

The fastest of them for each size, and the default, are tried `spinning`, too, where each rank has a core:
mpi_yield_when_idle=0, as under mpirun alone, by which a rank that waits keeps its core. Columns: time of one
all-reduce (median of a few, of the slowest rank); how often the default's; elements that differ from the expected
sum. A setting that fails, or takes too long, is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import (
    Column,
    Report,
    about,
    beside,
    in_turns,
    is_printing,
    machine,
    microseconds,
    mpi_variables,
    parse,
    parser,
    run_command,
    seconds_per_run,
    total,
)
from figures import fastest_of
from network import Network, why_not
from reducers import Gradients, packed

SIZES = (8, 64 << 10, 44_000_000, 102_000_000, 498_000_000)
COMPONENTS = ("sm", "xhc", "han", "adapt")
DEFAULT = "default"
SPINNING = {"mpi_yield_when_idle": "0"}
SECONDS_PER_RUN = 0.02
TIMEOUT_S = 60
COLUMNS = (
    Column("size", "size", "B", 11, "d"),
    Column("who", "  setting", width=44, left=True),
    Column("time_us", "time", "us", 12, ".1f"),
    Column("of_default", "of default", "times", 11, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__, runs=3)
    made.add_argument("--ranks", type=int, default=2, metavar="N", help="(2)")
    made.add_argument("--hosts", type=int, default=0, metavar="H", help="a rank on each of so many, as root")
    made.add_argument("--rate", type=int, default=1000, metavar="MBIT", help="of their links (1000)")
    made.add_argument("--sizes", nargs="+", type=int, default=None, metavar="N", help="bytes (8 to 498 MB)")
    made.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    options = parse(made)
    options.sizes = options.sizes or (list(SIZES[:2]) if options.quick else list(SIZES))
    return options


def settings(quick: bool) -> dict[str, dict[str, str]]:
    """Open MPI's parameters by name; of another MPI there is the default only."""
    try:
        info = subprocess.run([beside("ompi_info"), "--all", "--parsable"], capture_output=True, text=True).stdout
    except OSError:
        info = ""
    algorithms = re.findall(r"coll_tuned_allreduce_algorithm:enumerator:value:([1-9]):(\w+)", info)
    forced = {f"tuned {n} {name}": {"coll_tuned_allreduce_algorithm": n} for n, name in algorithms}
    if ring := forced.get("tuned 5 segmented_ring"):
        forced["tuned 5 segmented_ring, 1 MiB"] = {**ring, "coll_tuned_allreduce_algorithm_segmentsize": str(1 << 20)}
    found = {name: {"coll_tuned_use_dynamic_rules": "1", **each} for name, each in forced.items()}
    present = [name for name in COMPONENTS if f"mca:coll:{name}:" in info]
    found |= {f"coll {name}": {f"coll_{name}_priority": "100"} for name in present}
    return {DEFAULT: {}, **dict(list(found.items())[: 1 if quick else None])}


def work(options: argparse.Namespace) -> None:
    """One rank: the times of all sizes; no engine of ours runs."""
    found = []
    for size in options.sizes:
        gradients = Gradients([(size // 4,)])
        reducer = packed(gradients)
        times = in_turns({"": reducer.run}, options.runs, seconds_per_run(options, SECONDS_PER_RUN))[""]
        found.append({"size": size, **microseconds(times), "wrong": total(gradients.wrong(reducer))})
    if is_printing():
        Path(options.worker).write_text(json.dumps({"header": about(), "rows": found}))


def measured(setting: dict[str, str], options: argparse.Namespace, network: Network | None) -> dict[str, Any]:
    """What the ranks of one job found, or why it failed."""
    program = [__file__, "--runs", str(options.runs), "--sizes", *map(str, options.sizes)]
    program += ["--quick"] if options.quick else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        program += ["--worker", str(file)]
        if network:
            command = network.mpirun([sys.executable, *program], 1)
        else:
            command = [beside("ringrun"), "-np", str(options.ranks), sys.executable, *program]
        try:
            run_command(command, TIMEOUT_S, mpi_variables(setting))
        except (SystemExit, subprocess.TimeoutExpired) as error:
            return {"failed": [line for line in str(error).splitlines() if line.strip("- ")][-1]}
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def compare(options: argparse.Namespace, network: Network | None) -> None:
    """Setting by setting."""
    place = {"hosts": options.hosts, "mbit": options.rate} if network else {"ranks": options.ranks}
    note = f"median of {options.runs} runs, of the slowest rank, each setting in a job of its own"
    report = Report("mpi_tuning", {**place, **machine()}, COLUMNS, True, note)
    report.header["failed"] = {}
    tried = settings(options.quick)
    for name, setting in tried.items():
        try_one(name, setting, report, measured(setting, options, network))
    if not network and len(tried) > 1 and options.ranks <= (os.cpu_count() or 1):
        names = {fastest_of(report.rows, size)["who"].strip() for size in options.sizes} | {DEFAULT}
        for name in sorted(names):
            setting = tried[name] | SPINNING
            try_one(f"{name}, spinning", setting, report, measured(setting, options, network))
    report.finish(options)


def try_one(name: str, setting: dict[str, str], report: Report, found: dict[str, Any]) -> None:
    """The rows of one setting, or why there are none."""
    if "failed" in found:
        report.header["failed"][name] = found["failed"]
        report.say(f"# {name}: failed: {found['failed']}")
        return
    report.header |= {key: found["header"][key] for key in ("mpi", "mpi4py", "torch")}
    if name == DEFAULT:
        report.header["mpi_settings"] = found["header"]["mpi_settings"]
    for row in found["rows"]:
        default = next((each["time_us"] for each in report.rows if each["size"] == row["size"]), row["time_us"])
        report.add({**row, "who": f"  {name}", "setting": setting, "of_default": row["time_us"] / default})


def main() -> None:
    """With a network of hosts, or without."""
    options = arguments()
    if options.worker:
        work(options)
    elif not options.hosts:
        compare(options, None)
    elif reason := why_not():
        print(f"bench/mpi_tuning.py: skipped: {reason}")
    else:
        with Network(options.hosts) as network:
            network.shape(options.rate)
            compare(options, network)


if __name__ == "__main__":
    main()
