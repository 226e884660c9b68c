"""The run report: why a job is slow, and who keeps it waiting. Built from what ringreduce in each rank has measured.

collect   what ranks have measured and what has happened, in bounded memory
analyse   who waits for whom in a step, and how late each rank is
causes    stragglers: which ranks, hosts and links, why, and what to do
document  report.json
page      report.json → report.html, by report.html.jinja
write     writes it, and the page, while the job runs
command   ringrun report
live      a table of what ranks do just now, for `ringrun top`
metrics   the same for Prometheus

The launcher knows the names below, and nothing else of it; of the launcher it knows how messages are worded, how a rank
has ended, and why a file cannot be written (tests/unit/test_layers.py).
"""

from .collect import Collector
from .live import STEP_ENDS, Totals, encode, row, table
from .metrics import LOOPBACK, Metrics, require_prometheus
from .write import DATA, Writer

__all__ = [
    "DATA",
    "LOOPBACK",
    "STEP_ENDS",
    "Collector",
    "Metrics",
    "Totals",
    "Writer",
    "encode",
    "require_prometheus",
    "row",
    "table",
]
