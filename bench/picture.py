"""The picture of README: a model's gradients, ours beside the peers, drawn from the table in docs/benchmarks.md.

    python bench/picture.py      writes docs/gradients.svg; a test compares it with the table

Nothing is measured here: `ringrun -np 2 python bench/gradients.py` measures.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "gradients.svg"
BARS = {
    "ringreduce": ("ringreduce", "#d62728"),
    'DDP over "ring"': ('PyTorch DDP over "ring"', "#ff9896"),
    "`MPI_Allreduce`": ("MPI_Allreduce, packed *", "#1f77b4"),
    "DDP over gloo": ("PyTorch DDP over gloo", "#17becf"),
    "one copy": ("one copy", "#9e9e9e"),
}
"""The figures of a row that are drawn, what each is called, and its colour: that of bench/plots.py."""
MODELS = {"ResNet-50": "ResNet-50, 102 MB", "GPT-2": "GPT-2, 498 MB"}
MACHINE = "EPYC, 2026-11-23"
LABELS, LONGEST, HEIGHT, TEXT = 180, 290, 22, 'font-family="sans-serif" font-size="13"'
STYLE = "<style>text { fill: #222 } @media (prefers-color-scheme: dark) { text { fill: #ddd } }</style>"
"""No background: the picture has the page's, light or dark."""


def measured(model: str) -> dict[str, str]:
    """The milliseconds of each figure of this model with 2 ranks, from the table in docs/benchmarks.md."""
    table = (ROOT / "docs" / "benchmarks.md").read_text()
    row = rf"^\| {model}'s gradients, 2 ranks \| {MACHINE} \| \*\*([\d.]+) ms\*\* \| (.*) \|$"
    [(ours, others)] = re.findall(row, table, re.MULTILINE)
    return {name: ms for name, _, ms in (each.rpartition(" ") for each in [f"ringreduce {ours}", *others.split(", ")])}


def bars(model: str, top: int) -> list[str]:
    """A heading, and below it a bar for each row; the longest is that of DDP."""
    times = measured(model)
    lines = [f'<text x="10" y="{top + 15}" {TEXT} font-weight="bold">{MODELS[model]}</text>']
    for number, (name, (label, colour)) in enumerate(BARS.items(), 1):
        y, width = top + number * HEIGHT, LONGEST * float(times[name]) / max(map(float, times.values()))
        lines += [
            f'<text x="{LABELS - 8}" y="{y + 14}" {TEXT} text-anchor="end">{html.escape(label)}</text>',
            f'<rect x="{LABELS}" y="{y + 2}" width="{width:.1f}" height="{HEIGHT - 5}" fill="{colour}"/>',
            f'<text x="{LABELS + width + 6:.1f}" y="{y + 14}" {TEXT}>{times[name]} ms</text>',
        ]
    return lines


def picture() -> str:
    """The drawing, as SVG."""
    height = len(MODELS) * (len(BARS) + 1) * HEIGHT + 76
    first = 30
    title = "Time to average a model's gradients, 2 ranks on 2 cores, float32"
    body = [line for n, model in enumerate(MODELS) for line in bars(model, first + n * ((len(BARS) + 1) * HEIGHT + 6))]
    small = TEXT.replace("13", "11")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 540 {height}" width="540" height="{height}">',
            STYLE,
            f'<text x="10" y="20" {TEXT}>{title}</text>',
            *body,
            f'<text x="10" y="{height - 24}" {small}>* one buffer, as Horovod does it on CPUs (published); '
            "its packing is not counted.</text>",
            f'<text x="10" y="{height - 8}" {small}>bench/gradients.py, {MACHINE}; '
            "Open MPI 5.0.11, torch 2.13.0.</text>",
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
