"""report.html: every figure is report.json's, nothing comes from outside, and a browser does not complain."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from ringrun.errors import UsageError
from ringrun.run_report.page import quantity, render
from tests.support import tiers
from tests.support.browser import CHROMIUM, Browser
from tests.support.loops import in_a_loop
from tests.support.made_reports import HOSTILE, REPORTS

MOST_BYTES = 5_000_000
VOID = {"meta", "link", "br", "img", "hr", "input"}
ROWS = {
    "Steps over time": "over_time", "Ranks": "ranks", "Stragglers": "stragglers", "Links": "links", "Stalls": "stalls",
    "Algorithms": "algorithms", "Tensors": "tensors", "Memory": "memory", "Settings": "settings",
    "What --check found": "findings", "Ranks that failed": "failures", "Ranks lost": "elastic",
}  # fmt: skip
"""How a table's caption begins, longest first where two do, and what of report.json it shows."""


class Page(HTMLParser):
    """Its tables by caption, each a list of rows of (figure, text), and its scripts; each tag must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.scripts, self.figures, self.rows, self.figure = [], {}, [], [], [], None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        assert not re.match(r"(https?:)?//", attributes.get("src") or attributes.get("href") or ""), attributes
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "caption"):
            self.text, self.figure = "", None
        elif tag == "data":
            self.figure = json.loads(attributes["value"])
            self.figures.append(self.figure)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "caption":
            self.tables[self.text] = self.rows
        elif tag == "td":
            self.rows[-1].append((self.figure, self.text))

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open:
            self.text = getattr(self, "text", "") + data


def of(report, caption):
    return report[next(ROWS[begin] for begin in sorted(ROWS, key=len, reverse=True) if caption.startswith(begin))]


@pytest.mark.parametrize("name", REPORTS)
def test_every_figure_is_that_of_report_json(name):
    report = REPORTS[name]()
    page = Page(render(report))
    assert report in [json.loads(script) for script in page.scripts if script.startswith("{")]
    shown = {
        caption: rows[1:]
        for caption, rows in page.tables.items()
        if not caption.startswith(("Collective", "Hosts", "Versions"))
    }
    assert len(shown) == sum(bool(report[key]) for key in set(ROWS.values()))
    for caption, rows in shown.items():
        entries = of(report, caption)
        if caption.startswith("Ranks, those"):
            entries = sorted(entries, key=lambda entry: -entry["computing_ms"])
        assert len(rows) == len(entries)
        for row, entry in zip(rows, entries, strict=True):
            known = [*entry.values(), *("–" for value in entry.values() if value in ("", None))]
            assert [each for figure, text in row if (each := text if figure is None else figure) not in known] == []
            plain = [(figure, text) for figure, text in row if re.fullmatch(r"[\d,.]+", text) and figure is not None]
            assert [figure for figure, text in plain] == [json.loads(text.replace(",", "")) for _, text in plain]
    step = {value for value in report["step"].values() if value is not None}
    assert step - set(page.figures) == set() or not report["step"]["count"]


def test_a_table_shows_what_the_report_says_and_not_something_else():
    report = REPORTS["16-ranks-failed"]()
    page = Page(render(report))
    [row] = [rows for caption, rows in page.tables.items() if caption.startswith("Ranks;")]
    rank = report["ranks"][7]
    times = ["step_ms", "computing_ms", "waiting_ms", "exposed_ms", "hidden_ms", "core_wait_ms"]
    shown = ["rank", "host", *times, "steps", "rss", "shm", "fusion", "device", "pid", "end"]
    assert [text if figure is None else figure for figure, text in row[8]] == [rank[key] for key in shown]


def test_what_is_wrong_comes_first():
    top, _, _ = render(REPORTS["16-ranks-failed"]()).partition("Where the time of a step goes")
    for text in ("failed, exit code 1, 1 finding<", "This job failed", "1 finding of --check", "he first NaN: "):
        assert text in top


def test_where_no_step_has_ended_nothing_is_said_of_its_time():
    page = render(REPORTS["nothing"]())
    for text in ("stands out", "made the others wait", 'id="chart-ranks"', "Computing (ms)"):
        assert text not in page


def test_a_name_is_no_markup():
    report = REPORTS["16-ranks-failed"]()
    page = render(report | {"sentence": HOSTILE, "job": report["job"] | {"command": HOSTILE, "card": [HOSTILE]}})
    assert HOSTILE not in page
    assert page.count("<script") == 4
    Page(page)


def test_a_page_of_everything_is_small_enough():
    report = REPORTS["512-ranks"]()
    for rank in report["timeline"]["ranks"]:
        rank["operations"] = [rank["operations"][0] | {"name": "encoder." * 10 + str(k)} for k in range(256)]
    assert len(render(report).encode()) <= MOST_BYTES


def test_what_cannot_be_shown_is_an_error(monkeypatch):
    with pytest.raises(UsageError, match=r"^report\.json is incomplete: .* has no attribute "):
        render({"version": 1})
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(
        UsageError, match=r"^report\.html needs Jinja2 and Plotly: pip install '\.\[report\]' in a clone"
    ):
        render(REPORTS["2-ranks"]())


@in_a_loop(
    ("value", "kind", "shown"),
    [
        (0, "bytes", "0 B"), (1023, "bytes", "1023 B"), (1572864, "bytes", "1.5 MiB"), (3 << 60, "bytes", "3072 PiB"),
        (1.18e9, "rate", "1.18 GB/s"), (None, "rate", "–"), (0.974, "share", "97 %"), (3725, "duration", "1 h 2 min"),
        (61, "duration", "1 min 1 s"), (2.5, "duration", "2.5 s"), (8400, "count", "8,400"), (8400, "id", "8400"),
        ("2026-11-25T22:40:00+00:00", "time", "2026-11-25 22:40:00 UTC"), ("", "text", "–"), ("a,b", "text", "a,b"),
    ],
)  # fmt: skip
def test_a_figure_as_people_read_it(value, kind, shown):
    assert quantity(value, kind) == shown


@pytest.mark.adapters
@pytest.mark.parametrize("name", tiers.parted(REPORTS, lambda name: name == "16-ranks-failed"))
def test_a_browser_shows_it_without_a_complaint(name, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium: the page of the run report was opened in no browser; .ci/packages installs it")
    report = REPORTS[name]()
    path = tmp_path / "report.html"
    path.write_text(render(report))
    with Browser(tmp_path / "profile") as browser:
        for width, dark in ((1600, True), (390, False)):
            browser.open(path, width=width, dark=dark)
            charts = browser.value("charts")
            assert browser.complaints == []
            assert charts == browser.value("document.querySelectorAll('.chart .subplot').length")
            assert browser.value("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        if report["step"]["count"]:
            chosen = browser.value("document.getElementById('chart-ranks').data[0].x")
            assert set(chosen) <= {rank["computing_ms"] for rank in report["ranks"]}
            browser.value("document.querySelector('[data-zoom=\"0.5\"]').click()")
            end = report["timeline"]["ranks"][0]["to_ms"]
            zoomed = browser.value("document.getElementById('chart-timeline').layout.xaxis.range")
            assert zoomed == pytest.approx([end / 4, 3 * end / 4])
            browser.value("document.querySelectorAll('[aria-labelledby=ranks] th button')[3].click()")
            first = browser.value("document.querySelector('[aria-labelledby=ranks] td:nth-child(4) data').value")
            assert float(first) == max(rank["computing_ms"] for rank in report["ranks"])
            assert browser.complaints == []


@pytest.mark.adapters
def test_steps_over_time_have_a_gap_where_no_step_ended_and_charts_the_pages_font(tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium: the chart of steps over time was not drawn; .ci/packages installs it")
    report, path = REPORTS["2-ranks"](), tmp_path / "report.html"
    took = {"count": 10, "median_ms": 100.0, "p5_ms": 90.0, "p95_ms": 110.0}
    paused = [took | {"t_s": float(second)} for second in range(30) if not 10 < second < 16]
    slow = [took | {"t_s": 3.0 * number, "count": 1, "median_ms": 3000.0} for number in range(10)]
    with Browser(tmp_path / "profile") as browser:
        for over_time, lines in ((paused, 2), (slow, 1), (paused[:1], 1)):
            path.write_text(render(report | {"over_time": over_time}))
            browser.open(path)
            browser.value("charts")
            medians = "document.getElementById('chart-steps').data.filter(each => each.name === 'median step')"
            assert browser.value(f"{medians}.length") == lines, over_time
            assert browser.value(f"{medians}.flatMap(each => each.y).length") == len(over_time)
        parts = "[document.body, document.querySelector('#chart-steps text')]"
        page, chart = browser.value(f"{parts}.map(each => getComputedStyle(each).fontFamily)")
        assert page == chart
