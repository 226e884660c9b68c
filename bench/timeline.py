"""The pictures of docs/timeline.md, from real timelines of 2 ranks on 2 hosts. Run it as root, when little else runs.

    python bench/timeline.py       writes timeline-healthy.svg, timeline-late.svg and timeline-no-overlap.svg to docs/

Hosts are network namespaces, see network.py, with links of 1 Gbit/s. A rank sleeps where a model computes, as one with
a GPU would: 50 ms for each gradient of 5 MiB. It announces each alone. Nothing is measured here.
"""

from __future__ import annotations

import html
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from network import Network, why_not

DOCS = Path(__file__).parents[1] / "docs"
LAYERS = ("layer4", "layer3", "layer2", "layer1")  # in the order of backward
LAYER_S, LATE_S, STEPS = 50e-3, 100e-3, 16
WIDTH, LABELS, ROW, TEXT = 860, 150, 22, 'font-family="sans-serif" font-size="12"'
COLOURS = {
    "submit": "#7f7f7f",
    "wait for ranks": "#e0a030",
    "queue": "#9467bd",
    "copy in": "#17becf",
    "reduce": "#d62728",
    "copy out": "#1f77b4",
}
STYLE = """<style>
text { fill: #222 } .thin { stroke: #888 } .row { fill: #8882 } .note { fill: #222 } .digit { fill: #fff }
.flow { stroke: #222; fill: none }
@media (prefers-color-scheme: dark) {
text, .note { fill: #ddd } .digit { fill: #111 } .flow { stroke: #ddd } }
</style>"""
"""No background: the picture has the page's, light or dark."""
Spans = list[dict[str, Any]]
NOTES = {
    "healthy": (
        "A healthy step",
        ("layer4", 0, "reduce", "a gradient is reduced while the ranks compute the next one"),
        ("layer2", 1, "wait for ranks", "waits are short: both ranks submit at about the same time"),
        ("layer1", 0, "reduce", "only the last reduction has nothing to hide behind: the step waits for it"),
    ),
    "late": (
        "Rank 1 is late",
        ("layer4", 0, "wait for ranks", "a long wait: rank 0 has submitted; the details say: waited for rank 1"),
        ("layer4", 1, "wait for ranks", "a short one: rank 1 was the last; rank 0's flows lead here, and back"),
        ("layer4", 0, "reduce", "the reduction itself takes no longer than in a healthy step"),
    ),
    "no-overlap": (
        "No overlap",
        ("layer4", 0, "wait for ranks", "all gradients are submitted together, at the end of backward"),
        ("layer1", 0, "queue", "long queues: the engine is busy with the others"),
        ("layer1", 1, "reduce", "nothing computes meanwhile: all of this is added to the step"),
    ),
}
"""The title of each picture, and what is pointed at: tensor, rank, category, words."""


def work(how: str, path: str) -> None:
    """One rank."""
    import numpy as np

    import ringreduce as rr

    rr.init()
    gradients = {name: np.full(5 << 18, rr.rank() + 1, np.float32) for name in LAYERS}
    rr.start_timeline(path)
    rr.barrier()
    for _ in range(STEPS):
        handles = []
        time.sleep(LATE_S if how == "late" and rr.rank() == 1 else 0)
        for name, gradient in gradients.items():
            time.sleep(LAYER_S)
            if how != "no-overlap":
                handles.append(rr.allreduce_async(gradient, name=name))
        if how == "no-overlap":
            handles = [rr.allreduce_async(gradient, name=name) for name, gradient in gradients.items()]
        for handle in handles:
            rr.synchronize(handle)
    rr.stop_timeline()
    rr.shutdown()


def step_of(records: Spans) -> tuple[dict[tuple[int, str], Spans], Spans]:
    """The spans of the shortest step but the first, by rank and tensor, and the points of its flows."""
    rows = {(each["pid"], each["tid"]): each["args"]["name"] for each in records if each["name"] == "thread_name"}
    found: dict[tuple[int, str], list[Spans]] = defaultdict(list)
    for each in sorted((each for each in records if each["ph"] == "X"), key=lambda each: each["ts"]):  # type: ignore[no-any-return]
        tensor = rows[each["pid"], each["tid"]].partition(".")[2]
        if tensor in LAYERS:
            if each["cat"] == "submit":
                found[each["pid"], tensor].append([])
            found[each["pid"], tensor][-1].append(each)
    step = min(({row: steps[k] for row, steps in found.items()} for k in range(1, STEPS)), key=lasted)
    begun = {(own[0]["pid"], own[0]["tid"], own[0]["ts"]) for own in step.values()}
    flows = {each["id"] for each in records if each["ph"] == "s" and (each["pid"], each["tid"], each["ts"]) in begun}
    return step, [each for each in records if each.get("id") in flows]


def lasted(step: dict[tuple[int, str], Spans]) -> float:
    """From the first submission to the last end, in microseconds."""
    ends = [each["ts"] + each["dur"] for own in step.values() for each in own]
    return max(ends) - min(own[0]["ts"] for own in step.values())  # type: ignore[no-any-return]


def drawing(how: str, records: Spans) -> str:
    """The step, as SVG."""
    title, *notes = NOTES[how]
    step, flows = step_of(records)
    spans = [each for own in step.values() for each in own]
    first, last = min(each["ts"] for each in spans), max(each["ts"] + each["dur"] for each in spans)
    first -= 0.04 * (last - first)

    def x(us: float) -> float:
        return LABELS + (us - first) / (last - first) * (WIDTH - LABELS - 20)

    tops = {
        (rank, name): 64 + (rank * (len(LAYERS) + 1) + k + 1) * ROW
        for rank in range(2)
        for k, name in enumerate(LAYERS)
    }
    middles = {(own[0]["pid"], own[0]["tid"]): tops[row] + ROW / 2 for row, own in step.items()}
    lines = [f'<text x="10" y="20" {TEXT} font-weight="bold">{title}</text>', *legend()]
    for rank in range(2):
        lines.append(f'<text x="10" y="{tops[rank, LAYERS[0]] - 7}" {TEXT} font-weight="bold">rank {rank}</text>')
    for (rank, name), own in step.items():
        top = tops[rank, name]
        lines.append(f'<rect class="row" x="{LABELS}" y="{top + 2}" width="{WIDTH - LABELS - 20}" height="{ROW - 4}"/>')
        lines.append(f'<text x="{LABELS - 8}" y="{top + 15}" {TEXT} text-anchor="end">allreduce.{name}</text>')
        for each in own:
            place = f'x="{x(each["ts"]):.1f}" y="{top + 2}" height="{ROW - 4}"'
            wide = max(1.5, each["dur"] / (last - first) * (WIDTH - LABELS - 20))
            lines.append(f'<rect {place} width="{wide:.1f}" fill="{COLOURS[each["cat"]]}"/>')
    for number in sorted({each["id"] for each in flows if each["ph"] == "t" and how == "late"}):
        points = [(x(each["ts"]), middles[each["pid"], each["tid"]]) for each in flows if each["id"] == number]
        lines.append(curve(points))
    bottom = max(tops.values()) + ROW
    lines += axis(first, last, bottom, x)
    for number, (name, rank, category, words) in enumerate(notes, 1):
        span = max((each for each in step[rank, name] if each["cat"] == category), key=lambda each: each["dur"])  # type: ignore[no-any-return]
        lines += circle(max(x(span["ts"]) + 12, x(span["ts"] + span["dur"] / 2)), tops[rank, name] + ROW / 2, number)
        lines += circle(20, bottom + 26 + 20 * number, number)
        lines.append(f'<text x="36" y="{bottom + 30 + 20 * number}" {TEXT}>{html.escape(words)}</text>')
    height = bottom + 44 + 20 * len(notes)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, *lines, "</svg>\n"])


def legend() -> list[str]:
    """The categories and their colours."""
    lines, left = [], LABELS
    for category, colour in COLOURS.items():
        lines.append(f'<rect x="{left}" y="32" width="14" height="14" fill="{colour}"/>')
        lines.append(f'<text x="{left + 20}" y="44" {TEXT}>{category}</text>')
        left += 44 + 7 * len(category)
    return lines


def axis(first: float, last: float, bottom: float, x: Any) -> list[str]:
    """Every 50 ms."""
    lines = []
    for ms in range(0, int((last - first) / 1e3) + 1, 50):
        at = x(first + 1e3 * ms)
        lines.append(f'<line class="thin" x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 5}"/>')
        lines.append(f'<text x="{at:.1f}" y="{bottom + 18}" {TEXT} text-anchor="middle">{ms}{" ms" * (ms == 0)}</text>')
    return lines


def circle(x: float, y: float, number: int) -> list[str]:
    """A number that points at something."""
    digit = f'<text class="digit" x="{x:.1f}" y="{y + 4:.1f}" {TEXT} text-anchor="middle">{number}</text>'
    return [f'<circle class="note" cx="{x:.1f}" cy="{y:.1f}" r="8"/>', digit]


def curve(points: list[tuple[float, float]]) -> str:
    """A flow."""
    (x, y), *rest = points
    path = f"M {x:.1f} {y:.1f}"
    for left, top in rest:
        path += f" C {x + 20:.1f} {y:.1f} {left - 20:.1f} {top:.1f} {left:.1f} {top:.1f}"
        x, y = left, top
    return f'<path class="flow" d="{path}"/>'


def main() -> None:
    """Run each, and draw it."""
    if why := why_not():
        sys.exit(f"bench/timeline.py: {why}")
    with Network(2) as network:
        network.shape(1000)
        for how in NOTES:
            command = [sys.executable, str(Path(__file__).resolve()), how]
            records = network.run(command, variables={"RINGREDUCE_CYCLE_TIME_MS": "5"})
            (DOCS / f"timeline-{how}.svg").write_text(drawing(how, records))  # type: ignore[arg-type]


if __name__ == "__main__":
    work(*sys.argv[1:]) if sys.argv[1:] else main()
