"""Writes the figures of bench/results into docs/benchmarks.md and README.md, and draws the pictures of docs/.

    python bench/tables.py       a test compares: what is there is what this would write

It replaces what stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`; REGIONS has the names. Nothing
is measured here: bench/run.py measures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from figures import (
    DDP,
    DDP_RING,
    HOROVOD,
    MODELS,
    MPI,
    OURS,
    PEERS,
    RESULTS,
    TUNED,
    Figure,
    Machine,
    Row,
    bytes_text,
    digits,
    fastest_of,
    machines,
)
from page_pictures import DRAWN
from picture import PICTURES

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
DOCS = ROOT / "docs"
REGION = re.compile(r"(<!-- figures: ([a-z ]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
NAMES = {DDP: "DDP over gloo", DDP_RING: 'DDP over "ring"', MPI: "MPI", TUNED: "tuned MPI", HOROVOD: "Horovod's way"}
GPU_BAR_FROM = 64 << 20
MEMORY = {
    "init()": "after `init()`",
    "by name": "each array by name",
    "grouped": "`grouped_allreduce_`",
    "MPI_Allreduce, packed": "one `MPI_Allreduce`, packed",
    "DistributedOptimizer": "`DistributedOptimizer`, torch",
    "DDP ring": 'DDP, "ring"',
    "DDP gloo": "DDP, gloo",
}
QUICK = """**This was a quick run on a busy machine, with tiny models and one job each. It shows that everything
runs, and nothing about speed. `python bench/run.py` measures.**
"""


def main_table(found: Machine) -> str:
    """Five questions."""
    return table(found.questions(), PEERS, limit=True)


def calls_table(found: Machine) -> str:
    """One call, by size."""
    headings = {OURS: "`allreduce_`", DDP: "gloo", DDP_RING: 'backend "ring"', MPI: "`MPI_Allreduce`"}
    rows = [
        each._replace(what=each.what.removeprefix("One call of ").removesuffix(", 2 ranks")) for each in found.calls()
    ]
    return table(rows, (DDP, DDP_RING, MPI), limit=False, headings=headings)


def table(rows: Sequence[Row], peers: Sequence[str], limit: bool, headings: dict[str, str] | None = None) -> str:
    """Rows of figures; the lowest median of each is bold."""
    shown = [OURS, *(name for name in peers if any(name in each.who for each in rows))]
    heads = [(headings or {}).get(name, name) for name in shown] + (["for scale"] if limit else [])
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for each in rows:
        fastest = min((name for name in shown if name in each.who), key=lambda name: each.who[name].median)
        cells = [cell(each, name, name == fastest) for name in shown]
        if limit:
            cells.append(f"{digits(each.limit[1].median)}<br>{each.limit[0]}" if each.limit else "–")
        lines.append(f"| {each.what}, {each.unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(of: Row, name: str, is_fastest: bool) -> str:
    """The median, the range below it, and of ours the other way."""
    if name not in of.who:
        return "–"
    figure = of.who[name]
    median = f"**{digits(figure.median)}**" if is_fastest else digits(figure.median)
    also = f"{of.also[0]}: {digits(of.also[1].median)}" if of.also and name == OURS else ""
    return "<br>".join(filter(None, [median, figure.range, also]))


def slower(found: Machine) -> str:
    """Every row of the page in which a peer is faster."""
    lines = ["| | ringreduce | faster |", "|---|---:|---|"]
    rows = {each.what: each for each in [*found.questions(), *found.calls(), *found.others()]}
    for each in rows.values():
        peers = sorted(each.faster(), key=lambda found: found[1].median)
        said = "<br>".join(comparison(each, name, figure) for name, figure in peers)
        lines += [f"| {each.what}, {each.unit} | {with_range(each.who[OURS])} | {said} |"] if peers else []
    return "\n".join(lines)


def comparison(each: Row, name: str, figure: Figure) -> str:
    """One peer, and how many times as fast it is."""
    ours = each.who[OURS]
    overlap = ", ranges overlap" if ours.low <= figure.high else ""
    return f"{peer_of(each, name)} {with_range(figure)}: {digits(ours.median / figure.median)}× as fast{overlap}"


def peer_of(each: Row, name: str) -> str:
    """Who that is in this row."""
    if each.what.startswith("Starting"):
        return "mpirun"
    if "dies" in each.what:
        return "torchrun over gloo"
    if each.what.startswith("One call"):
        return {DDP: "gloo", DDP_RING: 'backend "ring"'}.get(name, NAMES[name])
    return NAMES[name]


def with_range(figure: Figure) -> str:
    """`14.0 (13.9–15.7)`."""
    return f"{digits(figure.median)} ({figure.range})" if figure.range else digits(figure.median)


def machine_text(found: Machine) -> str:
    """Which machine, when, which versions, how loaded."""
    loads = [float(job["load"]) for jobs in found.sets.values() for job in jobs]
    commits = dict.fromkeys(str(job["commit"]) for jobs in found.sets.values() for job in jobs)
    versions = [f"{name} {found.about(key)}" for name, key in (("Python", "python"), ("NumPy", "numpy"))]
    versions += [f"mpi4py {found.about('mpi4py')}", found.about("mpi"), f"torch {found.about('torch')}"]
    horovod = found.about("horovod")
    versions += ["Horovod not installed" if horovod == "absent" else f"Horovod {horovod}"]
    return (
        f"{found.name}, no GPU; ringreduce {found.about('ringreduce')} at {', '.join(commits)}; "
        f"{', '.join(versions)}. Settings of ringreduce: {found.about('settings')}; those that ringrun passes to MPI "
        f"on one host: {found.about('mpi_settings')}. One thread per rank. Load average at the start of a job, "
        f"from the one before: {min(loads)} to {max(loads)}."
    )


def summary(found: Machine) -> str:
    """The first lines of the page."""
    rows = found.questions()
    first = [each for each in rows if each.fastest() == OURS]
    clear = sum(each.is_clear for each in first)
    text = (
        f"**{found.name}:** ringreduce has the lowest median in {len(first)} of {len(rows)} rows; in {clear} of these "
    )
    text += f"its slowest run beats every other's fastest.{against(rows)}\n"
    lost: dict[str, list[str]] = {}
    for each in rows:
        if each not in first:
            lost.setdefault(peer_of(each, each.fastest()), []).append(lowered(each.what))
    text += "\nThe lowest in the others:\n\n" if lost else ""
    for peer, what in lost.items():
        also = ", which is ringreduce as DDP's backend" if peer == NAMES[DDP_RING] else ""
        text += f"- **{peer}**{also}: {'; '.join(what)}\n"
    return (QUICK + "\n" if found.is_quick else "") + text


def against(rows: Sequence[Row]) -> str:
    """A sentence on gradients on one host, where most of training's communication is."""
    of = [each.who for each in rows if each.what.startswith("Gradients") and each.what.endswith("ranks")]
    said = []
    for peer in (DDP, TUNED):
        ratios = [who[peer].median / who[OURS].median for who in of if {peer, OURS} <= who.keys()]
        said += [f"{NAMES[peer]} takes {digits(min(ratios))} to {digits(max(ratios))} times as long"] if ratios else []
    return f" For a model's gradients on one host, {', '.join(said)}." if said else ""


def lowered(text: str) -> str:
    """Inside a sentence."""
    return text[0].lower() + text[1:]


def tuning(found: Machine) -> str:
    """Which of MPI's settings was taken."""
    lines = ["| where | buffer | tried | fastest | speedup over the default |", "|---|---:|---:|---|---:|"]
    for name in (each for each in found.sets if each.startswith("tuning, ")):
        rows, where = found.rows(name), name.removeprefix("tuning, ")
        for size in dict.fromkeys(row["size"] for row in rows):
            of = [row for row in rows if row["size"] == size]
            best = fastest_of(of, size)
            gain = digits(1 / best["of_default"])
            lines.append(f"| {where} | {bytes_text(size)} | {len(of)} | {best['who']} | {gain} |")
        failed = {
            name: why for job in found.sets[name] for name, why in job.get("header", {}).get("failed", {}).items()
        }
        lines += [f"| {where} | | | failed: {each} | |" for each in failed]
    return "\n".join(lines)


def readme(found: Machine) -> str:
    """The picture's caption, and where we lose."""
    rows = [each for each in found.gradients("2 ranks", "2 ranks", "one copy") if OURS in each.who]
    lines = [QUICK] if found.is_quick else []
    for each in rows[:1]:
        peers = ", ".join(f"{NAMES[name]} {digits(each.who[name].median)}" for name in PEERS if name in each.who)
        lines.append(f"{each.what}: ringreduce {digits(each.who[OURS].median)} ms, {peers}.")
    lost = [size for size, each in zip(call_sizes(found), found.calls(), strict=True) if MPI in dict(each.faster())]
    where = [lowered(each.what) for each in found.questions() if not each.what.startswith("One ") and [*each.faster()]]
    where += [f"single calls of up to {bytes_text(max(lost))}"] if lost else []
    said = f" Another tool is faster for: {'; '.join(where)}." if where else ""
    return "\n".join([*lines, f"({found.name}.){said} [Benchmarks](docs/benchmarks.md) has all figures."])


def call_sizes(found: Machine) -> list[int]:
    """Of the rows of `calls`."""
    return sorted({int(each["size"]) for each in found.rows("calls, 2 ranks")})


def others(rest: Iterable[Machine]) -> str:
    """Earlier machines, each with its own tables."""
    parts = [
        f"## {each.about('processor')}, {each.kept['date']}\n\n{machine_text(each)}\n\n{main_table(each)}\n"
        for each in rest
        if not each.is_quick
    ]
    return "\n".join(parts)


def gpus(_: list[Machine]) -> str:
    """What bench/gpu/all.py has left in the folders of bench/results, one for each GPU."""
    return "\n\n".join(on_gpu(path) for path in sorted(RESULTS.iterdir()) if path.is_dir())


def on_gpu(folder: Path) -> str:
    """A GPU's tables: gradients, training steps; and what its kernels reach."""
    kept = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    about = kept["gradients-2"]["header"]
    head = (
        f"{about['gpus']} × {about['gpu']}, {about['date']}; driver {about['driver']}, CUDA "
        f"{about['driver_cuda']}, CuPy {about['cupy']}, torch {about['torch']}, {about['mpi']}."
    )
    gradients = {
        f"Gradients of {MODELS[model]}, {count} ranks, ms": of
        for count in (2, 4)
        for model, of in by_model(kept[f"gradients-{count}"]["rows"]).items()
    }
    steps = by_model(kept["train_step-2"]["rows"])
    steps = {f"A step of a {model} net, 2 ranks, ms": of for model, of in steps.items()}
    reached = [row["of_copy_percent"] for row in kept["kernels"]["rows"] if row["size"] >= GPU_BAR_FROM]
    kernels = f"{digits(min(reached))} to {digits(max(reached))} % of the speed of copying as many bytes"
    return "\n\n".join(
        [
            head,
            by_who(gradients),
            by_who(steps),
            f"For buffers of {bytes_text(GPU_BAR_FROM)} and more, our kernels (pack, sum, unpack) run at {kernels}.",
        ]
    )


def memory(_: list[Machine]) -> str:
    """What bench/memory.py has left in bench/results/memory.json; the scripts alone are what the rest stands beside."""
    kept = json.loads((RESULTS / "memory.json").read_text(encoding="utf-8"))
    counts = list(dict.fromkeys(row["ranks"] for row in kept["rows"]))
    found: dict[str, list[str]] = {}
    for row in kept["rows"]:
        more, peak = (Figure.of(row[key], 1) for key in ("more_runs_mb", "peak_runs_mb"))
        found.setdefault(row["who"], []).extend([with_lines(more), digits(row["shared_mb"]), with_lines(peak)])
    heads = [f"{what}, {count} ranks" for count in counts for what in ("private", "shared", "peak")]
    lines = ["| MB | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    lines += [f"| {MEMORY[who]} | {' | '.join(cells)} |" for who, cells in found.items() if who in MEMORY]
    return "\n".join(lines)


def with_lines(figure: Figure) -> str:
    """The median, and below it the range."""
    return "<br>".join(filter(None, [digits(figure.median), figure.range]))


def by_model(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each model's rows, by contender."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["model"], {})[row["who"].strip()] = row
    return found


def by_who(rows: dict[str, dict[str, Any]]) -> str:
    """Medians, a column for each contender; the lowest of those that reduce is bold."""
    who = list(next(iter(rows.values())))
    lines = ["| | " + " | ".join(who) + " |", "|---|" + "---:|" * len(who)]
    for what, of in rows.items():
        lowest = min((each["time_ms"], name) for name, each in of.items() if name != "compute alone")[1]
        times = {name: digits(of[name]["time_ms"]) for name in who}
        lines.append(
            f"| {what} | " + " | ".join(f"**{times[name]}**" if name == lowest else times[name] for name in who) + " |"
        )
    return "\n".join(lines)


REGIONS: dict[str, Callable[[list[Machine]], str]] = {
    "summary": lambda all_: summary(all_[0]),
    "questions": lambda all_: main_table(all_[0]),
    "machine": lambda all_: machine_text(all_[0]),
    "slower": lambda all_: slower(all_[0]),
    "calls": lambda all_: calls_table(all_[0]),
    "tuning": lambda all_: tuning(all_[0]),
    "others": lambda all_: others(all_[1:]),
    "gpus": gpus,
    "memory": memory,
    "readme": lambda all_: readme(all_[0]),
}


def rewritten(page: str, found: list[Machine]) -> str:
    """A page, with today's figures."""
    return REGION.sub(lambda part: f"{part[1]}{REGIONS[part[2]](found)}\n{part[3]}", page)


def main() -> None:
    """All pages, and the pictures."""
    found = machines()
    for path in PAGES:
        path.write_text(rewritten(path.read_text(encoding="utf-8"), found), encoding="utf-8")
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw(found[0]), encoding="utf-8")
    for name, drawn in DRAWN.items():
        (DOCS / name).write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
