"""The picture of README and docs/benchmarks.md: a model's gradients on 2 ranks, as SVG, for light and dark pages.

bench/tables.py writes it, from the figures that the tables have, too.
"""

from __future__ import annotations

import html

from figures import DDP, DDP_RING, HOROVOD, MPI, OURS, TUNED, Figure, Machine, Row, digits

BARS = {
    OURS: ("ringreduce", "#d62728"),
    DDP_RING: ('PyTorch DDP over "ring"', "#ff9896"),
    TUNED: ("MPI_Allreduce, tuned", "#6baed6"),
    MPI: ("MPI_Allreduce, default", "#1f77b4"),
    HOROVOD: ("Horovod's way *", "#9467bd"),
    DDP: ("PyTorch DDP over gloo", "#17becf"),
}
"""What each bar is called, and its colour: that of bench/plots.py."""
LIMIT = "#9e9e9e"
LABELS, LONGEST, HEIGHT, TEXT = 180, 240, 22, 'font-family="sans-serif" font-size="13"'
STYLE = (
    "<style>text { fill: #222 } .range { stroke: #222 } "
    "@media (prefers-color-scheme: dark) { text { fill: #ddd } .range { stroke: #ddd } }</style>"
)
"""No background: the picture has the page's, light or dark."""


def bars(shown: Row, top: int) -> list[str]:
    """A heading, and below it a bar for each contender, with a line from the fastest to the slowest run."""
    drawn = [(*BARS[name], shown.who[name]) for name in BARS if name in shown.who]
    drawn += [(shown.limit[0], LIMIT, shown.limit[1])] if shown.limit else []
    longest = max(figure.high for *_, figure in drawn)
    lines = [f'<text x="10" y="{top + 15}" {TEXT} font-weight="bold">{html.escape(shown.what)}</text>']
    for number, (label, colour, figure) in enumerate(drawn, 1):
        lines += bar(label, colour, figure, LONGEST / longest, top + number * HEIGHT)
    return lines


def bar(label: str, colour: str, figure: Figure, scale: float, y: int) -> list[str]:
    """One of them."""
    low, width, high = (scale * max(0, each) for each in (figure.low, figure.median, figure.high))
    middle = y + 2 + (HEIGHT - 5) / 2
    return [
        f'<text x="{LABELS - 8}" y="{y + 14}" {TEXT} text-anchor="end">{html.escape(label)}</text>',
        f'<rect x="{LABELS}" y="{y + 2}" width="{width:.1f}" height="{HEIGHT - 5}" fill="{colour}"/>',
        f'<path class="range" d="M{LABELS + low:.1f} {middle}H{LABELS + high:.1f}"/>',
        f'<text x="{LABELS + max(width, high) + 6:.1f}" y="{y + 14}" {TEXT}>{digits(figure.median)} ms</text>',
    ]


def picture(found: Machine) -> str:
    """The drawing, as SVG."""
    rows = found.gradients("2 ranks", "2 ranks", "one copy")
    title = "Time to average a model's gradients, float32: median, and range of all runs"
    body, top = [], 30
    for each in rows:
        body += bars(each, top)
        top += (len([name for name in BARS if name in each.who]) + 2) * HEIGHT + 6
    small = TEXT.replace("13", "11")
    versions = f"{found.about('mpi')}, torch {found.about('torch')}"
    notes = [
        "* one packed buffer by MPI_Allreduce, as published; packing and unpacking counted.",
        f"bench/gradients.py; {found.name}; {versions}.",
        *(["A QUICK RUN: NO FIGURES TO QUOTE."] if found.is_quick else []),
    ]
    height = top + 12 + 16 * len(notes)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 540 {height}" width="540" height="{height}">',
            STYLE,
            f'<text x="10" y="20" {TEXT}>{title}</text>',
            *body,
            *(
                f'<text x="10" y="{top + 20 + 16 * line}" {small}>{html.escape(note)}</text>'
                for line, note in enumerate(notes)
            ),
            "</svg>\n",
        ]
    )
