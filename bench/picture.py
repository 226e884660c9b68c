"""The pictures of README and docs/: one for each question, as SVG, for light and dark pages and for phones.

bench/tables.py writes them, from the figures that the tables have, too. They are as wide as a phone's page; a line of
text that does not fit is broken.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence

from figures import DDP, DDP_RING, HOROVOD, MPI, OURS, TUNED, Figure, Machine, Row, bytes_text, digits

BARS = {
    OURS: ("ringreduce", "#d62728"),
    DDP_RING: ('PyTorch DDP over "ring"', "#ff9896"),
    TUNED: ("MPI_Allreduce, tuned", "#6baed6"),
    MPI: ("MPI_Allreduce, default", "#1f77b4"),
    HOROVOD: ("Horovod's way *", "#9467bd"),
    DDP: ("PyTorch DDP over gloo", "#17becf"),
}
"""What each bar is called, and its colour: that of bench/plots.py."""
LIMIT, ORDERED = "#9e9e9e", "#e7a13d"
WIDTH, LABELS, LONGEST, HEIGHT = 400, 170, 148, 22
LINE = 17  # of text
CHARACTERS = 60  # in a line of the title, 68 of a note
STYLE = (
    "<style>text { fill: #222; font: 13px sans-serif } .note { font-size: 11px } .strong { font-weight: bold } "
    ".range, .axis { stroke: #222; fill: none } .grid { stroke: #888; opacity: .35 } "
    "@media (prefers-color-scheme: dark) { text { fill: #ddd } .range, .axis { stroke: #ddd } }</style>"
)
"""No background: the picture has the page's, light or dark."""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    """A line of it; kind: note or strong."""
    more = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:g}" y="{y:g}"{more}>{html.escape(words)}</text>'


def bars(shown: Row, top: int, unit: str) -> Iterator[str]:
    """A heading, and below it a bar for each contender, with a line from the fastest to the slowest run."""
    drawn = drawn_of(shown)
    longest = max(figure.high for *_, figure in drawn)
    yield text(10, top + 15, shown.what, "strong")
    for number, (label, colour, figure) in enumerate(drawn, 1):
        yield from bar(label, colour, figure, LONGEST / longest, top + number * HEIGHT, unit)


def drawn_of(shown: Row) -> list[tuple[str, str, Figure]]:
    """What each bar of a row is called, its colour, its figure."""
    names = dict(BARS)
    if "dies" in shown.what:  # what was measured there is no all-reduce
        names = {OURS: ("ringrun --elastic", BARS[OURS][1]), DDP: ("torchrun, gloo", BARS[DDP][1])}
    drawn = [(*names[name], shown.who[name]) for name in names if name in shown.who]
    drawn[1:1] = [(f"ringrun {shown.also[0].strip('`')}", ORDERED, shown.also[1])] if shown.also else []
    return drawn + ([(shown.limit[0], LIMIT, shown.limit[1])] if shown.limit else [])


def bar(label: str, colour: str, figure: Figure, scale: float, y: int, unit: str) -> Iterator[str]:
    """One of them."""
    low, width, high = (scale * max(0, each) for each in (figure.low, figure.median, figure.high))
    middle = y + 2 + (HEIGHT - 5) / 2
    yield text(LABELS - 8, y + 14, label, anchor="end")
    yield f'<rect x="{LABELS}" y="{y + 2}" width="{width:.1f}" height="{HEIGHT - 5}" fill="{colour}"/>'
    yield f'<path class="range" d="M{LABELS + low:.1f} {middle}H{LABELS + high:.1f}"/>'
    yield text(round(LABELS + max(width, high) + 6, 1), y + 14, f"{digits(figure.median)} {unit}")


def drawing(title: str, body: Sequence[str], top: int, notes: Sequence[str], found: Machine) -> str:
    """The whole picture: `body`, which begins below the title and ends at `top`, and the notes."""
    quick = ["A QUICK RUN: NO FIGURES TO QUOTE."] if found.is_quick else []
    said = f"{found.name}; {found.about('mpi')}, torch {found.about('torch')}."
    below = [line for note in [*notes, said, *quick] for line in textwrap.wrap(note, CHARACTERS + 8)]
    head = textwrap.wrap(title, CHARACTERS)
    height = top + 8 + 16 * len(below)
    size = f'width="{WIDTH}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {size}>',
            STYLE,
            *(text(10, 20 + LINE * line, words) for line, words in enumerate(head)),
            *body,
            *(text(10, top + 12 + 16 * line, words, "note") for line, words in enumerate(below)),
            "</svg>\n",
        ]
    )


def bar_chart(title: str, rows: Sequence[Row], notes: Sequence[str], found: Machine) -> str:
    """Bars for each row."""
    body, top = [], 14 + LINE * len(textwrap.wrap(title, CHARACTERS))
    for each in rows:
        body += bars(each, top, each.unit)
        top += (len(drawn_of(each)) + 1) * HEIGHT + 8
    return drawing(title, body, top, notes, found)


def gradients(found: Machine) -> str:
    """A model's gradients on 2 ranks: README's."""
    title = "Time to average a model's gradients, float32: median, and range of all runs"
    notes = ["* one packed buffer by MPI_Allreduce, as published; packing and unpacking counted."]
    return bar_chart(title, found.gradients("2 ranks", "2 ranks", "one copy"), notes, found)


def more_gradients(found: Machine) -> str:
    """The same on 4 ranks, and on 4 hosts."""
    rows = found.gradients("4 ranks", "4 ranks", "one copy") + found.gradients(
        "4 hosts", "4 hosts, 1 Gbit/s", "raw TCP"
    )
    notes = ["* one packed buffer by MPI_Allreduce, as published; packing and unpacking counted."]
    return bar_chart(
        "Time to average a model's gradients with more ranks than cores, and between hosts", rows, notes, found
    )


def steps(found: Machine) -> str:
    """A training step."""
    rows = [each for each in found.questions() if "step, " in each.what or "that step" in each.what]
    return bar_chart("A training step of a small GPT: median, and range of all runs", rows, (), found)


def death(found: Machine) -> str:
    """A rank dies."""
    title = "Continuing after a death: median, and range of all runs"
    return bar_chart(title, [each for each in found.questions() if "dies" in each.what], (), found)


def calls(found: Machine) -> str:
    """One call, by size: both axes are logarithmic."""
    title, rows = "One synchronous all-reduce on 2 ranks: time by size", found.calls()
    if not rows:
        return drawing(title, [], 40, (), found)
    sizes = sorted({int(each["size"]) for each in found.rows("calls, 2 ranks")})
    names = {OURS: "allreduce_", DDP_RING: 'backend "ring"', MPI: "MPI_Allreduce", DDP: "gloo"}
    lines = {name: (label, BARS[name][1], [each.who.get(name) for each in rows]) for name, label in names.items()}
    lines["also"] = ("ordered()", ORDERED, [each.also[1] if each.also else None for each in rows])
    known = [each.median for *_, figures in lines.values() for each in figures if each]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    left, right, upper, lower = 58, WIDTH - 14, 40 + 2 * LINE, 330
    body = []
    for power in range(low, high + 1):
        y = lower - (lower - upper) * (power - low) / (high - low)
        body.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
        body.append(text(left - 6, y + 4, us_text(10**power), "note", "end"))
    at = [left + 12 + (right - left - 24) * number / max(1, len(sizes) - 1) for number in range(len(sizes))]
    body += [text(x, lower + 18, bytes_text(size), "note", "middle") for x, size in zip(at, sizes, strict=True)]
    for number, (label, colour, figures) in enumerate(lines.values()):
        points = [
            f"{x:.1f} {lower - (lower - upper) * (math.log10(each.median) - low) / (high - low):.1f}"
            for x, each in zip(at, figures, strict=True)
            if each
        ]
        body.append(f'<path d="M{" L".join(points)}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        x, y = 10 + 128 * (number % 3), 40 + LINE * (number // 3)
        body += [f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>', text(x + 17, y, label)]
    return drawing(title, body, lower + 26, (), found)


def us_text(time_us: float) -> str:
    """`10 µs`, `1 ms`."""
    return f"{time_us / 1e3:g} ms" if time_us >= 1e3 else f"{time_us:g} µs"


PHASES = {
    "heard": "the others hear of the death",
    "failed": "their calls fail, and the state is restored",
    "stopped": "",
    "met": "they meet",
    "engine": "a new engine starts",
    "step": "the next step",
}
"""What happens after a death, as bench/elastic.py measures it; what takes no time to see has no name."""


def elastic(found: Machine) -> str:
    """A death's time line: medians of a job's deaths, on the slowest rank."""
    title = "--elastic: 4 ranks train, rank 2 is killed"
    row = next((each for each in found.rows("deaths") if each["how"] == "elastic"), None)
    if row is None:
        return drawing(title, [], 40, (), found)
    parts = [(float(row[name]), label) for name, label in PHASES.items() if label]
    usual = float(row["usual"])
    begin, ranks, upper = 3 * usual, 4, 40
    whole = begin + sum(each for each, _ in parts) + 3 * usual
    left, scale = 62, (WIDTH - 72) / whole
    colours = ["#e7a13d", "#d62728", "#9467bd", "#1f77b4", "#8fd18f"]
    body = []
    for rank in range(ranks):
        y = upper + 26 * rank
        body.append(text(10, y + 14, f"rank {rank}"))
        spans = [(number * usual, usual, "#2ca02c") for number in range(3)]
        if rank != 2:
            at = begin
            for (took, _), colour in zip(parts, colours, strict=True):
                spans.append((at, took, colour))
                at += took
            spans += [(at + number * usual, usual, "#2ca02c") for number in range(3)]
        for at, took, colour in spans:
            x, width = left + scale * at, max(1.0, scale * took - 1)
            body.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/>')
        if rank == 2:
            x = left + scale * begin
            body += [f'<path class="axis" d="M{x:.1f} {y}l12 18m0 -18l-12 18"/>', text(x + 18, y + 14, "killed")]
    y = upper + 26 * ranks + 14
    body.append(text(10, y, "after the death, median times:"))
    for (took, label), colour in zip(parts, colours, strict=True):
        y += LINE
        body += [f'<rect x="14" y="{y - 10}" width="12" height="10" fill="{colour}"/>']
        body.append(text(32, y, f"{digits(took)} ms: {label}"))
    y += LINE
    body += [f'<rect x="14" y="{y - 10}" width="12" height="10" fill="#2ca02c"/>']
    body.append(text(32, y, f"{digits(usual)} ms: a usual step"))
    return drawing(title, body, y + 14, (), found)


PICTURES: dict[str, Callable[[Machine], str]] = {
    "gradients.svg": gradients,
    "gradients-more.svg": more_gradients,
    "step.svg": steps,
    "calls.svg": calls,
    "death.svg": death,
    "elastic.svg": elastic,
}
"""The files in docs/, and what draws each."""
