"""Metrics of a running job for Prometheus, in the OpenMetrics format, by prometheus_client (the extra `metrics`)."""

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import MachineError
from .collect import Collector
from .live import Totals, exposed_s

LOOPBACK = "127.0.0.1"
_BUCKETS = range(-12, 12)  # a bucket is 14 of a rank's histogram, each 1.05 times as long as that before
_MERGED = 14
_BOUNDS = {n: str(float(f"{1.05 ** (_MERGED * (n + 1)):.4g}")) for n in _BUCKETS}  # in seconds: 0.00054 … 3600


class _Family(NamedTuple):
    """What is told of each rank: `values` returns one value, or those by another label."""

    kind: str
    text: str
    values: Callable[[Totals], float | Mapping[str, float]]
    label: str = ""


_FAMILIES = {
    "steps": _Family("counter", "Steps that have ended.", lambda said: said["step"]),
    "computing_seconds": _Family("counter", "Time in steps, less blocked time.", lambda said: said["computing_s"]),
    "blocked_seconds": _Family("counter", "Time training waited for operations.", lambda said: said["blocked_s"]),
    "exposed_seconds": _Family("counter", "Blocked time in which data moved; in the rest, ranks were late.", exposed_s),
    "hidden_seconds": _Family("counter", "Time data moved while the rank computed.", lambda said: said["hidden_s"]),
    "operations": _Family("counter", "Operations.", lambda said: _by_algorithm(said, 0), "algorithm"),
    "bytes": _Family("counter", "Bytes of operations.", lambda said: _by_algorithm(said, 1), "algorithm"),
    "sent_bytes": _Family("counter", "Bytes of messages to other ranks.", lambda said: sum(said["sent"].values())),
    "resident_memory_bytes": _Family("gauge", "Memory of the process.", lambda said: said["rss"]),
    "age_seconds": _Family("gauge", "Time since the rank last reported.", lambda said: said["age_s"]),
}


def _by_algorithm(said: Totals, at: int) -> dict[str, float]:
    """Return counts (0) or bytes (1) by algorithm, all sizes together."""
    sums: Counter[str] = Counter()
    for key, told in said["by_algorithm"].items():
        sums[key.rpartition(" ")[0]] += told[at]
    return dict(sums)


class Metrics:
    """Serves the metrics of a job, made from what each rank has said last."""

    def __init__(self, where: tuple[str, int] | None, collector: Collector) -> None:
        """where: address and port, 0 for any; None: it does nothing."""
        self._where = where
        self._collector = collector
        self._server: Any = None

    def start(self, say: Callable[[str], None]) -> None:
        """Begin to serve, once, until it is closed; say where, or why not: the job runs on."""
        if self._where is None:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        (address, port), self._where = self._where, None
        host = f"[{address}]" if ":" in address else address
        registry: Any = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, address, registry)
        except (OSError, UnicodeError) as error:  # the latter: it is no host's name, as with two dots in a row
            why = f"{host}:{port} cannot be used: {getattr(error, 'strerror', None) or error}"
            say(f"ringrun: no metrics, because {why}; the job continues without them")
        else:
            say(f"ringrun: metrics are at http://{host}:{self._server.server_port}/metrics")

    def close(self) -> None:
        """Serve no more: the second run of --twice needs the port."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield what prometheus_client writes; the histogram is that of the first rank, as all step together."""
        from prometheus_client import core

        families: dict[str, Any] = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        said = self._collector.latest()
        for name, (kind, text, values, label) in _FAMILIES.items():
            labels = ("rank", "host", *([label] if label else []))
            family = families[kind](f"ringreduce_{name}", text, labels=labels)
            for each in said:
                value = values(each)
                for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
                    family.add_metric((str(each["rank"]), each["host"], *([key] if label else [])), number)
            yield family
        for each in said[:1]:
            histogram = core.HistogramMetricFamily("ringreduce_step_seconds", "Duration of a step.")
            histogram.add_metric((), _buckets(each["histogram"]), each["step_s"])
            yield histogram


def _buckets(histogram: Mapping[str, int]) -> list[tuple[str, float]]:
    """Return how many steps took no longer than each bound; the histogram's indices are text in JSON."""
    counts = [(int(index) // _MERGED, count) for index, count in histogram.items()]
    buckets = [(bound, float(sum(count for n, count in counts if n <= last))) for last, bound in _BOUNDS.items()]
    return [*buckets, ("+Inf", float(sum(histogram.values())))]


def require_prometheus() -> None:
    """Raise MachineError where prometheus_client is missing."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise MachineError("--metrics-port needs prometheus_client; install it with: pip install prometheus_client")
