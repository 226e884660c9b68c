"""Makes report.html of report.json: one file that needs no network. Jinja2 and Plotly are the extra `report`.

Plotly draws the charts, from the report that the page holds. Its script, 4.8 MB, is packed in the page: 2.0 MB, which
every browser since 2023 unpacks. The others, as of 2026: Bokeh's is 1.3 MB, but its package brings a web server and
Pillow, and its themes are chosen when the page is written, not where it is read. Vega's is 0.9 MB, but its package is
84 MB, and starts a JavaScript engine that takes 2.6 s and 150 MB to write it. ECharts, 1 MB, is in no package of its
makers'.
"""

import base64
import gzip
import importlib.util
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..text import duration

TEMPLATE = "report.html.jinja"
UNITS = {
    "bytes": (1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]),
    "rate": (1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]),
}


MISSING = (
    "report.html needs Jinja2 and Plotly: pip install '.[report]' in a clone of ringreduce, "
    "or pip install jinja2 plotly"
)


def is_possible() -> bool:
    """Return whether the extra is installed; nothing is imported."""
    return all(importlib.util.find_spec(name) for name in ("jinja2", "plotly"))


def render(report: dict[str, Any]) -> str:
    """Return the page that shows `report`; UsageError without the extra, or for a report that lacks something."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(MISSING) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quantity"] = quantity
    plotly = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    try:
        return environment.get_template(TEMPLATE).render(report=report, plotly=plotly)
    except jinja2.UndefinedError as error:
        raise UsageError(f"report.json is incomplete: {error}") from error


def quantity(value: Any, kind: str) -> str:
    """Return a figure as people read it: `kind` is bytes, rate, share, duration, time or id; any other is as it is."""
    if value is None or value == "":
        return "–"
    if kind in UNITS:
        return _scaled(value, *UNITS[kind])
    if kind == "share":
        return f"{100 * value:.0f} %"
    if kind == "duration":
        return duration(value)
    if kind == "time":
        return str(value).replace("T", " ").replace("+00:00", " UTC")
    return f"{value:,}" if isinstance(value, int | float) and kind != "id" else str(value)


def _scaled(value: float, base: int, units: list[str]) -> str:
    power = next((k for k in range(len(units)) if value < base ** (k + 1)), len(units) - 1)
    scaled = value / base**power
    return f"{scaled:.0f} {units[power]}" if scaled >= 100 else f"{scaled:.3g} {units[power]}"
