"""What bench/run.py has kept, as figures: the median of all runs of all jobs, the lowest and the highest.

Each row of docs/benchmarks.md is a `Row`, each of its cells a `Figure`. Tables and picture come from here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
OURS, DDP, DDP_RING, MPI, TUNED, HOROVOD = (
    "ringreduce",
    "DDP, gloo",
    'DDP, "ring"',
    "MPI",
    "MPI, tuned",
    "Horovod's way",
)
PEERS = (DDP, DDP_RING, MPI, TUNED, HOROVOD)
MODELS = {"resnet50": "ResNet-50", "gpt2": "GPT-2", "tiny": "a tiny model"}


class Figure(NamedTuple):
    """Of one contender."""

    median: float
    low: float
    high: float
    runs: int

    @staticmethod
    def of(values_us: Sequence[float], per: float) -> Figure | None:
        """From runs in µs; `per`: µs of the unit."""
        values = [each / per for each in values_us]
        return Figure(statistics.median(values), min(values), max(values), len(values)) if values else None

    @property
    def range(self) -> str:
        """`13.9–15.7`; nothing of a single run."""
        return f"{digits(self.low)}–{digits(self.high)}" if self.runs > 1 else ""


class Row(NamedTuple):
    """A question, and who answers it how fast."""

    what: str
    unit: str
    who: dict[str, Figure]
    limit: tuple[str, Figure] | None = None
    also: tuple[str, Figure] | None = None
    """Another way of ours."""

    def fastest(self) -> str:
        """The contender with the lowest median."""
        return min(self.who, key=lambda name: self.who[name].median)

    @property
    def is_clear(self) -> bool:
        """The fastest one's slowest run is faster than every other contender's fastest."""
        first = self.fastest()
        return all(self.who[first].high < each.low for name, each in self.who.items() if name != first)

    def faster(self) -> Iterator[tuple[str, Figure]]:
        """The peers that are."""
        ours = self.who.get(OURS)
        return ((name, each) for name, each in self.who.items() if ours and each.median < ours.median)


def fastest_of(rows: Iterable[dict[str, Any]], size: int) -> dict[str, Any]:
    """MPI's fastest setting for so many bytes, of those that bench/mpi_tuning.py has tried."""
    return min((row for row in rows if row["size"] == size), key=lambda row: float(row["time_us"]))


def digits(value: float) -> str:
    """Three of them: 0.78, 14.0, 1,294."""
    places = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{places}f}".replace("-", "−")


class Machine:
    """A file in bench/results."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept
        self.sets: dict[str, list[dict[str, Any]]] = kept["sets"]

    @property
    def is_quick(self) -> bool:
        """These are no figures to quote."""
        return bool(self.kept["quick"])

    @property
    def name(self) -> str:
        """Which machine, and when."""
        return f"{self.about('processor')}, {self.about('cores')} cores, {self.kept['date']}"

    @property
    def headers(self) -> list[dict[str, Any]]:
        """Of all jobs that ran."""
        return [job["header"] for jobs in self.sets.values() for job in jobs if "header" in job]

    def about(self, key: str, default: str = "absent") -> str:
        """What the headers say, the first that does."""
        return str(next((each[key] for each in self.headers if key in each), default))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Of all jobs of a set."""
        return [row for job in self.sets.get(name, ()) for row in job.get("rows", ())]

    def tuned(self, name: str) -> str:
        """MPI's setting in this set."""
        return next((str(job["tuned"]) for job in self.sets.get(name, ()) if "tuned" in job), "")

    def figure(self, name: str, per: float = 1e3, key: str = "runs_us", **match: Any) -> Figure | None:
        """Of the rows of a set that have these values, over all jobs; ms unless `per` says otherwise."""
        rows = [row for row in self.rows(name) if match.items() <= row.items()]
        return Figure.of([each for row in rows for each in row.get(key, ())], per)

    def step(self, what: str, name: str, key: str = "runs_us", limit: str = "compute alone") -> Row:
        """A training step, or what communication adds to it."""
        who = {OURS: "ringreduce", DDP: "DDP gloo", DDP_RING: "DDP ring", MPI: "MPI_Allreduce", HOROVOD: "Horovod"}
        found = {column: self.figure(name, key=key, who=each) for column, each in who.items()}
        found[TUNED] = self.figure(f"{name}, tuned", key=key, who="MPI_Allreduce")
        return row(what, "ms", found, (limit, self.figure(name, key=key, who=limit)))

    def gradients(self, place: str, where: str, limit: str) -> list[Row]:
        """A model's, for each model that was measured."""
        name, made = f"gradients, {place}", []
        models = dict.fromkeys(str(each["model"]) for each in self.rows(name))
        for model in models:
            who = {OURS: "ringreduce, NumPy", DDP: "DDP gloo", DDP_RING: "DDP ring", MPI: "MPI_Allreduce, packed"}
            found = {column: self.figure(name, model=model, who=each) for column, each in who.items()}
            found[TUNED] = self.figure(f"{name}, tuned", model=model, who="MPI_Allreduce, packed")
            measured = self.figure(name, model=model, who="Horovod")
            found[HOROVOD] = measured or self.figure(name, model=model, who="Horovod's way")
            bound = self.figure(name, model=model, who=f"floor: {limit}")
            made.append(row(f"Gradients of {MODELS[model]}, {where}", "ms", found, (limit, bound)))
        return made

    def call(self, size: int, ranks: int = 2) -> Row:
        """One synchronous call; tuned MPI only where it differs from the default."""
        who = {OURS: "allreduce_", DDP: "torch gloo", DDP_RING: "torch ring", MPI: "MPI_Allreduce", HOROVOD: "Horovod"}
        name = f"calls, {ranks} ranks"
        found = {column: self.figure(name, 1, size=size, algorithm=each) for column, each in who.items()}
        if self.tuned(tuned := f"calls of {bytes_text(size)}, tuned") != "default" and ranks == 2:
            found[TUNED] = self.figure(tuned, 1, size=size, algorithm="MPI_Allreduce")
        ordered = self.figure(name, 1, size=size, algorithm="ordered()")
        also = ("`ordered()`", ordered) if ordered else None
        return row(f"One call of {bytes_text(size)}, {ranks} ranks", "µs", found, also=also)

    def death(self) -> Row:
        """A rank dies."""
        found = {OURS: self.figure("deaths", how="elastic"), DDP: self.figure("deaths", how="torchrun")}
        usual = Figure.of([1e3 * each["usual"] for each in self.rows("deaths") if each["how"] == "elastic"], 1e3)
        restarts = self.figure("deaths", how="restarts")
        also = ("`--restarts`", restarts) if restarts else None
        what = "One of 4 ranks dies: time to the next step"
        return row(what, "ms", found, ("a step without a death", usual), also)

    def questions(self) -> list[Row]:
        """The rows of the first table: five questions."""
        rows = [
            self.step("A training step, 2 ranks, 1 sequence each", "step"),
            self.step("What communication adds to that step", "step", "added_runs_us", "one copy"),
            self.step("A training step, 2 ranks, 4 sequences each", "step of 4"),
            *self.gradients("2 ranks", "2 ranks", "one copy"),
            *self.gradients("4 ranks", "4 ranks", "one copy"),
            *self.gradients("4 hosts", "4 hosts, 1 Gbit/s", "raw TCP"),
            self.call(8),
            self.call(32768),
            self.call(8, 4),
            self.death(),
        ]
        return [each for each in rows if OURS in each.who]

    def calls(self) -> list[Row]:
        """One call, by size."""
        sizes = sorted({int(each["size"]) for each in self.rows("calls, 2 ranks")})
        return [self.call(size) for size in sizes]

    def others(self) -> list[Row]:
        """What else may be slower than a peer's."""
        found = []
        for operation in dict.fromkeys(str(each["operation"]) for each in self.rows("halves")):
            of = [each for each in self.rows("halves") if each["operation"] == operation]
            kept = "ringreduce, out="  # MPI's result goes into memory that is there, too
            ours, into = (kept, "(out=)") if kept in {each["who"] for each in of} else ("ringreduce", "")
            who = {OURS: ours, MPI: "MPI"}
            figures = {name: self.figure("halves", operation=operation, who=each) for name, each in who.items()}
            found.append(row(f"`{operation}{into}` of {bytes_text(of[0]['size'])}, 2 ranks", "ms", figures))
        start = {OURS: self.figure("start", who="ringrun"), MPI: self.figure("start", who="mpirun")}
        return [*found, row("Starting and ending a job of 8 ranks", "ms", start)]


def row(
    what: str,
    unit: str,
    found: dict[str, Figure | None],
    limit: tuple[str, Figure | None] | None = None,
    also: tuple[str, Figure] | None = None,
) -> Row:
    """Without those that were not measured."""
    bound = (limit[0], limit[1]) if limit and limit[1] else None
    return Row(what, unit, {name: each for name, each in found.items() if each}, bound, also)


def bytes_text(count: int) -> str:
    """`32 KiB`."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10), ("MB", 10**6)):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"


def machines(folder: Path = RESULTS) -> list[Machine]:
    """The newest first; a quick run's after all others."""
    kept = [json.loads(path.read_text()) for path in sorted(folder.glob("*-cores.json"))]
    kept.sort(key=lambda each: (not each["quick"], each["date"]), reverse=True)
    return [Machine(each) for each in kept]
