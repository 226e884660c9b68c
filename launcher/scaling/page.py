"""Makes a page of what `ringrun scaling` has found: one file that needs no network, no script, and no other package."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from .analyse import HEADS, figure

_WIDTH, _HEIGHT, _EDGE = 640, 320, 48
_NUMBERS = ("ranks", "steps_s", "examples_s", "speed_up", "efficiency")

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Scaling: $command</title>
<link rel="icon" href="data:,">
<style>
:root { --page: #f5f6f8; --card: #fff; --text: #1d2530; --soft: #56616f; --line: #d7dce3; --own: #1f5fa8; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181d; --card: #1d2329; --text: #e6eaef; --soft: #a3aebb; --line: #39424d; --own: #8ab8ee; }
}
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 1.25rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.25rem; margin: 0 0 .25rem; }
code { font: .86em/1.5 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem; margin: 1rem 0; }
.sentence { font-size: 1.3rem; font-weight: 600; margin: 0 0 .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .93rem; min-width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.soft { color: var(--soft); }
tr > :last-child { min-width: 12rem; }
svg { width: 100%; min-width: 480px; max-width: ${width}px; height: auto; }
svg text { fill: var(--soft); font: 13px system-ui, "DejaVu Sans", sans-serif; }
</style>
</head>
<body>
<main>
<h1>Scaling</h1>
<p><code>$command</code></p>
<section><p class="sentence">$sentence</p>
$notes
</section>
<section><h2>Each number of ranks</h2>
<div class="scroll" role="region" aria-label="Each number of ranks" tabindex="0">
$table
</div>
<p class="soft">Medians of all rounds, with the lowest and the highest in brackets. Speed-up and efficiency compare
runs of the same round.</p>
</section>
$chart
$advice
</main>
</body>
</html>
""")


def render(document: Mapping[str, Any]) -> str:
    """Return the page that shows what --json writes."""
    advice = _list(document["advice"], "ol")
    return _PAGE.substitute(
        command=escape(shlex.join(document["command"])),
        sentence=escape(_capital(document["sentence"])),
        notes=_list(document["notes"], "ul"),
        table=_table([each["shown"] for each in document["sizes"]]),
        chart=_chart(document["sizes"]),
        advice=advice and f"<section><h2>What would help</h2>\n{advice}</section>",
        width=_WIDTH,
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list(texts: Sequence[str], kind: str) -> str:
    items = "".join(f"<li>{escape(_capital(each))}</li>\n" for each in texts)
    return f"<{kind}>\n{items}</{kind}>" if items else ""


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    def line(cells: Mapping[str, str], tag: str) -> str:
        made = (f"<{tag}{' class=number' * (name in _NUMBERS)}>{escape(cells[name])}</{tag}>" for name in HEADS)
        return f"<tr>{''.join(made)}</tr>\n"

    heads = line({name: _capital(head.lower()) for name, head in HEADS.items()}, "th")
    return f"<table>\n<thead>{heads}</thead>\n<tbody>\n{''.join(line(row, 'td') for row in rows)}</tbody>\n</table>"


def _chart(sizes: Sequence[Mapping[str, Any]]) -> str:
    """Return the speed-up by the number of ranks, beside the line on which it would be as large as that."""
    points = [(each["size"], each["speed_up"]) for each in sizes if each["speed_up"]]
    if len(points) < 2:
        return ""
    base, most = points[0][0], points[-1][0]
    highest = max(most / base, *(each["high"] for _, each in points))

    def at(size: float, speed_up: float) -> tuple[float, float]:
        x = _EDGE + (_WIDTH - 2 * _EDGE) * size / most
        return round(x, 1), round(_HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * speed_up / highest, 1)

    def path(places: Sequence[tuple[float, float]]) -> str:
        return "M" + " L".join(f"{x} {y}" for x, y in places)

    own = path([at(size, each["middle"]) for size, each in points])
    ideal = path([at(0, 0), at(most, most / base)])
    marks = []
    for size, each in points:
        (x, low), (_, high), (_, middle) = (at(size, each[name]) for name in ("low", "high", "middle"))
        marks.append(
            f'<path d="M{x} {low} V{high}" stroke="var(--own)" stroke-width="2"/>'
            f'<circle cx="{x}" cy="{middle}" r="4" fill="var(--own)"/>'
            f'<text x="{x}" y="{_HEIGHT - _EDGE + 20}" text-anchor="middle">{size}</text>'
            f'<text x="{x + 8}" y="{middle + 18}">{figure(each["middle"])}</text>'
        )
    return f"""<section><h2>Speed-up</h2>
<div class="scroll" role="region" aria-label="Speed-up" tabindex="0">
<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Speed-up by ranks; the figures are in the table above">
<path d="{ideal}" fill="none" stroke="var(--soft)" stroke-dasharray="4 4"/>
<path d="{own}" fill="none" stroke="var(--own)" stroke-width="2"/>
{"".join(marks)}
<path d="M{_EDGE} {_EDGE} V{_HEIGHT - _EDGE} H{_WIDTH - _EDGE}" fill="none" stroke="var(--line)"/>
<text x="{_WIDTH - _EDGE}" y="{_HEIGHT - 8}" text-anchor="end">ranks</text>
</svg>
</div>
<p class="soft">The dashed line is a speed-up equal to the number of ranks.</p>
</section>"""
