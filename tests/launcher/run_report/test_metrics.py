"""--metrics-port: what ranks say of their steps, as Prometheus gets it."""

import json
import math
import os
import re
import types
import urllib.request

import pytest

from ringrun import cli
from ringrun.errors import MachineError
from ringrun.report.outcome import RankEnd
from ringrun.run_report import metrics
from ringrun.run_report.collect import Collector
from tests.support.patience import patient, wait_until

parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="no prometheus_client")

HOST = os.uname().nodename
STEPS_S = [0.0003, 0.02, 0.2, 0.21, 7000.0]


def totals(rank):
    """Of a rank with `STEPS_S`, of which it has waited for operations for 2 s, and 1.5 s of these data moved."""
    histogram = [math.floor(math.log(s) / math.log(1.05)) for s in STEPS_S]
    return {
        "at_s": 50.0,
        "step": len(STEPS_S),
        "step_s": sum(STEPS_S),
        "rss": 1e9 + rank,
        "blocked_s": 2.0,
        "computing_s": sum(STEPS_S) - 2,
        "moving_s": 4.0 + rank,
        "hidden_s": 2.5 + rank,
        "histogram": {index: histogram.count(index) for index in histogram},
        "by_algorithm": {"shared 1024": [3, 300, 0.1], "shared 2048": [1, 1500, 0.1], "ring 1024": [2, 20, 0.2]},
        "sent": {1 - rank: 70, 2: 7},
    }


def scraped(url):
    """The samples there, by name and labels, those in the order of their names; the format is checked."""
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=patient(10)) as answer:
        text = answer.read().decode()
    samples = [each for family in parser.text_string_to_metric_families(text) for each in family.samples]
    return {(each.name.removeprefix("ringreduce_"), *each.labels.values()): each.value for each in samples}


def test_metrics_are_what_the_ranks_have_said_last():
    collector, lines = Collector(), []
    for rank in range(3):
        collector.measured(rank, json.dumps({"about": {"rank": rank, "host": "ab"[rank % 2]}}))
        collector.measured(rank, json.dumps({"totals": totals(rank)}))
    collector.ended(RankEnd(2, "a", 0, 1, 1.0))
    metrics.Metrics(None, collector).start(lines.append)
    served = metrics.Metrics(("127.0.0.1", 0), collector)
    served.start(lines.append)
    served.start(lines.append)
    [line] = lines
    url = re.fullmatch(r"ringrun: metrics are at (http://127\.0\.0\.1:\d+/metrics)", line)[1]
    found = scraped(url)
    of_1 = {name: value for (name, *labels), value in found.items() if labels == ["b", "1"]}
    assert of_1.pop("age_seconds") < 60
    assert of_1 == {
        "steps_total": 5,
        "computing_seconds_total": pytest.approx(sum(STEPS_S) - 2),
        "blocked_seconds_total": 2,
        "exposed_seconds_total": 1.5,
        "hidden_seconds_total": 3.5,
        "sent_bytes_total": 77,
        "resident_memory_bytes": 1e9 + 1,
    }
    assert [found["operations_total", name, "a", "0"] for name in ("shared", "ring")] == [4, 2]
    assert [found["bytes_total", name, "b", "1"] for name in ("shared", "ring")] == [1800, 20]
    assert {labels[-1] for _, *labels in found if labels[1:]} == {"0", "1"}, "rank 2 has ended"
    for seconds, count in [("0.0005456", 1), ("0.0166", 1), ("0.03287", 2), ("0.2551", 4), ("3629.0", 4), ("+Inf", 5)]:
        assert found["step_seconds_bucket", seconds] == count, seconds
    assert found["step_seconds_count",] == 5
    metrics.Metrics(("127.0.0.1", int(url.split(":")[2].partition("/")[0])), collector).start(lines.append)
    assert re.fullmatch(
        r"ringrun: no metrics, because .*:\d+ cannot be used: Address already in use; the job continues without them",
        lines[1],
    )


@pytest.mark.parametrize(("address", "url"), [("127.0.0.1", "127.0.0.1:9400"), ("::1", "[::1]:9400")])
@pytest.mark.parametrize("error", [None, OSError(99, "Cannot assign requested address")], ids=["served", "refused"])
def test_where_metrics_are_is_said_as_an_address_is_written(address, url, error, monkeypatch):
    def start_http_server(port, address, registry):
        if error:
            raise error
        return types.SimpleNamespace(server_port=port), None

    monkeypatch.setattr("prometheus_client.start_http_server", start_http_server)
    lines = []
    metrics.Metrics((address, 9400), Collector()).start(lines.append)
    no = f"no metrics, because {url} cannot be used: Cannot assign requested address; the job continues without them"
    assert lines == [f"ringrun: {no if error else f'metrics are at http://{url}/metrics'}"]


def test_a_name_that_is_no_host_s_costs_the_metrics_alone():
    lines = []
    metrics.Metrics(("ns..svc", 0), Collector()).start(lines.append)
    no = r"ringrun: no metrics, because ns\.\.svc:0 cannot be used: .*label.*; the job continues without them"
    assert re.fullmatch(no, "\n".join(lines)), lines


def test_a_job_serves_metrics_while_it_runs(start, program, tmp_path):
    job = start("-np", 2, "--metrics-port", 0, *program("steps"), tmp_path, 1)
    url = re.search(r"http://\S+", job.stderr.readline())[0]
    wait_until(lambda: all(scraped(url).get(("steps_total", HOST, rank), 0) > 3 for rank in "01"))
    found = scraped(url)
    assert sum(found[key] for key in found if (key[0], key[-1]) == ("bytes_total", "0")) >= 3 * 8000
    assert found["step_seconds_bucket", "0.03287"] < found["step_seconds_bucket", "+Inf"], "steps of 100 ms"
    (tmp_path / "stop").touch()
    assert job.wait(patient(20)) == 0, job.stderr.read()


def test_without_prometheus_client_no_job_is_started(monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="--metrics-port needs prometheus_client; install it with: pip install"):
        cli.parse(["--metrics-port", "9400", "true"])


@pytest.mark.parametrize(
    ("text", "where"),
    [("9400", ("127.0.0.1", 9400)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("[::1]:9400", ("::1", 9400))],
)
def test_where_metrics_are_served(text, where):
    assert cli.parse(["--metrics-port", text, "true"]).job.metrics == where
    assert cli.parse(["true"]).job.metrics is None
