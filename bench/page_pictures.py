"""Pictures of what pages of docs/ say, drawn from their text: the way of a gradient, and how a script scales.

bench/tables.py writes them; a test compares.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from picture import LINE, STYLE, WIDTH, text

DOCS = Path(__file__).resolve().parents[1] / "docs"
GROUPS = {
    "#2e7d32": ("what the user calls", ("torch", "optim", "api", "arrays")),
    "#1565c0": ("when it runs", ("engine", "negotiation", "execution", "runtime")),
    "#ef6c00": ("how the bytes move", ("collectives", "transport")),
}
"""The three groups of layers of docs/architecture.md: colour, what they answer, folders."""
NOTE, CHARACTERS = 14, 62
OURS, IDEAL = "#d62728", "#888"


def block(page: str, begin: str) -> list[str]:
    """The lines of the block of a page that contains `begin`."""
    blocks = re.findall(r"^```text\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return next(each for each in blocks if begin in each).splitlines()


def whole(height: float, title: str, body: list[str]) -> str:
    """The picture."""
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, text(10, 20, title, "strong"), *body]
    return "\n".join([*lines, "</svg>\n"])


def way() -> str:
    """The way of one gradient: a part for each line of the block, in the colour of its layers."""
    body, y = [], 30.0
    for colour, (what, _) in GROUPS.items():
        body += [f'<rect x="10" y="{y + 3:g}" width="12" height="10" fill="{colour}"/>', text(28, y + 13, what)]
        y += LINE
    y += 8
    for line in block("architecture.md", "torch/hooks.py hook"):
        who, what = re.split(r"  +", line.strip(), maxsplit=1)
        colour = next(colour for colour, (_, folders) in GROUPS.items() if who.split("/")[0] in folders)
        lines = textwrap.wrap(what, CHARACTERS)
        height = LINE + NOTE * len(lines) + 4
        body.append(f'<rect x="10" y="{y:g}" width="6" height="{height:g}" fill="{colour}"/>')
        body.append(text(24, y + 13, who, "strong"))
        body += [text(24, y + 13 + LINE + NOTE * number, words, "note") for number, words in enumerate(lines)]
        y += height + 8
    return whole(y + 4, "The way of one gradient", body)


def scaling() -> str:
    """The table that `ringrun scaling` printed: speed-up by ranks, with its range."""
    points: list[tuple[int, float, float, float]] = []
    for line in block("is-it-slow.md", "RANKS  STEPS/S")[1:]:
        found = re.match(r" +(\d+)  +\S+ \S+  +\S+ \S+  +([\d.]+)(?: \(([\d.]+)–([\d.]+)\))?", line)
        if found:
            middle = float(found[2])
            points.append((int(found[1]), middle, float(found[3] or middle), float(found[4] or middle)))
    most = points[-1][0]
    left, right, upper, lower = 34, WIDTH - 60, 40, 230

    def at(ranks: float, speed_up: float) -> tuple[float, float]:
        return left + (right - left) * ranks / most, lower - (lower - upper) * speed_up / most

    (x0, y0), (x1, y1) = at(0, 0), at(most, most)
    body = [
        f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" fill="none" stroke="{IDEAL}" stroke-dasharray="4 4"/>',
        f'<path class="axis" d="M{left} {upper}V{lower}H{right}"/>',
        text(right + 6, lower + 4, "ranks", "note"),
    ]
    body += [text(left - 6, at(0, each)[1] + 4, str(each), "note", "end") for each, *_ in points]
    line = " L".join(f"{x:.1f} {y:.1f}" for x, y in (at(ranks, middle) for ranks, middle, *_ in points))
    body.append(f'<path d="M{line}" fill="none" stroke="{OURS}" stroke-width="2.5"/>')
    for ranks, middle, low, high in points:
        (x, y), (_, y_low), (_, y_high) = at(ranks, middle), at(ranks, low), at(ranks, high)
        body.append(f'<path class="range" d="M{x:.1f} {y_low:.1f}V{y_high:.1f}"/>')
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{OURS}"/>')
        body += [
            text(round(x + 8, 1), round(y + 16, 1), f"{middle:g}"),
            text(round(x, 1), lower + 17, str(ranks), "note", "middle"),
        ]
    body.append(text(10, lower + 36, "Dashed: a speed-up as large as the number of ranks.", "note"))
    return whole(lower + 46, "Speed-up by ranks", body)


DRAWN: dict[str, Callable[[], str]] = {"scaling.svg": scaling, "way-of-a-gradient.svg": way}
"""The files in docs/, and what draws each."""
